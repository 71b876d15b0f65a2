"""Functions that a region cannot run in float32, because JAX reads the dtype first.

A region sees only the ops that follow. So the rows of these functions in `ops.py` name
one of these, each of which raises for some inputs in half precision:

    as_coarse          `jnp.linalg.pinv` takes its tolerance from the dtype of its
                       input, in Python, and so do all functions that decide on a rank.
                       In float16 the tolerance is 8,000 times as wide, and the answer
                       differs. `jax.random.categorical` draws noise in the dtype of the
                       logits, which has so few values in half precision that draws tie,
                       and ties go to the lowest index
    as_too_many        quantiles compute an index in the dtype of their input, which may
                       not count the input's elements
    as_rounded_labels  losses cast labels to the dtype of the predictions. A region
                       undoes that, but for NumPy arrays and numbers of Python, which
                       were rounded before it sees them
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from .._tree import HALVES
from .decision import Refuses

READS_DTYPE = """{function} got a {dtype} value in an autocast region or under a \
policy. It takes {what} from the dtype of its input, and {dtype} is too coarse for \
that. Cast the input: `x.astype(jnp.float32)`."""

ROUNDED = """{function} cast y_true to the dtype of y_pred, {dtype}, before the \
autocast region saw it, and {what}. Pass y_true as a JAX array, `jnp.asarray(y_true)`, \
or cast the predictions: `y_pred.astype(jnp.float32)`."""
EXACT = 256  # integers up to here are exact in each dtype


def check(function: str, refuses: Refuses, given: Sequence[Any]) -> None:
    """Raises TypeError if an op of one of these functions gets half precision.

    Args:
      given: the inputs of the op, as Python saw them.
    """
    for value in given:
        if getattr(value, "dtype", None) in HALVES:
            if problem := refuses(function, value):
                raise TypeError(problem)


def as_coarse(function: str, value: Any) -> str:
    what = "its precision"
    return READS_DTYPE.format(function=function, dtype=value.dtype, what=what)


def as_too_many(function: str, value: Any) -> str:
    exact = 2 ** (jnp.finfo(value.dtype).nmant + 1)  # the dtype counts up to here
    if math.prod(value.shape) <= exact:
        return ""
    return READS_DTYPE.format(function=function, dtype=value.dtype, what="indices")


def as_rounded_labels(function: str, value: Any) -> str:
    """For values of the host that lost more than a constant may."""
    if isinstance(value, jax.Array | AbstractValue):
        return ""
    numbers = np.asarray(value, np.float32)
    if np.isinf(numbers).any():
        what = "a number is inf there"
    elif np.ndim(value) and np.any((numbers % 1 != 0) | (np.abs(numbers) > EXACT)):
        what = "rounded its numbers"
    else:
        return ""
    return ROUNDED.format(function=function, dtype=value.dtype, what=what)
