"""A whole training step of GPT-2, ResNet-50 and ViT-B/16, with jamp and its peers.

    python -m benchmarks.train_step                   # small models, on the CPU
    python -m benchmarks.train_step --device gpu      # 124 M, 26 M and 87 M parameters
    python -m benchmarks.train_step --models gpt2 --rows "float16 by hand,autocast"

Every row is one compiled function from parameters, batch statistics, states and batch
to their next values, with the state donated. Rows begin with the same parameters and
see the same batch at every step. They are compiled in threads and then take turns, one
step each. "ratio" is a row's time over that of float16 by hand in the same round, as
the median over rounds with its standard error. A ratio is called level if it is within
two errors of 1, or as near as that of "float16 by hand, again", which is the same
program a second time. Clipping makes each update depend on all gradients, as a check
does, and a static scale without a check does not, so these two rows by hand tell what
such a dependency costs from what jamp costs. "memory" is XLA's peak, and "temporary" is
the memory beside arguments and results: the activations.
benchmarks/torch_train_step.py trains the same models in torch.

Under autocast, as in torch, embeddings are float32 and so is a transformer's residual
stream. In models cast by hand it is float16, except in the row "float32 residual".

A CPU can show that all rows train alike, and what jamp adds to a program: casts, the
check, the selection. XLA's CPU backend widens float16 to float32 in each product and
each loop, so a CPU cannot show the gain over float32 or float16's memory.

On a GPU the float32 row multiplies in TF32, and half precision uses cuDNN's flash
attention. The losses of the first steps must be finite and near those of float32. Since
the batch is always the same, a skipped step shows the same loss twice; repeats are
dropped before losses are compared.
"""

import functools
import gc
import os

from . import _harness
from .model_sizes import (
    add_arguments,
    chosen,
    is_wanted,
    parameters,
    peak_tflops,
    rounds,
    step_flops,
)

STEPS_COMPARED = 4
TOLERANCE = 0.03  # relative; measured: below 0.01, float16 against float32


def compile_row(build, size, flash, batch):
    """The compiled step, its state as a list of arrays, and figures from its HLO."""
    import jax
    import jax.numpy as jnp

    from shared import hlo

    step, state = build(size, flash)
    leaves, treedef = jax.tree.flatten(state)
    jitted = jax.jit(_harness.flat(step, treedef), donate_argnums=0)
    compiled = jitted.lower(leaves, *batch).compile()
    own = [jnp.array(leaf, copy=True) for leaf in leaves]  # some rows share theirs
    return compiled, own, hlo.summarize(compiled)


class Row:
    """One compiled step, its state, and the losses so far."""

    def __init__(self, build, size, flash, batch):
        self.batch, self.losses = batch, []
        self.compiled, self.state, self.program = compile_row(build, size, flash, batch)

    def __call__(self):
        import jax

        self.state, loss = self.compiled(self.state, *self.batch)
        jax.block_until_ready((self.state, loss))
        self.losses.append(loss)


def first_losses(row):
    """The losses of the first steps that moved the parameters."""
    losses = [float(loss) for loss in row.losses]
    distinct = [b for a, b in zip([None, *losses], losses, strict=False) if a != b]
    return distinct[:STEPS_COMPARED]


def check_losses(model, rows, reference, tolerance=TOLERANCE):
    """Raises AssertionError unless all rows train alike."""
    for name, row in rows.items():
        losses = first_losses(row)
        assert all(abs(x) < float("inf") for x in losses), f"{model}, {name}: {losses}"
        if reference in rows:
            pairs = zip(losses, first_losses(rows[reference]), strict=False)
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            assert worst < tolerance, f"{model}, {name}: {losses}, {worst:.3f} off"


def measure(model, size, args, peak):
    """Trains one model in all rows; row -> figures."""
    from . import models
    from .train_rows import BASE, REFERENCE, rows_for

    check_parameters(size)
    batch = models.make_batch(size)
    flash = args.device == "gpu"
    rows = _harness.together(
        {
            name: functools.partial(Row, build, size, flash, batch)
            for name, build in rows_for(size).items()
            if is_wanted(name, args)
        }
    )
    seconds = _harness.take_turns(rows, rounds(args))
    check_losses(model, rows, REFERENCE)
    flops = step_flops(size)
    table = {}
    for name, row in rows.items():
        program, times = row.program, _harness.figures(seconds[name], seconds.get(BASE))
        median = times["milliseconds"] / 1e3
        table[name] = {
            **times,
            "per_second": size.items / median,
            "unit": size.unit,
            "mfu": flops / median / peak / 1e12 if peak else None,
            "peak_megabytes": program.peak_bytes / 1e6,
            "temporary_megabytes": program.temporary_bytes / 1e6,
            "kernels": program.kernels,
            "gigabytes": program.bytes / 1e9,
            "losses": first_losses(row),
            "skipped": len(row.losses) - len(set(map(float, row.losses))),
        }
    return table


def check_parameters(size):
    import jax
    from flax import nnx

    from . import models

    model = nnx.eval_shape(lambda: models.make(size, flash=False))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in params) == parameters(size)


def show(table):
    from .train_rows import AGAIN

    unit = next(iter(table.values()))["unit"]
    columns = ["step", "time", "ratio", f"{unit}/s", "MFU", "memory", "temporary"]
    _harness.print_table(
        [*columns, "kernels", "losses", "skipped"],
        (
            [
                name,
                f"{row['milliseconds']:.1f} ms",
                _harness.ratio_cell(row, table.get(AGAIN)),
                f"{row['per_second']:,.0f}",
                "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %",
                f"{row['peak_megabytes']:,.0f} MB",
                f"{row['temporary_megabytes']:,.0f} MB",
                str(row["kernels"]),
                " ".join(f"{loss:.3f}" for loss in row["losses"]),
                str(row["skipped"]),
            ]
            for name, row in table.items()
        ),
    )


def main():
    parser = _harness.parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _harness.prepare(args, "benchmarks.train_step")
    import jax

    from .train_rows import ABSENT

    peak = peak_tflops(jax.devices()[0].device_kind, args)
    _harness.print_heading(*(f"no {name} here" for name in ABSENT))
    results = {}
    for model, size in chosen(args).items():
        print(f"\n{model}: {parameters(size) / 1e6:.1f} M parameters, {size}")
        results[model] = measure(model, size, args, peak)
        show(results[model])
        gc.collect()  # modules form cycles; frees their arrays
        jax.clear_caches()
        _harness.save(args.json, results)  # after each model, in case time runs out


if __name__ == "__main__":
    main()
