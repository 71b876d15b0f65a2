"""What is saved for the backward pass: autocast beside a model cast by hand.

    python -m benchmarks.memory
    python -m benchmarks.memory --all

Nothing runs: the bytes are those of the abstract leaves of what `jax.vjp` returns, for
float32 parameters. The models are Flax Linen's. By hand, every layer has dtype=float16,
LayerNorm float32, and the loss is taken in float32; under `jamp.autocast` no dtype is
set anywhere. "Stored" leaves out arrays of one number, such as the zeros of relu's
derivative, which a compiled program does not store.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import jax

from tests.residuals import CASES, STYLES, arguments, loss_of, residuals, total


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="equal groups as well")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def measure(case):
    """Style -> residuals."""
    args = arguments(case)
    return {style: residuals(loss_of(case.model, style), *args) for style in STYLES}


def summarize(kept):
    row = {style: total(kept[style]) for style in STYLES}
    row["ratio"] = row["autocast"] / row["by hand"]
    stored = {
        style: total(r for r in kept[style] if not r.constant) for style in STYLES
    }
    row["stored"] = stored
    row["stored_ratio"] = stored["autocast"] / stored["by hand"]
    return row


def group(kept):
    """Bytes and number of the residuals, by dtype, op and module."""
    sizes, counts = Counter(), Counter()
    for r in kept:
        key = (r.dtype, r.op, r.path, "x".join(map(str, r.shape)))
        sizes[key] += r.bytes
        counts[key] += 1
    return sizes, counts


def break_down(kept, everything):
    """Groups of residuals in which the two styles differ, the largest first."""
    (hand, hand_counts), (auto, auto_counts) = map(
        group, (kept["by hand"], kept["autocast"])
    )
    rows = [
        {
            "dtype": dtype,
            "op": op,
            "module": path,
            "shape": shape,
            "by_hand": [hand_counts[key], hand[key]],
            "autocast": [auto_counts[key], auto[key]],
        }
        for key in sorted(hand | auto, key=lambda k: -max(hand[k], auto[k]))
        for dtype, op, path, shape in [key]
        if everything or hand[key] != auto[key]
    ]
    return rows


def print_table(table):
    print(
        "\n| model | float32 | by hand | autocast | ratio | ratio of what is stored |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in table.items():
        sizes = " | ".join(f"{row[style] / 1e6:.1f} MB" for style in STYLES)
        print(f"| {name} | {sizes} | {row['ratio']:.3f} | {row['stored_ratio']:.3f} |")


def print_break_down(name, rows, least=1e6):
    print(f"\n{name}: where the two differ, in MB (number)\n")
    print("| dtype | shape | op | module | by hand | autocast |")
    print("|---|---|---|---|---:|---:|")
    for row in rows:
        cells = [row["by_hand"], row["autocast"]]
        if max(size for _, size in cells) < least:
            continue
        sizes = " | ".join(f"{size / 1e6:.1f} ({n})" for n, size in cells)
        names = " | ".join(row[k] for k in ("dtype", "shape", "op", "module"))
        print(f"| {names} | {sizes} |")


def main():
    args = parse_args()
    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}")
    kept = {name: measure(case) for name, case in CASES.items()}
    table = {name: summarize(k) for name, k in kept.items()}
    print_table(table)
    for name, k in kept.items():
        table[name]["groups"] = rows = break_down(k, args.all)
        if rows:
            print_break_down(name, rows)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
