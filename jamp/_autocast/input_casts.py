"""What an op's inputs are cast to, and its results where dtypes are fixed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .casting import dtypes_of
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Decision,
    Kind,
    Op,
    Params,
    Result,
    Values,
)
from .numbers import fits, is_inexact
from .products import in_attention, is_dot
from .trace import AutocastTrace
from .traits import PRODUCTS


def prepared(trace: AutocastTrace, op: Op, decision: Decision) -> tuple[Values, Params]:
    """The inputs and parameters in the dtypes that an op is to run in."""
    args, params = op.args, op.params
    given = [array_dtype(x) for x in args]
    if (dtype := dtype_for(trace, op, decision, given)) is None:
        return args, params
    is_product = op.primitive.name in PRODUCTS
    preferred = param(op, "preferred_element_type") if is_product else None
    if preferred in CASTABLE:
        dtypes = [*given, *dtypes_of(op.avals or ())]
        wholly = decision.cast is not None
        if wholly or (FLOAT32_DTYPE in dtypes and not is_attention(op)):
            # Recorded for float32 inputs; for half-precision ones, the user's wish.
            params = params | {"preferred_element_type": dtype}
    pairs = zip(args, given, strict=True)
    return [x if has == dtype else trace.cast(x, dtype) for x, has in pairs], params


def dtype_for(
    trace: AutocastTrace, op: Op, decision: Decision, given: Sequence[np.dtype]
) -> np.dtype | None:
    """What the floating inputs of an op are cast to, or None if they are not.

    Args:
      given: the dtypes of all inputs.
    """
    if decision.cast is not None:
        return decision.cast
    if decision.row is Kind.FLOAT32:
        return FLOAT32_DTYPE
    if decision.row is Kind.LOWER and not is_dot(op):
        if {*CASTABLE}.issuperset(filter(is_inexact, given)):
            return trace.settings.dtype
    if decision.row in (Kind.KEEP, Kind.ONE_OP) and op.avals is None:
        return None  # in a jaxpr, dtypes may be mixed by now
    dtype = widest(trace, op.args, given)
    if dtype is None and op.primitive.name in PRODUCTS:
        return next(filter(is_inexact, given), None)  # of a product that is not lowered
    return dtype


def widest(
    trace: AutocastTrace, args: Values, given: Sequence[np.dtype]
) -> np.dtype | None:
    """The dtype to promote to, or None. Numbers follow arrays where they fit."""
    pairs = [(x, d) for x, d in zip(args, given, strict=True) if is_inexact(d)]
    dtypes = frozenset(d for _, d in pairs)
    if len(dtypes) < 2:
        return None
    half, notes = trace.settings.dtype, trace.notes
    if all(d == half or notes.is_promoted(x, half) for x, d in pairs):
        return half  # float32 only as the others were, when this was traced
    free = frozenset(d for x, d in pairs if notes[x].constant is None)
    dtype = _compat.widest(free or dtypes)
    numbers = (notes[x].constant for x, _ in pairs)
    if all(n is None or fits(n, dtype) for n in numbers):
        return dtype
    return _compat.widest(dtypes)


def widens(trace: AutocastTrace, op: Op) -> bool:
    """Whether an op of a statistic gets float32 where it was traced otherwise.

    What the statistic was traced to give in half precision then stays float32, as where
    Python sees the float32.
    """
    if op.avals is None:
        return False
    dtypes = [array_dtype(x) for x in op.args]
    noted = (trace.notes[x].statistic for x in op.args)
    pairs = zip(dtypes, noted, dtypes_of(op.avals), strict=True)
    return any(
        d != aval or (is_noted and d == FLOAT32_DTYPE) for d, is_noted, aval in pairs
    )


def as_without(trace: AutocastTrace, op: Op, out: Any) -> Result:
    """Results in the dtype that they would have without autocast.

    Inputs of several dtypes have a result each.
    """
    is_product = op.primitive.name in PRODUCTS
    dtype = param(op, "preferred_element_type") if is_product else None
    if dtype is None:
        dtypes = frozenset(map(array_dtype, op.args)).intersection(CASTABLE)
        if not dtypes or (len(dtypes) > 1 and op.primitive.multiple_results):
            return out
        dtype = _compat.widest(dtypes)
    if op.primitive.multiple_results:
        return [trace.cast(x, dtype) for x in out]
    return trace.cast(out, dtype)


def is_attention(op: Op) -> bool:
    """Whether an op is the product of queries and keys in JAX's attention.

    JAX asks for it in float32 if it sees half precision. Where it was traced before, it
    saw float32, and did not need to ask.
    """
    if op.name != "dot_general" or op.is_baked:
        return False
    (contracting, _), shapes = param(op, "dimension_numbers"), map(np.shape, op.args)
    last = [(len(shape) - 1,) for shape in shapes]
    if [*map(tuple, contracting)] != last:  # as in the product with the values
        return False
    return in_attention(op)
