"""Casts in the code itself, JAX's own and the user's."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import array_dtype
from .._jaxprs import param
from .call_stack import code_of
from .casting import dtypes_of
from .decision import CASTABLE, FLOAT32_DTYPE, Decision, Kind, Op, Value
from .notes import Note
from .numbers import asks_for_dtype, holds, is_float, is_weak_array
from .products import in_attention
from .rules import BY_PRIMITIVE
from .trace import AutocastTrace

# A user who calls one of these on a product wants its dtype: see `with_bias`. By the
# ids of their codes.
CASTS = jnp.astype, jnp.asarray, jnp.array, lax.convert_element_type
EXPLICIT = frozenset(id(code_of(function)) for function in CASTS)


def is_explicit(op: Op) -> bool:
    return not EXPLICIT.isdisjoint(op.known.keys)


def convert(trace: AutocastTrace, op: Op, decision: Decision) -> Value:
    """Runs a cast. If JAX only promoted, the result follows the arrays it meets."""
    (x,), dtype = op.args, jnp.dtype(param(op, "new_dtype"))
    is_array = isinstance(x, jax.Array)
    is_plain = decision is BY_PRIMITIVE[op.name]  # no function or rule decides
    if op.avals is not None and not is_array:  # stays a known number
        return np.asarray(x).astype(dtype) if holds(dtype, x) else x
    given = array_dtype(x)
    if given not in CASTABLE or dtype not in CASTABLE:
        params = op.params
        if decision.cast is not None and dtype in CASTABLE and not op.is_baked:
            params = params | {"new_dtype": decision.cast}
        out = trace.bind(op.primitive, op.args, params)
        if dtype == FLOAT32_DTYPE and op.avals is not None and not is_float(x):
            # In code that sees half precision, JAX would have promoted to that.
            asked = not is_plain or is_explicit(op) or asks_for_dtype(op)
            trace.notes[out] = Note(counted=not asked)
        return out
    explicit = is_explicit(op)
    narrows = given == FLOAT32_DTYPE and dtype == trace.settings.dtype
    if explicit and narrows and not trace.settings.is_policy:
        if in_attention(op):
            return x  # its log-sum-exp merges blocks; its product casts the rest
    if not op.is_baked:
        # Under a policy, a norm's own cast of its result to half precision is kept.
        kept = explicit and decision.inside and dtype == trace.settings.dtype
        # In a function whose products are lowered, one that is not stays float32.
        kept = (kept and trace.settings.is_policy) or (
            decision.row is Kind.LOWER and given == dtype
        )
        if decision.cast is not None and not kept:
            dtype = decision.cast
        elif op.avals is not None and dtypes_of(op.avals)[0] == dtype != given:
            return x  # nothing was converted when this was traced
    promotes = is_plain and not (explicit or op.is_baked)
    if promotes and dtype == trace.settings.dtype and is_weak_array(x, op):
        out = trace.call(lax.convert_element_type, [x], {"new_dtype": x.dtype})
        trace.notes[out] = trace.notes[x]._replace(constant=None)  # but may be a bias
        return out
    if is_array and param(op, "sharding") is None and not explicit:
        if dtype != given:
            return trace.cast(x, dtype)
        if jax.typeof(x).weak_type == param(op, "weak_type"):
            return x
    out = trace.bind(op.primitive, op.args, op.params | {"new_dtype": dtype})
    note = trace.notes[x]
    trace.notes[out] = note._replace(sides=None) if explicit else note
    if dtype == FLOAT32_DTYPE:
        trace.notes.remember_widened(out, x)
    return out
