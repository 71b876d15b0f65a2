"""Functions that a region cannot give float32, because JAX has read the dtype before.

`jnp.linalg.pinv` takes its tolerance from the dtype of its input, in Python, and so
does all that decides on a rank. In float16 the tolerance is 8,000 times as wide, and
the answer another one. A region sees only what Python made of it. So half precision
that Python hands to such a function (`REFUSED` in `ops.py`) raises, as it does in
torch, and in JAX outside of regions. `COUNTED` functions compute an index in the dtype
of their input: they raise if that cannot count the input's elements.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._tree import HALVES
from .decision import Action, Kind

READS_DTYPE = """{function} of a {dtype} value, in an autocast region: it takes {what} \
from the dtype of its input, and that of {dtype} is too coarse. Cast the input: \
`x.astype(jnp.float32)`."""


def check_precision(action: Action | None, given: Sequence[Any]) -> None:
    """Raises TypeError if an op of such a function is given half precision.

    Args:
      action: what the region does with the op, or None.
      given: the inputs of the op, as Python saw them.
    """
    if action is None or action.table not in (Kind.REFUSED, Kind.COUNTED):
        return
    for value in given:
        dtype = getattr(value, "dtype", None)
        if dtype not in HALVES:
            continue
        exact = 2 ** (jnp.finfo(dtype).nmant + 1)  # it counts up to here
        if action.table is Kind.COUNTED and math.prod(value.shape) <= exact:
            continue
        what = "indices" if action.table is Kind.COUNTED else "a tolerance"
        function = action.why.name
        raise TypeError(READS_DTYPE.format(function=function, dtype=dtype, what=what))
