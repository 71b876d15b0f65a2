"""What `jamp.find_loss_scale` and `jamp.debug.check_step` cost beside one compilation.

    python -m benchmarks.proof_cost

Seconds to trace and compile a step, to run it once, and for each call, which traces and
compiles the step twice, as it is and in float32, and runs it some nine times. Only
their ratio means anything.
"""

import time

import jax

import jamp

from . import _harness, models, tables
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
    args = _harness.parser(__doc__).parse_args()
    _harness.prepare(args, "benchmarks.proof_cost")
    sizes = SIZES["small" if args.small else args.device]
    results = {}
    for name, size in list(sizes.items())[: 1 if args.small else None]:
        step, state = with_dynamic_loss_scale(models.make(size, False), autocast)
        call = state, *models.make_batch(size)
        row = results[name] = {}
        row["compile"], compiled = seconds(compiled_for, step, *call)
        row["run"], _ = seconds(compiled, *call)
        for function in (jamp.find_loss_scale, jamp.debug.check_step):
            row[function.__name__], _ = seconds(function, jax.jit(step), *call)
        _harness.save(args.json, results)
    tables.show("proof-cost", results)


if __name__ == "__main__":
    main()
