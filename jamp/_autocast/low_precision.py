"""Arrays in float8 or float16 with a power of two as their scale, and their products.

Scales are powers of two, so that they change no digit: however XLA orders the product
and the scaling, the bits are the same. One reduction yields the inverse of a scale. The
largest numbers of the formats, 448 and 57344, are 1.75 times a power of two. So the
bits of |x| give the exponent of the smallest power of two that brings x into range, and
that exponent grows with |x|. Float16, whose largest number is 65504, is scaled to 57344
as well.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import explicit
from .._targets import rounded
from .._tree import HALVES
from .contraction import Contraction, Dims

E4M3 = jnp.dtype("float8_e4m3fn")
E5M2 = jnp.dtype("float8_e5m2")
FLOAT8 = (E4M3, E5M2)
FLOAT16 = jnp.dtype("float16")
# 448 is 1.75 * 2**8, and 57344 is 1.75 * 2**15.
EXPONENTS = {E4M3: 8, E5M2: 15, FLOAT16: 15}
MANTISSA_BITS, EXPONENT_MASK = 23, 0x7F800000  # of float32
ABOVE_1_75 = 0x1FFFFF  # carries into the exponent if the mantissa is above 1.75
INFINITY, NAN = 0x7F800000, 0x7FC00000
# The largest number counts as at least 2**SMALLEST. In float8 that is torchao's limit,
# 1e-12, which is above 2**-40; in float16 it keeps the scale's inverse a normal number.
SMALLEST = {E4M3: -40, E5M2: -40, FLOAT16: -126 + 15}

# Each size of a product must be a multiple of the first, or at least the second: by
# padding, it then grows by 6 % at most.
MULTIPLE, PADDED = 16, 256

Axes = tuple[int, ...] | None  # along which numbers share a scale; None: all of them


class Scaled(NamedTuple):
    """A value in low precision: it stands for `values * inverse`."""

    values: Any
    # float32 powers of two: of shape (), or 1 in the shared axes; None: 1
    inverse: jax.Array | None = None


def quantized(x: jax.Array, *, dtype: np.dtype, axes: Axes) -> Scaled:
    """A value in a small format, with each number rounded to the nearest.

    An inf or nan makes the scale nan, and with it every result. The scale counts as a
    constant in derivatives.
    """
    wide = lax.convert_element_type(lax.stop_gradient(x), jnp.float32)
    if x.dtype in HALVES:  # or XLA may use the float32 that it was rounded from
        wide = rounded(wide, x.dtype)
    bits = lax.bitcast_convert_type(lax.abs(wide), jnp.int32)
    exponent = EXPONENTS[dtype]
    inverse = (bits + ABOVE_1_75) & EXPONENT_MASK
    inverse = inverse - (exponent << MANTISSA_BITS)
    least = (127 + SMALLEST[dtype] - exponent) << MANTISSA_BITS
    inverse = lax.max(inverse, jnp.full_like(inverse, least))
    inverse = lax.select(bits < INFINITY, inverse, jnp.full_like(inverse, NAN))
    over = tuple(range(x.ndim)) if axes is None else axes
    inverse = lax.reduce_max(inverse, over)
    if axes is not None:
        inverse = lax.expand_dims(inverse, axes)
    inverse = lax.bitcast_convert_type(inverse, jnp.float32)
    return Scaled(lax.convert_element_type(wide / inverse, dtype), inverse)


def multiplied(
    left: Scaled, right: Scaled, over: Contraction, dtype: np.dtype, **params: Any
) -> jax.Array:
    """The product of two values in a dtype.

    XLA turns the plain product of float8 into one kernel, and fuses a multiplication by
    a scalar into it if nothing is cast in between. In float16, though, the product
    would overflow before the scales bring it back.
    """
    wide = jnp.dtype("float32") if dtype == jnp.float16 else dtype
    sizes = over.result(left.values.shape, right.values.shape)
    left, right = padded(left, over.left), padded(right, over.right)
    out = lax.dot_general(
        left.values, right.values, over.numbers, preferred_element_type=wide, **params
    )
    # Multiplied first: one alone may be too large where the other is small.
    inverse, other = (sharded_as(out, x) for x in inverses(left, right, over))
    out = out * lax.convert_element_type(inverse * other, wide)
    out = lax.convert_element_type(out, dtype)
    return out if out.shape == sizes else lax.slice(out, [0] * out.ndim, sizes)


def padded(x: Scaled, dims: Dims) -> Scaled:
    """A value with zeros at its ends, where a product would have a size that is odd.

    XLA pads for float8 units too, but in a kernel of its own. It does so here for the
    sizes of several dimensions together, and for those that are sharded.
    """
    shape, sharding = x.values.shape, explicit(jax.typeof(x.values).sharding)
    ends = [0] * len(shape)
    for group in (dims.free, dims.contracted):
        if len(group) == 1 and is_padded(shape[d := group[0]]):
            is_whole = sharding is None or sharding.spec[d] is None
            ends[d] = -shape[d] % MULTIPLE if is_whole else 0
    if not any(ends):
        return x
    zero, one = jnp.zeros([], x.values.dtype), jnp.ones([], jnp.float32)
    values = lax.pad(x.values, zero, [(0, n, 0) for n in ends])
    inverse: Any = x.inverse
    sizes = zip(ends, inverse.shape, strict=False)
    padding = [(0, n if size > 1 else 0, 0) for n, size in sizes]
    return Scaled(values, lax.pad(inverse, one, padding))


def is_fit(size: Any) -> bool:
    """Whether float8 units take a size as it is. It may be symbolic."""
    return not size % MULTIPLE


def is_padded(size: Any) -> bool:
    """Whether a size is large enough to be padded where it is not fit."""
    return isinstance(size, int) and size >= PADDED


def inverses(left: Scaled, right: Scaled, over: Contraction) -> list[jax.Array]:
    """The inverse scales of those operands that have any, fit for the result."""
    n_left, n_right = len(over.left.free), len(over.right.free)
    both = (
        rows(left, over.left, after=n_right),
        rows(right, over.right, before=n_left),
    )
    return [inverse for inverse in both if inverse is not None]


def rows(x: Scaled, dims: Dims, *, before: int = 0, after: int = 0) -> jax.Array | None:
    """The inverse scales of an operand, with the dimensions of the result.

    Args:
      before: how many dimensions the result has between those of the batch and of this
        operand.
      after: how many it has at its end.
    """
    inverse: Any = x.inverse
    if np.ndim(inverse) == 0:
        return inverse
    n, kept = len(dims.batch), (*dims.batch, *dims.free)
    inverse = lax.squeeze(inverse, dims.contracted)
    inverse = lax.transpose(inverse, [sorted(kept).index(d) for d in kept])
    inverse = lax.expand_dims(inverse, range(n, n + before))
    return lax.expand_dims(inverse, range(inverse.ndim, inverse.ndim + after))


def sharded_as(out: jax.Array, inverse: jax.Array) -> jax.Array:
    """The inverse scales of rows, on a mesh of explicit axes sharded as the result.

    It may be sharded in another way than the input that they are from.
    """
    sharding = explicit(jax.typeof(out).sharding)
    if sharding is None or inverse.ndim == 0:
        return inverse
    sizes = zip(inverse.shape, sharding.spec, strict=True)
    spec = [None if size == 1 else axes for size, axes in sizes]
    return jax.sharding.reshard(inverse, sharding.update(spec=jax.P(*spec)))
