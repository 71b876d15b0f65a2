"""What is saved for the backward pass: autocast beside a model cast by hand.

    python -m benchmarks.memory           # groups of residuals that differ
    python -m benchmarks.memory --all     # every group of residuals, by shape

Nothing runs: the bytes are those of the abstract leaves of what `jax.vjp` returns, for
float32 parameters. The models are Flax Linen's. By hand, every layer has dtype=float16,
LayerNorm float32, and the loss is taken in float32; under `jamp.autocast` no dtype is
set anywhere. "Stored" leaves out arrays of one number, such as the zeros of relu's
derivative, which a compiled program does not store.
"""

import argparse
import json
import sys
from pathlib import Path

import jax

from tests.residuals import CASES, STYLES, arguments, loss_of, residuals, total


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every group, by shape")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


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
    """The residuals of both by dtype, op, module and shape, the largest group first."""
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


def print_table(table):
    print("\n| model | float32 | by hand | autocast | ratio | stored ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in table.items():
        sizes = " | ".join(f"{row[style] / 1e6:.1f} MB" for style in STYLES)
        ratios = f"{row['ratio']:.3f} | {row['stored']['ratio']:.3f}"
        print(f"| {name} | {sizes} | {ratios} |")


def print_break_down(name, rows):
    print(f"\n{name}, MB (number of arrays)\n")
    print("| arrays | op | module | by hand | autocast |")
    print("|---|---|---|---:|---:|")
    for row in rows:
        op = row["op"] + " of a number" * row["constant"]
        shape = f"[{','.join(map(str, row['shape']))}]" if row["shape"] else ""
        cells = [row["dtype"] + shape, op, row["module"]]
        for sizes in (row["by hand"], row["autocast"]):
            cells.append(f"{sum(sizes) / 1e6:.1f} ({len(sizes)})")
        print(f"| {' | '.join(cells)} |")


def is_large(row, least=1e6):
    return max(sum(row["by hand"]), sum(row["autocast"])) > least


def main():
    args = parse_args()
    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}")
    table = {name: summarize(measure(case)) for name, case in CASES.items()}
    print_table(table)
    for name, row in table.items():
        rows = row["groups"]
        if not args.all:
            rows = merge_shapes(rows)
            rows = [r for r in rows if sum(r["by hand"]) != sum(r["autocast"])]
        if rows := [r for r in rows if is_large(r)]:
            print_break_down(name, rows)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
