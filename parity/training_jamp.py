"""jamp's side of `training`: Flax models, `jamp.autocast` and both loss scalers.

The MLP and the transformer are Linen modules trained through optax with
`jamp.dynamic_loss_scale`; the CNN and the GAN are NNX modules with `jamp.GradScaler`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax import lax

import jamp

from .training_data import (
    ADAMW,
    BLOCKS,
    GROWTH_INTERVAL,
    LENGTH,
    MOMENTUM,
    SLOPE,
    VOCABULARY,
    WIDTH,
    Arrays,
    Run,
    Task,
    batches,
    weights,
)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128, name="fc1")(x))
        x = nn.relu(nn.Dense(128, name="fc2")(x))
        return nn.Dense(10, name="fc3")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(epsilon=1e-5, name="ln1")(x)
        q, k, v = (
            nn.Dense(WIDTH, name=name)(h).reshape(*h.shape[:2], 4, -1) for name in "qkv"
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(WIDTH, name="o")(mixed.reshape(h.shape))
        h = nn.LayerNorm(epsilon=1e-5, name="ln2")(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(h))
        return x + nn.Dense(WIDTH, name="down")(h)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        position = nn.Embed(LENGTH, WIDTH, name="position")
        x = nn.Embed(VOCABULARY, WIDTH, name="token")(x) + position.embedding
        for i in range(BLOCKS):
            x = Block(name=f"block{i}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="ln")(x)
        return nn.Dense(VOCABULARY, name="head")(x)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        average = {"momentum": 0.9, "rngs": rngs}
        self.conv1 = nnx.Conv(1, 8, (3, 3), padding=1, rngs=rngs)
        self.bn1 = nnx.BatchNorm(8, **average)
        self.conv2 = nnx.Conv(8, 16, (3, 3), strides=2, padding=1, rngs=rngs)
        self.bn2 = nnx.BatchNorm(16, **average)
        self.fc = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((1, 2)))


class Critic(nnx.Module):
    def __init__(self, n_out: int, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(8, 32, rngs=rngs)
        self.fc2 = nnx.Linear(32, 32, rngs=rngs)
        self.fc3 = nnx.Linear(32, n_out, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.fc1(x), SLOPE)
        return self.fc3(nnx.leaky_relu(self.fc2(x), SLOPE))


class GAN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.generator, self.discriminator = Critic(8, rngs), Critic(1, rngs)


# Parameters under torch's names, and in Flax's form.

LEAVES = {"conv": "kernel", "bn": "scale", "ln": "scale"}
EMBEDDINGS = ("token", "position")


def _path(name: str) -> tuple[str, ...]:
    """Flax's path for a torch parameter."""
    *path, leaf = name.split(".")
    if leaf == "weight":
        leaf = LEAVES.get(path[-1].rstrip("12"), "kernel")
        leaf = "embedding" if path[-1] in EMBEDDINGS else leaf
    return *path, leaf


def _turned(name: str, value: Any) -> Any:
    """A parameter in the other library's layout."""
    axes = {"kernel": {2: (1, 0), 4: (2, 3, 1, 0)}}.get(_path(name)[-1], {})
    return value.transpose(axes.get(value.ndim, range(value.ndim)))


def to_flax(params: Arrays) -> dict[str, Any]:
    """torch's parameters as a Flax tree."""
    tree: dict[str, Any] = {}
    for name, value in params.items():
        *path, leaf = _path(name)
        node = functools.reduce(lambda n, key: n.setdefault(key, {}), path, tree)
        node[leaf] = jnp.asarray(_turned(name, value))
    return tree


@functools.cache  # the same object: `nnx.jit` compiles once for all seeds
def _optimizer(task: Task) -> optax.GradientTransformation:
    if task.optimizer == "SGD":
        return optax.sgd(task.learning_rate, momentum=MOMENTUM)
    return optax.adamw(task.learning_rate, **ADAMW)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@functools.cache
def _trainer(task: Task) -> Callable[..., Any]:
    """The whole run of a Linen model: one `lax.scan` over the batches."""
    model = {"mlp": MLP, "transformer": Transformer}[task.model]()
    tx = jamp.dynamic_loss_scale(_optimizer(task), growth_interval=GROWTH_INTERVAL)

    def loss_fn(params, x, labels):
        with jamp.autocast(dtype=jnp.float16):
            return _cross_entropy(model.apply({"params": params}, x), labels)

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *batch)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        metrics = jamp.metrics(opt_state)
        names = ("loss_scale", "growth_tracker", "found_inf")
        return (params, opt_state), (loss, *(metrics[name] for name in names))

    @jax.jit
    def train(params, data):
        return lax.scan(step, (params, tx.init(params)), data)[1]

    return train


def _run_linen(task: Task, seed: int) -> Run:
    initial = to_flax(weights(task.model, seed))
    records = _trainer(task)(initial, batches(task.model, seed))
    loss, scale, tracker, skipped = map(np.asarray, records)
    return Run(loss, scale, tracker, skipped[:, None])


def _classifier_step(model, optimizers, scaler, x, labels):
    def loss_fn(model):
        with jamp.autocast(dtype=jnp.float16):
            loss = _cross_entropy(model(x), labels)
        return scaler.scale(loss), loss

    (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    return loss, [scaler.step(optimizers[0], model, grads)]


def _target(logits: jax.Array, value: float) -> jax.Array:
    labels = jnp.full_like(logits, value)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def _gan_step(model, optimizers, scaler, real, noise):
    def discriminator_loss(discriminator, generator):
        with jamp.autocast(dtype=jnp.float16):
            fake = lax.stop_gradient(generator(noise))
            loss = _target(discriminator(real), 1.0)
            loss = loss + _target(discriminator(fake), 0.0)
        return scaler.scale(loss), loss

    def generator_loss(generator, discriminator):
        with jamp.autocast(dtype=jnp.float16):
            loss = _target(discriminator(generator(noise)), 1.0)
        return scaler.scale(loss)

    parts = model.generator, model.discriminator
    gradient = nnx.value_and_grad(discriminator_loss, has_aux=True)
    (_, loss), grads = gradient(parts[1], parts[0])
    second = scaler.step(optimizers[1], parts[1], grads)
    grads = nnx.grad(generator_loss)(*parts)
    return loss, [scaler.step(optimizers[0], parts[0], grads), second]


@nnx.jit
def _train_nnx(model, optimizers, scaler, data):
    """The whole run of an NNX model: one `nnx.scan` over the batches."""
    train_step = _gan_step if isinstance(model, GAN) else _classifier_step

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scan(carry, batch):
        loss, skipped = train_step(*carry, *batch)
        carry[-1].update()
        scale, tracker = scaler_values(carry[-1])
        return carry, (loss, scale, tracker, jnp.stack(skipped))

    def scaler_values(scaler):
        return jnp.float32(scaler.get_scale()), scaler.growth_tracker[...]

    return scan((model, optimizers, scaler), data)[1]


def _run_nnx(task: Task, seed: int) -> Run:
    model = {"cnn": CNN, "gan": GAN}[task.model](nnx.Rngs(0))
    nnx.update(model, to_flax(weights(task.model, seed)))
    parts = (model.generator, model.discriminator) if task.model == "gan" else (model,)
    optimizers = tuple(nnx.Optimizer(p, _optimizer(task), wrt=nnx.Param) for p in parts)
    scaler = jamp.GradScaler(growth_interval=GROWTH_INTERVAL)
    data = tuple(batches(task.model, seed))
    records = _train_nnx(model, optimizers, scaler, data)
    return Run(*map(np.asarray, records))


def run(task: Task, seed: int) -> Run:
    run = _run_nnx if task.model in ("cnn", "gan") else _run_linen
    return run(task, seed)
