"""A Haiku CNN with BatchNorm learns handwritten digits.

It uses `hk.transform_with_state`, `jamp.autocast` around `apply`, and
`jamp.dynamic_loss_scale` around an optax optimizer. It trains in float32 and in float16
from the same weights and with the same batches, prints a table and draws
`runs/haiku_cnn/training.png`.

    python examples/haiku_cnn.py                  # scikit-learn's 8x8 digits, on a CPU
    python examples/haiku_cnn.py --seeds 0 1 2
    python examples/haiku_cnn.py --widths 256 512 --batch-size 1024  # for a GPU

Needs `pip install ".[examples]"`.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Training, add_flag, compare, make_parser, report
from sklearn.datasets import load_digits

import jamp


def cnn(images, train, widths):
    """No code for mixed precision; images [batch, 8, 8, 1] -> logits."""
    x = images
    for width in widths:
        x = hk.Conv2D(width, 3, with_bias=False)(x)
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(
            x, is_training=train
        )
        x = hk.max_pool(jax.nn.relu(x), (2, 2), (2, 2), "SAME")
    return hk.Linear(10)(hk.Flatten()(x))


def make_training(args, data, precision, seed):
    images, labels, test_images, test_labels = data
    transformed = hk.transform_with_state(functools.partial(cnn, widths=args.widths))
    model = hk.without_apply_rng(transformed)
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, args.steps))
    tx = jamp.dynamic_loss_scale(
        optimizer,
        growth_interval=args.growth_interval,
        enabled=precision == "float16",
    )

    def loss_fn(params, state, images, labels, train):
        with jamp.autocast(dtype=precision, enabled=precision != "float32"):
            logits, state = model.apply(params, state, images, train)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (state, logits)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(training_state, images, labels):
        params, state, opt_state = training_state
        grad_fn = jamp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, (new_state, _)), grads = grad_fn(params, state, images, labels, True)
        norm = optax.tree.norm(jamp.unscale(grads, opt_state))
        params, opt_state = jamp.step(tx, grads, opt_state, params)

        # An overflow may have reached the statistics, so a skip keeps the old ones.
        metrics = jamp.metrics(opt_state) | {"loss": loss, "grad_norm": norm}
        hold = functools.partial(jnp.where, metrics["found_inf"])
        state = jax.tree.map(hold, state, new_state)
        return (params, state, opt_state), metrics

    def step(training_state, batch):
        return train_step(training_state, *batch)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        chosen = rng.integers(len(images), size=args.batch_size)
        return images[chosen], labels[chosen]

    @jax.jit
    def test(params, state):
        loss, (_, logits) = loss_fn(params, state, test_images, test_labels, False)
        accuracy = (logits.argmax(-1) == test_labels).mean()
        return {"test accuracy": accuracy, "test loss": loss}

    def evaluate(training_state):
        params, state, _ = training_state
        return test(params, state)

    # Outside the region, because Haiku makes parameters in the dtype of the input.
    params, state = model.init(jax.random.key(seed), images[:1], True)
    return Training((params, state, tx.init(params)), step, batch, evaluate)


def read_digits():
    """Images float32 [n, 8, 8, 1] and labels [n]; a fifth of them is the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 8 - 1).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    return images[train], labels[train], images[test], labels[test]


def main(argv=None):
    parser = make_parser(__doc__, "haiku_cnn", steps=300)
    add = functools.partial(add_flag, parser)
    add("--widths", [32, 64], "channels of each convolution", nargs="+")
    add("--batch-size", 64, "images in a step")
    add("--learning-rate", 3e-3, "Adam's first learning rate; a cosine leads to 0")
    args = parser.parse_args(argv)

    runs = compare(args, functools.partial(make_training, args, read_digits()))
    report(args, runs, title="Training loss", log_scale=True)
    return runs


if __name__ == "__main__":
    main()
