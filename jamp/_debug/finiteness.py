"""Whether an array holds an inf or a nan, as one small number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

# A mark: FINE, or bits.
FINE, INF, NAN = 0, 1, 2
FRESH = 4  # an elementwise op made an inf or nan from inputs that are all finite


def can_hold_nan(value: ArrayLike) -> bool:
    """Whether a value is floating or complex."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float)
    return jnp.issubdtype(dtype, jnp.inexact)


@jax.jit
def mark_of(x: jax.Array, *inputs: jax.Array) -> jax.Array:
    """The mark of a value: uint8 []. FRESH is for results of elementwise ops."""
    is_bad, is_nan = bad_and_nan(x)
    flags = [(INF, is_bad & ~is_nan), (NAN, is_nan)]
    if inputs:
        given = functools.reduce(jnp.logical_or, (bad_and_nan(i)[0] for i in inputs))
        flags.append((FRESH, is_bad & ~given))
    bits = [jnp.any(flag).astype(jnp.uint8) * np.uint8(bit) for bit, flag in flags]
    return functools.reduce(jnp.bitwise_or, bits)


def bad_and_nan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Elements that are inf or nan, and those that are nan.

    Half precision is read as bits: XLA might otherwise look at the float32 value that
    it is computed from, which has not overflowed.
    """
    if jnp.iscomplexobj(x):
        parts = bad_and_nan(x.real), bad_and_nan(x.imag)
        return parts[0][0] | parts[1][0], parts[0][1] | parts[1][1]
    if x.dtype in (jnp.float16, jnp.bfloat16):
        bits = lax.bitcast_convert_type(x, jnp.uint16) & np.uint16(0x7FFF)
        infinity = np.asarray(np.inf, x.dtype).view(np.uint16)
        return bits >= infinity, bits > infinity
    if x.dtype.itemsize < 2:
        x = lax.convert_element_type(x, jnp.float32)
    return ~lax.is_finite(x), lax.ne(x, x)


def known_mark(value: ArrayLike) -> int:
    """The mark of a number that is known when the function is traced."""
    value = np.asarray(value, np.complex128)
    return NAN if np.any(np.isnan(value)) else INF if np.any(np.isinf(value)) else FINE
