"""Autocast through primitives that hold a jaxpr, and a function that makes another one.

`jax.custom_derivatives.linear_call` makes the jaxpr of its transpose on demand, and a
`custom_vjp` with `optimize_remat` makes that of the function without its rule. Both
jaxprs run baked: their products are in half precision, and their results have the
dtypes that they were traced with, so that they fit each other.
"""

import functools

from jax.extend.core import ClosedJaxpr

from .. import _compat
from .casting import CastingTrace, dtypes_of
from .decision import Action, Dtypes, Op, Value, Values
from .rewriting import rewrite


def linear_call(trace: CastingTrace, op: Op) -> Values:
    params, within = op.params, op.within
    jaxpr, transpose = params["callee"], params["transpose_thunk"]
    n_consts, make_child = params["num_callee_consts"], trace.spawner(True)
    linear = dtypes_of(jaxpr.in_avals[n_consts + params["num_res"] :])
    args = trace.as_traced(op.args, jaxpr.in_avals)
    callee, consts = baked_jaxpr(trace, jaxpr, within, dtypes_of(jaxpr.out_avals))

    @functools.cache
    def autocast_transpose():
        closed, consts = transpose()
        new, more = baked_jaxpr(make_child(), closed, within, linear)
        return new, [*more, *consts]

    changed = {
        "callee": callee,
        "transpose_thunk": autocast_transpose,
        "num_callee_consts": n_consts + len(consts),
    }
    return trace.bind(op.primitive, [*consts, *args], params | changed)


def remat_opt(trace: CastingTrace, op: Op) -> Values:
    params, within = op.params, op.within
    jaxpr, function = params["fwd_jaxpr"], params["fun_jaxpr_thunk"]
    make_child, dtypes = trace.spawner(True), dtypes_of(jaxpr.out_avals)
    args = trace.as_traced(op.args, jaxpr.in_avals)
    forward, consts = baked_jaxpr(trace, jaxpr, within, dtypes)

    @functools.cache
    def autocast_function():
        plain = ClosedJaxpr(*function())
        results = dtypes[params["num_res"] :]
        new = rewrite(make_child(), plain, plain.in_avals, within, results, True)
        return new.jaxpr.jaxpr, new.jaxpr.consts

    changed = {
        "fwd_jaxpr": forward,
        "fun_jaxpr_thunk": autocast_function,
        "num_consts": params["num_consts"] + len(consts),
    }
    return trace.bind(op.primitive, [*consts, *args], params | changed)


def baked_jaxpr(
    trace: CastingTrace, jaxpr: ClosedJaxpr, within: Action | None, dtypes: Dtypes
) -> tuple[ClosedJaxpr, list[Value]]:
    """A jaxpr with casts, and the values of its new first arguments."""
    new = rewrite(trace, jaxpr, jaxpr.in_avals, within, dtypes, True)
    opened, consts = _compat.open_jaxpr(new.jaxpr)
    return ClosedJaxpr(opened, ()), consts


THUNKS = {"linear_call": linear_call, "remat_opt": remat_opt}
