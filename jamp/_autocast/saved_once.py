"""Activations of which the backward pass keeps the input alone, as torch's does.

JAX differentiates `jax.nn.gelu` op by op, and for each it keeps a value: on a GPU, XLA
stores several of them. Here the last op of such a function is run as the function of
what the first one was given, and the derivative is computed anew from that. A product
with a gate, as in GeGLU, becomes a part of it: else both of its inputs would be kept.

The ops are those that JAX ran (`Made`), so that numbers are the same whatever the
formula is. Of other activations XLA keeps no more anyway (silu, squareplus,
log_sigmoid), or more bytes would move (softplus, elu, selu).
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .. import _compat
from .decision import Op, Params, Value, Values
from .numbers import is_float
from .trace import AutocastTrace

SAVED_ONCE = frozenset({"jax.nn.gelu", "jax.nn.mish"})
MADE = "made"


class Made(NamedTuple):
    """How a value was made in one of these functions."""

    primitive: Primitive
    params: Params
    args: Values
    is_result: bool  # of the whole function


class Literal(NamedTuple):
    """A number."""

    dtype: np.dtype
    content: bytes

    def value(self) -> np.ndarray:
        return np.frombuffer(self.content, self.dtype)[0]


class Step(NamedTuple):
    """One op. An input is a literal, or a place among the sources and earlier steps."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[Literal | int, ...]


def run_inside(
    trace: AutocastTrace, op: Op, args: Values, params: Params, out: Any
) -> Any:
    """The result of an op of such a function, which has run."""
    if op.is_baked or _compat.is_eager(trace.parent):
        return out
    if trace.settings.tells_weights:
        # In float8, XLA (in JAX 0.10) takes product and gelu for one kernel of cuBLAS's
        # that does not exist, and does not compile the program.
        return out
    is_result = op.primitive.multiple_results or is_last(op.name, args)
    made = Made(op.primitive, params, args, is_result)
    if is_result:
        again = run_again(trace, made)
        if again is None:
            return out
        out = [again] if op.primitive.multiple_results else again
    for x in jax.tree.leaves(out):
        trace.notes.remember(x, MADE, made)
    return out


def run_gated(trace: AutocastTrace, op: Op, args: Values, out: Any) -> Any:
    """A product, perhaps of the result of such a function and a gate."""
    inputs = [trace.notes.copy(x, MADE) for x in args]
    if not any(made is not None and made.is_result for made in inputs):
        return out
    if op.is_baked or np.shape(args[0]) != np.shape(args[1]):
        return out
    again = run_again(trace, Made(op.primitive, op.params, args, True), is_gated=True)
    return out if again is None else again


def is_last(name: str, args: Values) -> bool:
    """Whether an op is the function's last: its one product of two arrays."""
    return name == "mul" and all(isinstance(x, jax.Array) for x in args)


def run_again(
    trace: AutocastTrace, made: Made, is_gated: bool = False
) -> jax.Array | None:
    """What was made, as a function of its sources; None if they are more than a few."""
    steps, sources = steps_of(trace, made, is_gated)
    if len(sources) > 1 + is_gated or not all(map(is_float, sources)):
        return None
    try:
        function = saved_once(tuple(steps))
    except TypeError:  # a parameter that cannot be hashed
        return None
    trace.effects.touched = True
    return trace.call(function, sources, {})


def steps_of(
    trace: AutocastTrace, made: Made, is_gated: bool
) -> tuple[list[Step], list[Value]]:
    """How a value is made of its sources, which are not of the function."""
    steps: list[Step] = []
    sources: list[Value] = []
    places: dict[int, int] = {}

    def add(made: Made, opens: bool) -> int:
        inputs = tuple(place(x, opens) for x in made.args)
        params = tuple(sorted(made.params.items()))
        steps.append(Step(made.primitive, params, inputs))
        return len(steps) - 1

    def place(x: Value, opens: bool) -> Literal | int:
        if np.ndim(x) == 0 and not isinstance(x, jax.Array):
            return Literal(np.asarray(x).dtype, np.asarray(x).tobytes())
        if id(x) not in places:
            inner = trace.notes.copy(x, MADE)
            if inner is None or (inner.is_result and not opens):
                sources.append(x)
                places[id(x)] = -len(sources)
            else:
                places[id(x)] = add(inner, opens=False)
        return places[id(x)]

    add(made, is_gated)
    return steps, sources


@functools.lru_cache(maxsize=256)
def saved_once(steps: tuple[Step, ...]) -> Any:
    """A function of sources, of which nothing but these is kept for its derivative."""

    def plain(*sources: jax.Array) -> jax.Array:
        values: list[Any] = []

        def input_at(place: Literal | int) -> Any:
            if isinstance(place, Literal):
                return place.value()
            return values[place] if place >= 0 else sources[-place - 1]

        for primitive, params, inputs in steps:
            out: Any = primitive.bind(*map(input_at, inputs), **dict(params))
            values.append(out[0] if primitive.multiple_results else out)
        return values[-1]

    function = jax.custom_jvp(plain)

    @function.defjvp
    def _(primals, tangents):
        def tangent(primals, tangents):
            return jax.jvp(plain, tuple(map(anew, primals)), tangents)[1]

        out = jax.checkpoint(tangent, prevent_cse=False)(primals, tangents)
        return function(*primals), out

    return function


def anew(x: jax.Array) -> jax.Array:
    """A value from which XLA computes what it has computed from it before.

    Only for GPUs. Elsewhere XLA merges both, and chooses what to store: on a TPU, to
    compute them again would cost more cycles.
    """
    again = lax.optimization_barrier
    same = lambda x: x
    return lax.platform_dependent(x, cuda=again, rocm=again, default=same)
