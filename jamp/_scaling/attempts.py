"""A step's attempts on one batch: run, check for an overflow, hold, run again.

After an overflow, the next attempt starts from the state before the last one, with the
loss scale that the last one returned. So a step changes its state once per batch,
whatever it does to that state.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes, lax

from .._checks import imported, is_traced
from .._tree import Flag, PyTree, T
from .calls import Call, scales_of, with_scales
from .mesh import on_every_replica, varying_axes
from .program import Program
from .rule import LossScaleState
from .skip import check_same, select
from .state import DynamicLossScaleState

DELETED = """{caller}: step donated the buffers of its state (donate_argnums), so it \
cannot run again after an overflow. Jit and donate around {caller}: {cure}."""


def call_of(
    caller: str,
    step: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
) -> Call:
    """The call of a step in the style that its arguments show.

    NNX objects are arguments of the NNX style, unless the first argument holds a loss
    scale beside them, as a pair of a module and an optax state does.
    """
    objects = imported("flax.nnx", "Pytree")
    kinds = (DynamicLossScaleState, *objects)
    nodes = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    has_objects = any(isinstance(node, objects) for node in nodes((args, kwargs)))
    is_scale = lambda node: isinstance(node, DynamicLossScaleState)
    if not has_objects or any(map(is_scale, nodes(args[:1]))):
        return Call(caller, step, args, kwargs)
    from .nnx_call import NNXCall  # imports Flax

    return NNXCall(caller, step, args, kwargs)


def attempt(
    call: Call, state: T, inputs: PyTree
) -> tuple[T, PyTree, list[LossScaleState]]:
    """One run of a step: the state after it, its other results, the loss scales."""
    # New containers: changes that a step makes in place do not reach the next one.
    new, aux = call.run(*jax.tree.map(lambda leaf: leaf, (state, inputs)))
    check_same(new, state, f"{call.caller}: step")
    return new, aux, scales_of(new)


def run(call: Call, at_most: int) -> tuple[PyTree, PyTree]:
    """The state after the last attempt, and what else the attempt returned.

    Args:
      at_most: attempts, >= 1.
    """
    state = call.state
    if any(map(is_traced, jax.tree.leaves((state, call.inputs)))):
        return run_in_one_program(call, state, at_most)
    for count in range(1, at_most + 1):
        new, aux, scales = attempt(call, state, call.inputs)
        if any(map(_is_deleted, jax.tree.leaves(state))):
            raise ValueError(DELETED.format(caller=call.caller, cure=call.donating))
        again = is_worth_another(state, scales)
        if is_traced(again):  # the step reads a traced value that it closes over
            return run_in_one_program(call, state, at_most)
        if count == at_most or not again:
            break
        state = with_scales(state, next_scales(state, scales))
    return new, aux


def is_worth_another(state: PyTree, scales: list[LossScaleState]) -> Flag:
    """Whether an attempt overflowed, and left a scale that may not: bool [].

    A scale that does not move (at its floor, or static) would overflow again. A scale
    that the step did not use (inside `MultiSteps`) does not move either.
    """
    flags: list[jax.Array] = []
    for old, new in zip(scales_of(state), scales, strict=True):
        moved = (new.loss_scale != old.loss_scale) | (
            new.hysteresis_tracker != old.hysteresis_tracker
        )
        flags.append(new.found_inf & moved)
    return on_every_replica(jnp.any(jnp.stack(flags)))


def next_scales(state: PyTree, scales: list[LossScaleState]) -> list[LossScaleState]:
    """The loss scales for another attempt.

    A scale that overflowed is as the attempt left it, except for the record of skipped
    steps: the batch is not skipped yet.
    """

    def following(old: LossScaleState, new: LossScaleState) -> LossScaleState:
        retried = old._replace(
            loss_scale=new.loss_scale,
            growth_tracker=new.growth_tracker,
            hysteresis_tracker=new.hysteresis_tracker,
            retried_steps=old.retried_steps + 1,
        )
        choose = lambda new, old: jnp.where(found_inf, new, old)
        found_inf = new.found_inf
        return LossScaleState(*map(choose, retried, old))

    return list(map(following, scales_of(state), scales))


def run_in_one_program(call: Call, state: T, at_most: int) -> tuple[T, PyTree]:
    """`run` inside a trace: one `while`, the step traced once."""

    zero = _unknown_zero(scales_of(state)[0])
    once = Program(lambda state: attempt(call, state, call.inputs), state)
    aux = jax.tree.map(functools.partial(_placeholder, zero), once.shapes[1])

    def body(
        carry: tuple[jax.Array, jax.Array, T, PyTree],
    ) -> tuple[jax.Array, jax.Array, T, PyTree]:
        count, _, state, _ = carry
        new, aux, scales = once(state)
        again = is_worth_another(state, scales) & (count + 1 < at_most)
        held = with_scales(state, next_scales(state, scales))
        return count + 1, again, select(again, held, new), aux

    start = zero, zero == 0, state, aux
    _, _, state, aux = lax.while_loop(lambda carry: carry[1], body, start)
    return state, aux


def _unknown_zero(state: LossScaleState) -> jax.Array:
    """A zero that XLA does not take for a constant: int32 [].

    XLA copies each constant that a loop starts from, which is a launch on a GPU. What
    comes from this zero, one kernel writes.
    """
    scale = state.loss_scale
    if varying_axes(scale):  # the loop's count and flag do not vary
        return jnp.int32(0)
    return jnp.int32((scale == scale) & jnp.isnan(scale))


def _placeholder(zero: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of zeros that a loop starts from and does not read."""
    is_key = jnp.issubdtype(shape.dtype, dtypes.extended)
    if shape.shape or is_key or varying_axes(shape):
        return jnp.zeros_like(shape)
    return zero.astype(shape.dtype)


def _is_deleted(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()
