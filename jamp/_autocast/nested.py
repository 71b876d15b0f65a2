"""Autocast through primitives that hold jaxprs: jit, remat, scan, while, cond.

The jaxpr is rewritten: evaluated under an autocast trace inside a new jaxpr, and the
primitive is bound with that. The result is kept with the old jaxpr, so that each is
rewritten once per dtype. The results of jit and remat may change dtype, and what scan
stacks; a carry keeps its dtype, and the branches of a cond agree on the widest.

To support another such primitive, write a rule and enter it in `NESTED`; if its inside
must not be touched (a kernel, a callback), enter its name in `left_alone.py`. What
holds Python functions instead of jaxprs is in `custom.py`.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .draws import redrawn
from .notes import Note, holds
from .refused import check_precision
from .rules import Action
from .sources import is_library


def evaluate(trace, jaxpr, args, forced: Action | None = None, own_sources=False):
    """Runs a jaxpr op by op on an autocast trace.

    With `own_sources`, ops keep the record of where they come from that the jaxpr has;
    otherwise they come from the call that is being evaluated.
    """
    values: dict[Any, Any] = dict(
        zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    ) | dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, _compat.Literal) else values[atom]

    outer = _compat.current_name_stack()
    call = None if own_sources else _compat.current_traceback()
    for eqn in jaxpr.jaxpr.eqns:
        name_stack = outer + eqn.source_info.name_stack
        traceback = call or eqn.source_info.traceback
        inputs, avals = map(read, eqn.invars), [v.aval for v in eqn.invars]
        with (
            _compat.user_context(traceback, name_stack=name_stack),
            eqn.ctx.manager,
        ):
            out = trace.apply(
                eqn.primitive, list(inputs), dict(eqn.params), avals, forced
            )
        outs = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.jaxpr.outvars]


def as_array(trace, x, aval):
    """A result that Python may see, if it is a number so far."""
    if isinstance(x, np.ndarray | np.generic | float | int):
        with _compat.set_current_trace(trace.parent):
            x = jnp.asarray(x)
    return as_weak(trace, x, aval)


def as_weak(trace, x, aval):
    """A result as weakly typed as when it was traced: it follows other arrays."""
    weak = getattr(aval, "weak_type", False) and isinstance(x, jax.Array)
    if not weak or x.dtype != aval.dtype or jax.typeof(x).weak_type:
        return x
    weakly = {"new_dtype": x.dtype, "weak_type": True, "sharding": None}
    out = trace.bind(lax.convert_element_type_p, [x], weakly)
    trace.notes[out] = trace.notes[x]
    return out


class Rewritten(NamedTuple):
    """A jaxpr with casts, what is known of its results, and what was done to it."""

    jaxpr: Any
    notes: Sequence[Note]
    record: Any


CACHE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def rewrite(trace, jaxpr, avals, forced=None, outs=None, baked=False) -> Rewritten:
    """A jaxpr with casts for inputs of these abstract values.

    Args:
      outs: for each result the dtype that it must have, or None.
    """
    path, outs = trace.path(), tuple(outs or [None] * len(jaxpr.jaxpr.outvars))
    baked = baked or trace.baked
    key = (tuple(avals), outs, forced, baked, trace.settings, path)
    cache = CACHE.setdefault(jaxpr.jaxpr, {})
    if key not in cache:
        notes, record = [], type(trace.record)()
        make_child = trace.spawner(baked, record)

        def run(*args):
            child = make_child()
            results = evaluate(child, jaxpr, args, forced, own_sources=True)
            results = [
                r if dtype is None else as_weak(child, child.cast(r, dtype), aval)
                for r, dtype, aval in zip(results, outs, jaxpr.out_avals, strict=True)
            ]
            notes.extend(child.notes[r] for r in results)
            return results

        new = _compat.trace_to_jaxpr(run, avals, jaxpr.jaxpr.debug_info)
        record.touched |= list(new.in_avals) != list(jaxpr.in_avals)
        # An entry that held its own key would never die.
        cache[key] = Rewritten(new if record.touched else None, notes, record)
    result = cache[key]
    if result.jaxpr is None:  # nothing had to be changed
        result = result._replace(jaxpr=jaxpr)
    trace.record.hits |= result.record.hits
    trace.record.touched |= result.record.touched
    return result


def avals_of(args):
    return [jax.typeof(x) for x in args]


def with_dtype(aval, value):
    """The abstract value of an argument of which `scan` passes one slice."""
    dtype = _compat.dtype_of(value)
    return aval if dtype in (None, aval.dtype) else aval.update(dtype=dtype)


def annotate(trace, outs, new: Rewritten):
    for value, note in zip(outs, new.notes, strict=True):
        trace.notes[value] = note
    return outs


def jit(trace, primitive, args, params, avals, forced, baked):
    jaxpr = params["jaxpr"]
    source = _compat.source_name(jaxpr.jaxpr.debug_info)
    action = forced or trace.action(primitive, source)
    check_precision(action, jaxpr.in_avals)
    if (drawn := redrawn(trace, source, action, args, jaxpr)) is not None:
        return drawn
    half = trace.settings.dtype
    small = any(map(differs, args, jaxpr.in_avals)) or not all(
        isinstance(x, jax.Array) or holds(half, x) for x in args
    )
    small = small and is_library(source)
    if _compat.inlined_early(params) or small:
        outs = evaluate(trace, jaxpr, args, action)
        return [*map(functools.partial(as_array, trace), outs, jaxpr.out_avals)]
    new = rewrite(trace, jaxpr, avals_of(args), action, baked=baked)
    outs = trace.bind(primitive, args, params | {"jaxpr": new.jaxpr})
    return annotate(trace, outs, new)


def differs(value, aval) -> bool:
    return _compat.dtype_of(value) != getattr(aval, "dtype", None)


def call(trace, primitive, args, params, avals, forced, baked):
    """What `jax.checkpoint` makes of a scan: a function that is called in place."""
    jaxpr = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    if not hasattr(jaxpr, "jaxpr"):
        jaxpr = _compat.ClosedJaxpr(jaxpr, ())
    outs = evaluate(trace, jaxpr, args, forced, own_sources=True)
    return [*map(functools.partial(as_array, trace), outs, jaxpr.out_avals)]


def annotated(trace, primitive, args, params, avals, forced, baked):
    """A function with a word for the compiler: where it runs, what it is called."""
    new = rewrite(trace, params["jaxpr"], avals_of(args), forced, baked=baked)
    outs = trace.bind(primitive, args, params | {"jaxpr": new.jaxpr})
    return annotate(trace, outs, new)


def remat(trace, primitive, args, params, avals, forced, baked):
    jaxpr = _compat.ClosedJaxpr(params["jaxpr"], ())
    new = rewrite(trace, jaxpr, avals_of(args), forced, baked=baked)
    opened, consts = _compat.open_jaxpr(new.jaxpr)
    outs = trace.bind(primitive, [*consts, *args], params | {"jaxpr": opened})
    return annotate(trace, outs, new)


def scan(trace, primitive, args, params, avals, forced, baked):
    jaxpr = params["jaxpr"]
    start, n_carry = _compat.scan_arity(params)
    stop = start + n_carry
    carry = jaxpr.in_avals[start:stop]
    args = [*args[:start], *trace.as_traced(args[start:stop], carry), *args[stop:]]
    inside = [*map(with_dtype, jaxpr.in_avals, args)]
    n_stacked = len(jaxpr.jaxpr.outvars) - n_carry
    outs = [a.dtype for a in carry] + [None] * n_stacked
    new = rewrite(trace, jaxpr, inside, forced, outs, baked)
    return trace.bind(primitive, args, params | {"jaxpr": new.jaxpr})


def while_loop(trace, primitive, args, params, avals, forced, baked):
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_condition, n_body = params["cond_nconsts"], params["body_nconsts"]
    start = n_condition + n_body
    carry = body.in_avals[n_body:]
    args = [*args[:start], *trace.as_traced(args[start:], carry)]
    known = avals_of(args)
    dtypes = [a.dtype for a in carry]
    new_condition = rewrite(
        trace, condition, [*known[:n_condition], *carry], forced, baked=baked
    )
    new_body = rewrite(
        trace, body, [*known[n_condition:start], *carry], forced, dtypes, baked
    )
    jaxprs = {"cond_jaxpr": new_condition.jaxpr, "body_jaxpr": new_body.jaxpr}
    return trace.bind(primitive, args, params | jaxprs)


def cond(trace, primitive, args, params, avals, forced, baked):
    """The branches agree on the widest dtype of each result."""
    branches, known = params["branches"], avals_of(args[1:])
    new = [rewrite(trace, b, known, forced, None, baked) for b in branches]
    results = zip(*(n.jaxpr.out_avals for n in new), strict=True)
    dtypes = [agreed(avals) for avals in results]
    if any(dtypes):
        new = [rewrite(trace, b, known, forced, dtypes, baked) for b in branches]
    jaxprs = tuple(n.jaxpr for n in new)
    return trace.bind(primitive, args, params | {"branches": jaxprs})


def agreed(avals):
    """The widest dtype of a result, or None if the branches agree already."""
    dtypes = frozenset(getattr(a, "dtype", None) for a in avals)
    return _compat.widest(dtypes) if len(dtypes) > 1 else None


def custom_vmap(trace, primitive, args, params, avals, forced, baked):
    jaxpr, rule = params["call"], params["rule"]
    dtypes = [a.dtype for a in jaxpr.out_avals]
    args = trace.as_traced(args, jaxpr.in_avals)
    new = rewrite(trace, jaxpr, jaxpr.in_avals, forced, dtypes, baked)
    make_child = trace.spawner(baked)

    @functools.wraps(rule)
    def autocast_rule(*rule_args):
        with make_child().current() as child:
            out, batched = rule(*rule_args)
        leaves, tree = jax.tree.flatten(out)
        return tree.unflatten(map(child.cast, leaves, dtypes)), batched

    changed = {"call": new.jaxpr, "rule": autocast_rule}
    return trace.bind(primitive, args, params | changed)


NESTED = {
    "jit": jit,
    "call": call,
    "closed_call": call,
    "eval_jaxpr": call,
    "compute_on": annotated,
    "xla_metadata_call": annotated,
    "remat2": remat,
    "checkpoint": remat,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "custom_vmap_call": custom_vmap,
}
