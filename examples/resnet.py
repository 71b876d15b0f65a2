"""A ResNet learns handwritten digits, or the images in a folder, under a policy.

It uses Flax Linen, `jamp.linen.with_policy` and `jamp.dynamic_loss_scale`: convolutions
run in float16, while BatchNorm, loss and parameters stay in float32. It trains in
float32 and in float16 from the same weights and with the same batches, prints a table
and draws `runs/resnet/training.png`.

    python examples/resnet.py                     # scikit-learn's 8x8 digits, on a CPU
    python examples/resnet.py --seeds 0 1 2
    python examples/resnet.py --images FOLDER --size 32  # FOLDER/<class>/<any image>
    python examples/resnet.py --images FOLDER --size 224 --stages 3 4 6 3 --width 64 \\
        --batch-size 256 --steps 20000 --save-every 1000  # ResNet-50, for a GPU

Needs `pip install ".[examples]"`.
"""

import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Training, add_flag, compare, make_parser, report
from PIL import Image, ImageOps
from sklearn.datasets import load_digits

import jamp


class Block(nn.Module):
    """Narrow, convolve, widen, add."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(y.shape[-1], (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet without any code for mixed precision."""

    stages: tuple[int, ...]  # blocks at each resolution
    width: int
    classes: int

    @nn.compact
    def __call__(self, x, train):  # [batch, size, size, channels], uint8
        large = x.shape[1] >= 64
        x = x / 127.5 - 1.0
        kernel, stride = ((7, 7), 2) if large else ((3, 3), 1)
        x = nn.Conv(self.width, kernel, stride, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        if large:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                x = Block(self.width * 2**i, 2 if i > 0 and j == 0 else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))  # logits


class TrainState(jamp.linen.TrainState):
    batch_stats: Any


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    images, labels = batch

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(
            variables, images, train=True, mutable="batch_stats"
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed["batch_stats"]

    grad_fn = jamp.value_and_grad(loss_fn, state, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)
    norm = optax.tree.norm(jamp.unscale(grads, state))
    stepped = state.apply_gradients(grads=grads)
    # An overflow may have reached the statistics, so a skipped step keeps the old ones.
    metrics = jamp.metrics(stepped) | {"loss": loss, "grad_norm": norm}
    hold = functools.partial(jnp.where, metrics["found_inf"])
    batch_stats = jax.tree.map(hold, state.batch_stats, batch_stats)
    return stepped.replace(batch_stats=batch_stats), metrics


@jax.jit
def test_step(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.stack([(logits.argmax(-1) == labels).sum(), losses.sum()])


def make_training(args, data, precision, seed):
    images, labels, test_images, test_labels = data
    classes = 1 + max(labels.max(), test_labels.max())
    model = ResNet(tuple(args.stages), args.width, int(classes))
    if precision != "float32":  # norms, losses and parameters stay in float32
        model = jamp.linen.with_policy(model, f"mixed_{precision}")
    variables = model.init(jax.random.key(seed), images[:1], train=False)
    tx = make_optimizer(args, enabled=precision == "float16")
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        chosen = rng.integers(len(images), size=args.batch_size)
        return shifted(images[chosen], rng), labels[chosen]

    def evaluate(state):
        starts = range(0, len(test_labels), args.batch_size)
        pieces = [slice(start, start + args.batch_size) for start in starts]
        sums = [test_step(state, test_images[p], test_labels[p]) for p in pieces]
        accuracy, loss = np.sum(sums, axis=0) / len(test_labels)
        return {"test accuracy": accuracy, "test loss": loss}

    return Training(state, train_step, batch, evaluate)


def make_optimizer(args, enabled):
    """SGD; the loss scale wraps everything that must see unscaled gradients."""
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    kernels = functools.partial(jax.tree.map, lambda param: param.ndim > 1)
    sgd = optax.chain(
        optax.add_decayed_weights(args.weight_decay, mask=kernels),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )
    interval = args.growth_interval
    return jamp.dynamic_loss_scale(sgd, growth_interval=interval, enabled=enabled)


def shifted(images, rng):
    """Shifts each image by up to an eighth of its size, repeating its border."""
    size = images.shape[1]
    shifts = rng.integers(-(size // 8), size // 8 + 1, size=(2, len(images), 1))
    rows, columns = np.clip(np.arange(size) + shifts, 0, size - 1)
    number = np.arange(len(images))[:, None, None]
    return images[number, rows[:, :, None], columns[:, None, :]]


def read_digits():
    """Images uint8 [n, 8, 8, 1] and labels [n]."""
    pixels, labels = load_digits(return_X_y=True)
    return np.uint8(pixels * (255 / 16)).reshape(-1, 8, 8, 1), labels


def read_folder(folder, size):
    """All `folder/<class>/<image>` files: uint8 [n, size, size, 3], and labels [n]."""
    classes = sorted(folder.glob("*/"))
    if not classes:
        raise SystemExit(f"--images: {folder} has no subfolders, one for each class.")
    suffixes, images, labels = Image.registered_extensions(), [], []
    for label, path in enumerate(classes):
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in suffixes)
        if not files:
            raise SystemExit(f"--images: {path} has no images.")
        for file in files:
            with Image.open(file) as image:
                images.append(ImageOps.fit(image.convert("RGB"), (size, size)))
        labels += [label] * len(files)
    return np.stack(images), np.array(labels)


def main(argv=None):
    parser = make_parser(__doc__, "resnet", steps=400)
    add = functools.partial(add_flag, parser)
    add("--stages", [1, 1, 1], "blocks at each resolution", nargs="+")
    add("--width", 16, "channels of the first stage; each stage doubles them")
    add("--batch-size", 64, "images in a step")
    add("--learning-rate", 0.1, "the highest learning rate; a cosine leads to 0")
    add("--weight-decay", 5e-4, "of the kernels")
    add("--size", 32, "size that the folder's images are resized to")
    text = "folder with a subfolder of images for each class (default: load_digits)"
    parser.add_argument("--images", type=Path, help=text)
    args = parser.parse_args(argv)

    data = read_folder(args.images, args.size) if args.images else read_digits()
    order = np.random.default_rng(0).permutation(len(data[1]))
    test, train = np.split(order, [max(1, len(order) // 5)])
    data = [part[chosen] for chosen in (train, test) for part in data]
    runs = compare(args, functools.partial(make_training, args, data))
    report(args, runs, title="Training loss", log_scale=True)
    return runs


if __name__ == "__main__":
    main()
