"""Tables of pages, from the committed figures.

    python -m benchmarks.tables

writes the tables of the pages in `PAGES`, each between a comment that names it, such as
`<!-- benchmarks.tables nvidia-h200 gpt2 -->`, and `<!-- end -->`. The names are a
folder of `benchmarks/results` and one of `TABLES`. `benchmarks.gpu` writes all tables
of its folder to `tables.md`. `results/targets.md` has `benchmarks.targets_page`.

A ratio is called level where the rounds do not tell the row from the baseline
(`benchmarks._harness`). Without ±, the rounds were not kept.
"""

import functools
import itertools
import json
import re
import statistics
from pathlib import Path

from benchmarks import _harness, loss_scale_overhead
from benchmarks._harness import markdown
from benchmarks.float8_step import AGAIN as FLOAT8_AGAIN
from benchmarks.float8_step import ROWS as FLOAT8_ROWS
from benchmarks.model_sizes import ARRAYS, SIZES, WIDTHS, parameters

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "benchmarks/README.md",
    "docs/examples.md",
    "docs/float8.md",
    "docs/performance.md",
    "docs/policy.md",
    "docs/scaling.md",
)
MARK = re.compile(
    r"(<!-- benchmarks\.tables (\S+) (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL
)
MODELS = {"gpt2": "GPT-2", "resnet50": "ResNet-50", "vit": "ViT-B/16"}
# Of `train_rows` and `master_weights`, which import JAX.
BY_HAND, AGAIN = "float16 by hand", "float16 by hand, again"
FORM, FORM_AGAIN = "float32", "float32, again"
SHORT = (  # rows of the first page, besides the fastest
    "float32",
    "bfloat16 by hand",
    BY_HAND,
    "jamp.autocast + dynamic_loss_scale",
    "jamp Policy + dynamic_loss_scale",
    "flax DynamicScale, by hand",
    "torch AMP",
    "torch.compile AMP",
)
WHERE = "outside", "inside"  # of a region
EXAMPLES = {  # example -> result -> how it is called, and its digits; percent if < 0
    "gpt": {"test loss": ("test loss, nats per byte", 3)},
    "resnet": {"test accuracy": ("test accuracy", -1), "test loss": ("test loss", 3)},
    "gan": {"Fréchet distance": ("Fréchet distance", 3)},
    "rl": {"test reward": ("test reward", 3)},
    "fsdp": {"test loss": ("test loss, nats per byte", 3)},
    "export": {"test accuracy": ("test accuracy", -1)},
    "equinox_lstm": {"test loss": ("test loss", 3)},
    "haiku_cnn": {"test loss": ("test loss", 3)},
}
REDUCED = {"fsdp-float32": "float32", "fsdp-int8": "int8", "fsdp-float8": "float8"}
VERSIONS = {"python": "Python", "jax": "JAX", "flax": "Flax", "optax": "optax"}


def load(folder):
    """Part -> the document with its figures."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name: document for name, document in found.items() if "run" in document}


def compared(row, base, apart=False):
    """The ratio of two rows, with its error if the rounds were kept.

    Args:
      apart: whether the rows are of two processes, and so did not take turns.
    """
    if row.get("error") is not None:
        return _harness.Ratio(row["ratio"], row["error"])
    if "seconds" in row and "seconds" in base:
        how = _harness.ratio_of_medians if apart else _harness.ratio
        return how(row["seconds"], base["seconds"])
    medians = row["milliseconds"] / base["milliseconds"]
    return _harness.Ratio(row.get("ratio", medians), None)


def table(title, rows, columns, base, again="", apart=(), shown=None):
    """A table of rows, and what is to be known about its ratios.

    Args:
      columns: name -> what a row has there.
      base: the row that the ratios are to, and `again`, its second row.
      apart: rows of another process.
      shown: the rows to show besides the fastest; all by default.
    """
    ratios = {n: compared(row, rows[base], n in apart) for n, row in rows.items()}
    floor = abs(ratios[again].value - 1) if again in rows else 0.0
    fastest = min(rows, key=lambda name: rows[name]["milliseconds"])
    lines = []
    for name, row in rows.items():
        if shown is None or name in (*shown, fastest):
            cells = [name, rounded(row["milliseconds"])]
            cells += [ratios[name].text(floor), *(f(row) for f in columns.values())]
            lines.append(cells)
    return markdown([title, "ms", "ratio", *columns], lines)


def rounded(value):
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value, digits):
    return f"{100 * value:.{digits}f} %"


def about(document, *notes):
    """Where and when the figures were measured, with which versions."""
    return " ".join([where_and_when(document["run"]), *notes])


def about_all(documents):
    """The same of several files, whose dates may differ."""
    said = dict.fromkeys(where_and_when(document["run"]) for document in documents)
    return " ".join(said)


def where_and_when(run):
    versions = [f"{said} {run[name]}" for name, said in VERSIONS.items()]
    where = run["device"]
    if "benchmarks.targets" in run.get("command", ""):
        where = "Compiled, not run"
    elif where == "cpu":
        where = f"{run['cpus']} cores of an {run['processor']}"
    return ", ".join([where, run["date"], *versions]) + "."


def resolved(made, again):
    """What the text of tables says of their rounds and the baseline's second row.

    Args:
      made: the rows of each table.
    """
    kept = (
        row["seconds"] for rows in made for row in rows.values() if "seconds" in row
    )
    said = " or ".join(map(str, sorted(set(map(len, kept)))))
    notes = [f"{said} rounds." if said else "The rounds were not kept."]
    if not all(again in rows for rows in made):
        notes.append(
            "The baseline has one row, so how far two rows of one program lie apart is "
            "not known."
        )
    return notes


def kind_of(document):
    """Which sizes a benchmark's figures are of."""
    if "--small" in document["run"].get("command", ""):
        return "small"
    return "cpu" if document["run"]["device"] == "cpu" else "gpu"


def number(key, form, unit=1.0):
    return lambda row: "" if row.get(key) is None else format(row[key] / unit, form)


def training(name, documents, shown=None):
    """A model's training steps in JAX and torch."""
    document = documents.get(f"train-{name}") or documents.get("train")
    document = document or {"results": {}}
    rows = document["results"].get(name)
    if rows is None or BY_HAND not in rows:
        return ""
    others = [d for part, d in documents.items() if part.startswith("torch-")]
    apart = next((d for d in others if name in d["results"]), {"results": {}})
    torch_rows = apart["results"].get(name, {})
    size, unit = (
        SIZES[kind_of(document)][name],
        "tokens" if name == "gpt2" else "images",
    )
    items = f"{size.batch} x {size.sequence}" if name == "gpt2" else f"{size.batch}"
    columns = {
        f"{unit}/s": number("per_second", ",.0f"),
        "peak GB": number("peak_megabytes", ".1f", 1e3),
    }
    if shown is None:
        columns["GB moved"] = number("gigabytes", ".1f")
        columns["kernels"] = number("kernels", ".0f")
    title = f"{MODELS[name]}, {parameters(size) / 1e6:.0f} M, {items} {unit}"
    made = table(title, rows | torch_rows, columns, BY_HAND, AGAIN, torch_rows, shown)
    notes = resolved([rows], AGAIN)
    if torch_rows:
        notes.append(f"torch {apart['run']['torch']} ran in a process of its own.")
    return f"{made}\n\n{about(document, *notes)}"


def loss_scale(documents):
    """Loss scaling alone, by the number of parameters."""
    columns = {
        "reads": number("reads", "+.2f"),
        "kernels": number("kernels", ".0f"),
        "copies": number("copies", ".0f"),
    }
    plain, again = loss_scale_overhead.PLAIN, loss_scale_overhead.AGAIN
    made = []
    for part in ("loss-scale", "loss-scale-1b"):
        if part in documents:
            found = documents[part]["results"]
            for title, rows in found.items():
                made.append(table(title, rows, columns, plain, again))
            made.append(about(documents[part], *resolved(found.values(), again)))
    return "\n\n".join(made)


def masters(documents):
    """An update alone, by the form of the parameters."""
    if "masters" not in documents:
        return ""
    rows = documents["masters"]["results"]
    columns = {
        "bytes a parameter, moved": number("bytes_per_parameter", ".0f"),
        "held": number("held", ".0f"),
        "TB/s": number("terabytes_per_second", ".1f"),
    }
    title = f"AdamW alone, {ARRAYS} x {WIDTHS[kind_of(documents['masters'])]}^2"
    made = table(title, rows, columns, FORM, FORM_AGAIN)
    return f"{made}\n\n{about(documents['masters'], *resolved([rows], FORM_AGAIN))}"


def float8(documents):
    """Training steps in float8, and how long rows took to compile by XLA's flags."""
    columns = {
        "temporaries, GB": number("temporary_megabytes", ".1f", 1e3),
        "kernels": number("kernels", ".0f"),
    }
    made = []
    if document := documents.get("float8"):
        found = document["results"]
        for title, rows in found.items():
            made.append(table(title, rows, columns, FLOAT8_ROWS[0], FLOAT8_AGAIN))
        made.append(about(document, *resolved(found.values(), FLOAT8_AGAIN)))
    compiled = [d for part, d in documents.items() if part.startswith("float8-compile")]
    for document in compiled:
        found = document["results"]
        lines = []
        for name, row in found["rows"].items():
            took = row["seconds"]
            lines.append([name, row["outcome"] if took is None else f"{took:.1f}"])
        title = f"compiled with {found['flags']}"
        made += [markdown([title, "seconds"], lines), about(document)]
    return "\n\n".join(made)


def of_file(part, make, **how):
    """A table of one file: what `make` says of its results, and where they are from."""

    def made(documents):
        if part not in documents:
            return ""
        return f"{make(documents[part]['results'], **how)}\n\n{about(documents[part])}"

    return made


def eager(results, ways=()):
    """Microseconds of an op, outside and inside of a region."""
    ways = ways or results
    one = len(ways) == 1
    columns = [w if one else f"{way}, {w}" for way in ways for w in WHERE]
    rows = []
    for name in results["eager"]:
        found = [results[way].get(name) for way in ways]
        cells = [[rounded(f[where]) if f else "" for where in WHERE] for f in found]
        rows.append([name, *itertools.chain(*cells)])
    return markdown(["microseconds an op", *columns], rows)


def logging(documents):
    """A step that is logged, and one that would explain a skip."""
    if "logging" not in documents:
        return ""
    rows = documents["logging"]["results"]["rows"]
    made = table("a step", rows, {}, next(iter(rows)))
    return f"{made}\n\n{about(documents['logging'], *resolved([rows], None))}"


def compile_time(results):
    """Tracing, lowering and compiling under autocast, beside a model cast by hand."""
    rows = [
        [
            phase,
            *(f"{seconds:.2f} s" for seconds in row.values()),
            _harness.Ratio(**results["ratio"][phase]).text(),
        ]
        for phase, row in results["seconds"].items()
    ]
    return markdown(["phase", *results["seconds"]["total"], "ratio"], rows)


def proof_cost(results):
    """Seconds of the calls that prove a step, and their ratio to one compilation."""
    rows = []
    for name, row in results.items():
        calls = [f"{row[key]:.1f} s" for key in ("compile", "run")]
        for key in ("find_loss_scale", "check_step"):
            calls.append(f"{row[key]:.1f} s, {row[key] / row['compile']:.2f}")
        rows.append([MODELS[name], *calls])
    columns = ("compile", "run", "find_loss_scale", "check_step")
    return markdown(["a step", *columns], rows)


def kept(results):
    """Bytes that a model keeps for the backward pass, as JAX traces it."""
    ways = ("float32", "by hand", "autocast")
    rows = [
        [name, *(f"{row[way] / 1e6:.1f} MB" for way in ways), f"{row['ratio']:.3f}"]
        for name, row in results.items()
    ]
    return markdown(["kept for the backward pass", *ways, "ratio"], rows)


def trained(results):
    """Losses of float16 parameters with and without master weights."""
    made = []
    for optimizer, rows in results.items():
        cells = [
            [
                name,
                f"{row['first']:.4f}",
                "nan" if row["last"] is None else f"{row['last']:.4f}",
                "not finite"
                if row["worst difference"] is None
                else percent(row["worst difference"], 2),
            ]
            for name, row in rows.items()
        ]
        columns = ("first loss", "after 100 steps", "worst difference")
        made.append(markdown([optimizer, *columns], cells))
    return "\n\n".join(made)


def forms(results):
    """Masters of both forms, compared bit for bit."""
    keys = ("numbers", "differ", "skipped", "ties")
    rows = [
        [name, *(f"{row[key]:,}" for key in keys), f"{row['lost']:.3f}"]
        for name, row in results.items()
    ]
    columns = ("numbers", "differ", "skipped steps", "ties", "lost without masters")
    return markdown(["", *columns], rows)


def collectives(results):
    """What a step exchanges, and what loss scaling adds to it."""
    rows = []
    for row in results:
        megabytes = row["plain"]["by_dtype"]
        rows.append(
            [
                row["layout"],
                row["mode"],
                str(row["plain"]["count"]),
                *(f"{megabytes.get(dtype, 0) / 1e6:.3f}" for dtype in ("f16", "f32")),
                str(row["extra_count"]),
                str(row["extra_bytes"]),
            ]
        )
    sizes = ("MB in float16", "in float32", "jamp adds", "bytes")
    return markdown(["layout", "mode", "collectives", *sizes], rows, text=2)


def scaled_errors(results):
    """The least and the largest error of the gradients of twelve layers."""
    rows = [
        [name, percent(min(errors), 3), percent(max(errors), 3)]
        for name, errors in results.items()
        if not name.startswith("log2")
    ]
    return markdown(["error to float64", "least", "largest"], rows)


def compiled(results, base):
    """What a step of a full size becomes for an H100."""
    (found,) = results.values()
    first, cells = found["rows"][base], []
    for name, row in found["rows"].items():
        sizes = [f"{row['bytes'] / 1e9:.2f}", f"{row['bytes'] / first['bytes']:.3f}"]
        for key in ("temporary_bytes", "peak_bytes"):
            sizes += [f"{row[key] / 1e9:.2f}", f"{row[key] / first[key]:.3f}"]
        cells.append([name, str(row["kernels"]), *sizes])
    columns = ["kernels"]
    for column in ("GB moved", "temporaries, GB", "peak, GB"):
        columns += [column, "ratio"]
    return markdown([f"`{found['size']}`", *columns], cells)


def summary(documents):
    """What jamp adds to the steps of three models, and what they save over float32."""
    if "full-h100-vit" not in documents:
        return ""
    ways = {"a policy": "jamp Policy", "autocast": "jamp.autocast"}
    ways = {said: f"{name} + dynamic_loss_scale" for said, name in ways.items()}
    figures = {"bytes moved": "bytes", "peak memory": "peak_bytes"}
    wanted = [
        (f"{figure}, by {said}", row, key, BY_HAND)
        for figure, key in figures.items()
        for said, row in ways.items()
    ]
    row = "temporaries of autocast, against float32"
    wanted.append((row, ways["autocast"], "temporary_bytes", "float32"))
    models = {
        said: rows_of(documents, f"full-h100-{name}") for name, said in MODELS.items()
    }
    rows = [
        [said, *(f"{m[row][key] / m[base][key]:.3f}" for m in models.values())]
        for said, row, key, base in wanted
    ]
    head = "compiled for an H100, against float16 by hand"
    made = markdown([head, *models], rows)
    return f"{made}\n\n{about_all(documents[f'full-h100-{n}'] for n in MODELS)}"


def scaled(documents):
    """What scaled float16 costs beside plain float16."""
    if "full-h100-mlp-1024" not in documents:
        return ""
    own = ("scaled float16",)
    wanted = {
        "mlp-1024": ("MLP, 1024 wide", own),
        "mlp-4096": ("MLP, 4096 wide", own),
        "resnet50": (MODELS["resnet50"], own),
        "gpt2": (MODELS["gpt2"], ("float16 with XLA's attention", *own)),
    }
    lines = []
    for part, (said, rows) in wanted.items():
        found = rows_of(documents, f"full-h100-{part}")
        base = found["float16"]
        for row in ("float16", *rows):
            cells = [f"{said}, {row}"]
            for key in ("bytes", "temporary_bytes"):
                ratio = found[row][key] / base[key]
                cells.append(f"{found[row][key] / 1e9:.2f}")
                cells.append("" if row == "float16" else f"{ratio:.2f}")
            lines.append([*cells[:1], str(found[row]["ops"]), *cells[1:]])
    sizes = ("GB moved", "ratio", "temporaries, GB", "ratio")
    made = markdown(["compiled for an H100", "StableHLO ops", *sizes], lines)
    return f"{made}\n\n{about_all(documents[f'full-h100-{n}'] for n in wanted)}"


def examples(documents):
    """What the examples reach in float16 and float32."""
    rows = []
    for name, measured in EXAMPLES.items() if "gpt" in documents else ():
        document = documents[name]
        full, half = (document["results"][key] for key in ("float32", "float16"))
        skipped = statistics.mean(half["skipped steps"])
        steps = f"{skipped:.1f} of {document['run']['steps']}"
        for key, (said, digits) in measured.items():
            cells = [over_seeds(row[key], digits) for row in (full, half)]
            rows.append([f"`{name}.py`", said, *cells, steps])
    if not rows:
        return ""
    columns = ("measured", "float32", "float16", "skipped")
    made = markdown(["example", *columns], rows, text=2)
    return f"{made}\n\n{about_all(documents[name] for name in EXAMPLES)}"


def by_precision(results):
    """The language model in each precision."""
    means = {name: statistics.mean(row["test loss"]) for name, row in results.items()}
    rows = [
        [
            name,
            over_seeds(row["test loss"], 3),
            f"{means[name] / means['bfloat16']:.3f}",
        ]
        for name, row in results.items()
    ]
    return markdown(["", "test loss", "as a multiple of bfloat16's"], rows)


def mismatch(results):
    """How far a sampler and a trainer of the same weights are apart."""
    rows = [
        [
            name,
            over_seeds([1e3 * x for x in row["mismatch"]], 4),
            over_seeds(row["largest ratio"], 3),
            over_seeds(row["test reward"], 3),
        ]
        for name, row in results.items()
    ]
    columns = (
        "mean \\|log p of trainer - log p of sampler\\|, 1e-3",
        "largest ratio of the two p",
        "test reward",
    )
    return markdown(["", *columns], rows)


def reduced(documents):
    """A fully sharded model whose gradients are exchanged in other dtypes."""
    if "fsdp" not in documents:
        return ""
    results = {name: documents[name]["results"] for name in REDUCED}
    rows = [
        [
            f"computed in {precision}",
            *(
                over_seeds(found[precision]["test loss"], 3)
                for found in results.values()
            ),
        ]
        for precision in ("float32", "float16")
    ]
    made = markdown(["`--reduce`", *REDUCED.values()], rows)
    return f"{made}\n\n{about_all(documents[name] for name in REDUCED)}"


def over_seeds(values, digits):
    """Mean and standard deviation of a few runs, in percent if digits is below 0."""
    unit = " %" if digits < 0 else ""
    values = [100 * x if unit else x for x in values]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{mean:.{abs(digits)}f}{unit} ± {deviation:.{abs(digits)}f}"


def rows_of(documents, part):
    (found,) = documents[part]["results"].values()
    return found["rows"]


# Of the files beside the folders; the row that ratios are to.
COMPILED = {
    **dict.fromkeys(("gpt2", "gpt2-triton", "resnet50", "vit"), BY_HAND),
    **dict.fromkeys(("mlp", "mlp-triton", "llama"), "bfloat16"),
}
TABLES = {
    "first": functools.partial(training, "gpt2", shown=SHORT),
    **{name: functools.partial(training, name) for name in MODELS},
    "loss-scale": loss_scale,
    "masters": masters,
    "float8": float8,
    "eager": of_file("eager", eager, ways=("eager",)),
    "ops": of_file("eager", eager),
    "logging": logging,
    "compile-time": of_file("compile-time", compile_time),
    "proof-cost": of_file("proof-cost", proof_cost),
    "memory": of_file("memory", kept),
    "master-weights": of_file("master-weights", trained),
    "master-forms": of_file("master-forms", forms),
    "collectives": of_file("collectives", collectives),
    "scaled-error": of_file("scaled-error", scaled_errors),
    "examples": examples,
    "precisions": of_file("gpt", by_precision),
    "mismatch": of_file("rl", mismatch),
    "reduced": reduced,
    "summary": summary,
    "scaled": scaled,
    **{
        f"h100-{part}": of_file(f"full-h100-{part}", compiled, base=base)
        for part, base in COMPILED.items()
    },
}


def every(folder):
    """All tables of a folder."""
    documents = load(folder)
    made = {name: make(documents) for name, make in TABLES.items()}
    return "\n\n".join(f"## {name}\n\n{text}" for name, text in made.items() if text)


def written(text):
    """A page with its tables."""

    def fill(match):
        start, folder, name, end = match.groups()
        made = TABLES[name](load(RESULTS / folder))
        if not made:
            raise ValueError(f"{RESULTS / folder} has no figures for the table {name}")
        return f"{start}\n{made}\n\n{end}"

    return MARK.sub(fill, text)


def main():
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
