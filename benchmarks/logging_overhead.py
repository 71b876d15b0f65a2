"""What logging costs: a jitted float16 step with metrics, a History, reports on skips.

    python -m benchmarks.logging_overhead             # on the CPU
    python -m benchmarks.logging_overhead --device gpu

The model is an MLP with 12.6 million parameters (on a GPU 67 million), with float16
autocast, AdamW, a dynamic loss scale and donated buffers. "jamp.metrics" returns the
metrics from the step and drops them. "History" appends them and the loss to a
`jamp.debug.History`, with an `on_row` that reads one value, as a logger does. The last
two rows report on skipped steps, although none are skipped. A turn is `--steps` steps.
In all rows the host waits once at its end, so the time includes what a History does in
between, and would include any waiting of its own.
"""

import functools
import statistics

from benchmarks import _harness, tables

SIZES = {
    "cpu": {"width": 1773, "layers": 4, "batch": 64, "rounds": 50, "steps": 5},
    "gpu": {"width": 4096, "layers": 4, "batch": 64, "rounds": 50, "steps": 5},
    "small": {"width": 64, "layers": 2, "batch": 4, "rounds": 3, "steps": 2},
}


def build_rows(args):
    """Name -> a function that runs a turn. Also the number of parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    import jamp

    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3))

    def init_state():
        keys = jax.random.split(jax.random.key(0), args.layers)
        shape = (args.width, args.width)
        params = [
            {
                "kernel": jax.random.normal(key, shape) / args.width**0.5,
                "bias": jnp.zeros(args.width),
            }
            for key in keys
        ]
        return params, tx.init(params)

    @jamp.autocast(dtype=jnp.float16)
    def loss_fn(params, x, y):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - y) ** 2)

    def train_step(state, x, y):
        params, opt_state = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x, y)
        return jamp.step(tx, grads, opt_state, params), loss

    def explained_step(state, x, y, search=False):
        params, opt_state = state
        grad_fn = jamp.value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, x, y)
        state = jamp.step(tx, grads, opt_state, params)
        skipped = jamp.metrics(state)["found_inf"]
        report = jamp.debug.overflow_report(grads, when=skipped)
        if search:
            report = jamp.debug.find_nonfinite(grad_fn, when=skipped)(params, x, y)
        return state, (loss, report)

    def step_with_metrics(state, x, y):
        state, loss = train_step(state, x, y)
        return state, jamp.metrics(state) | {"loss": loss}

    seen = []
    history = jamp.debug.History(args.every, on_row=lambda _, row: seen.append(row))
    rows = {
        "no metrics": (train_step, None),
        "jamp.metrics": (step_with_metrics, None),
        f"+ History(every={args.every})": (step_with_metrics, history.append),
        "overflow_report(when=skipped)": (explained_step, None),
        "find_nonfinite(when=skipped)": (
            functools.partial(explained_step, search=True),
            None,
        ),
    }
    keys = jax.random.split(jax.random.key(1))
    batch = tuple(jax.random.normal(k, (args.batch, args.width)) for k in keys)
    turns = {}
    for name, (step, append) in rows.items():
        program = jax.jit(step, donate_argnums=0)
        turns[name] = turn_of(program, init_state(), batch, append, args.steps)
    shapes, _ = jax.eval_shape(init_state)
    return turns, sum(leaf.size for leaf in jax.tree.leaves(shapes))


def turn_of(step, state, batch, append, steps):
    """A function that runs some steps and waits for the last one."""
    import jax

    def turn():
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, *batch)
            if append is not None:
                append(metrics)
        jax.block_until_ready((state, metrics))

    return turn


def summarize(seconds, steps):
    each = {name: [turn / steps for turn in row] for name, row in seconds.items()}
    base = each["no metrics"]
    return {name: _harness.figures(row, base) for name, row in each.items()}


def append_microseconds(every, rounds=20):
    """The time of a single `append` of a dozen finished scalars."""
    import jax.numpy as jnp

    import jamp

    metrics = {f"metric {i}": jnp.float32(i) for i in range(12)}
    history = jamp.debug.History(every)

    def append():
        for _ in range(every):
            history.append(metrics)

    blocks = _harness.take_turns({"append": append}, rounds)["append"]
    return 1e6 * statistics.median(blocks) / every


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument(
        "--every", type=int, default=100, help="fetch interval of the History"
    )
    args = _harness.parse_sizes(parser, SIZES)
    _harness.prepare(args, "benchmarks.logging_overhead")
    turns, parameters = build_rows(args)
    _harness.print_heading(
        f"{parameters / 1e6:.1f} million parameters",
        f"batch {args.batch}",
        f"{args.rounds} rounds of {args.steps} steps",
    )
    table = summarize(_harness.take_turns(turns, args.rounds), args.steps)
    microseconds = append_microseconds(args.every)
    print(f"\nA single append of 12 scalars: {microseconds:.0f} microseconds")
    results = {"rows": table, "append_microseconds": microseconds}
    tables.show("logging", results)
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()
