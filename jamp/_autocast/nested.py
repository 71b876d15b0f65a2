"""Autocast through primitives that hold jaxprs: jit, remat, scan, while, cond.

The jaxpr is rewritten (`rewriting.py`) and the primitive is bound with the new one. The
results of jit and remat, and the stacked outputs of scan, may change dtype. A carry
keeps its dtype, and the branches of a cond agree on the widest.

To support another such primitive, write and register a rule. Primitives that hold
Python functions instead of jaxprs are in `custom.py`. What has no rule runs as it was
traced: the kernels, callbacks and solvers in `traits.py`, and the primitives of other
libraries.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr

from .. import _compat
from .._jaxprs import branches, called, calling, loop
from .call_stack import is_library
from .casting import avals_of, dtypes_of
from .decision import CASTABLE, FLOAT32_DTYPE, Kind, Op, Result, Value, Values
from .notes import Note
from .numbers import holds, is_float
from .one_op import COMPUTED_ANEW, halves, of_jaxpr
from .rewriting import Rewritten, annotate, in_place, rewrite
from .trace import AutocastTrace, register
from .traits import REF_WRITES
from .weights import activations_in, are_activations, note_activations


@register("jit")
def jit(trace: AutocastTrace, op: Op) -> Result:
    args, jaxpr = op.args, called(op)
    source = _compat.source_name(jaxpr.jaxpr.debug_info)
    if (outs := run_as_one(trace, op, jaxpr)) is not None:
        return outs
    half, dtypes = trace.settings.dtype, dtypes_of(jaxpr.in_avals)
    small = [*map(_compat.array_dtype, args)] != dtypes or not all(
        isinstance(x, jax.Array) or holds(half, x) for x in args
    )
    small = small and is_library(source)
    if _compat.inlined_early(op.params) or small:
        return in_place(trace, op, op.known.traceback)
    return rewritten(trace, op)


@register("compute_on", "remat2", "xla_metadata_call")
def rewritten(trace: AutocastTrace, op: Op) -> Values:
    """A call, perhaps with a hint for the compiler, of a function with casts."""
    known = known_of(trace, op.args)
    new = rewrite(trace, op, called(op), avals_of(op.args), known=known)
    jaxpr, consts = new.jaxpr, []
    if op.name == "remat2":  # whose jaxpr has no constants
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
    args, params = [*consts, *op.args], calling(op, jaxpr)
    outs: Any = trace.bind(op.primitive, args, params)
    return annotate(trace, outs, new)


def run_as_one(trace: AutocastTrace, op: Op, jaxpr: ClosedJaxpr) -> Values | None:
    """The results of a function that is one op; None if it is another or in float32."""
    decision = op.decision
    if decision is None:
        return None
    if decision.row is not Kind.ONE_OP and not (
        op.is_baked and decision.cast == FLOAT32_DTYPE
    ):
        return None
    if _compat.inlined_early(op.params):  # a part of it
        return None
    if (dtype := halves(op.args)) is None:
        return None
    whole = decision._replace(row=Kind.ONE_OP, cast=FLOAT32_DTYPE)
    inside = op._replace(within=whole, is_baked=False)
    avals = [
        aval.update(dtype=FLOAT32_DTYPE, weak_type=False) if is_float(x) else aval
        for x, aval in zip(op.args, avals_of(op.args), strict=True)
    ]
    new = rewrite(trace, inside, jaxpr, avals)
    outs = dtypes_of(jaxpr.out_avals)
    if dtype not in dtypes_of(jaxpr.in_avals):  # it was traced in float32
        outs = [dtype if out == FLOAT32_DTYPE else out for out in outs]
    function = of_jaxpr(new.jaxpr, tuple(outs), decision.why.name in COMPUTED_ANEW)
    with trace.noted(decision):
        return trace.call(function, op.args, {})


def known_of(trace: AutocastTrace, args: Values) -> list[Note]:
    """What is known about a function's arguments, inside it too."""
    notes = map(trace.notes.__getitem__, args)
    known = [Note(sides=n.sides, along=n.along) for n in notes]
    pairs = zip(known, activations_in(trace, args) or known, strict=True)
    return [n._replace(activation=other.activation) for n, other in pairs]


@register("call", "closed_call", "eval_jaxpr")
def call(trace: AutocastTrace, op: Op) -> Values:
    """What `jax.checkpoint` makes of a scan: a function that is called in place."""
    return in_place(trace, op)


@register("scan", "while")
def repeated(trace: AutocastTrace, op: Op) -> Values:
    """A loop keeps the dtypes of what it carries."""
    parts = loop(op)
    body, n_consts, n_carry, condition, _ = parts
    carried = body.in_avals[n_consts : n_consts + n_carry]
    before, consts, carry, slices = parts.split([*op.args])
    inputs = [*consts, *trace.as_traced(carry, carried), *slices]
    outs = [a.dtype for a in carried]
    outs += [None] * (len(body.out_avals) - n_carry)
    changed = [False] * n_consts + changes(body, n_consts, n_carry)
    known = activations_in(trace, inputs, changed)
    avals = [*map(with_dtype, body.in_avals, inputs)]
    new = rewrite(trace, op, body, avals, outs, known)
    params = op.params | {"jaxpr": new.jaxpr}
    if condition is not None:
        given = [*avals_of(before), *carried]
        tested = rewrite(trace, op, condition, given).jaxpr
        params = op.params | {"cond_jaxpr": tested, "body_jaxpr": new.jaxpr}
    results = trace.bind(op.primitive, [*before, *inputs], params)
    for value, note in zip(results[n_carry:], new.notes[n_carry:], strict=True):
        trace.notes[value] = Note(result=note.result)
    note_made(trace, results, new)
    return results


def changes(body: ClosedJaxpr, start: int, n: int) -> list[bool]:
    """Whether a loop changes each of the values that it carries."""
    pairs = zip(body.jaxpr.invars[start:], body.jaxpr.outvars[:n], strict=False)
    return [given is not made for given, made in pairs]


def note_made(trace: AutocastTrace, outs: Values, *functions: Rewritten) -> None:
    """Notes which results are activations in any of some functions."""
    each = zip(*(new.notes for new in functions), strict=True)
    made = [any(note.activation for note in notes) for notes in each]
    note_activations(trace, outs, made)


def with_dtype(aval: Any, value: Value) -> AbstractValue:
    """The abstract value of a slice that `scan` passes, in the argument's dtype."""
    dtype = _compat.array_dtype(value)
    return aval if dtype in (None, aval.dtype) else aval.update(dtype=dtype)


@register("cond")
def cond(trace: AutocastTrace, op: Op) -> Values:
    """The branches agree on the widest dtype of each result."""
    args = op.args[1:]
    avals, known = avals_of(args), known_of(trace, args)
    new = [rewrite(trace, op, branch, avals, known=known) for branch in branches(op)]
    results = zip(*(n.jaxpr.out_avals for n in new), strict=True)
    dtypes = [agreed(avals) for avals in results]
    if any(dtypes):
        given = avals, dtypes, known
        new = [rewrite(trace, op, branch, *given) for branch in branches(op)]
    jaxprs = tuple(n.jaxpr for n in new)
    outs = trace.bind(op.primitive, op.args, op.params | {"branches": jaxprs})
    for value, *notes in zip(outs, *(n.notes for n in new), strict=True):
        trace.notes[value] = Note(result=all(note.result for note in notes))
    note_made(trace, outs, *new)
    return outs


def agreed(avals: Sequence[AbstractValue]) -> np.dtype | None:
    """The widest dtype of a result, or None if the branches agree already."""
    dtypes = frozenset(getattr(a, "dtype", None) for a in avals)
    return _compat.widest(dtypes) if len(dtypes) > 1 else None


@register(*REF_WRITES)
def write(trace: AutocastTrace, op: Op) -> Result:
    """Writes a value into a `Ref`, in the dtype of the Ref.

    torch's `buffer[...] = h` casts h to the dtype of the buffer. JAX requires that
    dtype, and in a region h may be the result of a matrix product.
    """
    place, *values = trace.as_traced(op.args, op.avals)
    dtype = getattr(jax.typeof(place), "dtype", None)
    if dtype is not None and dtype in CASTABLE:
        values = [trace.cast(value, dtype) for value in values]
    note_activations(trace, [place], [any(are_activations(trace, values))])
    return trace.bind(op.primitive, [place, *values], op.params)
