"""Casts in the code itself, JAX's own and the user's, and how Python made an array."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .call_stack import called_function, code_of
from .decision import CASTABLE, FLOAT32_DTYPE, Action, Kind, Op, Value
from .input_casts import in_attention
from .notes import Note, holds, is_float
from .picks import index_note
from .rules import ACTIONS
from .trace import AutocastTrace, dtypes_of

# How Python made an array: what torch treats as a number, and what as an array.


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


# Casts. A user who calls one of these on a product wants its dtype: see `with_bias`.

EXPLICIT = frozenset(
    map(code_of, (jnp.astype, jnp.asarray, jnp.array, lax.convert_element_type))
)


def is_explicit() -> bool:
    return not EXPLICIT.isdisjoint(_compat.source_codes())


def convert(trace: AutocastTrace, op: Op, action: Action) -> Value:
    """Runs a cast. If JAX only promoted, the result follows the arrays it meets."""
    (x,), dtype = op.args, jnp.dtype(param(op, "new_dtype"))
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
            trace.notes[out] = Note(counted=not asked, added=trace.notes[x].added)
        elif not is_float(x):
            note = index_note(op, out, trace.notes)
            trace.notes[out] = note._replace(added=trace.notes[x].added)
        return out
    explicit = is_explicit()
    narrows = given == FLOAT32_DTYPE and dtype == trace.settings.dtype
    if explicit and narrows and trace.settings.listed:
        if in_attention(trace.decide.modules):
            return x  # its log-sum-exp merges blocks; its product casts the rest
    if not op.is_baked:
        # Under a policy, a norm's own cast of its result to half precision is kept.
        kept = explicit and action.marks and dtype == trace.settings.dtype
        # In a function whose products are lowered, one that is not stays float32.
        kept = (kept and not trace.settings.listed) or (
            action.table is Kind.LOWER and given == dtype
        )
        if action.dtype is not None and not kept:
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
    if is_array and param(op, "sharding") is None and not explicit:
        if dtype != given:
            return trace.cast(x, dtype)
    out = trace.bind(op.primitive, op.args, op.params | {"new_dtype": dtype})
    note = trace.notes[x]
    trace.notes[out] = note._replace(sides=None) if explicit else note
    if dtype == FLOAT32_DTYPE:
        trace.notes.remember_widened(out, x)
    return out
