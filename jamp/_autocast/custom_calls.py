"""Autocast through custom_jvp and custom_vjp functions that Python calls."""

from jax.extend.core import Primitive

from .. import _compat
from .bias import narrowed
from .casting import CastingTrace
from .custom import Contract, Function, bind_jvp, bind_vjp
from .decision import Params, Result, Values


def custom_jvp(
    trace: CastingTrace,
    primitive: Primitive,
    fun: "_compat.lu.WrappedFun",
    jvp: "_compat.lu.WrappedFun",
    args: Values,
    params: Params,
) -> Result:
    foreign, differentiated = trace.scope()
    as_it_is = params | {"subfuns": (fun, jvp)}
    if foreign:
        return trace.bind(primitive, args, as_it_is)
    baked = trace.baked or differentiated
    action = trace.action(primitive, _compat.source_name(fun.debug_info))
    if not baked:
        args = narrowed(trace, primitive, args, None)
    if action is not None:
        if action.dtype is not None and not baked:
            args = [trace.cast(x, action.dtype) for x in args]
        with trace.noted(action):
            return trace.bind(primitive, args, as_it_is)
    run = Function(trace, fun, baked)
    derivative = Function(trace, jvp, baked=True, of_tangents=True)
    contract = Contract(run, args, fun.debug_info)
    return bind_jvp(trace, primitive, args, params, contract, derivative, jvp)


def custom_vjp(
    trace: CastingTrace,
    primitive: Primitive,
    fun: "_compat.lu.WrappedFun",
    fwd: "_compat.lu.WrappedFun",
    bwd: "_compat.lu.WrappedFun",
    args: Values,
    params: Params,
) -> Result:
    foreign, differentiated = trace.scope()
    if foreign:
        return trace.bind(primitive, args, params | {"subfuns": (fun, fwd, bwd)})
    baked = trace.baked or differentiated
    if not baked:
        args = narrowed(trace, primitive, args, None)
    run = Function(trace, fun, baked)
    return bind_vjp(trace, primitive, args, params, run, (fun, fwd, bwd))
