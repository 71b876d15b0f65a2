"""What a backward pass is given of its forward pass, and models to measure it on."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

import jamp


class Residual(NamedTuple):
    """One array that `jax.vjp` keeps for the backward pass."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    op: str  # the op that made it; "argument" for a parameter as it is
    path: str  # the module that the op belongs to, with its numbers starred
    constant: bool  # a number that fills an array: XLA never stores it


def total(residuals) -> int:
    return sum(r.bytes for r in residuals)


def saved_bytes(loss: Callable, params: Any, *rest: Any) -> int:
    """The bytes of all that the function has which `jax.vjp` returns."""
    vjp = jax.eval_shape(lambda p, *r: jax.vjp(lambda q: loss(q, *r), p)[1], params, *rest)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))


def residuals(loss: Callable, params: Any, *rest: Any) -> list[Residual]:
    """The same one by one, with the op that made each."""

    def saved(p, *r):
        return jax.tree.leaves(jax.vjp(lambda q: loss(q, *r), p)[1])

    jaxpr = jax.make_jaxpr(saved)(params, *rest).jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    return [describe(v, makers, jaxpr) for v in jaxpr.outvars]


def describe(var, makers, jaxpr) -> Residual:
    aval = var.aval
    op, path, constant = origin(var, makers)
    size = aval.size * aval.dtype.itemsize
    return Residual(str(aval.dtype), aval.shape, size, op, path, constant)


def origin(var, makers) -> tuple[str, str, bool]:
    """The op that made a value, its module, and whether it is a number's broadcast."""
    if isinstance(var, Literal):
        return "literal", "", True
    if (eqn := makers.get(var)) is None:
        return "argument", "", False
    path = re.sub(r"_\d+", "_*", module_path(eqn))
    if eqn.primitive.name == "jit":
        inner = eqn.params["jaxpr"].jaxpr
        inside = {v: e for e in inner.eqns for v in e.outvars}
        op, deeper, constant = origin(
            inner.outvars[eqn.outvars.index(var)], inside
        )
        return f"{eqn.params['name']}: {op}", path or deeper, constant
    filled = eqn.primitive.name == "broadcast_in_dim"
    return eqn.primitive.name, path, filled and isinstance(eqn.invars[0], Literal)


def module_path(eqn) -> str:
    """The module path in an op's name stack, without transforms and regions."""
    path = str(eqn.source_info.name_stack)
    names = re.sub(r"jamp\.autocast\(\w+\)|\w+\(|\)", "", path).split("/")
    return "/".join(filter(None, names))


# The models. `dtype` is what somebody casting by hand gives to every layer.


def norm_dtype(dtype):
    return None if dtype is None else jnp.float32


class MLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(1024, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for width in (32, 64, 128):
            x = nn.relu(nn.Conv(width, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256, dtype=self.dtype)(x.reshape(len(x), -1)))
        return nn.Dense(10, dtype=self.dtype)(x)


class Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        y = nn.relu(conv_norm(self, x, self.width, 1))
        y = nn.relu(conv_norm(self, y, self.width, 3, self.stride))
        y = conv_norm(self, y, 4 * self.width, 1)
        if x.shape != y.shape:
            x = conv_norm(self, x, 4 * self.width, 1, self.stride)
        return nn.relu(x + y)


def conv_norm(module, x, width, size, stride=1):
    sizes, strides = (size, size), (stride, stride)
    x = nn.Conv(width, sizes, strides, use_bias=False, dtype=module.dtype)(x)
    return nn.BatchNorm(use_running_average=False, dtype=module.dtype)(x)


class ResNet50(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(conv_norm(self, x, 64, 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


class Block(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=norm_dtype(self.dtype))(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
        y = nn.LayerNorm(dtype=norm_dtype(self.dtype))(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Transformer(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 32000
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=norm_dtype(self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class Case(NamedTuple):
    model: Callable  # of a dtype
    inputs: jax.ShapeDtypeStruct
    target: float  # the most that autocast may keep, over the model cast by hand


def images(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


CASES = {
    "MLP": Case(MLP, images(512, 784), 1.02),
    "CNN": Case(CNN, images(64, 32, 32, 3), 1.10),
    "ResNet-50": Case(ResNet50, images(32, 224, 224, 3), 1.10),
    "transformer": Case(
        Transformer, jax.ShapeDtypeStruct((8, 512), jnp.int32), 1.35
    ),
}
STYLES = ("float32", "by hand", "autocast")


def loss_of(model: Callable, style: str, dtype: Any = jnp.float16) -> Callable:
    """`loss(params, state, x, labels)` of a model, with its products in `dtype`."""
    built = model(dtype=dtype) if style == "by hand" else model()

    def loss(params, state, x, labels):
        with jamp.autocast(dtype=dtype, enabled=style == "autocast"):
            logits, _ = built.apply({"params": params, **state}, x, mutable=[*state])
            if style == "by hand":
                logits = logits.astype(jnp.float32)
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return jnp.mean(cross_entropy(logits, labels))

    return loss


def arguments(model: Callable, inputs) -> tuple:
    """Abstract parameters, state, inputs and labels."""
    outputs, state = jax.eval_shape(model().init_with_output, jax.random.key(0), inputs)
    labels = jax.ShapeDtypeStruct(outputs.shape[:-1], jnp.int32)
    return state.pop("params"), state, inputs, labels
