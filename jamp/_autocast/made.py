"""How Python made an array: what torch treats as a number, and what as an array."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .decision import Value
from .sources import called_function, code_of


def parameters_of(function: object) -> tuple[str, ...]:
    code = code_of(function)
    n = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    return () if code is None else code.co_varnames[:n]


# Functions by which a user makes an array of one number.
FILLING = frozenset(
    map(code_of, (jnp.zeros, jnp.ones, jnp.full, jnp.empty, jnp.broadcast_to, lax.full))
)


def is_filled(number: Value) -> bool:
    """Whether the broadcast of a number is an array that a user made.

    In torch a number follows the arrays that it meets, and `torch.zeros(4)` does not:
    an accumulator that starts with it stays float32.
    """
    if np.ndim(number) or array_dtype(number) != jnp.float32:
        return False
    return called_function(_compat.source_codes()) in FILLING


# Functions that return the dtype that they are asked for, and those that do not.
STACKING = ("block", "concatenate", "dstack", "hstack", "stack", "vstack")
TYPED = frozenset(
    code_of(function)
    for name, function in vars(jnp).items()
    if name not in STACKING and "dtype" in parameters_of(function)
)


def is_weak_array(x: Value) -> TypeGuard[jax.Array]:
    """Whether JAX is about to cast an array as if it were a Python number.

    In JAX, `jnp.full((4,), 2.0)` and `jnp.arange(4) * 0.1` are only weakly float32, and
    take the dtype of the arrays that they meet. In torch they are float32.
    """
    if np.ndim(x) == 0 or array_dtype(x) != jnp.float32 or not jax.typeof(x).weak_type:
        return False
    return not asks_for_dtype()


def asks_for_dtype() -> bool:
    """Whether the user calls a function that returns the dtype it is asked for."""
    return called_function(_compat.source_codes()) in TYPED
