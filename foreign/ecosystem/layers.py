"""Calls of Haiku and Keras."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Call, Table
from .jax_numpy import FAR, IDS, MANY, TABLE

IMAGES = (2, 8, 8, 4)
TOKENS = (2, 8, 8)
CHANCES = {"positive": True, "scale": 0.98, "shift": 0.01, "counts": True}
LABELS = np.arange(64) % 2


def haiku_calls() -> list[Call]:
    hk = import_module("haiku")
    table = Table("hk")

    def add(name: str, build: Any, shape: Any, **options: Any) -> None:
        """A network that starts with the half-precision value."""
        model = hk.transform_with_state(lambda h: build(h))
        size = shape if isinstance(shape, tuple) else shape.shape
        params, state = model.init(jax.random.key(0), jnp.zeros(size))

        def run(h: jax.Array) -> Any:
            return model.apply(params, state, jax.random.key(1), h)[0]

        table(name, run, shape, **{"counts": True} | options)

    norm = {"create_scale": True, "create_offset": True}
    add("Linear", lambda h: hk.Linear(16)(h), TABLE)
    add("LayerNorm", lambda h: hk.LayerNorm(-1, **norm)(h), TABLE)
    add("LayerNorm of 1e3", lambda h: hk.LayerNorm(-1, **norm)(h), TABLE, scale=1e3)
    add("RMSNorm", lambda h: hk.RMSNorm(-1)(h), TABLE, scale=30.0)
    add("RMSNorm of 1e3", lambda h: hk.RMSNorm(-1)(h), TABLE, scale=1e3)
    add("GroupNorm", lambda h: hk.GroupNorm(2, **norm)(h), IMAGES, scale=1e3)
    add("InstanceNorm", lambda h: hk.InstanceNorm(**norm)(h), IMAGES, scale=1e3)
    batch = lambda h: hk.BatchNorm(True, True, 0.9)(h, is_training=True)
    add("BatchNorm", batch, IMAGES, scale=1e3)
    add("Conv2D", lambda h: hk.Conv2D(4, 3)(h), IMAGES)
    add("Conv2DTranspose", lambda h: hk.Conv2DTranspose(4, 3, 2)(h), IMAGES)
    add("avg_pool", lambda h: hk.avg_pool(h, 8, 8, "VALID"), IMAGES)
    add("max_pool", lambda h: hk.max_pool(h, 2, 2, "VALID"), IMAGES)
    attention = lambda h: hk.MultiHeadAttention(
        2, 4, w_init=hk.initializers.VarianceScaling(1.0)
    )(h, h, h)
    add("MultiHeadAttention", attention, TOKENS)
    for name in ("LSTM", "GRU", "VanillaRNN"):

        def unroll(h: jax.Array, name: str = name) -> Any:
            core = getattr(hk, name)(8)
            return hk.dynamic_unroll(core, h, core.initial_state(h.shape[1]))[0]

        add(f"{name} unrolled", unroll, (6, 2, 8))

    def quantized(h: jax.Array) -> Any:
        quantizer = hk.nets.VectorQuantizerEMA(8, 4, 0.25, 0.9)
        return quantizer(h + FAR[0], is_training=True)["loss"]

    add("nets.VectorQuantizerEMA loss at 319", quantized, TABLE)

    def convolved(h: jax.Array) -> Any:
        core = hk.Conv1DLSTM((8,), 4, 3)
        return core(h, core.initial_state(2))[0]

    add("Conv1DLSTM", convolved, (2, 8, 4))
    add("Embed", lambda h: h + hk.Embed(8, 8)(jnp.arange(64) % 8), TABLE)
    stacked = lambda h: hk.experimental.layer_stack(3)(
        lambda x: jnp.tanh(hk.Linear(8)(x)) + x.astype(jnp.float32)
    )(h.astype(jnp.float32))
    add("experimental.layer_stack", stacked, TABLE)
    add("remat", lambda h: hk.remat(hk.nets.MLP([8, 8]))(h), TABLE)
    average = lambda h: hk.ExponentialMovingAverage(0.99)(h)
    add("ExponentialMovingAverage", average, TABLE, gradient=False)
    quantized = lambda h: hk.nets.VectorQuantizer(8, 8, 0.25)(h, True)["quantize"]
    add("nets.VectorQuantizer", quantized, TABLE, gradient=False)
    return table.calls


def keras_calls() -> list[Call]:
    keras = import_module("keras")
    table = Table("keras")
    keras_losses(table, keras)
    keras_layers(table, keras)
    keras_operations(table, keras)
    return table.calls


def keras_losses(table: Table, keras: Any) -> None:
    hot = jax.nn.one_hot(LABELS * 3, 8)
    targets = jnp.asarray(LABELS[:, None] * np.ones((1, 8)), jnp.float32)
    for name in (
        "BinaryCrossentropy",
        "BinaryFocalCrossentropy",
        "Poisson",
        "KLDivergence",
        "Dice",
        "Tversky",
        "MeanAbsolutePercentageError",
        "MeanSquaredLogarithmicError",
    ):
        loss = getattr(keras.losses, name)()
        given = targets + ("Percentage" in name)  # it divides by them
        each = lambda h, loss=loss, given=given: loss(given, h)
        table(f"losses.{name}", each, TABLE, **CHANCES)
    extreme = np.concatenate([np.zeros(8), np.ones(8), np.linspace(0, 1, 48)])
    right = jnp.asarray(1 - (extreme > 0.5), jnp.float32)
    for name in ("BinaryCrossentropy", "Poisson", "KLDivergence"):
        loss = getattr(keras.losses, name)()
        table(
            f"losses.{name} at 0 and 1",
            lambda h, loss=loss: loss(right, h),
            extreme,
        )
    for name, given in (
        ("CategoricalCrossentropy", hot),
        ("CategoricalFocalCrossentropy", hot),
        ("SparseCategoricalCrossentropy", jnp.asarray(LABELS)),
    ):
        loss = getattr(keras.losses, name)()
        each = lambda h, loss=loss, given=given: loss(given, jax.nn.softmax(h))
        table(f"losses.{name}", each, TABLE, counts=True)
        loss = getattr(keras.losses, name)(from_logits=True)
        each = lambda h, loss=loss, given=given: loss(given, h)
        table(f"losses.{name}(from_logits)", each, TABLE, counts=True)
    names = "Huber LogCosh MeanSquaredError MeanAbsoluteError CosineSimilarity"
    for name in (names + " Hinge SquaredHinge CategoricalHinge").split():
        loss = getattr(keras.losses, name)()
        table(f"losses.{name}", lambda h, loss=loss: loss(hot, h), TABLE, counts=True)


def keras_layers(table: Table, keras: Any) -> None:
    layers = keras.layers

    def add(name: str, layer: Any, shape: Any, **options: Any) -> None:
        keras.utils.set_random_seed(0)
        layer.build(shape)
        variables = layer.trainable_variables, layer.non_trainable_variables
        values = [[v.value for v in group] for group in variables]
        run = lambda h: layer.stateless_call(*values, h)[0]
        table(f"layers.{name}", run, shape, **{"counts": True} | options)

    add("Dense", layers.Dense(16, activation="gelu"), TABLE)
    add("LayerNormalization", layers.LayerNormalization(), TABLE, scale=1e3)
    add("RMSNormalization", layers.RMSNormalization(), TABLE, scale=1e3)
    add("GroupNormalization", layers.GroupNormalization(2), IMAGES, scale=1e3)
    add("BatchNormalization", layers.BatchNormalization(), IMAGES, scale=1e3)
    add("UnitNormalization", layers.UnitNormalization(), TABLE, scale=1e3)
    add("Conv2D", layers.Conv2D(4, 3), IMAGES)
    add("DepthwiseConv2D", layers.DepthwiseConv2D(3), IMAGES)
    add(
        "GlobalAveragePooling2D",
        layers.GlobalAveragePooling2D(),
        (1, 64, 64, 4),
        shift=2.0,
    )
    add("AveragePooling2D", layers.AveragePooling2D(8), IMAGES)
    add("LSTM", layers.LSTM(8), TOKENS)
    add("GRU", layers.GRU(8), TOKENS)
    add(
        "Bidirectional", layers.Bidirectional(layers.SimpleRNN(4)), TOKENS, counts=False
    )
    add("Softmax", layers.Softmax(), TABLE)
    add("GaussianNoise", layers.GaussianNoise(0.1), TABLE)


def keras_operations(table: Table, keras: Any) -> None:
    ops = keras.ops
    for name in "mean sum var std logsumexp norm".split():
        scale, shift = (1e3, 0.0) if name in ("var", "std") else (1.0, 2.0)
        function = getattr(ops, name)
        table(f"ops.{name}", function, MANY, scale=scale, shift=shift, counts=True)
    moments = lambda h: ops.moments(h, axes=[0])
    table("ops.moments", moments, TABLE, scale=1e3, counts=True)
    sums = lambda h: ops.segment_sum(h, IDS, 8)
    table("ops.segment_sum", sums, IDS.shape, positive=True, shift=1.3, counts=True)
    norm = lambda h: ops.layer_normalization(h)
    table("ops.layer_normalization", norm, TABLE, scale=1e3, counts=True)
    spectrum = lambda h: ops.rfft(h)[0]
    table("ops.rfft", spectrum, (64,), counts=True)
    attend = lambda h: ops.dot_product_attention(h, h, h)
    table("ops.dot_product_attention", attend, (2, 8, 2, 8), counts=True)
    shape = 1, 4, 600, 1
    row = jnp.asarray(np.arange(2400.0).reshape(shape) % 251, jnp.float32)
    same = jnp.array([[1.0, 0, 0, 0, 1, 0, 0, 0]])
    still = lambda h: ops.image.affine_transform(row + h, same)
    table("ops.image.affine_transform of 600 pixels", still, shape)
    table("ops.unfold", lambda h: ops.unfold(row[..., 0][None] + h, 2), (1, 1, 1, 600))
    frames = lambda h: ops.extract_sequences(jnp.arange(3e5, 3e5 + 64) + h, 16, 8)
    table("ops.extract_sequences at 3e5", frames, (64,))

    def ctc(h: jax.Array) -> jax.Array:
        """The second row has more labels than frames."""
        labels = jnp.array([[1, 2, 3], [1, 2, 3]])
        frames = jnp.array([8, 2])
        return ops.ctc_loss(labels, h, jnp.array([3, 3]), frames)

    table("ops.ctc_loss of a padded batch", ctc, TOKENS, counts=True)
    table("ops.erfinv", ops.erfinv, TABLE, positive=True, scale=0.9, counts=True)


LIBRARIES = {"dm-haiku": haiku_calls, "keras": keras_calls}
