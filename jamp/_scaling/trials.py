"""Runs of one training step, at other loss scales. It is traced and compiled once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import PROVES, is_traced
from .._targets import options_for_few_runs
from .._tree import PyTree, cloned, partition
from .arithmetic import power_of_two
from .calls import Call, attempt, scales_of, with_scales
from .mesh import typed_as
from .rule import LossScaleState
from .state import find_states
from .traced import Traced

LOWEST, HIGHEST = -126, 32  # exponents that are searched
INFINITE = 128  # the exponent of a scale of inf
FRESH = np.uint32(1)  # `recent_skips` before a step, which shifts it if it is asked

INSIDE = """{caller} reads what the step computes, and got arrays inside a trace. Call \
it outside of jit, with a whole step, which may be jitted or mapped: \
{caller}(jax.pmap(step, ...), state, *batch)."""

PARTED = """{caller}: at a loss scale of {scales}, some devices skip the step and \
others take it, and what they should share parts. Name the mapped axes, \
jamp.dynamic_loss_scale(..., axis_name="data") or jamp.GradScaler(axis_name="data"), \
or average the gradients before the step."""


class Outcome(NamedTuple):
    """What a run did with each scale of the state, in the shape of the scale."""

    too_high: list[jax.Array]  # bool: it overflowed, or lowered the scale (`max_scale`)
    skipped: list[jax.Array]  # int32: how many steps it skipped
    asked: list[jax.Array]  # int32: how many steps checked for one; -1 above 31


class Run(NamedTuple):
    state: PyTree
    aux: PyTree
    outcome: Outcome


Exponents = Sequence[Any]  # int32 arrays, one for each scale, in its shape


class Trials:
    """A step that can be run again and again. What it writes to a `jax.Ref` is undone.

    Attributes:
      once: the program of the step: of the loss scales, the state and the arrays among
        the other arguments.

    Raises:
      TypeError: inside a trace.
    """

    def __init__(self, call: Call, in_float32: bool = False):
        self.call, self.scales = call, scales_of(call.state)
        if any(map(is_traced, jax.tree.leaves((call.state, call.inputs)))):
            raise TypeError(INSIDE.format(caller=call.caller))
        # Other leaves, such as `train=True`, do not change.
        is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
        self.arrays, rebuilt = partition(call.inputs, is_array)

        def step_at(
            tried: list[LossScaleState], state: PyTree, arrays: list[jax.Array]
        ) -> tuple[PyTree, PyTree]:
            return attempt(call, with_scales(state, tried), rebuilt(arrays))

        with PROVES(in_float32):
            self.once = Traced(step_at, self.scales, call.state, self.arrays)
        refs = [x for x in self.once.closed.consts if isinstance(x, jax.Ref)]
        self._refs = [(ref, ref[...]) for ref in refs]

        def run(exponents: Exponents, state: PyTree, arrays: list[jax.Array]) -> Run:
            tried = [_at(*of) for of in zip(scales_of(state), exponents, strict=True)]
            new, aux = self.once(tried, state, arrays)
            rows = zip(*map(_outcome, tried, scales_of(new)), strict=True)
            outcome = Outcome(*map(list, rows))
            return Run(new, aux, outcome) if in_float32 else Run(None, None, outcome)

        self._run = jax.jit(run, compiler_options=options_for_few_runs())

    def __call__(self, exponents: Exponents, state: PyTree = None) -> Run:
        """A run at these powers of two: from a state, or from that of the call."""
        state = self.call.state if state is None else state
        run = self._run(exponents, *cloned((state, self.arrays)))
        jax.block_until_ready(run)
        for ref, value in self._refs:
            ref[...] = value
        if any(map(differs_by_device, jax.tree.leaves(run.outcome))):
            scales = ", ".join(f"2**{np.max(e)}" for e in exponents)
            raise ValueError(PARTED.format(caller=self.call.caller, scales=scales))
        return run

    @property
    def paths(self) -> list[str]:
        return [*find_states(self.call.state)]

    def highest(self) -> tuple[Exponents, list[Any]]:
        """The largest exponents at which the step is finite, and which are asked.

        Returns:
          For each scale, the exponent, or `LOWEST - 1` if there is none. And whether
          the step checked for an overflow, which it does not do if the scale is
          disabled, or if its optimizer does not step.
        """
        shapes = [jnp.shape(s.loss_scale) for s in self.scales]
        full = lambda value: [np.full(shape, value) for shape in shapes]
        finite, infinite = full(np.int32(LOWEST - 1)), full(np.int32(HIGHEST + 1))
        asked, is_open = full(False), lambda low, high: np.any(high - low > 1)
        while any(map(is_open, finite, infinite)):
            middle = [*map(_middle, finite, infinite)]
            outcome = jax.tree.map(np.asarray, self(middle).outcome)
            finite = [*map(np.where, outcome.too_high, finite, middle)]
            infinite = [*map(np.where, outcome.too_high, middle, infinite)]
            asked = [steps != 0 for steps in outcome.asked]
        return finite, asked


def _middle(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """One between two; below 1, which few steps need, only if no other is left."""
    is_above = (low < LOWEST) & (high > 0)
    middle = np.maximum((low + high) // 2, LOWEST)
    return np.where(is_above, (high - 1) // 2, middle)


def _at(scale: LossScaleState, exponent: jax.Array) -> LossScaleState:
    """A scale with another value, and no record of steps."""
    fresh = jnp.full(jnp.shape(scale.recent_skips), FRESH)
    return scale._replace(
        loss_scale=typed_as(power_of_two(exponent), scale.loss_scale),
        recent_skips=typed_as(fresh, scale.recent_skips),
    )


def differs_by_device(array: jax.Array) -> bool:
    """Whether devices that should hold the same number hold several."""
    parts = array.addressable_shards if array.is_fully_replicated else ()
    return len({np.asarray(part.data).tobytes() for part in parts}) > 1


def _outcome(
    tried: LossScaleState, new: LossScaleState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    skipped = new.skipped_steps - tried.skipped_steps
    return (
        new.found_inf | (skipped > 0) | (new.loss_scale < tried.loss_scale),
        skipped,
        jnp.int32(31) - lax.clz(new.recent_skips).astype(jnp.int32),
    )
