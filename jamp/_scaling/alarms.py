"""The alarms: what the steps so far say about a training run.

They stay on the device: an alarm is a flag, not an exception.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._checks import check_range, is_traced, number
from .rule import LossScaleState

WINDOW = 32  # steps that `recent_skips` remembers


def alarms(
    state: LossScaleState, floor_steps: int, window: int, skipped_share: float
) -> dict[str, jax.Array]:
    """Flags that say that something is wrong with the run: each bool [].

    Raises:
      ValueError: a limit is out of its range.
      TypeError: a limit is not a number.
    """
    limits = check_limits(floor_steps, window, skipped_share)
    floor_steps, window, skipped_share = limits
    most = int(skipped_share * window)
    read = state.loss_scale, state.recent_skips, state.floor_steps
    flags = _alarms(*read, floor_steps, window, most)
    names = ("scale_at_floor", "scale_below_one", "many_skips")
    return dict(zip(names, flags, strict=True))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))  # one call for a loop on the host
def _alarms(
    loss_scale: jax.Array,
    recent_skips: jax.Array,
    steps_at_floor: jax.Array,
    floor_steps: int,
    window: int,
    most: int,
) -> tuple[jax.Array, ...]:
    newest = recent_skips & np.uint32(2**window - 1)
    many_skips = jax.lax.population_count(newest) > np.uint32(most)
    return steps_at_floor >= floor_steps, loss_scale < 1, many_skips


def check_limits(
    floor_steps: int, window: int, skipped_share: float
) -> tuple[int, int, float]:
    """The limits as Python numbers."""
    floor_steps = _static("floor_steps", floor_steps, operator.index)
    check_range("floor_steps", floor_steps, ">= 1", 1, 2**31 - 1)
    window = _static("window", window, operator.index)
    check_range("window", window, f"in [1, {WINDOW}]", 1, WINDOW)
    skipped_share = _static("skipped_share", skipped_share, float)
    check_range("skipped_share", skipped_share, "in [0, 1)", 0.0, 1 - 2**-53)
    return floor_steps, window, skipped_share


def _static(name: str, value: object, convert: Callable[[Any], float]) -> Any:
    if is_traced(value):
        raise TypeError(f"{name} must be a Python number; got a traced value.")
    return number(name, value, convert)
