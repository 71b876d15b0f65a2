"""ResNet-50 and a transformer in Linen and in NNX: plain, by hand, under a policy.

The Linen models are those of `shared.residuals`, and the NNX models here are the same
networks. `dtype` is what you pass to every layer to cast by hand, and `norms` is the
dtype that the norms return.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jamp
from shared import residuals

POLICY = "mixed_float16"
HALF = jnp.dtype("float16")


def softmax_in_float32(x):
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def attend(query, key, value, *, softmax=jax.nn.softmax, **unused):
    """Attention as two einsums and a softmax, like Linen's own.

    The models cast by hand need it in Linen too: with `force_fp32_for_softmax`, Linen's
    own attention keeps the weights in float32, and thus the second product. NNX's own
    is `jax.nn.dot_product_attention`, whose backward pass multiplies float32 by float16
    and whose float16 products JAX does not compile on a CPU.
    """
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    weights = softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


attend_by_hand = functools.partial(attend, softmax=softmax_in_float32)


class ConvNorm(nnx.Module):
    def __init__(self, inputs, width, size, stride, dtype, norms, rngs):
        self.conv = nnx.Conv(
            inputs,
            width,
            (size, size),
            (stride, stride),
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            width, use_running_average=False, dtype=norms, rngs=rngs
        )

    def __call__(self, x):
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    def __init__(self, inputs, width, stride, dtype, norms, rngs):
        layer = functools.partial(ConvNorm, dtype=dtype, norms=norms, rngs=rngs)
        self.reduce = layer(inputs, width, 1, 1)
        self.conv = layer(width, width, 3, stride)
        self.expand = layer(width, 4 * width, 1, 1)
        same = stride == 1 and inputs == 4 * width
        self.project = nnx.data(None if same else layer(inputs, 4 * width, 1, stride))

    def __call__(self, x):
        y = self.expand(nnx.relu(self.conv(nnx.relu(self.reduce(x)))))
        return nnx.relu((x if self.project is None else self.project(x)) + y)


class ResNet50(nnx.Module):
    def __init__(
        self,
        rngs,
        dtype=None,
        norms=None,
        blocks=(3, 4, 6, 3),
        width=64,
        classes=1000,
    ):
        self.stem = ConvNorm(3, width, 7, 2, dtype, norms, rngs)
        self.blocks, inputs = nnx.List(), width
        for stage, count in enumerate(blocks):
            for block in range(count):
                features, stride = width * 2**stage, 2 if stage and not block else 1
                self.blocks.append(
                    Bottleneck(inputs, features, stride, dtype, norms, rngs)
                )
                inputs = 4 * features
        self.head = nnx.Linear(inputs, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, width, heads, dtype, norms, attend, rngs):
        self.norm1 = nnx.LayerNorm(width, dtype=norms, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, dtype=norms, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(
        self,
        rngs,
        layers=12,
        width=768,
        heads=12,
        vocabulary=32000,
        dtype=None,
        norms=None,
        attend=attend,
    ):
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(width, heads, dtype, norms, attend, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(width, dtype=norms, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Case(NamedTuple):
    model: Callable  # of dtypes and sizes
    by_hand: dict[str, dict[str, Any]]  # ways of casting by hand
    sizes: dict[str, tuple[dict[str, Any], jax.ShapeDtypeStruct]]  # and the inputs

    @property
    def flax_api(self):
        return "linen" if issubclass(self.model, nn.Module) else "nnx"


class Built(NamedTuple):
    predict: Callable  # of parameters, state and inputs; also returns the new state
    loss: Callable  # of parameters, state, inputs and labels
    params: Any
    state: Any
    inputs: Any
    labels: Any

    @property
    def args(self):
        return self.params, self.state, self.inputs, self.labels


def ways(**kwargs):
    """Norms compute in float32 either way. The first way saves the least."""
    return {
        f"norms give {name}": {"dtype": HALF, "norms": jnp.dtype(name), **kwargs}
        for name in ("float16", "float32")
    }


IMAGES = {
    "full": ({}, residuals.images(32, 224, 224, 3)),
    "small": (
        {"blocks": (2, 1), "width": 8, "classes": 10},
        residuals.images(4, 32, 32, 3),
    ),
}
TOKENS = {
    "full": ({}, residuals.tokens(8, 512)),
    "small": (
        {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50},
        residuals.tokens(4, 16),
    ),
}
CASES = {
    "linen ResNet-50": Case(residuals.ResNet50, ways(), IMAGES),
    "linen transformer": Case(
        residuals.Transformer, ways(attend=attend_by_hand), TOKENS
    ),
    "nnx ResNet-50": Case(ResNet50, ways(), IMAGES),
    "nnx transformer": Case(Transformer, ways(attend=attend_by_hand), TOKENS),
}
FUSED = {"attend": nnx.dot_product_attention}
ONLY_TRACED = {
    "nnx transformer, attention of nnx": Case(
        Transformer,
        ways(),
        {size: (kwargs | FUSED, inputs) for size, (kwargs, inputs) in TOKENS.items()},
    ),
    "linen transformer, softmax in float16": Case(
        residuals.Transformer, ways(), TOKENS
    ),
    "nnx transformer, softmax in float16": Case(Transformer, ways(), TOKENS),
}


@functools.cache
def build(name, style, size="small", **policy):
    """A model with abstract parameters.

    Args:
      style: "float32", "policy", or one of the case's ways of casting by hand.
      policy: more arguments for `with_policy`.
    """
    case = (CASES | ONLY_TRACED)[name]
    sizes, inputs = case.sizes[size]
    dtypes = case.by_hand.get(style, {})
    make = {"linen": build_linen, "nnx": build_nnx}[case.flax_api]
    with_policy = functools.partial(
        getattr(jamp, case.flax_api).with_policy, policy=POLICY, **policy
    )
    predict, params, state = make(
        functools.partial(case.model, **sizes | dtypes),
        with_policy if style == "policy" else lambda model: model,
        inputs,
    )

    def loss(params, state, x, labels):
        logits = predict(params, state, x)[0]
        if style in case.by_hand:
            logits = logits.astype(jnp.float32)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(cross_entropy(logits, labels))

    logits, _ = jax.eval_shape(predict, params, state, inputs)
    labels = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
    return Built(predict, loss, params, state, inputs, labels)


def build_linen(make, with_policy, inputs):
    model = with_policy(make())

    def predict(params, state, x):
        return model.apply({"params": params, **state}, x, mutable=[*state])

    state = dict(jax.eval_shape(model.init, jax.random.key(0), inputs))
    return predict, state.pop("params"), state


def build_nnx(make, with_policy, inputs):
    model = with_policy(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def predict(params, state, x):
        model = nnx.merge(graph, params, state, copy=True)
        return model(x), nnx.split(model, nnx.Param, ...)[2]

    return predict, params, state
