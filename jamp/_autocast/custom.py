"""Autocast through primitives that hold Python functions: custom_jvp, custom_vjp.

Each function is wrapped so that it runs under an autocast trace wherever JAX calls it,
perhaps long after the region has ended. The dtypes of the results are those of the
primal code; what the rules of the derivative return is cast to them. The rules run
`baked`: their products are in half precision, and all that Python sees has the dtypes
that it would have without autocast.

When such a primitive arrives as an equation of a jaxpr, its primal code is a jaxpr, and
may get other dtypes than it was traced with. Its rules may not, and get theirs cast.
But inside a function that runs in float32 a JVP rule is evaluated as the jaxpr that it
was traced to: cast to half precision it would round what the function has computed.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _compat
from .bias import narrowed
from .nested import avals_of, evaluate
from .rules import Action


class Function:
    """A Python function that JAX holds, run under autocast wherever JAX calls it."""

    def __init__(self, trace, function, baked=False):
        self.function, self.child = function, trace.spawner(baked)

    def __call__(self, *args):
        """Returns the results, and the trace that they were computed on."""
        self.forget()
        with self.child().current() as child:
            return list(self.function.call_wrapped(*args)), child

    def forget(self):
        """Lets the function be called again: it notes the tree of its results."""
        for store in filter(None, self.function.stores):
            store.reset()


class JaxprFunction(Function):
    """The same for a jaxpr, whose inputs may have other dtypes by now."""

    def __init__(self, trace, jaxpr, forced, baked=False):
        super().__init__(trace, jaxpr, baked)
        self.forced = forced

    def forget(self):
        pass

    def __call__(self, *args):
        child = self.child()
        return evaluate(child, self.function, args, self.forced, True), child


class WideRule(JaxprFunction):
    """The JVP rule of an equation, in the dtype that all of its function runs in."""

    def __init__(self, trace, eqn, baked):
        super().__init__(trace, None, eqn.forced, baked)
        self.eqn = eqn

    def __call__(self, *args):
        half, n_consts = len(args) // 2, self.eqn.n_consts
        flags = [False] * (half - n_consts)  # no tangent is known to be zero
        jaxpr, consts, zeros = self.eqn.jvp.call_wrapped(*flags)
        self.function = _compat.ClosedJaxpr(jaxpr, consts)
        outs, child = super().__call__(*args[n_consts:half], *args[half + n_consts :])
        primals, tangents = outs[: len(zeros)], iter(outs[len(zeros) :])
        pairs = zip(primals, zeros, strict=True)
        tangents = [jnp.zeros_like(x) if zero else next(tangents) for x, zero in pairs]
        return [*primals, *tangents], child


class Contract:
    """The dtypes of a custom function's results: those of its primal code."""

    def __init__(self, run: Function, args, debug_info):
        self.run, self.debug_info = run, debug_info
        self.avals, self.known = avals_of(args), None

    def primal(self, *args):
        outs, _ = self.run(*args)
        self.known = [_compat.dtype_of(x) for x in outs]
        return outs

    def dtypes(self) -> list[Any]:
        if self.known is None:  # the primal code has not run, only its derivative
            _compat.trace_to_jaxpr(self.primal, self.avals, self.debug_info)
            self.run.forget()
        return self.known or []


def cast_all(child, values, dtypes):
    """Casts arrays; what stands for a zero is left."""
    return [
        child.cast(v, d) if d is not None and isinstance(v, jax.Array) else v
        for v, d in zip(values, dtypes, strict=True)
    ]


def custom_jvp(trace, primitive, fun, jvp, args, params, eqn=None):
    foreign, differentiated = trace.scope()
    baked = trace.baked or differentiated
    source = _compat.source_name(fun.debug_info)
    action = trace.action(primitive, source) if eqn is None else eqn.forced
    if eqn is None and not (foreign or baked):
        args = narrowed(trace, primitive, args, None)
    if foreign or (eqn is None and action is not None):
        if action is not None and action.dtype is not None and not (foreign or baked):
            args = [trace.cast(x, action.dtype) for x in args]
        params = params | {"subfuns": (fun, jvp)}
        with contextlib.nullcontext() if action is None else trace.noted(action):
            return trace.bind(primitive, args, params)

    run = Function(trace, fun, baked)
    if eqn is not None:
        run = JaxprFunction(trace, eqn.jaxpr, eqn.forced, baked)
    contract = Contract(run, args, fun.debug_info)
    derivative, traced = Function(trace, jvp, baked=True), None
    if eqn is not None and eqn.in_float32 and not params["symbolic_zeros"]:
        derivative = WideRule(trace, eqn, baked)
    elif eqn is not None:
        traced = [a.dtype for a in eqn.jaxpr.in_avals] * 2

    def autocast_jvp(*primals_and_tangents):
        run.forget()  # else JAX compares the dtypes before they are cast
        if traced is not None:
            primals_and_tangents = cast_all(
                derivative.child(), primals_and_tangents, traced
            )
        outs, child = derivative(*primals_and_tangents)
        return cast_all(child, outs, contract.dtypes() * 2)

    subfuns = (
        _compat.wrap(contract.primal, fun.debug_info),
        _compat.wrap(autocast_jvp, jvp.debug_info),
    )
    return trace.bind(primitive, args, params | {"subfuns": subfuns})


def custom_vjp(trace, primitive, fun, fwd, bwd, args, params, eqn=None):
    foreign, differentiated = trace.scope()
    if foreign:
        return trace.bind(primitive, args, params | {"subfuns": (fun, fwd, bwd)})
    baked = trace.baked or differentiated
    if eqn is None and not baked:
        args = narrowed(trace, primitive, args, None)
    run = Function(trace, fun, baked)
    if eqn is not None:
        run = JaxprFunction(trace, eqn.jaxpr, eqn.forced, baked)
    contract = Contract(run, args, fun.debug_info)
    forward, backward = Function(trace, fwd, True), Function(trace, bwd, True)
    dtypes = [_compat.dtype_of(x) for x in args]
    natural = []  # the dtypes that the rules know the results in

    def autocast_fwd(*args_and_flags):
        run.forget()  # else JAX compares the dtypes before they are cast
        outs, child = forward(*args_and_flags)
        results = contract.dtypes()
        n_residuals = len(outs) - len(results)
        natural[:] = map(_compat.dtype_of, outs[n_residuals:])
        return cast_all(child, outs, [None] * n_residuals + results)

    def autocast_bwd(*residuals_and_cotangents):
        n_residuals = len(residuals_and_cotangents) - len(natural)
        cotangent_dtypes = [None] * n_residuals + natural
        inputs = cast_all(backward.child(), residuals_and_cotangents, cotangent_dtypes)
        outs, child = backward(*inputs)
        cotangents, packed = _compat.split_bwd(outs)
        return packed(cast_all(child, cotangents, dtypes))

    subfuns = (
        _compat.wrap(contract.primal, fun.debug_info),
        _compat.wrap(autocast_fwd, fwd.debug_info),
        _compat.wrap(autocast_bwd, bwd.debug_info),
    )
    return trace.bind(primitive, args, params | {"subfuns": subfuns})


class Equation(NamedTuple):
    """A custom function that arrives as an equation of a jaxpr."""

    jaxpr: _compat.ClosedJaxpr
    forced: Action | None
    jvp: Any  # gives the JVP rule as a jaxpr
    n_consts: int

    @property
    def in_float32(self) -> bool:
        """Whether it is part of a function that runs in float32."""
        return self.forced is not None and self.forced.dtype == jnp.float32


def custom_call(rule):
    def from_equation(trace, primitive, args, params, avals, forced, baked):
        jaxpr = params["call_jaxpr"]
        source = _compat.source_name(jaxpr.jaxpr.debug_info)
        action = forced or trace.action(primitive, source)
        rule_jaxpr = params.get("jvp_jaxpr_fun")
        eqn = Equation(jaxpr, action, rule_jaxpr, params["num_consts"])
        params = primitive.get_bind_params(params)
        subfuns = params.pop("subfuns")
        if rule is custom_vjp:
            args = trace.as_traced(args, jaxpr.in_avals)
        return rule(trace, primitive, *subfuns, args, params, eqn)

    return from_equation


def shard_map(trace, primitive, fun, args, params):
    foreign, differentiated = trace.scope()
    make_child = trace.spawner(differentiated)

    def autocast_fun(*args):
        with make_child().current():
            return fun(*args)

    run = fun if foreign else autocast_fun
    return trace.bind(primitive, args, params | {"subfuns": (run,)})


def shard_map_equation(trace, primitive, args, params, avals, forced, baked):
    args = trace.as_traced(args, avals)
    params = primitive.get_bind_params(params)
    (fun,) = params.pop("subfuns")
    return shard_map(trace.as_baked(), primitive, fun, args, params)


class CallingTrace(_compat.Trace):
    """What JAX calls on a trace for a primitive that is given Python functions."""

    def process_call(self: Any, primitive, fun, tracers, params, /):
        with self.current():
            return fun.call_wrapped(*tracers)

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
        return custom_jvp(self, primitive, fun, jvp, tracers, params)

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, tracers, /, **params):
        return custom_vjp(self, primitive, fun, fwd, bwd, tracers, params)

    def process_shard_map(self, primitive, fun, tracers, /, **params):
        return shard_map(self, primitive, fun, tracers, params)


CUSTOM = {
    "custom_jvp_call": custom_call(custom_jvp),
    "custom_vjp_call": custom_call(custom_vjp),
    "shard_map": shard_map_equation,
}
