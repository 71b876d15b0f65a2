"""What a product loses in a lower dtype against float32: forward and backward.

Errors are relative, for the whole result and for its worst slice: a row (along the last
axis) or a column (along all others). A slice is measured against its own size: its
norm, or the norm that its numbers would have if their signs were random, whichever is
larger. Otherwise a row in which terms happen to cancel would count as an error.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .._autocast.decision import FLOAT32_DTYPE, Op, Params
from .._autocast.derivatives import with_gradients
from .._autocast.float8 import RECIPES, Float8Product, product_for
from .._autocast.low_precision import E4M3, Scaled, quantized

# Slices of fewer numbers are not judged: their errors depend too much on chance.
LEAST = 16
# A slice that is smaller than this share of the largest one is lost in float32 too if
# the two are added.
NEGLIGIBLE = 2.0**-24
DIRECTIONS = ("forward", "dgrad", "wgrad")
BFLOAT16 = jnp.dtype("bfloat16")

Run = Callable[[jax.Array, jax.Array], jax.Array]
Measured = dict[str, jax.Array]


class Probed(NamedTuple):
    """A product that runs in several dtypes."""

    exact: Run
    candidates: dict[str, Run]  # by dtype, or recipe of float8
    scale: float  # a loss scale that multiplies the gradient before it is cast
    contracted: tuple[Sequence[int], Sequence[int]]  # axes of both inputs
    n_rows: int  # axes of the result that are the left input's


class Measures(NamedTuple):
    """Functions to run on a product's inputs, and on its inputs and cotangent."""

    forward: Callable[[jax.Array, jax.Array], Measured]
    backward: Callable[[jax.Array, jax.Array, jax.Array], Measured]


def measures(op: Op, names: Sequence[str], scale: float) -> Measures:
    """Measures of the product that an op is, in the named dtypes and recipes.

    Args:
      scale: a loss scale.
    """
    params = tuple(sorted(op.params.items()))
    products = tuple(product_for(op, BFLOAT16, n) for n in names if n in RECIPES)
    n_left = np.ndim(op.args[0])
    return measures_for(op.primitive, params, n_left, tuple(names), products, scale)


@functools.lru_cache(maxsize=4096)
def measures_for(
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    n_left: int,
    names: tuple[str, ...],
    products: tuple[Float8Product, ...],
    scale: float,
) -> Measures:
    """One result for equal products, so that the layers of a model compile once."""
    half = [name for name in names if name not in RECIPES]
    candidates = {
        **{product.recipe: in_float8(product) for product in products},
        **{name: in_half(primitive, dict(params), jnp.dtype(name)) for name in half},
    }
    contracted = ((-1,), (-1,))
    if primitive.name == "dot_general":
        contracted, _ = dict(params)["dimension_numbers"]
    p = Probed(
        exactly(primitive, dict(params)),
        candidates,
        scale,
        contracted,
        n_left - len(contracted[0]),
    )
    forward, backward = (
        jax.jit(functools.partial(f, p)) for f in (forward_numbers, backward_numbers)
    )
    return Measures(forward, backward)


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
        return with_gradients(product)(left, right, inputs)

    return run


def forward_numbers(p: Probed, left: jax.Array, right: jax.Array) -> Measured:
    """Errors of the result by candidate, [1, 2], and the spread of the inputs."""
    left, right = (x.astype(FLOAT32_DTYPE) for x in (left, right))
    exact, size = p.exact(left, right), typical(p.exact, left, right)
    numbers = {
        "spread x": row_spread(left, p.contracted[0]),
        "spread w": row_spread(right, p.contracted[1]),
        "largest forward": top_of(left, right, exact),
    }
    for name, run in p.candidates.items():
        got = run(left, right).astype(FLOAT32_DTYPE)
        numbers[name] = errors(got, exact, size)[None]
    return numbers


def backward_numbers(
    p: Probed, left: jax.Array, right: jax.Array, cotangent: jax.Array
) -> Measured:
    """Errors of both gradients by candidate, [2, 2], and the cotangent's spread.

    The sizes of gradients are those of products, with the same random signs.
    """
    left, right, cotangent = (x.astype(FLOAT32_DTYPE) for x in (left, right, cotangent))
    exact = jax.vjp(p.exact, left, right)[1](cotangent)
    (x, x_unit), (w, w_unit), (g, g_unit) = map(scaled_square, (left, right, cotangent))
    of_x, of_w = map(jnp.sqrt, jax.vjp(p.exact, x, w)[1](g))
    sizes = of_x * (w_unit * g_unit), of_w * (x_unit * g_unit)
    axes = range(cotangent.ndim)
    numbers = {
        "spread g": row_spread(cotangent, axes[p.n_rows :]),
        "spread of columns of g": row_spread(cotangent, axes[: p.n_rows]),
        "largest backward": top_of(cotangent, *exact),
    }
    for name, run in p.candidates.items():
        out, pull = jax.vjp(run, left, right)
        got = pull((cotangent * p.scale).astype(out.dtype))
        got = [x.astype(FLOAT32_DTYPE) / p.scale for x in got]
        triples = zip(got, exact, sizes, strict=True)
        numbers[name] = jnp.stack([errors(*triple) for triple in triples])
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
        own = jnp.maximum(norm(exact, axes), norm(size, axes))
        matters = ~(own < NEGLIGIBLE * jnp.max(own))
        slices = jnp.where(matters, ratio(lost, own), jnp.zeros_like(own))
        worst = jnp.maximum(worst, jnp.max(slices))
    both = jnp.stack([whole, worst])
    return jnp.where(jnp.isnan(both), jnp.full_like(both, jnp.inf), both)


def row_spread(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """How many powers of two are between the largest row and the smallest.

    Args:
      axes: the axes of a row. A row of zeros does not count.
    """
    rows = jnp.max(jnp.abs(x), axis=tuple(axes), initial=0)
    most = jnp.max(rows, initial=0)
    least = jnp.min(jnp.where(rows > 0, rows, jnp.full_like(rows, jnp.inf)))
    powers = jnp.log2(most) - jnp.log2(least)
    return jnp.where(most > 0, powers, jnp.zeros_like(powers))


def top_of(*values: jax.Array) -> jax.Array:
    """The largest magnitude of all; nan if one of them holds a nan."""
    tops: list[Any] = [jnp.max(jnp.abs(x), initial=0) for x in values]
    return functools.reduce(jnp.maximum, tops)
