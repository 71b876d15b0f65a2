"""What a product loses in a lower dtype against float32: forward and backward.

Errors are relative, for the whole result and for its worst slice: a row (along the last
axis) or a column (along all others). Each product of a batch is measured alone, and the
largest errors are kept. A slice is measured against its own size: its norm, or the norm
that its numbers would have if their signs were random, whichever is larger. Otherwise a
row in which terms happen to cancel would count as an error.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .._autocast.contraction import Contraction
from .._autocast.decision import FLOAT32_DTYPE, Op, Params
from .._autocast.derivatives import with_gradients
from .._autocast.float8 import RECIPES, Float8Product, product_for
from .._autocast.low_precision import E4M3, Scaled, quantized

# Slices of fewer numbers are not judged: their errors depend too much on chance.
LEAST = 16
# A slice that is smaller than this share of the largest one is lost in float32 too if
# the two are added.
NEGLIGIBLE = 2.0**-24
DIRECTIONS = FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"
BFLOAT16 = jnp.dtype("bfloat16")

Run = Callable[[jax.Array, jax.Array], jax.Array]
Measured = dict[str, jax.Array]


class Probed(NamedTuple):
    """A product to measure. Equal ones, of the layers of a model, compile once."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    over: Contraction
    dtypes: tuple[str, ...]  # candidates in half precision
    products: tuple[Float8Product, ...]  # and in float8
    scale: float  # a loss scale that multiplies the gradient before it is cast
    weight: int  # which input is the weight: 0 or 1

    @classmethod
    def of(cls, op: Op, names: Sequence[str], scale: float, weight: int) -> Self:
        params = tuple(sorted(op.params.items()))
        products = tuple(product_for(op, BFLOAT16, n) for n in names if n in RECIPES)
        dtypes = tuple(name for name in names if name not in RECIPES)
        if op.name == "dot_general":
            over = Contraction.of_op(op)
        else:  # of a convolution, errors are those of rows along the last axis
            n = np.ndim(op.args[0])
            over = Contraction.of((((n - 1,), (n - 1,)), ((), ())), (n, n))
        return cls(op.primitive, params, over, dtypes, products, scale, weight)

    @property
    def exact(self) -> Run:
        return exactly(self.primitive, dict(self.params))

    @property
    def candidates(self) -> dict[str, Run]:
        """By dtype, or recipe of float8."""
        half = functools.partial(in_half, self.primitive, dict(self.params))
        in_halves = {name: half(jnp.dtype(name)) for name in self.dtypes}
        return {p.recipe: in_float8(p) for p in self.products} | in_halves


def exactly(primitive: Primitive, params: Params) -> Run:
    highest = (lax.Precision.HIGHEST,) * 2
    wide = {"preferred_element_type": FLOAT32_DTYPE, "precision": highest}
    return functools.partial(primitive.bind, **{**params, **wide})


def in_half(primitive: Primitive, params: Params, dtype: np.dtype) -> Run:
    params = {**params, "preferred_element_type": dtype}

    def run(left, right):
        return primitive.bind(left.astype(dtype), right.astype(dtype), **params)

    return run


def in_float8(product: Float8Product) -> Run:
    def run(left, right):
        quantize = functools.partial(quantized, dtype=E4M3)
        lower = lambda x: Scaled(x.astype(BFLOAT16))
        inputs = product.inputs(left, right, quantize, lower)
        out: Any = with_gradients(product, left, right, inputs)
        return out

    return run


@functools.partial(jax.jit, static_argnums=0)
def forward_numbers(p: Probed, left: jax.Array, right: jax.Array) -> Measured:
    """Errors of the result by candidate: "float8 forward", say, of [2]."""
    left, right = (x.astype(FLOAT32_DTYPE) for x in (left, right))
    exact, size = p.exact(left, right), typical(p.exact, left, right)
    numbers = {}
    for name, run in p.candidates.items():
        got = run(left, right).astype(FLOAT32_DTYPE)
        found = entry_errors(got, exact, size, p.over.batch_of_result)
        numbers[f"{name} {FORWARD}"] = found
    return numbers


@functools.partial(jax.jit, static_argnums=0)
def backward_numbers(
    p: Probed, left: jax.Array, right: jax.Array, cotangent: jax.Array
) -> Measured:
    """Errors of both gradients by candidate, [2], and the gradients' largest number.

    The sizes of gradients are those of products, with the same random signs.
    """
    left, right, cotangent = (x.astype(FLOAT32_DTYPE) for x in (left, right, cotangent))
    exact = jax.vjp(p.exact, left, right)[1](cotangent)
    (x, x_unit), (w, w_unit), (g, g_unit) = map(scaled_square, (left, right, cotangent))
    of_x, of_w = map(jnp.sqrt, jax.vjp(p.exact, x, w)[1](g))
    sizes = of_x * (w_unit * g_unit), of_w * (x_unit * g_unit)
    numbers = {"largest backward": top_of(cotangent, *exact)}
    for name, run in p.candidates.items():
        out, pull = jax.vjp(run, left, right)
        got = pull((cotangent * p.scale).astype(out.dtype))
        got = [x.astype(FLOAT32_DTYPE) / p.scale for x in got]
        of = (WGRAD, DGRAD) if p.weight == 0 else (DGRAD, WGRAD)
        each = zip(got, exact, sizes, (dims.batch for dims in p.over), strict=True)
        for direction, arrays in zip(of, each, strict=True):
            numbers[f"{name} {direction}"] = entry_errors(*arrays)
    return numbers


def typical(run: Run, left: jax.Array, right: jax.Array) -> jax.Array:
    """The size of each number of a product if its terms had random signs."""
    (left, unit), (right, other) = scaled_square(left), scaled_square(right)
    return jnp.sqrt(run(left, right)) * (unit * other)


def scaled_square(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squares of numbers divided by the largest one, and the largest one."""
    unit = jnp.max(jnp.abs(x), initial=0)
    unit = jnp.where(unit > 0, unit, jnp.ones_like(unit))
    return jnp.square(x / unit), unit


def entry_errors(
    got: jax.Array, exact: jax.Array, size: jax.Array, batch: Sequence[int]
) -> jax.Array:
    """The largest errors of the entries of a batch, or of the one product: [2]."""

    def entries(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, batch, range(len(batch)))
        return x.reshape(-1, *x.shape[len(batch) :])

    each = jax.vmap(errors)(*map(entries, (got, exact, size)))
    return jnp.max(each, axis=0, initial=0)


def errors(got: jax.Array, exact: jax.Array, size: jax.Array) -> jax.Array:
    """The relative error of the whole, and of the worst slice that matters: [2]."""
    unit = jnp.maximum(jnp.max(jnp.abs(exact), initial=0), jnp.max(size, initial=0))
    unit = jnp.where(unit > 0, unit, jnp.ones_like(unit))
    got, exact, size = got / unit, exact / unit, size / unit
    norm = lambda x, axes: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes))
    ratio = lambda a, b: jnp.where(a == 0, jnp.zeros_like(a), a / b)
    whole = worst = ratio(norm(got - exact, None), norm(exact, None))
    last = exact.ndim - 1
    for axes in ((last,), tuple(range(last))):
        if int(np.prod([exact.shape[axis] for axis in axes])) < LEAST or last < 1:
            continue
        lost = norm(got - exact, axes)
        sizes = jnp.maximum(norm(exact, axes), norm(size, axes))
        matters = ~(sizes < NEGLIGIBLE * jnp.max(sizes))
        slices = jnp.where(matters, ratio(lost, sizes), jnp.zeros_like(sizes))
        worst = jnp.maximum(worst, jnp.max(slices))
    both = jnp.stack([whole, worst])
    return jnp.where(jnp.isnan(both), jnp.full_like(both, jnp.inf), both)


def top_of(*values: jax.Array) -> jax.Array:
    """The largest magnitude of all; nan if one of them holds a nan."""
    tops: list[Any] = [jnp.max(jnp.abs(x), initial=0) for x in values]
    return functools.reduce(jnp.maximum, tops)
