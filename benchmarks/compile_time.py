"""What autocast costs before the first step: tracing, lowering and compiling.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --layers 24 --repetitions 9

A training step of a Flax Linen transformer, `jax.value_and_grad` of its loss, with
float16 set by hand on every layer and with none set under `jamp.autocast`. The two take
turns; each time the functions are new and JAX's caches are empty. Then the matrix
products of the two compiled programs are counted by the dtypes of their operands.
"""

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

STYLES = ("by hand", "autocast")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def compile_once(args, style):
    """Seconds for tracing and lowering, seconds for compiling, and the program."""
    import jax
    import jax.numpy as jnp

    from tests.residuals import Transformer, arguments, loss_of

    model = partial(Transformer, args.layers, args.width, args.heads, 1024)
    tokens = jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32)
    inputs = arguments(model, tokens)
    step = jax.jit(jax.value_and_grad(loss_of(model, style)))
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    lowered = step.lower(*inputs)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return middle - start, time.perf_counter() - middle, lowered, compiled


def count_dots(text: str) -> Counter:
    """The matrix products of a program in text, by the dtypes of their operands."""
    dtypes = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[", text, re.MULTILINE))
    counts = Counter()
    for operands in re.findall(r" dot\(([^)]*)\)", text):
        names = re.findall(r"%?([\w.-]+)(?:,|$)", operands)
        counts[" x ".join(dtypes.get(name, name) for name in names)] += 1
    return counts


def main():
    args = parse_args()
    import jax
    for style in STYLES: compile_once(args, style)
    results={s:[] for s in STYLES}
    for _ in range(args.repetitions):
        for style in STYLES:
            a,b,lo,co=compile_once(args, style)
            results[style].append((a,b))
            Path(f'/tmp/m/{style.replace(" ","")}.hlo').write_text(co.as_text())
            Path(f'/tmp/m/{style.replace(" ","")}.mlir').write_text(lo.as_text())
    for s in STYLES: print(s,[statistics.median(c) for c in zip(*results[s])], results[s])
    for s in STYLES: print(count_dots(Path(f'/tmp/m/{s.replace(" ","")}.hlo').read_text()))


if __name__ == "__main__":
    main()
