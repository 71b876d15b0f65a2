"""Writes the tables of the pages from the committed figures.

    python -m benchmarks.tables            # writes each table again
    python -m benchmarks.tables --check    # names those that are stale

A table stands on any page between a comment that names it, such as
`<!-- benchmarks.tables nvidia-h200 gpt2 -->`, and `<!-- end -->`. The names are a
folder of `benchmarks/results` and one of `TABLES`. `benchmarks.gpu` writes all tables
of its folder to `tables.md`. What is compiled and not run has its tables in
`benchmarks.compiled_tables`.

A ratio is called level where the rounds do not tell the row from the baseline
(`benchmarks._harness`). Without ±, the rounds were not kept.
"""

import argparse
import functools
import itertools
import json
import re
import statistics
from pathlib import Path

from benchmarks import _harness, compiled_tables, loss_scale_overhead
from benchmarks._harness import Ratio, about, grid, markdown, number, percent
from benchmarks.compiled_tables import BY_HAND, MODELS
from benchmarks.float8_step import AGAIN as FLOAT8_AGAIN
from benchmarks.float8_step import ROWS as FLOAT8_ROWS
from benchmarks.model_sizes import ARRAYS, SIZES, WIDTHS, parameters

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("*.md", "benchmarks/**/*.md", "docs/**/*.md", "parity/*.md")
MARK = re.compile(
    r"(<!-- benchmarks\.tables (\S+) (\S+) -->\n)((?:(?!<!--).)*)(<!-- end -->\n)",
    re.DOTALL,
)
# Of `train_rows` and `master_weights`, which import JAX.
AGAIN = "float16 by hand, again"
FORM, FORM_AGAIN = "float32", "float32, again"
SHORT = (  # rows of the first page, besides the fastest
    "float32",
    BY_HAND,
    "jamp.autocast + dynamic_loss_scale",
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


# --- steps that took turns


def compared(row, base, apart=False):
    """The ratio of two rows, with its error if the rounds were kept.

    Args:
      apart: whether the rows are of two processes, and so did not take turns.
    """
    if row.get("error") is not None:
        return Ratio(row["ratio"], row["error"])
    if "seconds" in row and "seconds" in base:
        how = _harness.ratio_of_medians if apart else _harness.ratio
        return how(row["seconds"], base["seconds"])
    medians = row["milliseconds"] / base["milliseconds"]
    return Ratio(row.get("ratio", medians), None)


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


def in_turns(document, columns, base, again, titles=None):
    """A table for each of a file's results, and how well they are resolved."""
    found = titles or document["results"]
    made = [table(title, rows, columns, base, again) for title, rows in found.items()]
    made.append(about(document, notes=resolved(found.values(), again)))
    return "\n\n".join(made)


def kind_of(document):
    """Which sizes a benchmark's figures are of."""
    if "--small" in document["run"].get("command", ""):
        return "small"
    return "cpu" if document["run"]["device"] == "cpu" else "gpu"


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
    size = SIZES[kind_of(document)][name]
    unit = "tokens" if name == "gpt2" else "images"
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
    if shown is not None:  # the first page says how many rounds, and no more
        del notes[1:]
    if torch_rows:
        notes.append(f"torch {apart['run']['torch']} ran in a process of its own.")
    return f"{made}\n\n{about(document, notes=notes)}"


def loss_scale(documents):
    """Loss scaling alone, by the number of parameters."""
    columns = {
        "reads": number("reads", "+.2f"),
        "kernels": number("kernels", ".0f"),
        "copies": number("copies", ".0f"),
    }
    rows = loss_scale_overhead.PLAIN, loss_scale_overhead.AGAIN
    found = [documents.get(part) for part in ("loss-scale", "loss-scale-1b")]
    return "\n\n".join(in_turns(each, columns, *rows) for each in found if each)


def masters(document):
    """An update alone, by the form of the parameters."""
    columns = {
        "bytes a parameter, moved": number("bytes_per_parameter", ".0f"),
        "held": number("held", ".0f"),
        "TB/s": number("terabytes_per_second", ".1f"),
    }
    title = f"AdamW alone, {ARRAYS} x {WIDTHS[kind_of(document)]}^2"
    rows = {title: document["results"]}
    return in_turns(document, columns, FORM, FORM_AGAIN, rows)


def logging(document):
    """A step that is logged, and one that would explain a skip."""
    rows = document["results"]["rows"]
    return in_turns(document, {}, next(iter(rows)), None, {"a step": rows})


def float8(documents):
    """Training steps in float8, and how long rows took to compile by XLA's flags."""
    columns = {
        "temporaries, GB": number("temporary_megabytes", ".1f", 1e3),
        "kernels": number("kernels", ".0f"),
    }
    made = []
    if document := documents.get("float8"):
        made.append(in_turns(document, columns, FLOAT8_ROWS[0], FLOAT8_AGAIN))
    for part, document in documents.items():
        if part.startswith("float8-compile"):
            found = document["results"]
            took = lambda row: number("seconds", ".1f")(row) or row["outcome"]
            title = f"compiled with {found['flags']}"
            made += [grid(title, found["rows"], {"seconds": took}), about(document)]
    return "\n\n".join(made)


# --- other figures of one file


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


def compile_time(results):
    """Tracing, lowering and compiling under autocast, beside a model cast by hand."""
    rows = {
        phase: row | {"ratio": Ratio(**results["ratio"][phase])}
        for phase, row in results["seconds"].items()
    }
    columns = {
        way: number(way, ".2f", said=" s") for way in results["seconds"]["total"]
    }
    return grid("phase", rows, columns | {"ratio": lambda row: row["ratio"].text()})


def proof_cost(results):
    """Seconds of the calls that prove a step, and their ratio to one compilation."""
    rows = {MODELS[name]: row for name, row in results.items()}
    columns = {key: number(key, ".1f", said=" s") for key in ("compile", "run")}
    for key in ("find_loss_scale", "check_step"):
        columns[key] = lambda row, key=key: (
            f"{row[key]:.1f} s, {row[key] / row['compile']:.2f}"
        )
    return grid("a step", rows, columns)


def kept(results):
    """Bytes that a model keeps for the backward pass, as JAX traces it."""
    ways = "float32", "by hand", "autocast"
    columns = {way: number(way, ".1f", 1e6, " MB") for way in ways}
    columns["ratio"] = number("ratio", ".3f")
    return grid("kept for the backward pass", results, columns)


def trained(results):
    """Losses of float16 parameters with and without master weights."""
    worst = "worst difference"
    columns = {
        "first loss": number("first", ".4f"),
        "after 100 steps": lambda row: number("last", ".4f")(row) or "nan",
        worst: lambda row: (
            "not finite" if row[worst] is None else percent(row[worst], 2)
        ),
    }
    return "\n\n".join(grid(*rows, columns) for rows in results.items())


def forms(results):
    """Masters of both forms, compared bit for bit."""
    columns = {"numbers": "numbers", "differ": "differ"}
    columns |= {"skipped steps": "skipped", "ties": "ties"}
    columns = {said: number(key, ",") for said, key in columns.items()}
    columns["lost without masters"] = number("lost", ".3f")
    return grid("", results, columns)


def collectives(results):
    """What a step exchanges, and what loss scaling adds to it."""
    sent = lambda dtype: (
        lambda row: f"{row['plain']['by_dtype'].get(dtype, 0) / 1e6:.3f}"
    )
    columns = {
        "mode": lambda row: row["mode"],
        "collectives": lambda row: str(row["plain"]["count"]),
        "MB in float16": sent("f16"),
        "in float32": sent("f32"),
        "jamp adds": number("extra_count", "d"),
        "bytes": number("extra_bytes", "d"),
    }
    lines = ([row["layout"], *(f(row) for f in columns.values())] for row in results)
    return markdown(["layout", *columns], lines, text=2)


def scaled_errors(results):
    """The least and the largest error of the gradients of twelve layers."""
    rows = {name: errors for name, errors in results.items() if name[:4] != "log2"}
    ends = {"least": min, "largest": max}
    columns = {
        said: lambda row, of=of: percent(of(row), 3) for said, of in ends.items()
    }
    return grid("error to float64", rows, columns)


# --- examples


def over_seeds(values, digits):
    """Mean and standard deviation of a few runs, in percent if digits is below 0."""
    unit = " %" if digits < 0 else ""
    values = [100 * x if unit else x for x in values]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{mean:.{abs(digits)}f}{unit} ± {deviation:.{abs(digits)}f}"


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
    return f"{made}\n\n{about(*(documents[name] for name in EXAMPLES))}"


def by_precision(results):
    """The language model in each precision."""
    mean = lambda row: statistics.mean(row["test loss"])
    columns = {
        "test loss": lambda row: over_seeds(row["test loss"], 3),
        "as a multiple of bfloat16's": lambda row: (
            f"{mean(row) / mean(results['bfloat16']):.3f}"
        ),
    }
    return grid("", results, columns)


def mismatch(results):
    """How far a sampler and a trainer of the same weights are apart."""
    columns = {
        "mean \\|log p of trainer - log p of sampler\\|, 1e-3": lambda row: over_seeds(
            [1e3 * x for x in row["mismatch"]], 4
        ),
        "largest ratio of the two p": lambda row: over_seeds(row["largest ratio"], 3),
        "test reward": lambda row: over_seeds(row["test reward"], 3),
    }
    return grid("", results, columns)


def reduced(documents):
    """A fully sharded model whose gradients are exchanged in other dtypes."""
    if "fsdp" not in documents:
        return ""
    found = {said: documents[name]["results"] for name, said in REDUCED.items()}
    rows = {f"computed in {name}": name for name in ("float32", "float16")}
    columns = {
        said: lambda name, of=of: over_seeds(of[name]["test loss"], 3)
        for said, of in found.items()
    }
    made = grid("`--reduce`", rows, columns)
    return f"{made}\n\n{about(*(documents[name] for name in REDUCED))}"


# --- the pages


def of_file(part, make):
    """A table of one file, or "" if the folder does not have it."""
    return lambda documents: make(documents[part]) if part in documents else ""


def of_results(part, make, **how):
    """The same of the file's results alone, and below it where they are from."""
    return of_file(part, lambda d: f"{make(d['results'], **how)}\n\n{about(d)}")


TABLES = {
    "first": functools.partial(training, "gpt2", shown=SHORT),
    **{name: functools.partial(training, name) for name in MODELS},
    "loss-scale": loss_scale,
    "masters": of_file("masters", masters),
    "float8": float8,
    "eager": of_results("eager", eager, ways=("eager",)),
    "ops": of_results("eager", eager),
    "logging": of_file("logging", logging),
    "compile-time": of_results("compile-time", compile_time),
    "proof-cost": of_results("proof-cost", proof_cost),
    "memory": of_results("memory", kept),
    "master-weights": of_results("master-weights", trained),
    "master-forms": of_results("master-forms", forms),
    "collectives": of_results("collectives", collectives),
    "scaled-error": of_results("scaled-error", scaled_errors),
    "examples": examples,
    "precisions": of_results("gpt", by_precision),
    "mismatch": of_results("rl", mismatch),
    "reduced": reduced,
    **{
        f"h100-{part}": of_results(f"full-h100-{part}", compiled_tables.step, base=base)
        for part, base in compiled_tables.STEPS.items()
    },
    "summary": compiled_tables.summary,
    "scaled": compiled_tables.scaled,
    "targets": compiled_tables.targets,
    "targets-gpt2": compiled_tables.small_gpt2,
}


def load(folder):
    """Part -> the document with its figures."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name: found[name] for name in sorted(found) if "run" in found[name]}


def show(name, results, part=""):
    """Prints the table of figures that were measured just now."""
    document = {"run": _harness.describe(), "results": _harness.finite(results)}
    print(f"\n{TABLES[name]({part or name: document})}", flush=True)


def every(folder):
    """All tables of a folder."""
    documents = load(folder)
    made = {name: make(documents) for name, make in TABLES.items()}
    return "\n\n".join(f"## {name}\n\n{text}" for name, text in made.items() if text)


def written(text):
    """A page with its tables, and the names of those that it did not have so."""
    stale = []

    def fill(match):
        start, folder, name, old, end = match.groups()
        made = TABLES[name](load(RESULTS / folder))
        if not made:
            raise ValueError(f"{RESULTS / folder} has no figures for the table {name}")
        if old != f"\n{made}\n\n":
            stale.append(f"{folder} {name}")
        return f"{start}\n{made}\n\n{end}"

    filled, count = MARK.subn(fill, text)
    if count != text.count("<!-- benchmarks."):
        raise ValueError("a comment of a table is misspelt, or its end is missing")
    return filled, stale


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, found = parser.parse_args().check, 0
    for page in sorted(page for glob in PAGES for page in ROOT.glob(glob)):
        filled, stale = written(page.read_text())
        found += len(stale)
        for name in stale:
            print(f"{page.relative_to(ROOT)}: {name}")
        if stale and not check:
            page.write_text(filled)
    return int(check and found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
