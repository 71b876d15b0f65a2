"""Runs of one training step from one state, at other loss scales.

Outside of a trace, the step is traced and compiled once for all of them. Inside of one
it is a part of the program, and runs in a loop.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import is_traced
from .._tree import PyTree, partition
from .arithmetic import power_of_two
from .calls import Call, attempt, scales_of, with_scales
from .labels import LABELLED
from .mesh import on_every_replica, typed_as
from .rule import LossScaleState
from .state import find_states
from .traced import Traced
from .watched import COUNTED, NOT_STEPPED

LOWEST, HIGHEST = -126, 32  # exponents that are searched


class Outcome(NamedTuple):
    """What a run did with each scale of the state, in the shape of the scale."""

    too_high: list[jax.Array]  # bool: it overflowed, or lowered the scale (`max_scale`)
    skipped: list[jax.Array]  # int32: how many steps it skipped
    asked: list[jax.Array]  # bool: whether it checked for an overflow


class Run(NamedTuple):
    state: PyTree
    aux: PyTree
    outcome: Outcome


Exponents = list[jax.Array]  # int32, one for each scale, in its shape
Between = tuple[Exponents, Exponents, list[jax.Array]]  # finite, infinite, asked


class Trials:
    """A step that can be run again and again.

    Attributes:
      once: the program of the step: of the loss scales, the state and the arrays among
        the other arguments. It has labels (`LABELLED`).
    """

    def __init__(self, call: Call):
        self.call, self.scales = call, scales_of(call.state)
        self.is_inside = any(map(is_traced, jax.tree.leaves((call.state, call.inputs))))
        # Other leaves, such as `train=True`, do not change.
        is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
        self.arrays, rebuilt = partition(call.inputs, is_array)

        def step_at(
            tried: list[LossScaleState], state: PyTree, arrays: list[jax.Array]
        ) -> tuple[PyTree, PyTree, list[LossScaleState]]:
            return attempt(call, with_scales(state, tried), rebuilt(arrays))

        with LABELLED(True):
            self.once = Traced(step_at, self.scales, call.state, self.arrays)

        def run(
            exponents: Exponents,
            code: np.uint32,
            state: PyTree,
            arrays: list[jax.Array],
        ) -> Run:
            tried = [
                _at(*of, code) for of in zip(scales_of(state), exponents, strict=True)
            ]
            new, aux, scales = self.once(tried, state, arrays)
            rows = zip(*map(_outcome, tried, scales), strict=True)
            return Run(new, aux, Outcome(*map(list, rows)))

        self._run = run if self.is_inside else jax.jit(run)

    def __call__(self, exponents: Exponents, counts: bool = False) -> Run:
        """A run at these powers of two, from the state that was given.

        Args:
          counts: whether who watches the step counts its gradients.
        """
        code = COUNTED if counts else NOT_STEPPED
        run = self._run(exponents, code, self.call.state, self.arrays)
        return run if self.is_inside else jax.block_until_ready(run)

    @property
    def paths(self) -> list[str]:
        return [*find_states(self.call.state)]

    def highest(self) -> tuple[Exponents, list[jax.Array]]:
        """The largest exponents at which the step is finite, and which are asked.

        Returns:
          For each scale, the exponent, or `LOWEST - 1` if there is none. And whether
          the step checked for an overflow, which it does not do if the scale is
          disabled, or if its optimizer does not step.
        """
        full = lambda value: [
            jnp.full(jnp.shape(s.loss_scale), value, jnp.int32) for s in self.scales
        ]
        none = [jnp.zeros(jnp.shape(s.loss_scale), bool) for s in self.scales]
        between = full(LOWEST - 1), full(HIGHEST + 1), none
        if self.is_inside:
            times = math.ceil(math.log2(HIGHEST - LOWEST + 2))
            halve = lambda _, between: self._halve(_middle, between)
            finite, _, asked = lax.fori_loop(0, times, halve, between)
            return finite, asked
        is_open = lambda low, high: np.any(np.asarray(high - low) > 1)
        while any(map(is_open, *between[:2])):
            between = self._halve(_likely, between)
        return between[0], between[2]

    def _halve(
        self, choose: Callable[[jax.Array, jax.Array], jax.Array], between: Between
    ) -> Between:
        finite, infinite, _ = between
        middle = [*map(choose, finite, infinite)]
        outcome = self(middle).outcome
        too_high = [*map(on_every_replica, outcome.too_high)]
        asked = [*map(on_every_replica, outcome.asked)]
        return (
            [*map(jnp.where, too_high, finite, middle)],
            [*map(jnp.where, too_high, middle, infinite)],
            asked,
        )


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.maximum((low + high) // 2, LOWEST)


def _likely(low: jax.Array, high: jax.Array) -> jax.Array:
    """The same, but scales below 1, which few steps need, only if no other is left."""
    is_above = (low < LOWEST) & (high > 0)
    return jnp.where(is_above, (high - 1) // 2, _middle(low, high))


def _at(scale: LossScaleState, exponent: jax.Array, code: np.uint32) -> LossScaleState:
    """A scale with another value, and no record of steps."""
    codes = jnp.full(jnp.shape(scale.recent_skips), code, jnp.uint32)
    return scale._replace(
        loss_scale=typed_as(power_of_two(exponent), scale.loss_scale),
        recent_skips=typed_as(codes, scale.recent_skips),
    )


def _outcome(
    tried: LossScaleState, new: LossScaleState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    skipped = new.skipped_steps - tried.skipped_steps
    return (
        new.found_inf | (skipped > 0) | (new.loss_scale < tried.loss_scale),
        skipped,
        new.recent_skips != tried.recent_skips,
    )
