"""A generator and a critic learn to draw digits, with one loss scale for both.

It uses Flax NNX, `jamp.autocast` and one `jamp.GradScaler` for two models and two
optimizers, with a gradient penalty, that is, a gradient in the loss. It trains in
float32 and in float16 from the same weights and with the same batches, prints a table,
and draws `runs/gan/training.png` and `runs/gan/samples.png`.

    python examples/gan.py                        # a minute on a CPU
    python examples/gan.py --seeds 0 1 2
    python examples/gan.py --width 512 --batch-size 256 --steps 20000  # for a GPU

Needs `pip install ".[examples]"`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import Training, add_flag, compare, make_parser, report
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jamp


class Generator(nnx.Module):
    """A network without any code for mixed precision."""

    def __init__(self, args, rngs):
        width = args.width
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.dense = nnx.Linear(args.latents, 4 * 4 * width, rngs=rngs)
        self.conv1, self.conv2 = conv(width, width), conv(width, width // 2)
        self.conv3 = conv(width // 2, 1)

    def __call__(self, latents):  # [batch, latents] -> images [batch, 8, 8, 1]
        x = nnx.leaky_relu(self.dense(latents)).reshape(len(latents), 4, 4, -1)
        x = nnx.leaky_relu(self.conv1(x)).repeat(2, axis=1).repeat(2, axis=2)
        return nnx.tanh(self.conv3(nnx.leaky_relu(self.conv2(x))))


class Critic(nnx.Module):
    """A network without any code for mixed precision."""

    def __init__(self, width, rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.conv1, self.conv2 = conv(1, width // 2), conv(width // 2, width, strides=2)
        self.conv3 = conv(width, width)
        self.dense = nnx.Linear(4 * 4 * width, 1, rngs=rngs)

    def __call__(self, images):  # [batch, 8, 8, 1] -> logits [batch]
        x = nnx.leaky_relu(self.conv1(images))
        x = nnx.leaky_relu(self.conv3(nnx.leaky_relu(self.conv2(x))))
        return self.dense(x.reshape(len(x), -1))[:, 0]


def forward(model, x, precision):
    with jamp.autocast(dtype=precision, enabled=precision != "float32"):
        return model(x).astype(jnp.float32)


def mean_squared_slope(critic, real, precision):
    """How steep the critic is at real images: the R1 penalty.

    PyTorch's AMP examples also scale the loss of an inner gradient and unscale the
    result, because the gradient of a mean loss would vanish in float16. This gradient
    starts from 1 for each image and does not vanish. Without a division in here, the
    scale of the whole loss also stays in all of the outer backward pass.
    """
    slopes = jax.grad(lambda real: forward(critic, real, precision).sum())(real)
    return jnp.sum(slopes**2, axis=(1, 2, 3)).mean()


@functools.partial(nnx.jit, static_argnames=("precision", "weight"))
def train_step(models, optimizers, scaler, real, latents, precision, weight):
    critic, generator, average = models

    def critic_loss(critic):
        fake = forward(generator, latents, precision)
        fake_logits = forward(critic, fake, precision)
        real_logits = forward(critic, real, precision)
        loss = jnp.mean(nnx.softplus(fake_logits) + nnx.softplus(-real_logits))
        penalty = mean_squared_slope(critic, real, precision)
        return scaler.scale(loss + weight / 2 * penalty), (loss, penalty)

    def generator_loss(generator):
        logits = forward(critic, forward(generator, latents, precision), precision)
        loss = nnx.softplus(-logits).mean()
        return scaler.scale(loss), loss

    critic_grads, (loss, penalty) = nnx.grad(critic_loss, has_aux=True)(critic)
    generator_grads, other_loss = nnx.grad(generator_loss, has_aux=True)(generator)
    critic_grads = scaler.unscale_(
        optimizers[0], critic_grads
    )  # to measure their norms
    generator_grads = scaler.unscale_(optimizers[1], generator_grads)
    critic_skipped = scaler.step(optimizers[0], critic, critic_grads)
    generator_skipped = scaler.step(optimizers[1], generator, generator_grads)
    scaler.update()  # once; backs off if either was skipped

    old, new = nnx.state(average, nnx.Param), nnx.state(generator, nnx.Param)
    nnx.update(average, optax.incremental_update(new, old, 0.005))
    return jamp.metrics(scaler) | {
        "loss": loss,
        "penalty": penalty,
        "grad_norm": optax.tree.norm(nnx.as_pure(critic_grads)),
        "critic_skipped": critic_skipped,
        "generator_loss": other_loss,
        "generator_grad_norm": optax.tree.norm(nnx.as_pure(generator_grads)),
        "generator_skipped": generator_skipped,
    }


def make_training(args, images, test_images, precision, seed):
    rngs = nnx.Rngs(seed)
    critic, generator = Critic(args.width, rngs), Generator(args, rngs)
    adam = optax.adam(args.learning_rate, b1=0.0, b2=0.99)
    optimizers = [nnx.Optimizer(m, adam, wrt=nnx.Param) for m in (critic, generator)]
    average = nnx.clone(generator)  # of its parameters, over training; kept at the end
    scaler = jamp.GradScaler(
        growth_interval=args.growth_interval, enabled=precision == "float16"
    )

    take = functools.partial(train_step, precision=precision, weight=args.penalty)

    def step(state, batch):
        return state, take(*state, *batch)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        real = images[rng.integers(len(images), size=args.batch_size)]
        return real, np.float32(rng.normal(size=(args.batch_size, args.latents)))

    def evaluate(state):
        critic, _, average = state[0]
        latents = jax.random.normal(jax.random.key(0), (len(images), args.latents))
        fake = forward(average, latents, precision)
        logits = [forward(critic, x, precision).mean() for x in (test_images, fake)]
        distance = frechet_distance(fake, test_images, basis=images)
        return {"Fréchet distance": distance, "critic's gap": logits[0] - logits[1]}

    models = critic, generator, average
    return Training((models, optimizers, scaler), step, batch, evaluate)


def frechet_distance(first, second, basis):
    """Distance of normal distributions, in the basis images' 16 main directions."""
    first, second, basis = (np.reshape(x, (len(x), -1)) for x in (first, second, basis))
    directions = np.linalg.svd(basis - basis.mean(0), full_matrices=False)[2][:16]
    first, second = first @ directions.T, second @ directions.T
    covariances = np.cov(first.T), np.cov(second.T)
    shared = np.linalg.eigvals(covariances[0] @ covariances[1]).real.clip(0)
    means = np.sum((first.mean(0) - second.mean(0)) ** 2)
    return means + np.trace(sum(covariances)) - 2 * np.sum(np.sqrt(shared))


def draw_grids(args, runs, test_images):
    """64 images of each precision, from the same random numbers, and real ones."""
    latents = jax.random.normal(jax.random.key(1), (64, args.latents))
    grids = {"real": test_images[:64]}
    for precision in args.precisions:
        average = runs[precision, args.seeds[0]].state[0][2]
        grids[precision] = forward(average, latents, precision)
    figure = Figure(figsize=(4 * len(grids), 4.3), layout="constrained")
    panels = figure.subplots(1, len(grids))
    for axes, (name, grid) in zip(panels, grids.items(), strict=True):
        tiles = np.pad(np.reshape(grid, (8, 8, 8, 8)), ((0, 0), (0, 0), (1, 1), (1, 1)))
        axes.imshow(tiles.swapaxes(1, 2).reshape(80, 80), cmap="gray", vmin=-1, vmax=1)
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig(args.out / "samples.png", dpi=150)
    print(f"Samples: {args.out / 'samples.png'}.")


def main(argv=None):
    parser = make_parser(__doc__, "gan", steps=1500)
    add = functools.partial(add_flag, parser)
    add("--latents", 32, "random numbers that make an image")
    add("--width", 32, "channels")
    add("--batch-size", 64, "real images in a step, and as many generated ones")
    add("--learning-rate", 1e-3, "Adam's learning rate, for both models")
    add("--penalty", 1.0, "weight of the gradient penalty")
    args = parser.parse_args(argv)

    pixels, _ = load_digits(return_X_y=True)
    images = np.float32(pixels / 8 - 1).reshape(-1, 8, 8, 1)
    images = np.random.default_rng(0).permutation(images)
    test_images, images = np.split(images, [len(images) // 2])
    runs = compare(args, functools.partial(make_training, args, images, test_images))
    report(args, runs, title="Critic's loss")
    floor = frechet_distance(images, test_images, basis=images)
    print(f"Fréchet distance of training from test images: {floor:.4f}.")
    draw_grids(args, runs, test_images)
    return runs


if __name__ == "__main__":
    main()
