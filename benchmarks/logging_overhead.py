"""What looking costs: a jitted float16 step with metrics, a History, reports on skips.

    python -m benchmarks.logging_overhead             # on the CPU
    python -m benchmarks.logging_overhead --device gpu --width 4096 --rounds 100

An MLP of 12.6 million parameters, float16 autocast, AdamW, dynamic loss scale, donated
buffers. "jamp.metrics" returns the metrics from the step and drops them; "History"
appends them and the loss to a `jamp.debug.History(every=100)`, with an `on_row` that
reads one value, as a logger does. The last two rows make a report of steps that are
skipped, of which there are none. The rows take turns, `--steps` steps each, round
after round; the host waits once at the end of a turn, for all rows alike, so what a
History does between is measured, and so would be its waiting. A row's ratio is the
median over rounds of its time over the plain step's in the same round; the rows change
places from round to round.

malloc is set up as in `benchmarks.loss_scale_overhead`.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.loss_scale_overhead import RAISED_MALLOC


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--width", type=int, default=1773, help="units of a layer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--every", type=int, default=100, help="of the History")
    parser.add_argument("--default-malloc", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def build_rows(args):
    """Name -> a dict with the compiled step, its state, and what takes its metrics."""
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
    compiled = {}
    for name, (step, append) in rows.items():
        state = init_state()
        program = jax.jit(step, donate_argnums=0)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
        compiled[name] = {"step": program, "state": state, "append": append}
        compiled[name] |= {"seconds": [], "parameters": parameters}
    return compiled, batch


def measure(rows, batch, rounds, steps, warmup=2):
    import jax

    names = list(rows)
    for turn in range(rounds + warmup):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            row = rows[name]
            step, append = row["step"], row["append"]
            start = time.perf_counter()
            for _ in range(steps):
                row["state"], metrics = step(row["state"], *batch)
                if append is not None:
                    append(metrics)
            jax.block_until_ready((row["state"], metrics))
            if turn >= warmup:
                row["seconds"].append((time.perf_counter() - start) / steps)


def summarize(rows):
    base = rows["no metrics"]["seconds"]
    table = {}
    for name, row in rows.items():
        ratios = [a / b for a, b in zip(row["seconds"], base, strict=True)]
        table[name] = {
            "milliseconds": 1e3 * statistics.median(row["seconds"]),
            "ratio": statistics.median(ratios),
        }
    return table


def append_microseconds(every):
    """What one `append` of a dozen finished scalars takes by itself."""
    import jax.numpy as jnp

    import jamp

    metrics = {f"metric {i}": jnp.float32(i) for i in range(12)}
    history = jamp.debug.History(every)
    for _ in range(2 * every):
        history.append(metrics)
    blocks = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(every):
            history.append(metrics)
        blocks.append(1e6 * (time.perf_counter() - start) / every)
    return statistics.median(blocks)


def main():
    args = parse_args()
    raised = all(os.environ.get(k) == v for k, v in RAISED_MALLOC.items())
    if args.device == "cpu" and not args.default_malloc and not raised:
        command = [sys.executable, "-m", "benchmarks.logging_overhead"]
        os.environ.update(RAISED_MALLOC)
        os.execv(sys.executable, [*command, *sys.argv[1:]])
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[args.device]

    import jax

    rows, batch = build_rows(args)
    parameters = rows["no metrics"]["parameters"]
    print(
        f"Python {sys.version.split()[0]}, JAX {jax.__version__}, "
        f"{jax.devices()[0].device_kind}, {parameters / 1e6:.1f} million parameters, "
        f"batch {args.batch}, {args.rounds} rounds of {args.steps} steps\n"
    )
    measure(rows, batch, args.rounds, args.steps)
    table = summarize(rows)
    print("| step | time | ratio |\n|---|---:|---:|")
    for name, row in table.items():
        print(f"| {name} | {row['milliseconds']:.2f} ms | {row['ratio']:.4f} |")
    microseconds = append_microseconds(args.every)
    print(f"\nOne append of 12 scalars by itself: {microseconds:.0f} microseconds")
    if args.json:
        result = {"rows": table, "append_microseconds": microseconds}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
