"""What an op's inputs are cast to, and its results where dtypes are fixed."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from .. import _compat
from .._compat import array_dtype
from .casting import CastingTrace, dtypes_of
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
from .notes import fits, is_inexact
from .products import is_dot
from .rules import codes_at, loaded

ATTENTION = ("jax.nn.dot_product_attention",)


def prepared(trace: CastingTrace, op: Op, action: Action) -> tuple[Values, Params]:
    """The inputs and parameters in the dtypes that an op is to run in."""
    args, params = op.args, op.params
    given = [array_dtype(x) for x in args]
    floats = {i: dtype for i, dtype in enumerate(given) if is_inexact(dtype)}
    match cast := cast_for(trace, op, action, floats):
        case RunIn(dtype, _):
            pass
        case Promote():
            dtypes = [*floats.values()]
            dtype = widest(trace, [args[i] for i in floats], dtypes)
            if dtype is None and "preferred_element_type" in params:
                dtype = dtypes[0]  # of a product that is not lowered
        case Keep():
            return args, params
    if dtype is None:
        return args, params
    preferred = params.get("preferred_element_type")
    if preferred in CASTABLE:
        known = [*given, *dtypes_of(op.avals or ())]
        wholly = isinstance(cast, RunIn) and cast.wholly
        if wholly or (FLOAT32_DTYPE in known and not is_attention(op)):
            # Recorded for float32 inputs; for half-precision ones, the user's wish.
            trace.effects.touched |= preferred != dtype
            params = params | {"preferred_element_type": dtype}
    pairs = zip(args, given, strict=True)
    return [x if has == dtype else trace.cast(x, dtype) for x, has in pairs], params


def cast_for(
    trace: CastingTrace, op: Op, action: Action, floats: Mapping[int, np.dtype]
) -> Cast:
    """What an action means for one op.

    Args:
      floats: the dtypes of its floating inputs, by their place.
    """
    if action.dtype is not None:
        return RunIn(action.dtype, wholly=True)
    match action.kind:
        case Kind.LOWER:
            castable = all(dtype in CASTABLE for dtype in floats.values())
            is_lowered = castable and not is_dot(op)
            return RunIn(trace.settings.dtype) if is_lowered else Promote()
        case Kind.FLOAT32:
            return RunIn(FLOAT32_DTYPE)
        case Kind.PROMOTE:
            return Promote()
        case Kind.INTO if 0 in floats:
            return RunIn(floats[0])
        case Kind.KEEP if op.avals is not None:  # dtypes may be mixed by now
            return Promote()
    return Keep()


def widest(
    trace: CastingTrace, floats: Values, dtypes: Sequence[np.dtype]
) -> np.dtype | None:
    """The dtype to promote to, or None. Numbers follow arrays where they fit."""
    if len(set(dtypes)) < 2:
        return None
    half, notes = trace.settings.dtype, trace.notes
    pairs = list(zip(floats, dtypes, strict=True))
    if all(d == half or notes.is_promoted(x, half) for x, d in pairs):
        return half  # float32 only as the others were, when this was traced
    free = [dtype for x, dtype in pairs if notes[x].constant is None]
    dtype = _compat.widest(frozenset(free or dtypes))
    numbers = (notes[x].constant for x in floats)
    if all(n is None or fits(n, dtype) for n in numbers):
        return dtype
    return _compat.widest(frozenset(dtypes))


def widens(trace: CastingTrace, op: Op) -> bool:
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


def is_attention(op: Op) -> bool:
    """Whether an op is the product of queries and keys in JAX's attention.

    JAX asks for it in float32 if it sees half precision. Where it was traced before, it
    saw float32, and did not need to ask.
    """
    if op.name != "dot_general" or op.is_baked:
        return False
    (contracting, _), shapes = op.params["dimension_numbers"], map(np.shape, op.args)
    last = [(len(shape) - 1,) for shape in shapes]
    if [*map(tuple, contracting)] != last:  # as in the product with the values
        return False
    attention = codes_at(ATTENTION, loaded())
    return not attention.keys().isdisjoint(map(id, _compat.source_codes()))
