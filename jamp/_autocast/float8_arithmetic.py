"""A matrix product in float8: scales, casts, and the derivative.

Scales are powers of two, so that they change no digit: however XLA orders the product
and the scaling, the bits are the same. One reduction yields the inverse of a scale. The
largest numbers of the formats, 448 and 57344, are 1.75 times a power of two; so to
|x| as bits belongs the exponent of the smallest power of two that brings x into range,
and that exponent grows with |x|.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import cotangent_sharding
from .float8 import E4M3, E5M2

# 448 is 1.75 * 2**8, and 57344 is 1.75 * 2**15.
EXPONENTS = {E4M3: 8, E5M2: 15}
MANTISSA_BITS, EXPONENT_MASK = 23, 0x7F800000  # of float32
ABOVE_1_75 = 0x1FFFFF  # carries into the exponent if the mantissa is above 1.75
INFINITY, NAN = 0x7F800000, 0x7FC00000
# torchao takes the largest number for 1e-12 at least, which lies above 2**-40.
SMALLEST = -40

TWICE = """A float8 product has one derivative, and a second one was asked for where \
this was not known when the product was traced (`jax.jit`, `scan` or `jax.checkpoint` \
between the two derivatives).
Put the product under `jamp.autocast(jnp.bfloat16)`, or take both derivatives in one \
`jax.jit`."""

Axes = tuple[int, ...] | None  # along which numbers share a scale; None: all of them
Derivative = Callable[..., tuple[jax.Array, jax.Array]]


class Scaled(NamedTuple):
    """A value in float8, of which `values * inverse` is left."""

    values: jax.Array
    inverse: jax.Array  # float32 powers of two: of shape (), or 1 in the shared axes


def quantized(x: jax.Array, *, dtype: np.dtype, axes: Axes) -> Scaled:
    """A value in float8, each number as near as its format has one.

    An inf or nan makes the scale nan, and so all that is computed with it. The scale
    takes no part in a derivative.
    """
    wide = lax.convert_element_type(lax.stop_gradient(x), jnp.float32)
    bits = lax.bitcast_convert_type(lax.abs(wide), jnp.int32)
    exponent = EXPONENTS[dtype]
    inverse = (bits + ABOVE_1_75) & EXPONENT_MASK
    inverse = inverse - (exponent << MANTISSA_BITS)
    least = (127 + SMALLEST - exponent) << MANTISSA_BITS
    inverse = lax.max(inverse, jnp.full_like(inverse, least))
    inverse = lax.select(bits < INFINITY, inverse, jnp.full_like(inverse, NAN))
    over = tuple(range(x.ndim)) if axes is None else axes
    inverse = lax.reduce_max(inverse, over)
    if axes is not None:
        inverse = lax.expand_dims(inverse, axes)
    inverse = lax.bitcast_convert_type(inverse, jnp.float32)
    return Scaled(lax.convert_element_type(wide / inverse, dtype), inverse)


class Product(NamedTuple):
    """A `dot_general` with one contracting dimension and no batch dimensions."""

    contracted: tuple[int, int]  # the dimension of the left, of the right input
    ndims: tuple[int, int]
    params: tuple[tuple[str, Any], ...]  # its other parameters
    out: np.dtype
    half: np.dtype  # of the region
    recipe: str

    @property
    def is_rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    def free(self, side: int) -> tuple[int, ...]:
        return tuple(d for d in range(self.ndims[side]) if d != self.contracted[side])

    def contracting(self, side: int) -> Axes:
        """The axes that share a scale in the product itself."""
        return (self.contracted[side],) if self.is_rowwise else None

    def kept(self, side: int) -> Axes:
        """And in the derivative of the other input."""
        rows = self.recipe == "rowwise"
        return self.free(side) if rows else None


class Inputs(NamedTuple):
    """What a product is computed from, and what its derivative is."""

    left: Scaled
    right: Scaled
    # For the derivative: float8, or the left one in half precision.
    kept_left: Scaled | jax.Array
    kept_right: Scaled


def forward(product: Product, left: Scaled, right: Scaled) -> jax.Array:
    """The product of two float8 values, in the dtype that it is asked for."""
    params = dict(product.params)
    return rescaled(
        product.out,
        functools.partial(
            lax.dot_general,
            left.values,
            right.values,
            dims(product.contracted),
            precision=params.get("precision"),
            out_sharding=params.get("out_sharding"),
        ),
        row_scales(left, product.contracted[:1], after=product.ndims[1] - 1),
        row_scales(right, product.contracted[1:], before=product.ndims[0] - 1),
    )


def dims(contracted: tuple[Any, Any]) -> Any:
    one = [(c,) if isinstance(c, int) else tuple(c) for c in contracted]
    return (tuple(one), ((), ()))


def row_scales(
    x: Scaled, contracted: Sequence[int], *, before: int = 0, after: int = 0
) -> jax.Array:
    """The inverse scales of an input as they lie in the result.

    Args:
      contracted: the dimensions that the result does not have.
      before: how many dimensions the result has in front of those of this input.
      after: and behind them.
    """
    if x.inverse.ndim == 0:
        return x.inverse
    rows = lax.squeeze(x.inverse, contracted)
    rows = lax.expand_dims(rows, range(before))
    return lax.expand_dims(rows, range(rows.ndim, rows.ndim + after))


def rescaled(
    dtype: np.dtype,
    dot: Callable[..., jax.Array],
    *inverses: jax.Array,
) -> jax.Array:
    """A product of scaled values in a dtype, with the scales taken away again.

    XLA makes a float8 kernel of the plain product; a product with scalars becomes a
    part of it if nothing is cast in between. In float16, though, the product would
    overflow before the scales bring it back.
    """
    wide = jnp.dtype("float32") if dtype == jnp.float16 else dtype
    out = dot(preferred_element_type=wide)
    if all(inverse.ndim == 0 for inverse in inverses):
        inverses = (functools.reduce(lax.mul, inverses),)
    for inverse in inverses:
        out = out * lax.convert_element_type(inverse, wide)
    return lax.convert_element_type(out, dtype)


@functools.cache
def product_of(product: Product, dtypes: tuple[np.dtype, np.dtype]) -> Callable:
    """The function of two inputs and of what was made of them: see `Inputs`.

    Its derivative is in float8 too, of the first order and in reverse mode.

    Args:
      dtypes: of the inputs, and so of their gradients.
    """

    @jax.custom_vjp
    def float8_product(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return forward(product, inputs.left, inputs.right)

    def fwd(left: jax.Array, right: jax.Array, inputs: Inputs):
        kept_left, kept_right = inputs.kept_left, inputs.kept_right
        inverse = tied(kept_right.inverse, left, right)
        like = tuple(cotangent_sharding(x) for x in (left, right))
        residuals = kept_left, kept_right._replace(inverse=inverse), Static(like)
        return float8_product(left, right, inputs), residuals

    def bwd(residuals, cotangent: jax.Array):
        left, right, shardings = residuals
        cotangent = once(cotangent, right.inverse)
        grads = backward(product, left, right, cotangent, shardings.value)
        left, right = map(lax.convert_element_type, grads, dtypes)
        return left, right, None

    float8_product.defvjp(fwd, bwd)
    return float8_product


@functools.cache
def product_in_any_mode(product: Product) -> Callable:
    """The same where derivatives are others: forward, or more than one.

    They run in half precision.
    """
    params = dict(product.params)

    @jax.custom_jvp
    def float8_product(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return forward(product, inputs.left, inputs.right)

    @float8_product.defjvp
    def _(primals, tangents):
        (left, right, inputs), (dleft, dright, _) = primals, tangents

        def dot(x, y):
            x, y = (lax.convert_element_type(z, product.half) for z in (x, y))
            return lax.dot_general(
                x,
                y,
                dims(product.contracted),
                precision=params.get("precision"),
                out_sharding=params.get("out_sharding"),
            )

        tangent = dot(dleft, right) + dot(left, dright)
        tangent = lax.convert_element_type(tangent, product.out)
        return float8_product(left, right, inputs), tangent

    return float8_product


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """What is known when a function is traced."""

    value: Any


def backward(
    product: Product,
    left: Scaled | jax.Array,
    right: Scaled,
    cotangent: jax.Array,
    shardings: tuple[Any, Any],
) -> tuple[jax.Array, jax.Array]:
    """The gradients of both inputs, in the dtype of the cotangent."""
    n_left = product.ndims[0] - 1
    of_left = tuple(range(n_left))  # the cotangent's dimensions
    of_right = tuple(range(n_left, cotangent.ndim))
    is_rowwise = product.is_rowwise
    dtype = E4M3 if is_rowwise else E5M2

    def cast(axes):
        axes = axes if is_rowwise else None
        return quantized(cotangent, dtype=dtype, axes=axes)

    out = cotangent.dtype
    at, free = product.contracted, (product.free(0), product.free(1))
    order = np.argsort([*free[0], at[0]])
    # The gradient of the left input: its free dimensions, then the contracted one.
    ct = cast(of_right)
    dleft = rescaled(
        out,
        functools.partial(
            lax.dot_general,
            ct.values,
            right.values,
            dims((of_right, free[1])),
            precision=lax.Precision.HIGHEST,
            out_sharding=untransposed(shardings[0], order),
        ),
        row_scales(ct, of_right, after=1),
        row_scales(right, free[1], before=len(of_left)),
    )
    dleft = lax.transpose(dleft, order)
    # That of the right one: the contracted dimension, then its free ones.
    order = np.argsort([at[1], *free[1]])
    sharding = untransposed(shardings[1], order)
    contracted = dims((free[0], of_left))
    if isinstance(left, Scaled):
        ct = ct if not is_rowwise else cast(of_left)
        dright = rescaled(
            out,
            functools.partial(
                lax.dot_general,
                left.values,
                ct.values,
                contracted,
                precision=lax.Precision.HIGHEST,
                out_sharding=sharding,
            ),
            row_scales(left, free[0], after=len(of_right)),
            row_scales(ct, of_left, before=1),
        )
    else:
        ct = lax.convert_element_type(cotangent, product.half)
        dright = lax.dot_general(left, ct, contracted, out_sharding=sharding)
        dright = lax.convert_element_type(dright, out)
    return dleft, lax.transpose(dright, order)


def untransposed(sharding: Any, order: np.ndarray) -> Any:
    """The sharding of what becomes a gradient by `transpose(_, order)`."""
    if sharding is None:
        return None
    spec = [sharding.spec[i] for i in np.argsort(order)]
    return sharding.update(spec=jax.P(*spec))


# A derivative of the derivative. What is kept is float8, which holds no tangent: JAX
# would take those that it stands for to be constants, and give a wrong number.


@jax.custom_jvp
def tied(inverse: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """The scale that is kept, with a tangent if an input has one."""
    return inverse


@tied.defjvp
def _(primals, tangents):
    zeros = (lax.convert_element_type(dx, jnp.float32) * 0 for dx in tangents[1:])
    return tied(*primals), functools.reduce(lax.add, map(jnp.sum, zeros))


@jax.custom_jvp
def once(cotangent: jax.Array, inverse: jax.Array) -> jax.Array:
    """The cotangent, which cannot be differentiated."""
    return cotangent


@once.defjvp
def _(primals, tangents):
    raise NotImplementedError(TWICE)
