"""Evaluating a jaxpr op by op under autocast, and rewriting it into a new one.

The new jaxpr is kept with the old one, so that each is rewritten once per dtype.
"""

import contextlib
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, set_current_trace

from .. import _compat
from .._jaxprs import called, read
from .decision import Decision, Dtypes, Op, Value, Values
from .notes import Note
from .retracing import CACHED
from .trace import AutocastTrace

NO_CONTEXT: Any = contextlib.nullcontext()


def evaluate(
    trace: AutocastTrace,
    jaxpr: ClosedJaxpr,
    args: Values,
    within: Decision | None = None,
    call: Any = None,
) -> list[Value]:
    """Runs a jaxpr op by op on an autocast trace.

    Args:
      call: the traceback of a call from which the ops come; None: they keep the
        jaxpr's record of where they come from.
    """
    outer = _compat.current_name_stack()
    here = _compat.equation_context()

    def results(eqn: JaxprEqn, inputs: list[Value]) -> Values:
        source, place = eqn.source_info, NO_CONTEXT
        if call is None or source.name_stack:
            traceback = source.traceback if call is None else call
            stack = outer + source.name_stack
            place = _compat.user_context(traceback, name_stack=stack)
        avals = [v.aval for v in eqn.invars]
        # JAX compiles a program again in a context that is set, if only to itself.
        context = NO_CONTEXT if eqn.ctx == here else eqn.ctx.manager
        with place, context:
            op = Op(eqn.primitive, inputs, dict(eqn.params), avals, within)
            out: Any = trace.apply(op)
        return out if eqn.primitive.multiple_results else [out]

    with _compat.user_context(call, name_stack=outer):
        return read(jaxpr, args, results)


def in_place(trace: AutocastTrace, op: Op, call: Any = None) -> list[Value]:
    """Evaluates a function whose results Python may see: they are arrays."""
    jaxpr = called(op)
    outs = evaluate(trace, jaxpr, op.args, op.within, call)
    pairs = zip(outs, jaxpr.out_avals, strict=True)
    return [as_array(trace, out, aval) for out, aval in pairs]


def as_array(trace: AutocastTrace, x: Value, aval: AbstractValue) -> Value:
    """A result that Python may see, as an array if it is a number."""
    if isinstance(x, np.ndarray | np.generic | float | int):
        with set_current_trace(trace.parent):
            x = jnp.asarray(x)
    return as_weak(trace, x, aval)


def as_weak(trace: AutocastTrace, x: Value, aval: Any) -> Value:
    """A result as weakly typed as when it was traced: it follows other arrays."""
    if not getattr(aval, "weak_type", False) or not isinstance(x, jax.Array):
        return x
    if x.dtype != aval.dtype or jax.typeof(x).weak_type:
        return x
    weakly = {"new_dtype": x.dtype, "weak_type": True, "sharding": None}
    out = trace.bind(lax.convert_element_type_p, [x], weakly)
    trace.notes[out] = trace.notes[x]
    return out


class Rewritten(NamedTuple):
    """A jaxpr with casts, what is known about its results, and which rules decided."""

    jaxpr: ClosedJaxpr
    notes: Sequence[Note]
    hits: set[int]


CACHE: weakref.WeakKeyDictionary[Jaxpr, dict[Hashable, Rewritten]] = (
    weakref.WeakKeyDictionary()
)


def rewrite(
    trace: AutocastTrace,
    op: Op,
    jaxpr: ClosedJaxpr,
    avals: Sequence[AbstractValue],
    outs: Dtypes | None = None,
    known: Sequence[Note] = (),
) -> Rewritten:
    """A jaxpr that an op holds, with casts for inputs of these abstract values.

    Args:
      outs: for each result the dtype that it must have, or None.
      known: for each input what is known about it, if anything is.
    """
    place = trace.place.path(), trace.decide.running_here()
    outs = tuple(outs or [None] * len(jaxpr.jaxpr.outvars))
    baked = op.is_baked or trace.baked
    given = tuple(avals), tuple(known)
    key = (*given, outs, op.within, baked, trace.settings, place)
    cache = CACHE.setdefault(jaxpr.jaxpr, {}) if CACHED.value else {}
    if key not in cache:
        notes: list[Note] = []
        hits: set[int] = set()
        make_child = trace.spawner(baked, hits)

        def run(*args):
            child = make_child()
            child.follow(args, known)
            results = evaluate(child, jaxpr, args, op.within)
            results = [
                r if dtype is None else as_weak(child, child.cast(r, dtype), aval)
                for r, dtype, aval in zip(results, outs, jaxpr.out_avals, strict=True)
            ]
            notes.extend(child.notes[r] for r in results)
            return results

        new = _compat.trace_to_jaxpr(run, avals, jaxpr.jaxpr.debug_info)
        cache[key] = Rewritten(new, notes, hits)
    result = cache[key]
    trace.hits |= result.hits
    return result


def annotate(trace: AutocastTrace, outs: Values, new: Rewritten) -> Values:
    for value, note in zip(outs, new.notes, strict=True):
        trace.notes[value] = note
    return outs
