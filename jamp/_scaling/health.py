"""What the steps so far say about a training run, kept beside its loss scale.

Four scalars that no step is decided by, and the alarms that are read from them. All
stay on the device: an alarm is a flag, not an exception.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_range, is_traced, number
from .arithmetic import LossScaleConfig, floor

WINDOW = 32  # steps that `recent_skips` remembers


class Health(NamedTuple):
    """What readers of a loss scale are told beside the scale itself."""

    found_inf: jax.Array  # bool []: whether the last step was skipped
    skipped_steps: jax.Array  # int32 []: steps skipped so far
    recent_skips: jax.Array  # uint32 []: the last 32 steps, the newest lowest; 1: skip
    floor_steps: jax.Array  # int32 []: steps at the floor since it overflowed there


def init() -> Health:
    """Before the first step."""
    return Health(
        found_inf=jnp.zeros([], jnp.bool_),
        skipped_steps=jnp.zeros([], jnp.int32),
        recent_skips=jnp.zeros([], jnp.uint32),
        floor_steps=jnp.zeros([], jnp.int32),
    )


def record(
    health: Health, found_inf: jax.Array, loss_scale: jax.Array, config: LossScaleConfig
) -> Health:
    """After one step, which left the scale where it is now.

    A scale that starts at its floor does no harm there: steps are counted from the
    first overflow on.
    """
    skipped, at_floor = jnp.asarray(found_inf), loss_scale <= floor(config)
    stuck = at_floor & (skipped | (health.floor_steps > 0))
    return Health(
        found_inf=skipped,
        skipped_steps=health.skipped_steps + skipped.astype(jnp.int32),
        recent_skips=(health.recent_skips << 1) | skipped.astype(jnp.uint32),
        floor_steps=jnp.where(stuck, health.floor_steps + 1, 0),
    )


def alarms(
    loss_scale: jax.Array,
    health: Health,
    floor_steps: int,
    window: int,
    skipped_share: float,
) -> dict[str, jax.Array]:
    """Flags that say that something is wrong with the run: each bool [].

    Raises:
      ValueError: a limit is out of its range.
      TypeError: a limit is no number.
    """
    limits = check_limits(floor_steps, window, skipped_share)
    floor_steps, window, skipped_share = limits
    most = int(skipped_share * window)
    flags = _alarms(loss_scale, health, floor_steps, window, most)
    names = ("scale_at_floor", "scale_below_one", "many_skips")
    return dict(zip(names, flags, strict=True))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))  # one call for a loop on the host
def _alarms(loss_scale, health, floor_steps, window, most):
    newest = health.recent_skips & np.uint32(2**window - 1)
    many_skips = jax.lax.population_count(newest) > np.uint32(most)
    return health.floor_steps >= floor_steps, loss_scale < 1, many_skips


def check_limits(
    floor_steps: Any, window: Any, skipped_share: Any
) -> tuple[int, int, float]:
    """The limits as Python numbers."""
    floor_steps = _static("floor_steps", floor_steps, operator.index)
    check_range("floor_steps", floor_steps, ">= 1", 1, 2**31 - 1)
    window = _static("window", window, operator.index)
    check_range("window", window, f"in [1, {WINDOW}]", 1, WINDOW)
    skipped_share = _static("skipped_share", skipped_share, float)
    check_range("skipped_share", skipped_share, "in [0, 1)", 0.0, 1 - 2**-53)
    return floor_steps, window, skipped_share


def _static(name: str, value: Any, convert: Any) -> Any:
    if is_traced(value):
        raise TypeError(f"{name} must be a Python number; got a traced value.")
    return number(name, value, convert)
