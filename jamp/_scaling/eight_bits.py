"""Means over devices in eight bits: blocks of numbers that share a power of two.

A block x is sent as one byte per number and one byte for their common scale:

    e    = the least integer with max|x| <= limit * 2**e    # 127, or 448 in float8
    code = round(x * 2**-e)                                 # to nearest, ties to even

Scaling by a power of two is exact, so the only error is that of `round`. In int8, e is
1 less if that makes the sum of the squared errors smaller, although it clips the
largest numbers to 127: if only one is a little above a power of two, all others gain a
bit. The scale's byte has one value for "not finite": then the whole block is nan.

A mean has three parts: an `all_to_all` of these bytes, after which each device has its
own part of the array from all devices, the mean of that part in float32, and, if all
devices need the whole array, an `all_gather` of the bytes of the means. Each number is
rounded twice, and all devices read the same bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._checks import DTYPE_NAMES, did_you_mean, dtype_or_none, shown
from .arithmetic import power_of_two

EIGHT_BITS = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}

LOWEST = -126  # exponent of a scale: below it, scales or their inverses are subnormal
NOT_FINITE = 255  # the scale's byte of a block with an inf or nan

Names = tuple[str, ...]


class Means(NamedTuple):
    """Means over devices, and what rounding lost."""

    rows: list[jax.Array]  # float32 [devices, blocks, size], the same on all devices
    lost_here: list[jax.Array]  # of the same shape: what this device has not sent
    lost_of_means: list[jax.Array]  # float32 [blocks, size]: of the part it averages


def is_eight_bits(dtype: np.dtype | None) -> TypeGuard[np.dtype]:
    return dtype in EIGHT_BITS


def reduction_dtype(name: str, dtype: DTypeLike | None) -> np.dtype | None:
    """A dtype to average in, or None, or TypeError naming the argument."""
    if dtype is None:
        return None
    known, names = dtype_or_none(dtype), [*DTYPE_NAMES, *EIGHT_BITS]
    wide = known is not None and jnp.issubdtype(known, jnp.floating)
    if not is_eight_bits(known) and not (wide and jnp.finfo(known).bits >= 16):
        raise TypeError(
            f"{name} must be a floating dtype of 16 bits or more, int8, float8_e4m3fn, "
            f"or None; got {shown(dtype)}.{did_you_mean(dtype, names)}"
        )
    return known


def encode(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Blocks as bytes: float32 [..., size] -> uint8 [..., size + 1]."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    limit = EIGHT_BITS[dtype]
    exponent = _exponent(largest, limit)
    scaled = x * power_of_two(-exponent)
    # Clipped above 2**127, where the scale has its maximum: finite stays finite.
    codes = jnp.clip(scaled, -limit, limit)
    if dtype == jnp.int8:
        codes = lax.round(codes, lax.RoundingMethod.TO_NEAREST_EVEN)
        finer = lax.round(2 * scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
        finer = jnp.clip(finer, -limit, limit)
        squares = lambda lost: jnp.sum(lost * lost, axis=-1, keepdims=True)
        gains = squares(finer / 2 - scaled) < squares(codes - scaled)
        gains &= exponent > LOWEST
        codes = jnp.where(gains, finer, codes)
        exponent = jnp.where(gains, exponent - 1, exponent)
    codes = lax.convert_element_type(codes, dtype)
    scale = jnp.where(jnp.isfinite(largest), exponent - LOWEST, NOT_FINITE)
    parts = [
        lax.bitcast_convert_type(codes, jnp.uint8),
        lax.convert_element_type(scale, jnp.uint8),
    ]
    # Or XLA for GPUs decodes float32 numbers that it has not rounded to float8.
    return lax.optimization_barrier(jnp.concatenate(parts, axis=-1))


def decode(sent: jax.Array, dtype: np.dtype) -> jax.Array:
    """The blocks of `encode`: uint8 [..., size + 1] -> float32 [..., size]."""
    codes = lax.bitcast_convert_type(sent[..., :-1], dtype)
    scale = lax.convert_element_type(sent[..., -1:], jnp.int32)
    exponent = jnp.minimum(scale + LOWEST, 127)
    factor = jnp.where(scale == NOT_FINITE, jnp.nan, power_of_two(exponent))
    return lax.convert_element_type(codes, jnp.float32) * factor


def _exponent(largest: jax.Array, limit: float) -> jax.Array:
    """The least e with `largest <= limit * 2**e`, within the range of scales: int32.

    The bits of a float32 are its exponent and its mantissa, in this order. Their
    distance to the limit's bits, in whole exponents and rounded up, is e.
    """
    of_limit = int(np.float32(limit).view(np.int32))
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    distance = (bits - of_limit + (2**23 - 1)) >> 23
    return jnp.clip(distance, LOWEST, 254 - (of_limit >> 23))


def blocked(rows: jax.Array, block: int) -> jax.Array:
    """Rows in blocks of one size, padded with zeros: [n, m] -> [n, blocks, size].

    A block has at most `block` numbers: a row of 300 has two blocks of 150.
    """
    count = -(-rows.shape[1] // block)
    size = -(-rows.shape[1] // count)
    padded = jnp.pad(rows, ((0, 0), (0, count * size - rows.shape[1])))
    return padded.reshape(len(rows), count, size)


def to_rows(x: jax.Array, devices: int, block: int) -> jax.Array:
    """An array in equal parts for the devices: float32 [devices, blocks, size]."""
    length = -(-x.size // devices)
    flat = lax.convert_element_type(x, jnp.float32).reshape(-1)
    padded = jnp.pad(flat, (0, devices * length - x.size))
    return blocked(padded.reshape(devices, length), block)


def from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    devices, size = len(rows), int(np.prod(shape))
    flat = rows.reshape(devices, -1)[:, : -(-size // devices)]
    return flat.reshape(-1)[:size].reshape(shape)


def average(
    rows: Sequence[jax.Array],
    axes: Names,
    dtype: np.dtype,
    carried: Sequence[jax.Array] | None = None,
) -> Means:
    """Means over devices, in two collectives for all arrays together.

    Args:
      rows: float32 [devices, blocks, size] each, from `to_rows`.
      axes: mapped axes.
      dtype: one of `EIGHT_BITS`.
      carried: `lost_of_means` of the mean before this one. It is added.
    """
    sent = [encode(x, dtype) for x in rows]
    means = scatter(sent, axes, dtype)
    if carried is not None:
        means = [mean + lost for mean, lost in zip(means, carried, strict=True)]
    sent_again = [encode(mean, dtype) for mean in means]
    # This tells shard_map's type system that all devices hold the same values.
    gathered = lax.all_gather(_joined(sent_again, 0), axes, axis=0, to="invarying")
    whole = _taken_apart(gathered, sent_again, 1)

    def lost(before: Sequence[jax.Array], sent: Sequence[jax.Array]) -> list[jax.Array]:
        return [x - decode(y, dtype) for x, y in zip(before, sent, strict=True)]

    return Means(
        [decode(x, dtype) for x in whole], lost(rows, sent), lost(means, sent_again)
    )


def scatter(sent: Sequence[jax.Array], axes: Names, dtype: np.dtype) -> list[jax.Array]:
    """The means of this device's parts: uint8 [devices, ...] each -> float32 [...]."""
    received = lax.all_to_all(_joined(sent, 1), axes, 0, 0, tiled=True)
    # Divided first: a mean overflows only where a gradient does.
    divided = [
        decode(x, dtype) / lax.axis_size(axes) for x in _taken_apart(received, sent, 1)
    ]
    return [jnp.sum(x, axis=0) for x in divided]


def scatter_along(
    x: jax.Array, dim: int, axes: Names, dtype: np.dtype, block: int
) -> jax.Array:
    devices = lax.axis_size(axes)
    front = jnp.moveaxis(lax.convert_element_type(x, jnp.float32), dim, 0)
    shape = front.shape[0] // devices, *front.shape[1:]
    rows = blocked(front.reshape(devices, -1), block)
    [mean] = scatter([encode(rows, dtype)], axes, dtype)
    own = mean.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    return jnp.moveaxis(own, 0, dim)


def clipped_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 in another dtype, whose range x may exceed after rounding to 8 bits."""
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -largest, largest)  # nan stays
    return lax.convert_element_type(x, dtype)


def _joined(arrays: Sequence[jax.Array], batch: int) -> jax.Array:
    """The bytes of all arrays in one array: [*batch, ...] each -> [*batch, bytes]."""
    flat = [x.reshape(*x.shape[:batch], -1) for x in arrays]
    return jnp.concatenate(flat, axis=-1)


def _taken_apart(
    joined: jax.Array, like: Sequence[jax.Array], batch: int
) -> list[jax.Array]:
    """The arrays that `_joined` joined, in their shapes after the batch dimensions."""
    shapes = [x.shape[-2:] for x in like]
    ends = np.cumsum([a * b for a, b in shapes])[:-1].tolist()
    parts = jnp.split(joined, ends, axis=-1)
    lead = joined.shape[:batch]
    return [x.reshape(*lead, *s) for x, s in zip(parts, shapes, strict=True)]
