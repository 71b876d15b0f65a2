"""Tables of what was measured on a GPU, from the figures that `benchmarks.gpu` writes.

    python -m benchmarks.gpu_page

writes the tables of the pages in `PAGES`, each between a comment that names it, such as
`<!-- benchmarks.gpu_page nvidia-h200 gpt2 -->`, and `<!-- end -->`. The names are a
folder of `benchmarks/results` and one of `TABLES`. `benchmarks.gpu` writes all tables
of its folder to `tables.md`.

A ratio is called level where the rounds do not tell the row from the baseline
(`benchmarks._harness`). Without ±, the rounds were not kept.
"""

import functools
import json
import re
from pathlib import Path

from benchmarks import _harness, loss_scale_overhead
from benchmarks.float8_step import AGAIN as FLOAT8_AGAIN
from benchmarks.float8_step import ROWS as FLOAT8_ROWS
from benchmarks.model_sizes import ARRAYS, SIZES, WIDTHS, parameters

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "benchmarks/README.md", "docs/performance.md", "docs/policy.md")
MARK = re.compile(
    r"(<!-- benchmarks\.gpu_page (\S+) (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL
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
            time = row["milliseconds"]
            cells = [name, f"{time:.1f}" if time >= 10 else f"{time:.2f}"]
            cells += [ratios[name].text(floor), *(f(row) for f in columns.values())]
            lines.append(f"| {' | '.join(cells)} |")
    heads = [title, "ms", "ratio", *columns]
    rule = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *lines])


def about(document, *notes):
    """Where and when the figures were measured, with which versions."""
    run = document["run"]
    versions = [f"{said} {run[name]}" for name, said in VERSIONS.items()]
    return " ".join([", ".join([run["device"], run["date"], *versions]) + ".", *notes])


def resolved(rows, again):
    """What a table's text says of its rounds and its baseline's second row."""
    rounds = {len(row["seconds"]) for row in rows.values() if "seconds" in row}
    said = " or ".join(map(str, sorted(rounds)))
    notes = [f"{said} rounds." if said else "The rounds were not kept."]
    if again not in rows:
        notes.append(
            "The baseline has one row, so how far two rows of one program lie apart is "
            "not known."
        )
    return notes


def kind_of(document):
    """Which sizes a benchmark's figures are of."""
    return "small" if "--small" in document["run"].get("command", "") else "gpu"


def number(key, form, unit=1.0):
    return lambda row: "" if row.get(key) is None else format(row[key] / unit, form)


def training(name, documents, shown=None):
    """A model's training steps in JAX and torch."""
    document = documents.get(f"train-{name}", {"results": {}})
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
    notes = resolved(rows, AGAIN)
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
            for title, rows in documents[part]["results"].items():
                made.append(table(title, rows, columns, plain, again))
            made.append(about(documents[part], *resolved(rows, again)))
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
    return f"{made}\n\n{about(documents['masters'], *resolved(rows, FORM_AGAIN))}"


def float8(documents):
    """Training steps in float8, and how long rows took to compile by XLA's flags."""
    columns = {
        "temporaries, GB": number("temporary_megabytes", ".1f", 1e3),
        "kernels": number("kernels", ".0f"),
    }
    made = []
    if document := documents.get("float8"):
        for title, rows in document["results"].items():
            made.append(table(title, rows, columns, FLOAT8_ROWS[0], FLOAT8_AGAIN))
        made.append(about(document, *resolved(rows, FLOAT8_AGAIN)))
    compiled = [d for part, d in documents.items() if part.startswith("float8-compile")]
    for document in compiled:
        found = document["results"]
        lines = [f"| compiled with {found['flags']} | seconds |", "|---|---:|"]
        for name, row in found["rows"].items():
            took = row["seconds"]
            lines.append(
                f"| {name} | {row['outcome'] if took is None else f'{took:.1f}'} |"
            )
        made += ["\n".join(lines), about(document)]
    return "\n\n".join(made)


TABLES = {
    "first": functools.partial(training, "gpt2", shown=SHORT),
    **{name: functools.partial(training, name) for name in MODELS},
    "loss-scale": loss_scale,
    "masters": masters,
    "float8": float8,
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
        return f"{start}\n{TABLES[name](load(RESULTS / folder))}\n\n{end}"

    return MARK.sub(fill, text)


def main():
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
