"""What a forward pass saves for its backward pass, and models to measure it on."""

import functools
import re
from collections.abc import Callable, Iterable
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
    op: str  # that made it, such as "dot_general"; "argument" for a parameter itself
    path: str  # of the op's module, with stars for the modules' numbers
    constant: bool  # filled with one number, which XLA does not store


def total(residuals: Iterable[Residual]) -> int:
    return sum(r.bytes for r in residuals)


def saved(loss: Callable, params: Any, *rest: Any) -> list[Any]:
    """The leaves of what `jax.vjp` returns for the gradient of the parameters."""
    return jax.tree.leaves(jax.vjp(lambda p: loss(p, *rest), params)[1])


def saved_bytes(loss: Callable, *args: Any) -> int:
    leaves = jax.eval_shape(functools.partial(saved, loss), *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def residuals(loss: Callable, *args: Any) -> list[Residual]:
    """The same leaves, each with the op that made it."""
    jaxpr = jax.make_jaxpr(functools.partial(saved, loss))(*args).jaxpr
    found = []
    for var in jaxpr.outvars:
        dtype, shape = var.aval.dtype, var.aval.shape
        size = var.aval.size * dtype.itemsize
        found.append(Residual(str(dtype), shape, size, *origin(jaxpr, var)))
    return found


def origin(jaxpr, var) -> tuple[str, str, bool]:
    """The op that made a value, its module, and whether the value is one number."""
    if isinstance(var, Literal):
        return "literal", "", True
    eqn = next((e for e in reversed(jaxpr.eqns) if var in e.outvars), None)
    if eqn is None:
        return "argument", "", False
    op, path = eqn.primitive.name, module_path(eqn)
    if op == "jit":
        inner = eqn.params["jaxpr"].jaxpr
        result = inner.outvars[eqn.outvars.index(var)]
        op, _, constant = origin(inner, result)
        return f"{eqn.params['name']}: {op}", path, constant
    filled = op == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
    return op, path, filled


def module_path(eqn) -> str:
    """Turns "jvp(jamp.autocast(float16))/CNN/Conv_0" into "CNN/Conv_*"."""
    path = str(eqn.source_info.name_stack)
    path = re.sub(r"jamp\.autocast\([^)]*\)|\w+\(|\)", "", path)
    return re.sub(r"_\d+", "_*", "/".join(filter(None, path.split("/"))))


# The models. `dtype` is what you pass to every layer to cast by hand, and `norms` is
# the dtype that the norms return, if not their default.


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
    norms: Any = None

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
    dtype = module.norms or module.dtype
    return nn.BatchNorm(use_running_average=False, dtype=dtype)(x)


class ResNet50(nn.Module):
    dtype: Any = None
    norms: Any = None
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        x = nn.relu(conv_norm(self, x, self.width, 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                width, stride = self.width * 2**stage, 2 if stage and not block else 1
                x = Bottleneck(width, stride, self.dtype, self.norms)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


class Block(nn.Module):
    heads: int
    dtype: Any = None
    norms: Any = None
    attend: Callable = nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        width, norms = x.shape[-1], self.norms or norm_dtype(self.dtype)
        y = nn.LayerNorm(dtype=norms)(x)
        x = x + nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, attention_fn=self.attend
        )(y)
        y = nn.LayerNorm(dtype=norms)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Transformer(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 32000
    dtype: Any = None
    norms: Any = None
    attend: Callable = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype, self.norms, self.attend)(x)
        x = nn.LayerNorm(dtype=self.norms or norm_dtype(self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class Case(NamedTuple):
    model: Callable  # of a dtype
    inputs: jax.ShapeDtypeStruct
    target: float  # at most, relative to the bytes of the model cast by hand


def images(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


CASES = {
    "MLP": Case(MLP, images(512, 784), 1.02),
    "CNN": Case(CNN, images(64, 32, 32, 3), 1.10),
    "ResNet-50": Case(ResNet50, images(32, 224, 224, 3), 1.10),
    "transformer": Case(Transformer, tokens(8, 512), 1.35),
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


def arguments(case: Case) -> tuple[Any, Any, Any, Any]:
    """Abstract parameters, state, inputs and labels."""
    init = case.model().init_with_output
    logits, state = jax.eval_shape(init, jax.random.key(0), case.inputs)
    labels = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
    return state.pop("params"), state, case.inputs, labels
