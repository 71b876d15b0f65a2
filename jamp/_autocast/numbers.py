"""Numbers, which follow the arrays that they meet: Python's, and those of a jaxpr.

In torch a number takes the dtype of an array, and `torch.zeros(4)` is an array. JAX
traces both to the broadcast of a number, or makes the array weakly typed. How Python
made it tells them apart.
"""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._compat import array_dtype
from .._tree import HALVES
from .call_stack import code_of
from .decision import Op, Value


@functools.cache
def is_inexact(dtype: np.dtype | None) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_float(x: ArrayLike) -> bool:
    return is_inexact(array_dtype(x))


def scalar(value: Any) -> float | None:
    """The number in a literal; arrays are not read, because that would block."""
    if isinstance(value, jax.Array) or not hasattr(value, "dtype"):
        return None
    if array_dtype(value) is None or np.ndim(value):  # None for a reference or a token
        return None
    return float(value) if jnp.issubdtype(value.dtype, np.floating) else None


def fits(number: float, dtype: np.dtype) -> bool:
    """Whether the number survives in `dtype`: a literal such as -1e10 or 1e-9 may not.

    >>> fits(0.5, jnp.float16), fits(-1e10, jnp.float16), fits(1e-9, jnp.float16)
    (True, False, False)
    """
    limits = jnp.finfo(dtype)
    usual = float(limits.tiny) <= abs(number) <= float(limits.max)
    return usual or number == 0 or not np.isfinite(number)


def holds(dtype: np.dtype, number: Any) -> bool:
    """Whether a number stays finite in half precision, as a mask of -1e10 does not.

    >>> number = np.float32(-1e10)
    >>> holds(jnp.float16, number), holds(jnp.bfloat16, number)
    (False, True)
    """
    if dtype not in HALVES or scalar(number) is None or not np.isfinite(number):
        return True
    return abs(float(number)) <= float(jnp.finfo(dtype).max)


# Numbers in JAX's log10, sinc, logaddexp2 and selu, and in its norms whose order is not
# a power of 2, by what they are rounded to.
NUMBERS = (1 / np.log(10), np.pi, np.log(2), 1 / np.log(2), 1.6732632423543772)
NUMBERS += (1.0507009873554805, *(1 / n for n in (3, 5, 6, 7, 9, 10)))
EXACT = {
    jnp.dtype(half): {float(np.asarray(x, half)): x for x in NUMBERS} for half in HALVES
}


def unrounded(number: ArrayLike) -> np.ndarray:
    """A number of a jaxpr in float32, as it was before JAX rounded it for its array.

    >>> bool(unrounded(np.float16(1 / 3)) == np.float32(1 / 3))
    True
    """
    number = np.asarray(number)
    if number.ndim == 0:
        number = EXACT.get(number.dtype, {}).get(float(number), number)
    return np.asarray(number, np.float32)


# How Python made an array.


def parameters_of(function: object) -> tuple[str, ...]:
    code = code_of(function)
    n = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    return () if code is None else code.co_varnames[:n]


# Functions by which a user makes an array of one number.
FILLING = frozenset(
    map(code_of, (jnp.zeros, jnp.ones, jnp.full, jnp.empty, jnp.broadcast_to, lax.full))
)


def is_filled(op: Op, number: Value) -> bool:
    """Whether the broadcast of a number is an array that a user made.

    In torch a number follows the arrays that it meets, and `torch.zeros(4)` does not:
    an accumulator that starts with it stays float32.
    """
    if np.ndim(number) or array_dtype(number) != jnp.float32:
        return False
    return op.known.called in FILLING


# Functions that return the dtype that they are asked for, and those that do not.
STACKING = ("block", "concatenate", "dstack", "hstack", "stack", "vstack")
TYPED = frozenset(
    code_of(function)
    for name, function in vars(jnp).items()
    if name not in STACKING and "dtype" in parameters_of(function)
)


def is_weak_array(x: Value, op: Op) -> TypeGuard[jax.Array]:
    """Whether JAX is about to cast an array as if it were a Python number.

    In JAX, `jnp.full((4,), 2.0)` and `jnp.arange(4) * 0.1` are only weakly float32, and
    take the dtype of the arrays that they meet. In torch they are float32.
    """
    if np.ndim(x) == 0 or array_dtype(x) != jnp.float32 or not jax.typeof(x).weak_type:
        return False
    return not asks_for_dtype(op)


def asks_for_dtype(op: Op) -> bool:
    """Whether the user calls a function that returns the dtype it is asked for."""
    return op.known.called in TYPED
