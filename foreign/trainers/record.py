"""What a run of another project's trainer leaves behind."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp

from ..models.training import by_path

STEPS = 20


class RecordedState(NamedTuple):
    start: Any  # the parameters that `init` was given
    first: Any  # the gradients of the first update, as `start`
    applied: jax.Array  # int32 scalar: how many updates were made
    inner_state: Any


def recorded(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, which keeps its first gradients and counts its updates.

    It goes inside of `jamp.dynamic_loss_scale`. There the gradients are unscaled, and a
    skipped step does not arrive.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        start = jax.tree.map(jnp.copy, params)
        first = jax.tree.map(jnp.zeros_like, params)
        return RecordedState(start, first, jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        def keep(old, new):
            return jnp.where(state.applied == 0, new, old).astype(old.dtype)

        first = jax.tree.map(keep, state.first, updates)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, RecordedState(
            state.start, first, state.applied + 1, inner_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class Outcome(NamedTuple):
    """What a trainer's own loop gave.

    Attributes:
      losses: the loss that it reports in each step.
      params: the last parameters.
      opt_state: the last optimizer state, with a `RecordedState` in it.
      products: the work in matrix products of the compiled step, by dtype.
    """

    losses: list[float]
    params: Any
    opt_state: Any
    products: Mapping[str, float]


class Record(NamedTuple):
    """An outcome as arrays of NumPy, to compare.

    Attributes:
      losses: the loss of each step.
      gradients: those of the first step that was not skipped, by path.
      distance: of the last parameters from the first, relative to their norm.
      held: whether the last parameters have the bits of the first.
      applied: how many updates the project's optimizer made.
      skipped: how many steps jamp counted as skipped.
      products: the work in matrix products by dtype.
      lines: how many lines the conversion added and removed.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    distance: float
    held: bool
    applied: int
    skipped: int
    products: Mapping[str, float]
    lines: tuple[int, int]


def record(outcome: Outcome, lines: tuple[int, int], scaled: bool) -> Record:
    found = [
        leaf
        for leaf in jax.tree.leaves(outcome.opt_state, is_leaf=is_recorded)
        if is_recorded(leaf)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} optimizers were recorded, and not one")
    (state,) = found
    start, last = by_path(state.start), by_path(outcome.params)
    if [a.shape for a in start.values()] != [b.shape for b in last.values()]:
        raise ValueError("the optimizer was initialized with other parameters")
    pairs = list(zip(start.values(), last.values(), strict=True))
    moved = sum(float(np.sum((b - a).astype(np.float64) ** 2)) for a, b in pairs)
    norm = sum(float(np.sum(a.astype(np.float64) ** 2)) for a, _ in pairs)
    return Record(
        [float(loss) for loss in outcome.losses],
        by_path(state.first),
        (moved / norm) ** 0.5,
        all(np.array_equal(a, b) for a, b in pairs),
        int(state.applied),
        int(jamp.metrics(outcome.opt_state)["skipped_steps"]) if scaled else 0,
        dict(outcome.products),
        lines,
    )


def is_recorded(leaf: Any) -> bool:
    return isinstance(leaf, RecordedState)
