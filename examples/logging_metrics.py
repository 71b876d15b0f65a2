"""Log loss, gradient norm, loss scale and skipped steps without slowing training down.

A small Flax Linen network learns scikit-learn's `load_digits` in float16. The jitted
step returns its metrics as device arrays; `jamp.debug.History` collects them, copies
them to the host while the next steps run, and hands each step's row to the logger.

    python examples/logging_metrics.py --logger print
    python examples/logging_metrics.py --logger tensorboard
    python examples/logging_metrics.py --logger wandb  # offline: no account, no network

Then `tensorboard --logdir runs/logging`, or `wandb sync` the folder that W&B names.

Needs `pip install ".[examples,logging]"`; a CPU is enough.
"""

import argparse
import functools
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp


class MLP(nn.Module):
    """An MLP without any code for mixed precision."""

    @nn.compact
    def __call__(self, x):
        for width in (256, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


# The short growth interval is for show: the scale climbs until gradients overflow.
tx = jamp.dynamic_loss_scale(optax.adam(1e-3), growth_interval=20)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, images, labels):
    def loss_fn(params):
        with jamp.autocast(dtype=jnp.float16):
            logits: Any = MLP().apply(params, images)  # float16
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
    # The gradients carry the scale in the state from before the update. On a step that
    # overflows, and is therefore skipped, the norm is inf or nan.
    grad_norm = optax.tree.norm(jamp.unscale(grads, opt_state))
    params, opt_state = jamp.step(tx, grads, opt_state, params)
    metrics = jamp.metrics(opt_state) | {"loss": loss, "grad_norm": grad_norm}
    return params, opt_state, metrics


def open_logger(name, logdir):
    """A function of (step, row) that logs, and one that ends the log."""
    logdir.mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        from tensorboardX import SummaryWriter  # pyright: ignore

        writer = SummaryWriter(str(logdir))

        def on_row(step, row):
            for key, value in finite(row).items():
                writer.add_scalar(f"train/{key}", value, step)

        return on_row, writer.close

    if name == "wandb":
        import wandb  # pyright: ignore

        run = wandb.init(project="jamp", mode="offline", dir=str(logdir))
        return lambda step, row: run.log(finite(row), step=step), run.finish

    def on_row(step, row):
        if step % 20 == 0 or row["found_inf"]:
            text = "  ".join(f"{key} {float(row[key]):<8.4g}" for key in SHOWN)
            print(f"step {step:4d}  {text}{'  skipped' * row['found_inf']}")

    return on_row, lambda: None


SHOWN = ("loss", "grad_norm", "loss_scale", "skipped_steps")


def finite(row):
    """Leaves out the norm of a skipped step, which a chart cannot show.

    The skip itself is logged: `found_inf` is 1, and `skipped_steps` counts it.
    """
    return {key: float(value) for key, value in row.items() if math.isfinite(value)}


def batches(images, labels, steps, batch_size=64, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        batch = rng.integers(len(images), size=batch_size)
        yield images[batch], labels[batch]


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ("tensorboard", "wandb", "print")
    add("--logger", choices=names, default="print", help="default: print")
    add("--steps", type=int, default=300, help="training steps (default: 300)")
    add(
        "--logdir",
        type=Path,
        default=Path("runs/logging"),
        help="folder for the log files",
    )
    add("--every", type=int, default=50, help="steps to fetch together")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        from sklearn.datasets import load_digits

        on_row, close = open_logger(args.logger, args.logdir)
    except ModuleNotFoundError as error:
        hint = 'pip install ".[examples,logging]"'
        raise SystemExit(f"{error.name} is not installed. Run: {hint}") from None
    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(pixels / 16, np.float32)

    params = MLP().init(jax.random.key(0), images[:1])
    opt_state = tx.init(params)
    history = jamp.debug.History(every=args.every, on_row=on_row)
    try:
        for batch in batches(images, np.int32(labels), args.steps):
            params, opt_state, metrics = train_step(params, opt_state, *batch)
            history.append(metrics)
    finally:  # after Ctrl-C as well: log what the device has computed
        history.fetch()
        close()
    print(history)
    return history


if __name__ == "__main__":
    main()
