"""Counting numbers by their float32 exponent, on the device and from their bits."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

BIAS = 127  # of an exponent in the bits: 2**0 has 127


def count_exponents(
    arrays: Iterable[ArrayLike],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts the elements of floating and complex arrays.

    Both parts of complex arrays count. Magnitudes of float64 that are out of float32's
    range count with the first or last exponent. A sum stops at 2**32 - 1.

    Returns:
      Three counts. The first is uint32 [256], by the exponent in the bits, without
      zeros, infs and nans, so that 255 is always 0. The others are uint32 []: zeros,
      and infs and nans.
    """
    counts = jnp.zeros(256, jnp.uint32)
    zeros = nonfinite = jnp.zeros([], jnp.uint32)
    for array in arrays:
        x = jnp.asarray(array)
        for part in (x.real, x.imag) if jnp.iscomplexobj(x) else (x,):
            exponent, is_zero = _exponents(part)
            is_finite = exponent < 255
            counted = (is_finite & ~is_zero).astype(jnp.uint32)
            counts = _add(counts, _scatter(exponent, counted))
            zeros = _add(zeros, jnp.sum(is_zero, dtype=jnp.uint32))
            nonfinite = _add(nonfinite, jnp.sum(~is_finite, dtype=jnp.uint32))
    return counts, zeros, nonfinite


def _exponents(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The exponent of float32, 255 for inf and nan; and whether an element is zero.

    Both are read from the bits, because XLA's CPU backend treats subnormals as zeros.
    """
    if x.dtype == jnp.float64:
        words = lax.bitcast_convert_type(x, jnp.uint32)
        low, high = words[..., 0], words[..., 1] & jnp.uint32(0x7FFFFFFF)
        wide = (high >> 20).astype(jnp.int32)
        exponent = jnp.clip(wide - (1023 - BIAS), 0, 254)
        return jnp.where(wide == 2047, 255, exponent), (low | high) == 0
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    else:  # the subnormals of float16 and below are normal in float32
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = bits & jnp.uint32(0x7FFFFFFF)
    return (bits >> 23).astype(jnp.int32), bits == 0


def _scatter(exponent: jax.Array, counted: jax.Array) -> jax.Array:
    """Sums `counted` by exponent."""
    mesh = jax.typeof(exponent).sharding.mesh
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    spec = jax.sharding.PartitionSpec()
    out = jax.sharding.NamedSharding(mesh, spec) if explicit else None
    return jnp.zeros(256, jnp.uint32).at[exponent].add(counted, out_sharding=out)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum, or the largest uint32."""
    total = a + b
    return jnp.where(total < a, jnp.uint32(2**32 - 1), total)
