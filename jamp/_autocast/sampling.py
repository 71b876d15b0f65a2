"""Random draws in float32 where JAX would make them in half precision.

`jax.random.categorical` draws its noise in the dtype of the logits, and `bernoulli` in
that of the probability. In half precision the noise has so few values that draws tie,
and ties go to the lowest index: of 1000 equal logits in bfloat16, the first 100 win
more than half of the time. torch draws in float32. So inside these functions (`DRAW` in
`ops.py`) a region makes the draw itself, from the same key and of the same shape:
the results are those of float32 inputs, bit for bit.

JAX jits each kind of noise as a separate function, and a region sees the call: the
name of the function, its arrays, and the jaxpr with shape and dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, set_current_trace

from .._jaxprs import equations, param
from .._tree import HALVES
from .call_stack import is_library
from .decision import FLOAT32_DTYPE, Decision, Kind, Op, Result, Value
from .trace import AutocastTrace, register

Shape = tuple[int, ...]
HALF_NOISE = "half_noise"
UNKNOWN = """autocast: {function} would draw in half precision here, which is biased, \
and this version of JAX draws in a way that autocast does not know. Cast its input: \
`logits.astype(jnp.float32)`."""


def redrawn(
    trace: AutocastTrace, source: str, op: Op, jaxpr: ClosedJaxpr
) -> list[Value] | None:
    """The results of one of JAX's random functions, drawn in float32.

    None if it is another function, or does not draw in half precision.
    """
    name, decision = source.partition(" at ")[0], op.decision
    if decision is None or decision.row is not Kind.DRAW or not is_library(source):
        return None
    avals = [*jaxpr.in_avals, *jaxpr.out_avals]
    if name not in DRAWN or not any(_dtype(aval) in HALVES for aval in avals):
        return None
    if len(op.args) != DRAWN[name].__code__.co_argcount:
        return None  # JAX evaluates a part of it; `random_bits` sees the bits, if any
    (key, *rest), shape = op.args, jaxpr.out_avals[0].shape
    twice = _draws_twice(jaxpr, shape)
    if name == "_bernoulli" and not twice:
        return None  # a comparison with a `_uniform`, which is redrawn when it arrives
    n_batched = np.ndim(key)  # under vmap, each example has a key
    draw = functools.partial(DRAWN[name], shape=shape[n_batched:], twice=twice)
    is_known = shape[:n_batched] == np.shape(key) and not (n_batched and rest and twice)
    if not is_known or (name == "_uniform" and any(map(np.ndim, rest))):
        raise NotImplementedError(unknown(decision))
    for _ in range(n_batched):
        draw = jax.vmap(draw, in_axes=(0, *[None] * len(rest)))
    wide = [trace.cast(x, FLOAT32_DTYPE) for x in rest]
    with trace.noted(decision), set_current_trace(trace.parent):
        return [draw(key, *wide)]


def half_noise(
    trace: AutocastTrace, source: str, op: Op, jaxpr: ClosedJaxpr
) -> Decision | None:
    """How `debug.explain` names a call that draws half precision; None: it does not.

    A function that is asked for a dtype gives it: `normal(key, h.shape, h.dtype)` has a
    thousand values in float16, and none beyond 3.5.
    """
    decision = op.decision
    if decision is None or not trace.settings.observed or not is_library(source):
        return None
    is_drawn = decision.why.name.startswith("jax.random.") and decision.row is Kind.KEEP
    if not is_drawn or not any(_dtype(aval) in HALVES for aval in jaxpr.out_avals):
        return None
    return decision._replace(why=decision.why._replace(kind=HALF_NOISE))


@register("random_bits")
def random_bits(trace: AutocastTrace, op: Op) -> Result:
    """Raises NotImplementedError for half-precision bits in a function that draws."""
    decision = op.decision
    if decision is not None and decision.row is Kind.DRAW:
        if param(op, "bit_width") < 32:
            raise NotImplementedError(unknown(decision))
    return trace.left_alone(op)


def unknown(decision: Decision) -> str:
    return UNKNOWN.format(function=decision.why.name)


def _uniform(
    key: Value, low: Value, high: Value, *, shape: Shape, twice: bool
) -> jax.Array:
    del twice
    return random.uniform(key, shape, jnp.float32, low, high)


def _normal(key: Value, *, shape: Shape, twice: bool) -> jax.Array:
    del twice
    return random.normal(key, shape, jnp.float32)


def _gumbel(key: Value, *, shape: Shape, twice: bool) -> jax.Array:
    return random.gumbel(key, shape, jnp.float32, "high" if twice else "low")


def _bernoulli(key: Value, p: Value, *, shape: Shape, twice: bool) -> jax.Array:
    return random.bernoulli(key, p, shape, "high" if twice else "low")


DRAWN = {
    "_uniform": _uniform,
    "_normal": _normal,
    "_gumbel": _gumbel,
    "_bernoulli": _bernoulli,
}


def _draws_twice(jaxpr: ClosedJaxpr, shape: Shape) -> bool:
    """Whether two numbers are drawn for each element, for `mode="high"`."""
    drawn: Any = (v.aval for eqn in equations(jaxpr) for v in eqn.outvars)
    return any(
        _dtype(aval) in HALVES and math.prod(aval.shape) == 2 * math.prod(shape)
        for aval in drawn
    )


def _dtype(aval: AbstractValue) -> np.dtype | None:
    return getattr(aval, "dtype", None)
