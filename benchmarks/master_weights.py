"""Training with master weights beside float32 and naive float16.

    python -m benchmarks.master_weights

The problem is the one in shared/master_weights.py: a wide net on 256 points, for 100
steps on the whole set. float16 means float16 parameters and a float16 forward and
backward pass. Without a loss scale, the plain optax optimizer also works in float16.
Under `jamp.dynamic_loss_scale` it works in float32, and its updates are rounded to
float16.

    python -m benchmarks.master_weights --steps 10000

trains a small net in bfloat16 for so many steps, with full masters and with remainders:
loss scale, skipped steps and a checkpoint in the middle included. It counts the numbers
that differ between the two, and shows how much of the masters' path the parameters lose
without them.

    python -m benchmarks.master_weights --update --device gpu

times AdamW's update alone, donated, of four square arrays in each form of parameters:
what a form moves and holds, in bytes a parameter. "Scaled" forms are under a loss
scale, whose check also reads the gradients. Only this mode is timed.
"""

import functools

from benchmarks import _harness, tables
from benchmarks.model_sizes import ARRAYS, WIDTHS
from shared.master_weights import (
    FORMS,
    TRAINED,
    both_forms,
    curves,
    worst_difference,
)

PLAIN, AGAIN = "float32", "float32, again"


def summarize(losses):
    reference = losses["float32"]
    return {
        kind: {
            "first": float(curve[0]),
            "last": float(curve[-1]),
            "worst difference": float(worst_difference(curve, reference)),
        }
        for kind, curve in losses.items()
    }


def compare_forms(args):
    results = {}
    for name, inner in list(FORMS.items())[: 1 if args.small else None]:
        for seed in range(1 if args.small else args.seeds):
            found = both_forms(inner, args.steps, seed)
            results[f"{name}, seed {seed}"] = found._asdict()
            _harness.save(args.json, results)
    tables.show("master-forms", results)


def forms():
    """Form -> the dtype of the parameters and gradients, and the optimizer."""
    import jax.numpy as jnp
    import optax

    import jamp

    inner, half = optax.adamw(1e-3), jnp.bfloat16
    kept = {
        "float32": (jnp.float32, inner),
        "master_weights": (half, jamp.master_weights(inner)),
        "remainder": (half, jamp.master_weights(inner, remainder=True)),
        "float16 masters": (jnp.float16, jamp.master_weights(inner)),
    }
    scaled = {
        f"scaled {name}": (dtype, jamp.dynamic_loss_scale(tx))
        for name, (dtype, tx) in kept.items()
    }
    return {PLAIN: kept[PLAIN], AGAIN: kept[PLAIN], "bfloat16 alone": (half, inner)} | (
        kept | scaled
    )


class Update:
    """A compiled update of parameters, without a model."""

    def __init__(self, dtype, tx, width):
        import jax
        import jax.numpy as jnp

        import jamp
        from shared import hlo

        keys = jax.random.split(jax.random.key(0), ARRAYS)
        params = [jax.random.normal(key, (width, width), dtype) for key in keys]
        # A loss scale divides them by 2**16.
        self.grads = jax.tree.map(lambda p: jnp.ones_like(p), params)
        self.state = params, tx.init(params)
        step = lambda state, grads: jamp.step(tx, grads, state[1], state[0])
        jitted = jax.jit(step, donate_argnums=0)
        self.program = jitted.lower(self.state, self.grads).compile()
        self.figures = hlo.summarize(self.program)
        self.held = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def __call__(self):
        import jax

        self.state = jax.block_until_ready(self.program(self.state, self.grads))


def time_updates(args):
    width = WIDTHS["small" if args.small else args.device]
    rows = _harness.together(
        {
            name: functools.partial(Update, dtype, tx, width)
            for name, (dtype, tx) in forms().items()
        }
    )
    seconds = _harness.take_turns(rows, args.rounds or (4 if args.small else 30))
    parameters, results = ARRAYS * width**2, {}
    for name, row in rows.items():
        times = _harness.figures(seconds[name], seconds[PLAIN])
        results[name] = {
            **times,
            "bytes_per_parameter": row.figures.bytes / parameters,
            "held": row.held / parameters,
            "kernels": row.figures.kernels,
            "terabytes_per_second": row.figures.bytes / times["milliseconds"] / 1e9,
        }
    print(f"\n{ARRAYS} x {width}^2 = {parameters / 1e6:.1f} million parameters")
    tables.show("masters", results)
    _harness.save(args.json, results)


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--steps", type=int, help="of both forms in bfloat16 instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--update", action="store_true", help="time updates instead")
    parser.add_argument("--rounds", type=int, help="of updates; 30, with --small 4")
    args = parser.parse_args()
    _harness.prepare(args, "benchmarks.master_weights")
    _harness.print_heading()
    if args.update:
        time_updates(args)
        return
    if args.steps:
        compare_forms(args)
        return
    optimizers = list(TRAINED.items())[: 1 if args.small else None]
    results = {name: summarize(curves(inner)) for name, inner in optimizers}
    tables.show("master-weights", results)
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()
