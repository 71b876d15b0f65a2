"""Float16 training with `jamp.autocast` and `jamp.GradScaler`, beside float32.

A small Flax NNX CNN learns scikit-learn's `load_digits` twice, from the same weights
and with the same batches. The growth interval is short, so the loss scale climbs until
gradients overflow. `GradScaler` then skips the step and lowers the scale.

Run it with `make demo` or `python examples/digits.py`; a CPU is enough. It prints a
table and draws `runs/digits/scale.png`. Needs `pip install ".[examples]"`.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

try:
    import rich
    from matplotlib.figure import Figure
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as error:
    hint = 'pip install ".[examples]"'
    raise SystemExit(f"{error.name} is not installed. Run: {hint}") from None

FETCH_EVERY = 20  # steps; fetching the metrics makes the host wait for the device
ON_A_CPU = """\
A CPU has no units for float16: XLA converts to float32 and back. So float16 saves
time on a GPU, and none here. Look at the accuracy, which is the same, and at the
loss scale: it climbs until gradients overflow, and such a step is skipped.
"""


class CNN(nnx.Module):
    """A CNN without any code for mixed precision."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):  # [batch, 8, 8, 1]
        x = nnx.relu(self.conv1(images))
        x = nnx.relu(self.conv2(x))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(x)


def loss_and_accuracy(model, images, labels, use_amp):
    with jamp.autocast(dtype=jnp.float16, enabled=use_amp):
        logits = model(images)  # float16
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()


@nnx.jit(static_argnames="use_amp")
def train_step(model, optimizer, scaler, images, labels, use_amp):
    def loss_fn(model):
        loss, accuracy = loss_and_accuracy(model, images, labels, use_amp)
        return scaler.scale(loss), (loss, accuracy)

    scale = scaler.get_scale()  # this step's scale; update() may change it
    (_, (loss, accuracy)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    skipped = scaler.step(optimizer, model, grads)
    scaler.update()
    return {"loss": loss, "accuracy": accuracy, "scale": scale, "skipped": skipped}


def train(use_amp, data, args, progress, task):
    """Returns every step's metrics, test accuracy and loss, and the time of a step."""
    train_images, test_images, train_labels, test_labels = data
    model = CNN(nnx.Rngs(args.seed))
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    scaler = jamp.GradScaler(growth_interval=args.growth_interval, enabled=use_amp)

    start = time.perf_counter()
    history = []  # on the device at first, fetched a few steps at a time
    for step, batch in enumerate(batches(len(train_images), args), start=1):
        images, labels = train_images[batch], train_labels[batch]
        metrics = train_step(model, optimizer, scaler, images, labels, use_amp)
        history.append(metrics)
        if step == 1:  # it compiles
            jax.block_until_ready(metrics)
            start = time.perf_counter()
        if step % FETCH_EVERY == 0 or step == args.steps:
            history[-FETCH_EVERY:] = jax.device_get(history[-FETCH_EVERY:])
            progress.update(task, completed=step, metrics=describe(history))

    seconds = (time.perf_counter() - start) / max(args.steps - 1, 1)
    evaluate = nnx.jit(loss_and_accuracy, static_argnames="use_amp")
    results = evaluate(model, test_images, test_labels, use_amp)
    loss, accuracy = jax.device_get(results)
    metrics = {key: np.array([step[key] for step in history]) for key in history[0]}
    return metrics, accuracy, loss, seconds


def batches(size, args):
    """Indices of the training images, reshuffled in each epoch."""
    rng = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = rng.permutation(size)
        for start in range(0, size - args.batch_size + 1, args.batch_size):
            yield order[start : start + args.batch_size]


def describe(history):
    """The live columns: means of the last steps, the scale, skips since the start."""
    recent = history[-FETCH_EVERY:]
    loss, accuracy = np.mean([(s["loss"], s["accuracy"]) for s in recent], axis=0)
    scale = f"2^{np.log2(history[-1]['scale']):<2.0f}"
    skipped = sum(step["skipped"] for step in history)
    return f"loss {loss:.4f} acc {accuracy:4.0%} scale {scale} skipped {skipped}"


def results_table(runs):
    table = Table(caption="Without the first step, which compiles.")
    shown = "test accuracy", "test loss", "skipped steps", "loss scale", "ms a step"
    for column in ("run", *shown):
        table.add_column(column, justify="right")
    for name, (metrics, accuracy, loss, seconds) in runs.items():
        skipped = f"{metrics['skipped'].sum()} of {len(metrics['skipped'])}"
        first, *_, last = np.log2(metrics["scale"])
        scale = f"2^{first:.0f} to 2^{last:.0f}" if name == "float16" else "none"
        cells = f"{accuracy:.2%}", f"{loss:.4f}", skipped, scale
        table.add_row(name, *cells, f"{1e3 * seconds:.1f}")
    return table


def draw(runs, path):
    """The loss of both runs, and below it the loss scale of the float16 run."""
    figure = Figure(figsize=(9, 6), layout="constrained")  # Agg: needs no display
    top, bottom = figure.subplots(2, sharex=True)
    blue, orange, red = "#1761b0", "#f0a33c", "#c8102e"

    for name, color, width in (("float32", orange, 3.5), ("float16", blue, 1.3)):
        loss = runs[name][0]["loss"]
        window = min(9, len(loss))
        smooth = np.convolve(loss, np.ones(window) / window, "valid")
        centers = np.arange(len(smooth)) + (window - 1) / 2
        top.plot(loss, color=color, alpha=0.25, linewidth=0.6)
        top.plot(centers, smooth, color=color, linewidth=width, label=name)
    top.set(title="Training loss, mean of 9 steps", ylabel="cross entropy (nats)")
    top.set_yscale("log")

    scale, skipped = (runs["float16"][0][key] for key in ("scale", "skipped"))
    skips = skipped.nonzero()[0]
    label = f"skipped step ({len(skips)} of {len(scale)})"
    bottom.step(range(len(scale)), scale, where="post", color=blue, label="loss scale")
    bottom.plot(skips, scale[skips], "X", color=red, label=label)
    bottom.set(title="Float16 loss scale", xlabel="step", ylabel="scale (log2 axis)")
    bottom.set_yscale("log", base=2)

    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.margins(x=0.01)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_args():
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show)
    add = parser.add_argument
    add("--epochs", type=int, default=20, help="passes over the training images")
    add("--batch-size", type=int, default=64, help="images per step")
    add(
        "--learning-rate",
        type=float,
        default=2e-3,
        help="Adam's learning rate; it decays to 0",
    )
    add("--growth-interval", type=int, default=20, help="finite steps until growth")
    add("--seed", type=int, default=0, help="seed of the split, weights and batches")
    add("--out", type=Path, default=Path("runs/digits"), help="folder for the picture")
    return parser.parse_args()


def main():
    args = parse_args()
    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 16).reshape(-1, 8, 8, 1)
    data = train_test_split(
        images, labels, test_size=0.3, stratify=labels, random_state=args.seed
    )
    args.steps = args.epochs * (len(data[0]) // args.batch_size)
    if jax.default_backend() == "cpu":
        print(ON_A_CPU)

    names, runs = ("float16", "float32"), {}
    text, live = TextColumn("{task.description}"), TextColumn("{task.fields[metrics]}")
    with Progress(text, BarColumn(12), MofNCompleteColumn(), live) as progress:
        tasks = {n: progress.add_task(n, total=args.steps, metrics="") for n in names}
        for name, task in tasks.items():
            runs[name] = train(name == "float16", data, args, progress, task)

    rich.print(results_table(runs))
    draw(runs, args.out / "scale.png")
    print(f"Loss and scale over the steps: {args.out / 'scale.png'}")


if __name__ == "__main__":
    main()
