"""A step's attempts on one batch: run, check for an overflow, hold, run again.

After an overflow, the next attempt starts from the state before the last one, with the
loss scale that the last one returned. So a step changes its state once per batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import dtypes, lax
from jax.extend.core import jaxpr_as_fun

from .._checks import is_traced, shown
from .._tree import Flag, PyTree, T
from .held import held_on_skip
from .mesh import on_every_replica, varying_axes
from .rule import LossScaleState
from .skip import check_same, choose

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # state, inputs: state, aux
Attempt = tuple[PyTree, PyTree, list[LossScaleState]]

DELETED = """{caller}: step donated the buffers of its state (donate_argnums), so it \
cannot run again after an overflow. Jit and donate around {caller}: {cure}."""


class Scales(Protocol):
    """How the loss scales in a state are read and written."""

    def get(self, state: PyTree) -> list[LossScaleState]: ...
    def put(self, state: T, scales: Sequence[LossScaleState]) -> T: ...


class Attempts:
    """A step, and the loss scales in its state.

    Args:
      caller: the function that a user called, for messages.
      step: takes a state and a pytree of inputs, and returns the next state and what
        else the user's step returns.
      scales: access to the loss scales of a state.
      at_most: attempts, >= 1.
      donating: how to write the wrapped step if it is to donate its state.
    """

    def __init__(
        self,
        caller: str,
        step: Step,
        scales: Scales,
        at_most: int = 1,
        donating: str = "jax.jit(jamp.retry(step), donate_argnums=0)",
    ):
        self.caller, self.step, self.scales = caller, step, scales
        self.at_most, self.donating = at_most, donating

    def run(self, state: T, inputs: PyTree) -> tuple[T, PyTree]:
        """The state after the last attempt, and what else the attempt returned.

        Args:
          state: before the step.
          inputs: of the step.
        """
        if any(map(is_traced, jax.tree.leaves((state, inputs)))):
            return self.in_one_program(state, inputs)
        count = 0
        while True:
            count += 1
            new, aux, scales = self.attempt(state, inputs)
            if any(_is_deleted(leaf) for leaf in jax.tree.leaves(state)):
                raise ValueError(DELETED.format(caller=self.caller, cure=self.donating))
            again = self.is_worth_another(state, scales)
            if is_traced(again):  # the step reads a traced value that it closes over
                return self.in_one_program(state, inputs)
            if count == self.at_most or not again:
                return new, aux
            state = self.scales.put(state, self.next_scales(state, scales))

    def attempt(self, state: PyTree, inputs: PyTree) -> Attempt:
        """One run of the step: the state after it, its other results, the scales."""
        # New containers: changes that a step makes in place do not reach the next one.
        own = jax.tree.map(lambda leaf: leaf, (state, inputs))
        result: Any = self.step(*own)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"{self.caller}: step must return (state, aux), with None for aux if "
                f"there is nothing else; got {shown(result)}."
            )
        new, aux = result
        check_same(new, state, f"{self.caller}: step")
        return new, aux, self.scales.get(new)

    def is_worth_another(self, state: PyTree, scales: list[LossScaleState]) -> Flag:
        """Whether an attempt overflowed, and left a scale that may not: bool [].

        A scale that does not move (at its floor, or static) would overflow again. A
        scale that the step did not use (inside `MultiSteps`) does not move either.
        """
        flags: list[jax.Array] = []
        for old, new in zip(self.scales.get(state), scales, strict=True):
            moved = (new.loss_scale != old.loss_scale) | (
                new.hysteresis_tracker != old.hysteresis_tracker
            )
            flags.append(new.found_inf & moved)
        return on_every_replica(jnp.any(jnp.stack(flags)))

    def next_scales(
        self, state: PyTree, scales: list[LossScaleState]
    ) -> list[LossScaleState]:
        """The loss scales for another attempt.

        A scale that overflowed is as the attempt left it, except for the record of
        skipped steps: the batch is not skipped yet.
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

        return list(map(following, self.scales.get(state), scales))

    def in_one_program(self, state: T, inputs: PyTree) -> tuple[T, PyTree]:
        """`run` inside a trace: one `while`, the step traced once."""
        state, attempt, held, shapes = self.traced(state, inputs)

        def body(
            carry: tuple[jax.Array, jax.Array, PyTree, PyTree],
        ) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
            count, _, state, _ = carry
            new, aux, scales = attempt(state)
            again = self.is_worth_another(state, scales) & (count + 1 < self.at_most)
            kept = [
                new_leaf if is_held else choose(again, old_leaf, new_leaf)
                for is_held, old_leaf, new_leaf in zip(
                    held, jax.tree.leaves(state), jax.tree.leaves(new), strict=True
                )
            ]
            following = self.next_scales(state, scales)
            chosen = jax.tree.map(
                functools.partial(jnp.where, again), following, scales
            )
            kept = jax.tree.unflatten(jax.tree.structure(state), kept)
            return count + 1, again, self.scales.put(kept, chosen), aux

        zero = _unknown_zero(self.scales.get(state)[0])
        aux = jax.tree.map(functools.partial(_placeholder, zero), shapes)
        start = zero, zero == 0, state, aux
        _, _, state, aux = lax.while_loop(lambda carry: carry[1], body, start)
        return state, aux

    def traced(
        self, state: T, inputs: PyTree
    ) -> tuple[T, Callable[[T], Attempt], list[bool], PyTree]:
        """The state as a loop carries it, a traced attempt, and two facts about it.

        These are, for each leaf of the state, whether the step holds it itself, and
        the shapes of what else the step returns.
        """
        # A new function: JAX would return the old trace of a function that it knows,
        # although the step may have changed.
        once = lambda state: self.attempt(state, inputs)
        trace = jax.make_jaxpr(once, return_shape=True)
        program, shapes = trace(state)
        tree = jax.tree.structure(shapes)

        def attempt(state: T) -> Attempt:
            return tree.unflatten(jaxpr_as_fun(program)(*jax.tree.leaves(state)))

        new, aux, scales = shapes
        count = len(jax.tree.leaves(new))
        held = [False] * count
        # With several scales, or replicas, one may have stepped and another not.
        if len(scales) == 1 and not varying_axes(scales[0].found_inf):
            place = count + len(jax.tree.leaves(aux))
            place += LossScaleState._fields.index("found_inf")
            held = held_on_skip(program, place, count)
        return state, attempt, held, aux


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
