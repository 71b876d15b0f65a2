"""Models that know nothing of jamp, each with a loss and data to train on.

No layer is given a dtype: these are float32 models. Sizes are arguments; the defaults
are small enough to train on a CPU in a test.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Task(NamedTuple):
    """What a training loop must know of a model.

    `state` is what a step replaces without a gradient: batch statistics, counters.
    `loss` enters the region around the forward pass.
    """

    init: Callable[[Any], tuple[Any, Any]]  # key -> params, state
    loss: Callable[..., tuple[Any, Any]]  # params, state, batch, key, region
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    optimizer: optax.GradientTransformation


def labeled_images(rng, batch, size, channels, classes=10, noise=1.0):
    """Noisy copies of one fixed pattern per class."""
    patterns = np.random.default_rng(7).normal(size=(classes, size, size, channels))
    labels = rng.integers(classes, size=batch)
    images = patterns[labels] + noise * rng.normal(size=(batch, size, size, channels))
    return {"image": images.astype(np.float32), "label": labels.astype(np.int32)}


def sequences(rng, batch, length, vocabulary):
    """Sequences in which a fixed table gives the next token four times in five.

    Token 0 is padding; the last tokens of some sequences are padding.
    """
    table = 1 + np.random.default_rng(7).permutation(vocabulary - 1)
    tokens = rng.integers(1, vocabulary, size=(batch, length))
    for t in range(1, length):
        follows = rng.random(batch) < 0.8
        tokens[:, t] = np.where(follows, table[tokens[:, t - 1] - 1], tokens[:, t])
    lengths = rng.integers(length // 2, length + 1, size=(batch, 1))
    return np.where(np.arange(length) < lengths, tokens, 0).astype(np.int32)


def classification_loss(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def token_loss(logits, targets, smoothing=0.1):
    """Cross entropy with smoothed labels, over the tokens that are not padding."""
    vocabulary = logits.shape[-1]
    labels = jax.nn.one_hot(targets, vocabulary) * (1 - smoothing)
    labels = labels + smoothing / vocabulary
    losses = -jnp.sum(labels * nn.log_softmax(logits), axis=-1)
    weights = (targets > 0).astype(jnp.float32)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def linen_task(module, inputs, loss, batch, optimizer, rngs=()):
    """A task of a Linen module.

    Args:
      inputs: batch -> the positional arguments of the module, after the last of which
        comes whether it trains.
      loss: outputs, batch -> loss.
      rngs: the names of the streams that the module draws from in training.
    """

    def init(key):
        example = jax.tree.map(jnp.asarray, batch(np.random.default_rng(0)))
        variables = module.init(
            {name: key for name in ("params", *rngs)}, *inputs(example), train=False
        )
        variables = dict(variables)
        return variables.pop("params"), variables

    def task_loss(params, state, data, key, region):
        streams = {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)}
        with region():
            outputs, state = module.apply(
                {"params": params, **state},
                *inputs(data),
                train=True,
                rngs=streams,
                mutable=list(state),
            )
            return loss(outputs, data), state

    return Task(init, task_loss, batch, optimizer)


# Flax Linen: images.


ImageConv = functools.partial(
    nn.Conv, use_bias=False, kernel_init=nn.initializers.he_uniform()
)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around which the input is added."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        def conv(features, kernel, stride=1):
            return ImageConv(features, (kernel, kernel), (stride, stride))

        def norm(**kwargs):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, **kwargs)

        y = nn.relu(norm()(conv(self.width, 1)(x)))
        y = nn.relu(norm()(conv(self.width, 3, self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, 1)(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The residual network of the Flax ImageNet example."""

    width: int
    stages: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        x = ImageConv(self.width, (7, 7), (2, 2), [(3, 3), (3, 3)])(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.width * 2**stage, stride)(x, train)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))


def resnet50(width=2, size=32, batch=32, classes=10):
    return linen_task(
        ResNet(width, classes=classes),
        inputs=lambda data: (data["image"],),
        loss=lambda logits, data: classification_loss(logits, data["label"]),
        batch=lambda rng: labeled_images(rng, batch, size, 3, classes, noise=0.3),
        optimizer=optax.sgd(5e-4, momentum=0.9),
    )


class VariationalAutoencoder(nn.Module):
    hidden: int
    latents: int
    pixels: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.relu(nn.Dense(self.hidden)(x))
        mean, log_variance = nn.Dense(self.latents)(y), nn.Dense(self.latents)(y)
        noise = jax.random.normal(self.make_rng("latents"), log_variance.shape)
        z = mean + noise * jnp.exp(0.5 * log_variance)
        y = nn.relu(nn.Dense(self.hidden)(z))
        return nn.Dense(self.pixels)(y), mean, log_variance


def evidence_loss(outputs, data):
    """Binary cross entropy in the example's way, and the divergence of the latents."""
    logits, mean, log_variance = outputs
    log_p, x = nn.log_sigmoid(logits), data["image"]
    entropy = -jnp.sum(x * log_p + (1 - x) * jnp.log(-jnp.expm1(log_p)), axis=-1)
    terms = 1 + log_variance - jnp.square(mean) - jnp.exp(log_variance)
    return jnp.mean(entropy) + jnp.mean(-0.5 * jnp.sum(terms, axis=-1))


def vae(hidden=32, latents=8, size=28, batch=16):
    def binary_images(rng):
        images = labeled_images(rng, batch, size, 1, noise=0.3)["image"]
        return {"image": (images.reshape(batch, -1) > 0).astype(np.float32)}

    return linen_task(
        VariationalAutoencoder(hidden, latents, size**2),
        inputs=lambda data: (data["image"],),
        loss=evidence_loss,
        batch=binary_images,
        optimizer=optax.adam(3e-3),
        rngs=("latents",),
    )


# Flax Linen: text.


def sinusoids(length, width):
    """Position embeddings of Vaswani et al., float32 [1, length, width]."""
    rates = np.exp(np.arange(0, width, 2) * -(np.log(1e4) / width))
    angles = np.arange(length)[:, None] * rates
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return jnp.asarray(table.reshape(1, length, width), jnp.float32)


def shift_right(tokens):
    return jnp.pad(tokens, [(0, 0), (1, 0)])[:, :-1]


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if there is memory, and two dense layers."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, train, memory=None, memory_mask=None):
        def attention(y, memory, mask):
            return nn.MultiHeadDotProductAttention(
                self.heads, dropout_rate=self.dropout, deterministic=not train
            )(y, memory, mask=mask)

        def drop(y):
            return nn.Dropout(self.dropout, deterministic=not train)(y)

        y = nn.LayerNorm()(x)
        x = x + drop(attention(y, y, mask))
        if memory is not None:
            x = x + drop(attention(nn.LayerNorm()(x), memory, memory_mask))
        y = drop(nn.relu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + drop(nn.Dense(x.shape[-1])(y))


class TranslationModel(nn.Module):
    """An encoder and a decoder that share the embedding with the logits, as in WMT."""

    vocabulary: int
    width: int
    heads: int
    depth: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, source, target, train):
        embed = nn.Embed(
            self.vocabulary,
            self.width,
            embedding_init=nn.initializers.normal(self.width**-0.5),
        )

        def embedded(tokens):
            x = embed(tokens) * self.width**0.5
            x = x + sinusoids(tokens.shape[1], self.width)
            return nn.Dropout(self.dropout, deterministic=not train)(x)

        x = embedded(source)
        mask = nn.make_attention_mask(source > 0, source > 0)
        for _ in range(self.depth):
            x = TransformerBlock(self.heads, self.dropout)(x, mask, train)
        memory = nn.LayerNorm()(x)

        y = embedded(shift_right(target))
        mask = nn.combine_masks(
            nn.make_attention_mask(target > 0, target > 0), nn.make_causal_mask(target)
        )
        memory_mask = nn.make_attention_mask(target > 0, source > 0)
        for _ in range(self.depth):
            block = TransformerBlock(self.heads, self.dropout)
            y = block(y, mask, train, memory, memory_mask)
        return embed.attend(nn.LayerNorm()(y))


def wmt(vocabulary=32, width=32, heads=4, depth=1, length=10, batch=8):
    """The target is the source with each token replaced by another."""
    dictionary = np.random.default_rng(9).permutation(vocabulary - 1) + 1
    dictionary = np.concatenate([[0], dictionary]).astype(np.int32)

    def pairs(rng):
        source = sequences(rng, batch, length, vocabulary)
        return {"source": source, "target": dictionary[source]}

    return linen_task(
        TranslationModel(vocabulary, width, heads, depth),
        inputs=lambda data: (data["source"], data["target"]),
        loss=lambda logits, data: token_loss(logits, data["target"]),
        batch=pairs,
        optimizer=optax.adam(2e-3),
        rngs=("dropout",),
    )


# Equinox.


class VisionBlock(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(
            width, width, 2 * width, 1, activation=jax.nn.gelu, key=keys[1]
        )

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class VisionTransformer(eqx.Module):
    """Of one image, as Equinox models are."""

    patches: eqx.nn.Conv2d
    positions: jax.Array
    blocks: list[VisionBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size, patch, width, heads, depth, classes, key):
        keys = jax.random.split(key, depth + 3)
        self.patches = eqx.nn.Conv2d(3, width, patch, patch, key=keys[0])
        tokens = (size // patch) ** 2
        self.positions = 0.02 * jax.random.normal(keys[1], (tokens, width))
        self.blocks = [VisionBlock(width, heads, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=keys[2])

    def __call__(self, image):
        x = self.patches(jnp.transpose(image, (2, 0, 1)))
        x = x.reshape(x.shape[0], -1).T + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


def vit(size=16, patch=4, width=32, heads=4, depth=2, batch=8, classes=10, *, inside):
    """With the region inside the function that `vmap` maps, or around the `vmap`."""

    def make(key):
        return VisionTransformer(size, patch, width, heads, depth, classes, key)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.filter(
        shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct), inverse=True
    )

    def init(key):
        return eqx.filter(make(key), eqx.is_inexact_array), {}

    def loss(params, state, data, key, region):
        model = eqx.combine(params, static)

        def one(image, label):
            with region():
                return classification_loss(model(image), label)

        if inside:
            return jnp.mean(jax.vmap(one)(data["image"], data["label"])), state
        with region():
            logits = jax.vmap(model)(data["image"])
            return classification_loss(logits, data["label"]), state

    def batch_of(rng):
        return labeled_images(rng, batch, size, 3, classes)

    return Task(init, loss, batch_of, optax.adam(1e-3))
