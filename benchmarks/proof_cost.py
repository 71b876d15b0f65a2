"""What `jamp.find_loss_scale` and `jamp.debug.check_step` cost beside one compilation.

    python -m benchmarks.proof_cost

Seconds to trace and compile a step, to run it once, and for each call, which traces and
compiles the step once and runs it some ten times. Only their ratio means anything.
"""

import time

import jax

import jamp

from . import models
from .model_sizes import SIZES
from .train_rows import autocast, with_dynamic_loss_scale


def seconds(function, *args):
    """How long a call takes, from an empty cache."""
    jax.clear_caches()
    start = time.perf_counter()
    result = function(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start, result


def compiled_for(step, *args):
    return jax.jit(step).lower(*args).compile()


def main():
    print("| model | compile | run | find_loss_scale | check_step |")
    print("|---|---:|---:|---:|---:|")
    for name, size in SIZES["cpu"].items():
        step, state = with_dynamic_loss_scale(models.make(size, False), autocast)
        call = state, *models.make_batch(size)
        once, compiled = seconds(compiled_for, step, *call)
        run, _ = seconds(compiled, *call)
        cells = [f"{once:.1f} s", f"{run:.2f} s"]
        for function in (jamp.find_loss_scale, jamp.debug.check_step):
            start = time.perf_counter()
            jax.clear_caches()
            function(jax.jit(step), *call)
            spent = time.perf_counter() - start
            cells.append(f"{spent:.1f} s, {spent / once:.2f} times")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
