"""Functions of custom_jvp, custom_vjp and shard_map, wherever JAX calls them.

Each function is wrapped so that it runs under an autocast trace, perhaps long after the
region has ended. The dtypes of the results are those of the primal code; the results of
the derivative rules are cast to them. The rules run baked: their products are in half
precision, and the values that Python sees have the dtypes that they would have without
autocast.

The functions come in two ways: Python hands them to JAX, or they are in an equation of
a jaxpr. Then the primal code is a jaxpr, and may get other dtypes than it was traced
with. The rules may not: their inputs are cast back. But inside a function that runs in
float32, a JVP rule is evaluated as the jaxpr that it was traced to, because a cast to
half precision would round what the function has computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .. import _compat
from .._jaxprs import bound, called, param, with_functions
from .advice import advise
from .casting import avals_of, dtypes_of
from .decision import (
    FLOAT32_DTYPE,
    Decision,
    Dtypes,
    Kind,
    Op,
    Result,
    Value,
    Values,
)
from .one_op import halves
from .rewriting import evaluate
from .trace import AutocastTrace, register
from .weights import activations_in, are_activations, note_activations

# What runs a function that JAX holds, on a trace.
Run = Callable[[AutocastTrace, Values], list[Value]]


class Function:
    """A function that JAX holds, run under autocast wherever JAX calls it."""

    def __init__(
        self,
        trace: AutocastTrace,
        run: Run,
        baked: bool = False,
        of_tangents: bool = False,
        args: Values = (),
    ):
        self.run, self.known = run, activations_in(trace, args)
        self.child = trace.spawner(baked, of_tangents=of_tangents)

    def __call__(self, *args: Value) -> tuple[list[Value], AutocastTrace]:
        """Returns the results, and the trace that they were computed on."""
        child = self.child()
        child.follow(args, self.known)
        return self.run(child, args), child


def of_python(function: Any) -> Run:
    def run(child: AutocastTrace, args: Values) -> list[Value]:
        forget(function)
        try:
            with child.current():
                return list(function.call_wrapped(*args))
        except Exception as error:
            # A derivative may run after its region, which then gives it no note.
            advise(error, child.settings)
            raise

    return run


def forget(function: Any) -> None:
    """Lets a function be called again: it notes the tree of its results."""
    for store in filter(None, function.stores):
        store.reset()


def of_jaxpr(jaxpr: ClosedJaxpr, within: Decision | None) -> Run:
    """The inputs may have other dtypes by now."""
    return lambda child, args: evaluate(child, jaxpr, args, within)


def wide_rule(op: Op) -> Run:
    """The JVP rule of an equation, in the dtype that its whole function runs in."""
    make_jvp, n_consts = param(op, "jvp_jaxpr_fun"), param(op, "num_consts")

    def run(child: AutocastTrace, args: Values) -> list[Value]:
        half = len(args) // 2
        flags = [False] * (half - n_consts)  # no tangent is known to be zero
        jaxpr, consts, zeros = make_jvp.call_wrapped(*flags)
        given = *args[n_consts:half], *args[half + n_consts :]
        outs = evaluate(child, ClosedJaxpr(jaxpr, consts), given, op.decision)
        primals, tangents = outs[: len(zeros)], iter(outs[len(zeros) :])
        pairs = zip(primals, zeros, strict=True)
        tangents = [jnp.zeros_like(x) if zero else next(tangents) for x, zero in pairs]
        return [*primals, *tangents]

    return run


class Contract:
    """The dtypes of a custom function's results: those of its primal code."""

    def __init__(self, trace: AutocastTrace, op: Op, args: Values):
        self.function, self.avals = bound(op)[1][0], avals_of(args)
        jaxpr = called(op)
        run = of_python(self.function) if jaxpr is None else of_jaxpr(jaxpr, op.within)
        self.run = Function(trace, run, op.is_baked, args=args)
        self.known: list[np.dtype | None] | None = None
        self.activations: list[bool] = []

    def primal(self, *args: Value) -> list[Value]:
        outs, child = self.run(*args)
        self.activations = are_activations(child, outs)
        self.known = [_compat.array_dtype(x) for x in outs]
        return outs

    def dtypes(self) -> list[np.dtype | None]:
        if self.known is None:  # the primal code has not run, only its derivative
            debug_info = self.function.debug_info
            _compat.trace_to_jaxpr(self.primal, self.avals, debug_info)
            forget(self.function)
        return self.known or []


def cast_all(child: AutocastTrace, values: Values, dtypes: Dtypes) -> list[Value]:
    """Casts arrays, and leaves symbolic zeros."""
    return [
        child.cast(v, d) if d is not None and isinstance(v, jax.Array) else v
        for v, d in zip(values, dtypes, strict=True)
    ]


def is_in_float32(op: Op) -> bool:
    """Whether a custom_jvp was traced as a part of a function that runs in float32."""
    if op.decision is None or called(op) is None:
        return False
    return op.decision.cast == FLOAT32_DTYPE and not param(op, "symbolic_zeros")


def bind_jvp(trace: AutocastTrace, op: Op, args: Values) -> Result:
    """Binds a custom_jvp whose functions run under autocast."""
    params, (fun, jvp) = bound(op)
    contract = Contract(trace, op, args)
    jaxpr = called(op)
    if is_in_float32(op):
        derivative = Function(trace, wide_rule(op), op.is_baked)
        jaxpr = None  # it takes any dtypes
    else:
        derivative = Function(trace, of_python(jvp), True, of_tangents=True)

    def autocast_jvp(*primals_and_tangents):
        forget(fun)  # or JAX compares the dtypes before they are cast
        inputs = primals_and_tangents
        if jaxpr is not None:
            traced = dtypes_of(jaxpr.in_avals) * 2
            inputs = cast_all(derivative.child(), inputs, traced)
        outs, child = derivative(*inputs)
        return cast_all(child, outs, contract.dtypes() * 2)

    functions = (
        _compat.wrap(contract.primal, fun.debug_info),
        _compat.wrap(autocast_jvp, jvp.debug_info),
    )
    outs = trace.bind(op.primitive, args, with_functions(params, *functions))
    note_activations(trace, outs, contract.activations)
    return outs


def bind_vjp(trace: AutocastTrace, op: Op, args: Values) -> Result:
    """Binds a custom_vjp whose functions run under autocast."""
    params, (fun, fwd, bwd) = bound(op)
    contract = Contract(trace, op, args)
    forward = Function(trace, of_python(fwd), True)
    backward = Function(trace, of_python(bwd), True)
    dtypes = [_compat.array_dtype(x) for x in args]
    natural: list[np.dtype | None] = []  # the dtypes of the results in the rules

    def autocast_fwd(*args_and_flags):
        forget(fun)  # or JAX compares the dtypes before they are cast
        outs, child = forward(*args_and_flags)
        results = contract.dtypes()
        n_residuals = len(outs) - len(results)
        natural[:] = map(_compat.array_dtype, outs[n_residuals:])
        return cast_all(child, outs, [None] * n_residuals + results)

    def autocast_bwd(*residuals_and_cotangents):
        n_residuals = len(residuals_and_cotangents) - len(natural)
        cotangent_dtypes = [None] * n_residuals + natural
        inputs = cast_all(backward.child(), residuals_and_cotangents, cotangent_dtypes)
        outs, child = backward(*inputs)
        cotangents, packed = _compat.split_bwd(outs)
        return packed(cast_all(child, cotangents, dtypes))

    functions = (
        _compat.wrap(contract.primal, fun.debug_info),
        _compat.wrap(autocast_fwd, fwd.debug_info),
        _compat.wrap(autocast_bwd, bwd.debug_info),
    )
    outs = trace.bind(op.primitive, args, with_functions(params, *functions))
    if trace.tells_weights:
        contract.dtypes()  # the rules have run, and perhaps not the primal code
    note_activations(trace, outs, contract.activations)
    return outs


# The rules.


@register("custom_jvp_call")
def custom_jvp(trace: AutocastTrace, op: Op) -> Result:
    args, decision = op.args, op.decision
    if decision is not None and decision.row is Kind.ONE_OP and not op.is_baked:
        if decision.cast is None and (dtype := halves(args)) is not None:
            wide = [trace.cast(x, FLOAT32_DTYPE) for x in args]
            decision = decision._replace(cast=FLOAT32_DTYPE)
            op = op._replace(args=wide, decision=decision, within=decision)
            outs: Any = custom_jvp(trace, op)
            return [trace.cast(x, dtype) for x in outs]
    if decision is not None and called(op) is None:
        if decision.cast is not None and not op.is_baked:
            args = [trace.cast(x, decision.cast) for x in args]
        with trace.noted(decision):
            return trace.bind(op.primitive, args, op.params)
    return bind_jvp(trace, op, args)


@register("custom_vjp_call")
def custom_vjp(trace: AutocastTrace, op: Op) -> Result:
    jaxpr = called(op)
    args = trace.as_traced(op.args, None if jaxpr is None else jaxpr.in_avals)
    return bind_vjp(trace, op, args)


@register("shard_map")
def shard_map(trace: AutocastTrace, op: Op) -> Result:
    """Runs the function under autocast; from a jaxpr, in dtypes that JAX has fixed."""
    args = trace.as_traced(op.args, op.avals)
    make_child = trace.spawner(op.is_baked or called(op) is not None)
    params, (fun,) = bound(op)
    known = activations_in(trace, args)

    def autocast_fun(*args):
        with make_child().current() as child:
            child.follow(args, known)
            outs = fun(*args)
            made[:] = are_activations(child, outs)
            return outs

    made: list[bool] = []
    outs = trace.bind(op.primitive, args, with_functions(params, autocast_fun))
    note_activations(trace, outs, made)
    return outs
