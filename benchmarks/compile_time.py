"""What autocast costs before the first step: tracing, lowering and compiling.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --layers 24 --repetitions 15

A training step of a Flax Linen transformer, `jax.value_and_grad` of its loss: with
float16 set by hand on every layer, and with no dtype set under `jamp.autocast`. The two
take turns, each time with new functions and with JAX's caches emptied; a ratio is the
median over turns of autocast's time over that by hand in the same turn.

The matrix products of the two programs are counted by the dtypes of their operands, as
lowered and as compiled; XLA multiplies in float32 on a CPU that has no float16.
"""

import argparse
import functools
import gc
import json
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp

from tests.residuals import Case, Transformer, arguments, loss_of

STYLES = ("by hand", "autocast")
PHASES = ("trace and lower", "compile", "total")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def build(case, args, style):
    """The seconds of each phase, and the programs as lowered and as compiled."""
    step = jax.jit(jax.value_and_grad(loss_of(case.model, style)))
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    lowered = step.lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    seconds = dict(
        zip(PHASES, (middle - start, end - middle, end - start), strict=True)
    )
    return seconds, {"lowered": lowered.as_text(), "compiled": compiled.as_text()}


def count_products(text):
    """Matrix products of a program's text (StableHLO or HLO) by operand dtypes."""
    counts = Counter()
    for types in re.findall(r"stablehlo\.dot_general .*: \((.*)\) ->", text):
        counts[" x ".join(re.findall(r"[x<]([a-z]+\d+)>", types))] += 1
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    for operands in re.findall(r" dot\(([^)]*)\)", text):
        names = re.findall(r"%?([\w.-]+)(?:,|$)", operands)
        counts[" x ".join(dtypes[name] for name in names)] += 1
    return counts


def measure(args):
    model = functools.partial(
        Transformer, args.layers, args.width, heads=args.width // 64, vocabulary=1024
    )
    tokens = jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32)
    case = Case(model, tokens, target=0)
    inputs = arguments(case)
    programs = {style: build(case, inputs, style)[1] for style in STYLES}  # warms up
    turns = [
        {style: build(case, inputs, style)[0] for style in STYLES}
        for _ in range(args.repetitions)
    ]
    results = {"seconds": {}, "ratio": {}, "products": {}}
    for phase in PHASES:
        results["seconds"][phase] = {
            style: statistics.median(turn[style][phase] for turn in turns)
            for style in STYLES
        }
        results["ratio"][phase] = statistics.median(
            turn["autocast"][phase] / turn["by hand"][phase] for turn in turns
        )
    for stage in ("lowered", "compiled"):
        results["products"][stage] = {
            style: count_products(programs[style][stage]) for style in STYLES
        }
    return results


def print_tables(results):
    print("\n| phase | by hand | autocast | ratio |")
    print("|---|---:|---:|---:|")
    for phase, seconds in results["seconds"].items():
        cells = " | ".join(f"{seconds[style]:.2f} s" for style in STYLES)
        print(f"| {phase} | {cells} | {results['ratio'][phase]:.2f} |")
    print("\n| matrix products | by hand | autocast |")
    print("|---|---:|---:|")
    for stage, counts in results["products"].items():
        for dtypes in sorted(counts["by hand"] | counts["autocast"]):
            cells = " | ".join(str(counts[style][dtypes]) for style in STYLES)
            print(f"| {stage}, {dtypes} | {cells} |")


def main():
    args = parse_args()
    print(
        f"Python {sys.version.split()[0]}, JAX {jax.__version__}, "
        f"{jax.devices()[0].device_kind}, {args.layers} layers x {args.width}, "
        f"batch {args.batch} x {args.length}, {args.repetitions} repetitions"
    )
    results = measure(args)
    print_tables(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    products = results["products"].values()
    if any(counts["by hand"] != counts["autocast"] for counts in products):
        sys.exit("The two programs do not multiply the same number of matrices alike.")


if __name__ == "__main__":
    main()
