"""Checks of arguments: numbers, their ranges, names of axes."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import is_traced, shown


def check_count(name: str, value: Any) -> int:
    """The value as a Python integer, or ValueError if int32 has it not, or below 0."""
    value = number(name, value, operator.index)
    check_range(name, value, ">= 0 and < 2**31", 0, 2**31 - 1)
    return value


def check_range(
    name: str, value: Any, allowed: str, lowest: float, highest: float
) -> None:
    """Raises ValueError unless a known value lies in [lowest, highest]."""
    if not is_traced(value) and not lowest <= value <= highest:
        raise ValueError(f"{name} must be {allowed}; got {value!r}.")


def number(name: str, value: Any, convert: Any) -> Any:
    """A Python number, or the traced scalar that `optax.inject_hyperparams` passes."""
    kind = "an integer" if convert is operator.index else "a number"
    refused = lambda: TypeError(f"{name} must be {kind}; got {shown(value)}.")
    if isinstance(value, bool | str | bytes) or not _is_scalar(value):
        raise refused()
    if is_traced(value):
        return value
    try:
        return convert(value)
    except OverflowError:  # an integer that no float holds
        return math.inf if operator.gt(value, 0) else -math.inf
    except (TypeError, ValueError):
        raise refused() from None


def _is_scalar(value: Any) -> bool:
    """Whether an array is a real number of shape []; True for all that is no array."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return True
    is_real = any(jnp.issubdtype(value.dtype, d) for d in (jnp.integer, jnp.floating))
    return is_real and value.shape == ()


def axis_names(axis_name: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The axes as a tuple, or an error naming `axis_name`."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    is_sequence = isinstance(names, Sequence) and all(isinstance(n, str) for n in names)
    if names is not None and not is_sequence:
        raise TypeError(
            f"axis_name must be a name or a sequence of names; got {axis_name!r}."
        )
    if names is not None and len(set(names)) < len(names):
        raise ValueError(f"axis_name must name each axis once; got {axis_name!r}.")
    return None if names is None else tuple(names)
