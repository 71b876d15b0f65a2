"""Float16 products whose cotangents are scaled, each by its own power of two.

A cotangent has the dtype of its primal, so these products return float32, and their
backward products get a float32 cotangent:

    s = a power of two that brings max |dy| near float16's largest number
    dx, dw = float16(dy / s) @ w.T * s, x.T @ float16(dy / s) * s

with sums in float32. No loss scale is needed as long as nothing else is float16, so
functions that the tables lower as a whole follow the rows of their primitives.

In code that is already a derivative (`jax.grad` inside the region), it is not known
which input is a cotangent, so both are scaled.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Literal, Primitive

from .. import _compat
from .._compat import array_dtype
from .casting import CastingTrace
from .decision import CASTABLE, FLOAT32_DTYPE, SCALED_NOTE, Action, Op, Value, Values
from .derivatives import in_reverse_mode
from .float8_arithmetic import quantized
from .float8_derivative import Static, once
from .products import is_dot
from .traits import PRODUCTS

FLOAT16 = jnp.dtype("float16")
NAME = 'A product with recipe="scaled"'
TWICE = """A product with recipe="scaled" has one derivative. A second one was asked \
for, which was not known when the product was traced: `jax.jit`, `scan` or \
`jax.checkpoint` is between the two derivatives.
Put the product under `jamp.autocast(jnp.bfloat16)` or `jamp.autocast(enabled=False)`, \
or take both derivatives in one `jax.jit`."""


def with_scale(op: Op, action: Action) -> Action:
    """The action for a product of a region that scales, with a note that it does."""
    floats = [array_dtype(x) for x in op.args[:2]]
    if is_dot(op) or not all(dtype in CASTABLE for dtype in floats):
        return action._replace(recipe=None)
    note = ", ".join(filter(None, (action.why.note, SCALED_NOTE)))
    return action._replace(why=action.why._replace(note=note))


class Product(NamedTuple):
    """A matrix product or a convolution."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]

    def bind(self, *args: Value) -> jax.Array:
        """The product of float16 inputs, summed and returned in float32."""
        return self.primitive.bind(*args, **dict(self.params))


class Operand(NamedTuple):
    """A value in float16: it stands for `values * inverse`."""

    values: Any
    inverse: jax.Array | None = None  # a float32 power of two; None: 1


class Kept(NamedTuple):
    """What a product is computed from, and its gradients."""

    left: Operand
    right: Operand
    others: tuple[Value, ...]  # the group sizes of a ragged product


def scaled_product(trace: CastingTrace, op: Op, derived: bool) -> jax.Array:
    """Runs a product in float16, with a derivative that scales the cotangent.

    Args:
      derived: whether it is part of a derivative, and an input may be a cotangent.
    """
    left, right, *others = op.args
    kept = Kept(
        operand(trace, left, derived), operand(trace, right, derived), tuple(others)
    )
    params = op.params | {"preferred_element_type": FLOAT32_DTYPE}
    if isinstance(params.get("precision"), lax.DotAlgorithmPreset | lax.DotAlgorithm):
        params["precision"] = None  # some of them would sum in float16
    product = Product(op.primitive, tuple(sorted(params.items())))
    if _compat.is_differentiated_once(trace.parent):
        function = in_reverse_mode(product_of(product), NAME)
    else:
        function = product_in_any_mode(product)
    leaves, tree = jax.tree.flatten(kept)
    trace.effects.touched = True
    return trace.call(flat(function, tree), [left, right, *leaves], {})


def operand(trace: CastingTrace, x: Value, derived: bool) -> Operand:
    """An input in float16, and scaled if it may be a cotangent."""
    if not derived:
        return Operand(trace.cast(x, FLOAT16))
    key = "scaled", FLOAT16
    if (copy := trace.notes.copy(x, key)) is None:
        copy = trace.call(quantized, [x], {"dtype": FLOAT16, "axes": None})
        copy = Operand(*copy)
        trace.notes.remember(x, key, copy)
    return copy


@functools.cache
def flat(function: Callable[..., jax.Array], tree: Any) -> Callable[..., jax.Array]:
    """The function with the leaves of `Kept` as arguments."""
    return lambda left, right, *leaves: function(left, right, tree.unflatten(leaves))


def forward(product: Product, kept: Kept) -> jax.Array:
    out = product.bind(kept.left.values, kept.right.values, *kept.others)
    return unscaled(out, kept.left, kept.right)


def unscaled(out: jax.Array, left: Operand, right: Operand) -> jax.Array:
    """A result times both inputs' powers of two, whose product may be out of range.

    The smaller one comes first: the other one could not save what it flushes to zero.
    """
    inverses = [x.inverse for x in (left, right) if x.inverse is not None]
    if len(inverses) == 2:
        inverses = [lax.min(*inverses), lax.max(*inverses)]
    for inverse in inverses:
        out = out * inverse
    return out


@functools.cache
def product_of(product: Product) -> Callable[..., jax.Array]:
    """A function of two inputs and of what was made of them: see `Kept`.

    It has a first derivative, in reverse mode.
    """

    @jax.custom_vjp
    def scaled_product(left: jax.Array, right: jax.Array, kept: Kept) -> jax.Array:
        return forward(product, kept)

    def fwd(left: jax.Array, right: jax.Array, kept: Kept):
        avals = jax.typeof(left), jax.typeof(right)
        return scaled_product(left, right, kept), (kept, Static(avals))

    def bwd(residuals, cotangent: jax.Array):
        kept, static = residuals
        operands = kept.left, kept.right
        cotangent = once(TWICE)(cotangent, *(x.values for x in operands))
        scaled = Operand(*quantized(cotangent, dtype=FLOAT16, axes=None))
        avals = static.value
        grads = (
            gradient(product, side, scaled, operands[1 - side], kept.others, avals)
            for side in (0, 1)
        )
        dtypes = [aval.dtype for aval in avals]
        return *map(lax.convert_element_type, grads, dtypes), None

    scaled_product.defvjp(fwd, bwd)
    return scaled_product


def gradient(
    product: Product,
    side: int,
    cotangent: Operand,
    other: Operand,
    others: Values,
    avals: tuple[ShapedArray, ShapedArray],
) -> jax.Array:
    """The gradient of the left or the right input, in float32.

    Args:
      other: the other input.
      others: inputs without a gradient.
      avals: of both inputs, as they were given.
    """

    def transposed(cotangent, other, *others):
        def linear(x):
            pair = (x, other) if side == 0 else (other, x)
            return product.bind(*pair, *others)

        return jax.linear_transpose(linear, wide[side])(cotangent)[0]

    # The transpose is read off a float32 product, where all dtypes agree.
    wide = [aval.update(dtype=FLOAT32_DTYPE, weak_type=False) for aval in avals]
    given: Any = jax.typeof(cotangent.values)
    given = given.update(dtype=FLOAT32_DTYPE), wide[1 - side], *map(jax.typeof, others)
    jaxpr = jax.make_jaxpr(transposed)(*given)
    out = evaluated(jaxpr, [cotangent.values, other.values, *others])
    return unscaled(out, cotangent, other)


def evaluated(jaxpr: ClosedJaxpr, args: Values) -> jax.Array:
    """The one result of a jaxpr that moves float16 values and multiplies them."""
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name in PRODUCTS:
            wide = eqn.params | {"preferred_element_type": FLOAT32_DTYPE}
            eqn = eqn.replace(params=wide)
        values.update(zip(eqn.outvars, _compat.bind_eqn(eqn, inputs), strict=True))
    (out,) = jaxpr.jaxpr.outvars
    return values[out]


@functools.cache
def product_in_any_mode(product: Product) -> Callable[..., jax.Array]:
    """The same for other derivatives: in forward mode, or of higher order.

    They run in float32.
    """

    @jax.custom_jvp
    def scaled_product(left: jax.Array, right: jax.Array, kept: Kept) -> jax.Array:
        return forward(product, kept)

    @scaled_product.defjvp
    def _(primals, tangents):
        (left, right, kept), (dleft, dright, _) = primals, tangents

        def exact(x, y):
            x, y = (lax.convert_element_type(z, FLOAT32_DTYPE) for z in (x, y))
            return product.bind(x, y, *kept.others)

        tangent = exact(dleft, right) + exact(left, dright)
        return scaled_product(left, right, kept), tangent

    return scaled_product
