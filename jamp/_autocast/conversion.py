"""Casts in the code itself, JAX's own and the user's: `convert_element_type`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .casting import CastingTrace, dtypes_of
from .decision import CASTABLE, FLOAT32_DTYPE, Action, Op, Value
from .made import asks_for_dtype, is_weak_array
from .notes import Note, holds, is_float
from .rules import ACTIONS
from .sources import code_of

# A user who calls one of these on a product wants its dtype: see `with_bias`.
EXPLICIT = frozenset(
    map(code_of, (jnp.astype, jnp.asarray, jnp.array, lax.convert_element_type))
)


def is_explicit() -> bool:
    return not EXPLICIT.isdisjoint(_compat.source_codes())


def convert(trace: CastingTrace, op: Op, action: Action) -> Value:
    """Runs a cast. If JAX only promoted, the result follows the arrays it meets."""
    (x,), dtype = op.args, jnp.dtype(op.params["new_dtype"])
    is_array = isinstance(x, jax.Array)
    if op.avals is not None and not is_array:  # stays a known number
        return np.asarray(x).astype(dtype) if holds(dtype, x) else x
    given = array_dtype(x)
    if given not in CASTABLE or dtype not in CASTABLE:
        params = op.params
        if action.dtype is not None and dtype in CASTABLE and not op.is_baked:
            trace.effects.touched |= dtype != action.dtype
            params = params | {"new_dtype": action.dtype}
        out = trace.bind(op.primitive, op.args, params)
        if dtype == FLOAT32_DTYPE and op.avals is not None and not is_float(x):
            # In code that sees half precision, JAX would have promoted to that.
            asked = action is not ACTIONS[op.name] or is_explicit() or asks_for_dtype()
            trace.notes[out] = Note(counted=not asked)
        return out
    explicit = is_explicit()
    if not op.is_baked:
        # Under a policy, a norm's own cast of its result to half precision is kept.
        kept = explicit and action.marks and dtype == trace.settings.dtype
        if action.dtype is not None and not (kept and not trace.decide.refines):
            trace.effects.touched |= dtype != action.dtype
            dtype = action.dtype
        elif op.avals is not None and dtypes_of(op.avals)[0] == dtype != given:
            return x  # nothing was converted when this was traced
    promotes = action is ACTIONS[op.name] and not (explicit or op.is_baked)
    if promotes and dtype == trace.settings.dtype and is_weak_array(x):
        trace.effects.touched = True
        out = trace.call(lax.convert_element_type, [x], {"new_dtype": x.dtype})
        trace.notes[out] = trace.notes[x]._replace(constant=None)  # but may be a bias
        return out
    if is_array and op.params["sharding"] is None and not explicit:
        if dtype != given:
            return trace.cast(x, dtype)
    out = trace.bind(op.primitive, op.args, op.params | {"new_dtype": dtype})
    note = trace.notes[x]
    trace.notes[out] = note._replace(sides=None) if explicit else note
    if dtype == FLOAT32_DTYPE:
        trace.notes.remember_widened(out, x)
    return out
