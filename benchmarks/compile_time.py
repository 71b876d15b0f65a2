"""What autocast costs before the first step: tracing, lowering and compiling.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --layers 24 --rounds 15

The step is `jax.value_and_grad` of the loss of a Flax Linen transformer. It is compiled
with float16 set by hand on every layer, and without any dtype under `jamp.autocast`,
each time from new functions and with empty JAX caches. Tracing and lowering are in
seconds of the processor, without Python's garbage collector, whose full collections
come at a number of objects that one program just reaches and the other does not.

The matrix products of the two programs are counted by the dtypes of their operands, as
lowered and as compiled (including cuBLAS calls). On a CPU without float16, XLA
multiplies in float32.
"""

import functools
import gc
import re
import statistics
import sys
import time
from collections import Counter

import jax
import jax.numpy as jnp

from benchmarks import _harness, tables
from shared.residuals import Case, Transformer, arguments, loss_of

STYLES = ("by hand", "autocast")
PHASES = ("trace", "trace and lower", "compile", "total")
FULL = {"layers": 12, "width": 256, "batch": 4, "length": 128, "rounds": 9}
SIZES = {
    "cpu": FULL,
    "gpu": FULL,
    "small": {"layers": 1, "width": 64, "batch": 2, "length": 8, "rounds": 1},
}


def build(case, args, style):
    """The seconds of each phase, and the programs as lowered and as compiled."""
    step = jax.jit(jax.value_and_grad(loss_of(case.model, style)))
    jax.clear_caches()
    gc.collect()
    gc.disable()
    times = [time.process_time()]
    traced = step.trace(*args)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    gc.enable()
    start = time.perf_counter()
    compiled = lowered.compile()
    compiling = time.perf_counter() - start
    both = times[2] - times[0]
    found = times[1] - times[0], both, compiling, both + compiling
    seconds = dict(zip(PHASES, found, strict=True))
    return seconds, {"lowered": lowered.as_text(), "compiled": compiled.as_text()}


def count_products(text):
    """Matrix products of a program's text (StableHLO or HLO) by operand dtypes."""
    counts = Counter()
    for types in re.findall(r"stablehlo\.dot_general .*: \((.*)\) ->", text):
        counts[" x ".join(re.findall(r"[x<]([a-z]+\d+)>", types))] += 1
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    dots = re.findall(r" dot\(([^)]*)\)", text)
    dots += re.findall(r' custom-call\(([^)]*)\).*target="__cublas', text)
    for operands in dots:
        names = re.findall(r"%?([\w.-]+)(?:,|$)", operands)[:2]
        counts[" x ".join(dtypes[name] for name in names)] += 1
    return counts


def measure(args):
    model = functools.partial(
        Transformer, args.layers, args.width, heads=args.width // 64, vocabulary=1024
    )
    tokens = jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32)
    case = Case(model, tokens, target=0)
    inputs = arguments(case)
    programs, seconds = {}, {style: [] for style in STYLES}

    def building(style):
        def row():
            phases, programs[style] = build(case, inputs, style)
            seconds[style].append(phases)

        return row

    rows = {style: building(style) for style in STYLES}
    _harness.take_turns(rows, args.rounds, warmup=0 if args.small else 1)
    taken = {
        phase: {
            style: [turn[phase] for turn in seconds[style][-args.rounds :]]
            for style in STYLES
        }
        for phase in PHASES
    }
    return {
        "seconds": {
            phase: {style: statistics.median(row) for style, row in rows.items()}
            for phase, rows in taken.items()
        },
        "ratio": {
            phase: _harness.ratio(rows["autocast"], rows["by hand"])._asdict()
            for phase, rows in taken.items()
        },
        "products": {
            stage: {style: count_products(programs[style][stage]) for style in STYLES}
            for stage in ("lowered", "compiled")
        },
    }


def print_products(results):
    _harness.print_table(
        ("matrix products", *STYLES),
        [
            (f"{stage}, {dtypes}", *(str(counts[style][dtypes]) for style in STYLES))
            for stage, counts in results["products"].items()
            for dtypes in sorted(counts["by hand"] | counts["autocast"])
        ],
    )


def main():
    args = _harness.parse_sizes(_harness.parser(__doc__), SIZES)
    _harness.prepare(args, "benchmarks.compile_time")
    _harness.print_heading(
        f"{args.layers} layers x {args.width}",
        f"batch {args.batch} x {args.length}",
        f"{args.rounds} rounds",
    )
    results = measure(args)
    tables.show("compile-time", results)
    print_products(results)
    _harness.save(args.json, results)
    products = results["products"]
    if args.device == "gpu":  # there XLA chooses kernels by their speed
        products.pop("compiled")
    if any(counts["by hand"] != counts["autocast"] for counts in products.values()):
        sys.exit("The two programs do not multiply the same number of matrices alike.")


if __name__ == "__main__":
    main()
