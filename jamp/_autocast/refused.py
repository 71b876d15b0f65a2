"""Functions that a region cannot run in float32, because JAX reads the dtype first.

`jnp.linalg.pinv` takes its tolerance from the dtype of its input, in Python, and so do
all functions that decide on a rank. In float16 the tolerance is 8,000 times as wide,
and the answer differs. `jax.random.categorical` draws noise in the dtype of the logits,
which has so few values in half precision that draws tie, and ties go to the lowest
index. A region sees only the ops that follow. So these functions (`REFUSED` in
`ops.py`) raise if Python hands them half precision. `COUNTED` functions compute an
index in the dtype of their input, and raise if that dtype cannot count the input's
elements. `LABELS` functions cast labels to the dtype of the predictions. A region
undoes that, but for NumPy arrays and numbers of Python, which were rounded before it
sees them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from .._tree import HALVES
from .decision import Decision, Kind

READS_DTYPE = """{function} got a {dtype} value in an autocast region or under a \
policy. It takes {what} from the dtype of its input, and {dtype} is too coarse for \
that. Cast the input: `x.astype(jnp.float32)`."""

ROUNDED = """{function} cast y_true to the dtype of y_pred, {dtype}, before the \
autocast region saw it, and {what}. Pass y_true as a JAX array, `jnp.asarray(y_true)`, \
or cast the predictions: `y_pred.astype(jnp.float32)`."""
READING = Kind.REFUSED, Kind.COUNTED, Kind.LABELS
EXACT = 256  # integers up to here are exact in each dtype


def check_precision(decision: Decision | None, given: Sequence[Any]) -> None:
    """Raises TypeError if an op of one of these functions gets half precision.

    Args:
      decision: what the region does with the op, or None.
      given: the inputs of the op, as Python saw them.
    """
    if decision is None or decision.row not in READING:
        return
    if decision.row is Kind.LABELS:
        return check_labels(decision.why.name, given)
    for value in given:
        dtype = getattr(value, "dtype", None)
        if dtype not in HALVES:
            continue
        exact = 2 ** (jnp.finfo(dtype).nmant + 1)  # the dtype counts up to here
        if decision.row is Kind.COUNTED and math.prod(value.shape) <= exact:
            continue
        what = "indices" if decision.row is Kind.COUNTED else "its precision"
        function = decision.why.name
        raise TypeError(READS_DTYPE.format(function=function, dtype=dtype, what=what))


def check_labels(function: str, given: Sequence[Any]) -> None:
    """Raises TypeError for values of the host that lost more than a constant may."""
    for value in given:
        dtype = getattr(value, "dtype", None)
        if dtype not in HALVES or isinstance(value, jax.Array | AbstractValue):
            continue
        numbers = np.asarray(value, np.float32)
        if np.isinf(numbers).any():
            what = "a number is inf there"
        elif np.ndim(value) and np.any((numbers % 1 != 0) | (np.abs(numbers) > EXACT)):
            what = "rounded its numbers"
        else:
            continue
        raise TypeError(ROUNDED.format(function=function, dtype=dtype, what=what))
