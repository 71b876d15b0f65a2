"""What is saved for the backward pass: autocast beside a model cast by hand.

    python -m benchmarks.memory           # groups of residuals that differ
    python -m benchmarks.memory --all     # every group of residuals, by shape

Nothing runs: the bytes are those of the abstract leaves that `jax.vjp` returns, for
float32 parameters. The models are in Flax Linen. The model cast by hand has
dtype=float16 on every layer, float32 LayerNorms, and takes the loss in float32. The
model under `jamp.autocast` sets no dtype. "Stored" leaves out arrays filled with one
number, such as the zeros of relu's derivative, which a compiled program does not store.
"""

from functools import partial

from benchmarks import _harness, tables
from shared.residuals import (
    CASES,
    STYLES,
    Case,
    Transformer,
    arguments,
    loss_of,
    residuals,
    tokens,
    total,
)

SMALL = {
    "MLP": CASES["MLP"],
    "transformer": Case(partial(Transformer, 1, 64, 2, 256), tokens(2, 16), 0),
}


def measure(case):
    """Style -> residuals."""
    args = arguments(case)
    return {style: residuals(loss_of(case.model, style), *args) for style in STYLES}


def summarize(kept):
    stored = {style: [r for r in kept[style] if not r.constant] for style in STYLES}
    row = {style: total(kept[style]) for style in STYLES}
    row["stored"] = {style: total(stored[style]) for style in STYLES}
    for sizes in (row, row["stored"]):
        sizes["ratio"] = sizes["autocast"] / sizes["by hand"]
    row["groups"] = break_down(kept)
    return row


def break_down(kept):
    """Both models' residuals by dtype, op, module and shape, largest group first."""
    groups = {}
    for style in ("by hand", "autocast"):
        for r in kept[style]:
            key = (r.dtype, r.constant, r.op, r.path, r.shape)
            sizes = groups.setdefault(key, {"by hand": [], "autocast": []})
            sizes[style].append(r.bytes)
    names = ("dtype", "constant", "op", "module", "shape")
    rows = [dict(zip(names, key, strict=True)) | groups[key] for key in groups]
    return sorted(rows, key=lambda row: -sum(row["by hand"] + row["autocast"]))


def merge_shapes(rows):
    merged = {}
    for row in rows:
        key = (row["dtype"], row["constant"], row["op"], row["module"])
        start = row | {"shape": (), "by hand": [], "autocast": []}
        into = merged.setdefault(key, start)
        into["by hand"] += row["by hand"]
        into["autocast"] += row["autocast"]
    return merged.values()


def print_break_down(name, rows):
    print(f"\n{name}, MB (number of arrays)")
    _harness.print_table(
        ("arrays", "op", "module", "by hand", "autocast"), map(cells, rows)
    )


def cells(row):
    shape = f"[{','.join(map(str, row['shape']))}]" if row["shape"] else ""
    yield row["dtype"] + shape
    yield row["op"] + " of a number" * row["constant"]
    yield row["module"]
    for sizes in (row["by hand"], row["autocast"]):
        yield f"{sum(sizes) / 1e6:.1f} ({len(sizes)})"


def is_large(row, least=1e6):
    return max(sum(row["by hand"]), sum(row["autocast"])) > least


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="every group, by shape")
    args = parser.parse_args()
    _harness.prepare(args, "benchmarks.memory")
    _harness.print_heading()
    cases = SMALL if args.small else CASES
    table = {name: summarize(measure(case)) for name, case in cases.items()}
    totals = {
        name: {key: row[key] for key in row if key != "groups"}
        for name, row in table.items()
    }
    tables.show("memory", totals)
    for name, row in table.items():
        rows = row["groups"]
        if not args.all:
            rows = merge_shapes(rows)
            rows = [r for r in rows if sum(r["by hand"]) != sum(r["autocast"])]
        if rows := [r for r in rows if is_large(r)]:
            print_break_down(name, rows)
    _harness.save(args.json, totals)


if __name__ == "__main__":
    main()
