"""What an op's inputs are cast to, and its results where dtypes are fixed."""

import jax
import numpy as np

from .. import _compat
from .._compat import array_dtype
from .casting import CastingTrace
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Action,
    Cast,
    Keep,
    Kind,
    Op,
    Params,
    Promote,
    Result,
    RunIn,
    Values,
)
from .notes import fits, is_float
from .products import is_dot


def cast_for(trace: CastingTrace, op: Op, action: Action) -> Cast:
    """What an action means for one op."""
    if action.dtype is not None:
        return RunIn(action.dtype, wholly=True)
    match action.kind:
        case Kind.LOWER:
            castable = all(array_dtype(x) in CASTABLE for x in op.args if is_float(x))
            is_lowered = castable and not is_dot(op)
            return RunIn(trace.settings.dtype) if is_lowered else Promote()
        case Kind.FLOAT32:
            return RunIn(FLOAT32_DTYPE)
        case Kind.PROMOTE:
            return Promote()
        case Kind.INTO if is_float(op.args[0]):
            return RunIn(array_dtype(op.args[0]))
        case Kind.KEEP if op.avals is not None:  # dtypes may be mixed by now
            return Promote()
    return Keep()


def prepared(trace: CastingTrace, op: Op, cast: Cast) -> tuple[Values, Params]:
    """The inputs and parameters in the dtypes that an op is to run in."""
    args, params = op.args, op.params
    floats = [x for x in args if is_float(x)]
    match cast:
        case RunIn(dtype, _):
            pass
        case Promote():
            dtype = widest(trace, floats)
        case Keep():
            dtype = None
    if dtype is None:
        return args, params
    preferred = params.get("preferred_element_type")
    dtypes = [array_dtype(x) for x in floats]
    dtypes += [getattr(a, "dtype", None) for a in op.avals or ()]
    wholly = isinstance(cast, RunIn) and cast.wholly
    if preferred in CASTABLE and (FLOAT32_DTYPE in dtypes or wholly):
        # Recorded for float32 inputs; for half-precision ones the user's wish.
        trace.effects.touched |= preferred != dtype
        params = params | {"preferred_element_type": dtype}
    return [trace.cast(x, dtype) for x in args], params


def widest(trace: CastingTrace, floats: Values) -> np.dtype | None:
    """The dtype to promote to, or None. Numbers follow arrays where they fit."""
    if len({array_dtype(x) for x in floats}) < 2:
        return None
    half, notes = trace.settings.dtype, trace.notes
    known = (x for x in floats if array_dtype(x) != half)
    if all(notes[x].widened and notes.cast(x, half) is not None for x in known):
        return half  # float32 only as the others were, when this was traced
    free = [x for x in floats if notes[x].constant is None]
    dtype = _compat.widest(frozenset(map(array_dtype, free or floats)))
    numbers = (notes[x].constant for x in floats)
    if all(n is None or fits(n, dtype) for n in numbers):
        return dtype
    return _compat.widest(frozenset(map(array_dtype, floats)))


def as_without(
    trace: CastingTrace, out: Result, args: Values, params: Params
) -> Result:
    """Results in the dtype that they would have without autocast."""
    dtypes = [array_dtype(x) for x in args if array_dtype(x) in CASTABLE]
    preferred = params.get("preferred_element_type")
    if preferred is None and not dtypes:
        return out
    dtype = _compat.widest(frozenset(dtypes)) if preferred is None else preferred
    return jax.tree.map(lambda x: trace.cast(x, dtype), out)
