"""An Equinox LSTM reads handwritten digits row by row.

It uses `jamp.autocast` around a vmapped single-example model, and
`jamp.dynamic_loss_scale` around an optax optimizer. It trains in float32 and in float16
from the same weights and with the same batches, prints a table and draws
`runs/equinox_lstm/training.png`.

    python examples/equinox_lstm.py               # scikit-learn's 8x8 digits, on a CPU
    python examples/equinox_lstm.py --seeds 0 1 2
    python examples/equinox_lstm.py --layers 4 --width 2048 --batch-size 1024  # GPU

Needs `pip install ".[examples]"`.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Training, add_flag, compare, make_parser, report
from sklearn.datasets import load_digits

import jamp


class LSTM(eqx.Module):
    """An LSTM without any code for mixed precision."""

    cells: list[eqx.nn.LSTMCell]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, layers, width, key):
        keys = jax.random.split(key, layers + 1)
        sizes = [8] + [width] * (layers - 1)
        self.cells = [
            eqx.nn.LSTMCell(size, width, key=k)
            for size, k in zip(sizes, keys[1:], strict=True)
        ]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=keys[0])

    def __call__(self, rows):  # [8, 8], one image -> logits [10]
        for cell in self.cells:
            zeros = jnp.zeros(cell.hidden_size)

            def read(carry, row, cell=cell):
                hidden, memory = cell(row, carry)
                return (hidden, memory), hidden

            _, rows = jax.lax.scan(read, (zeros, zeros), rows)
        return self.head(self.norm(rows[-1]))


def make_training(args, data, precision, seed):
    images, labels, test_images, test_labels = data
    model = LSTM(args.layers, args.width, jax.random.key(seed))
    params, static = eqx.partition(model, eqx.is_inexact_array)  # arrays, and the rest
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    tx = jamp.dynamic_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        growth_interval=args.growth_interval,
        enabled=precision == "float16",
    )

    def loss_fn(params, images, labels):
        model = eqx.combine(params, static)
        with jamp.autocast(dtype=precision, enabled=precision != "float32"):
            logits = jax.vmap(model)(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (logits.argmax(-1) == labels).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, images, labels):
        params, opt_state = state
        grad_fn = jamp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, accuracy), grads = grad_fn(params, images, labels)
        norm = optax.tree.norm(jamp.unscale(grads, opt_state))
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        more = {"loss": loss, "accuracy": accuracy, "grad_norm": norm}
        return (params, opt_state), jamp.metrics(opt_state) | more

    def step(state, batch):
        return train_step(state, *batch)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        chosen = rng.integers(len(images), size=args.batch_size)
        return images[chosen], labels[chosen]

    def evaluate(state):
        loss, accuracy = jax.jit(loss_fn)(state[0], test_images, test_labels)
        return {"test accuracy": accuracy, "test loss": loss}

    return Training((params, tx.init(params)), step, batch, evaluate)


def read_digits():
    """Images float32 [n, 8, 8] and labels [n]; a fifth of them is the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 8 - 1).reshape(-1, 8, 8)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    return images[train], labels[train], images[test], labels[test]


def main(argv=None):
    parser = make_parser(__doc__, "equinox_lstm", steps=400)
    add = functools.partial(add_flag, parser)
    add("--layers", 2, "LSTM layers")
    add("--width", 64, "width of their states")
    add("--batch-size", 64, "images in a step")
    add("--learning-rate", 5e-3, "Adam's first learning rate; a cosine leads to 0")
    args = parser.parse_args(argv)

    runs = compare(args, functools.partial(make_training, args, read_digits()))
    report(args, runs, title="Training loss", log_scale=True)
    return runs


if __name__ == "__main__":
    main()
