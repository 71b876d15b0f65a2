"""Functions of custom_jvp and custom_vjp under autocast, wherever JAX calls them.

Each function is wrapped so that it runs under an autocast trace, perhaps long after the
region has ended. The dtypes of the results are those of the primal code; the results of
the derivative rules are cast to them. The rules run baked: their products are in half
precision, and the values that Python sees have the dtypes that they would have without
autocast.

`custom_calls.py` has the functions that Python hands to JAX, `custom_equations.py`
those that arrive as equations of a jaxpr.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import DebugInfo, Primitive

from .. import _compat
from .._tree import HALVES
from .advice import advise
from .casting import CastingTrace, avals_of
from .decision import FLOAT32_DTYPE, Dtypes, Params, Result, Value, Values
from .sources import JAX, raised_in


class Function:
    """A Python function that JAX holds, run under autocast wherever JAX calls it."""

    def __init__(
        self,
        trace: CastingTrace,
        function: Any,
        baked: bool = False,
        of_tangents: bool = False,
    ):
        self.function = function
        self.child = trace.spawner(baked, of_tangents=of_tangents)

    def __call__(self, *args: Value) -> tuple[list[Value], CastingTrace]:
        """Returns the results, and the trace that they were computed on.

        A derivative may run after its region, which then gives its errors no note.
        """
        self.forget()
        child = self.child()
        try:
            with child.current():
                return list(self.function.call_wrapped(*args)), child
        except Exception as error:
            if child.settings.listed:  # a policy has a note of its own
                advise(error, child.settings.dtype)
            raise

    def forget(self) -> None:
        """Lets the function be called again: it notes the tree of its results."""
        for store in filter(None, self.function.stores):
            store.reset()


class Contract:
    """The dtypes of a custom function's results: those of its primal code."""

    def __init__(self, run: Function, args: Values, debug_info: DebugInfo):
        self.run, self.debug_info = run, debug_info
        self.avals = avals_of(args)
        self.known: list[np.dtype | None] | None = None

    def primal(self, *args: Value) -> list[Value]:
        outs, _ = self.run(*args)
        self.known = [_compat.array_dtype(x) for x in outs]
        return outs

    def dtypes(self) -> list[np.dtype | None]:
        if self.known is None:  # the primal code has not run, only its derivative
            _compat.trace_to_jaxpr(self.primal, self.avals, self.debug_info)
            self.run.forget()
        return self.known or []


def cast_all(child: CastingTrace, values: Values, dtypes: Dtypes) -> list[Value]:
    """Casts arrays, and leaves symbolic zeros."""
    return [
        child.cast(v, d) if d is not None and isinstance(v, jax.Array) else v
        for v, d in zip(values, dtypes, strict=True)
    ]


def run_rule(rule: Function, values: Values) -> tuple[list[Value], CastingTrace]:
    """Runs a JVP rule, on float32 if JAX refuses its dtypes in half precision.

    A rule that mixes dtypes may give a float32 result with a float16 tangent.
    """
    try:
        return rule(*values)
    except TypeError as error:
        if refuses_half(error, values):
            wide = [FLOAT32_DTYPE] * len(values)
            # An error of the second run says less than the first one.
            with contextlib.suppress(Exception):
                return rule(*cast_all(rule.child(), values, wide))
        raise


def refuses_half(error: TypeError, values: Values) -> bool:
    """Whether JAX itself raised an error in a rule that got half precision."""
    dtypes = [_compat.array_dtype(x) for x in values if isinstance(x, jax.Array)]
    return any(dtype in HALVES for dtype in dtypes) and raised_in(JAX, error)


def bind_jvp(
    trace: CastingTrace,
    primitive: Primitive,
    args: Values,
    params: Params,
    contract: Contract,
    derivative: Function,
    jvp: "_compat.lu.WrappedFun",
    traced: Dtypes | None = None,
) -> Result:
    """Binds a custom_jvp whose functions run under autocast.

    Args:
      jvp: the rule as JAX knows it.
      traced: the dtypes of primals and tangents that the rule was made for, or None if
        it takes any.
    """

    def autocast_jvp(*primals_and_tangents):
        contract.run.forget()  # or JAX compares the dtypes before they are cast
        inputs = primals_and_tangents
        if traced is not None:
            inputs = cast_all(derivative.child(), inputs, traced)
        outs, child = run_rule(derivative, inputs)
        return cast_all(child, outs, contract.dtypes() * 2)

    subfuns = (
        _compat.wrap(contract.primal, contract.debug_info),
        _compat.wrap(autocast_jvp, jvp.debug_info),
    )
    return trace.bind(primitive, args, params | {"subfuns": subfuns})


def bind_vjp(
    trace: CastingTrace,
    primitive: Primitive,
    args: Values,
    params: Params,
    run: Function,
    rules: "tuple[_compat.lu.WrappedFun, _compat.lu.WrappedFun, _compat.lu.WrappedFun]",
) -> Result:
    """Binds a custom_vjp whose functions run under autocast.

    Args:
      run: the primal code.
      rules: the primal code and the two rules, as JAX knows them.
    """
    fun, fwd, bwd = rules
    contract = Contract(run, args, fun.debug_info)
    forward, backward = Function(trace, fwd, True), Function(trace, bwd, True)
    dtypes = [_compat.array_dtype(x) for x in args]
    natural: list[np.dtype | None] = []  # the dtypes of the results in the rules

    def autocast_fwd(*args_and_flags):
        run.forget()  # or JAX compares the dtypes before they are cast
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

    subfuns = (
        _compat.wrap(contract.primal, fun.debug_info),
        _compat.wrap(autocast_fwd, fwd.debug_info),
        _compat.wrap(autocast_bwd, bwd.debug_info),
    )
    return trace.bind(primitive, args, params | {"subfuns": subfuns})


def bind_shard_map(
    trace: CastingTrace,
    primitive: Primitive,
    fun: Callable[..., Result],
    args: Values,
    params: Params,
) -> Result:
    """Binds a shard_map whose function runs under autocast."""
    foreign, differentiated = trace.scope()
    make_child = trace.spawner(differentiated, typed=trace.typed)

    def autocast_fun(*args):
        with make_child().current():
            return fun(*args)

    run = fun if foreign else autocast_fun
    return trace.bind(primitive, args, params | {"subfuns": (run,)})
