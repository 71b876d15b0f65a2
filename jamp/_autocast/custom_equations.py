"""Autocast through custom_jvp, custom_vjp and shard_map as equations of a jaxpr.

Their primal code is then a jaxpr, and may get other dtypes than it was traced with. The
rules may not: their inputs are cast back. But inside a function that runs in float32, a
JVP rule is evaluated as the jaxpr that it was traced to, because a cast to half
precision would round what the function has computed.
"""

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .. import _compat
from .casting import CastingTrace, dtypes_of
from .custom import Contract, Function, bind_jvp, bind_shard_map, bind_vjp
from .decision import FLOAT32_DTYPE, Action, Op, Result, Value
from .rewriting import evaluate


class JaxprFunction(Function):
    """A jaxpr as a `Function`; its inputs may have other dtypes by now."""

    def __init__(
        self,
        trace: CastingTrace,
        jaxpr: ClosedJaxpr | None,
        within: Action | None,
        baked: bool = False,
    ):
        super().__init__(trace, jaxpr, baked)
        self.within = within

    def forget(self) -> None:
        pass

    def __call__(self, *args: Value) -> tuple[list[Value], CastingTrace]:
        child = self.child()
        return evaluate(child, self.function, args, self.within, True), child


class WideRule(JaxprFunction):
    """The JVP rule of an equation, in the dtype that its whole function runs in.

    Args:
      make_jvp: returns the rule as a jaxpr.
    """

    def __init__(
        self,
        trace: CastingTrace,
        make_jvp: "_compat.lu.WrappedFun",
        n_consts: int,
        within: Action,
        baked: bool,
    ):
        super().__init__(trace, None, within, baked)
        self.make_jvp, self.n_consts = make_jvp, n_consts

    def __call__(self, *args: Value) -> tuple[list[Value], CastingTrace]:
        half, n_consts = len(args) // 2, self.n_consts
        flags = [False] * (half - n_consts)  # no tangent is known to be zero
        jaxpr, consts, zeros = self.make_jvp.call_wrapped(*flags)
        self.function = ClosedJaxpr(jaxpr, consts)
        outs, child = super().__call__(*args[n_consts:half], *args[half + n_consts :])
        primals, tangents = outs[: len(zeros)], iter(outs[len(zeros) :])
        pairs = zip(primals, zeros, strict=True)
        tangents = [jnp.zeros_like(x) if zero else next(tangents) for x, zero in pairs]
        return [*primals, *tangents], child


def action_of(trace: CastingTrace, op: Op) -> Action | None:
    source = _compat.source_name(op.params["call_jaxpr"].jaxpr.debug_info)
    return op.within or trace.action(op.primitive, source)


def custom_jvp_call(trace: CastingTrace, op: Op) -> Result:
    jaxpr, action = op.params["call_jaxpr"], action_of(trace, op)
    params = op.primitive.get_bind_params(op.params)
    fun, jvp = params.pop("subfuns")
    baked = trace.baked or trace.scope().differentiated
    run = JaxprFunction(trace, jaxpr, action, baked)
    contract = Contract(run, op.args, fun.debug_info)
    in_float32 = action is not None and action.dtype == FLOAT32_DTYPE
    if action is not None and in_float32 and not params["symbolic_zeros"]:
        make_jvp, n_consts = op.params["jvp_jaxpr_fun"], op.params["num_consts"]
        rule, traced = WideRule(trace, make_jvp, n_consts, action, baked), None
    else:
        rule = Function(trace, jvp, baked=True, of_tangents=True)
        traced = dtypes_of(jaxpr.in_avals) * 2
    return bind_jvp(trace, op.primitive, op.args, params, contract, rule, jvp, traced)


def custom_vjp_call(trace: CastingTrace, op: Op) -> Result:
    jaxpr, action = op.params["call_jaxpr"], action_of(trace, op)
    params = op.primitive.get_bind_params(op.params)
    rules = params.pop("subfuns")
    args = trace.as_traced(op.args, jaxpr.in_avals)
    baked = trace.baked or trace.scope().differentiated
    run = JaxprFunction(trace, jaxpr, action, baked)
    return bind_vjp(trace, op.primitive, args, params, run, rules)


def shard_map(trace: CastingTrace, op: Op) -> Result:
    args = trace.as_traced(op.args, op.avals)
    params = op.primitive.get_bind_params(op.params)
    (fun,) = params.pop("subfuns")
    return bind_shard_map(trace.as_typed(), op.primitive, fun, args, params)


CUSTOM = {
    "custom_jvp_call": custom_jvp_call,
    "custom_vjp_call": custom_vjp_call,
    "shard_map": shard_map,
}
