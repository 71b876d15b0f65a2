"""What the state says: the loss scale, the scalars worth logging, flags for alarms.

Each function finds the one loss scale in any nest of optax, Flax or user states. An
alarm is a flag on the device, which `jamp.debug.check` turns into an exception.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_range, imported, is_traced, number
from .._tree import PyTree
from .rule import LossScaleState
from .state import describe, find_states, scalars_of

WINDOW = 32  # steps that `recent_skips` remembers
# In the order of `_alarms`.
FLAGS = ("scale_at_floor", "scale_below_one", "many_skips")

TWO_SCALES = """opt_state holds {} loss scales, at {}; gradients that are scaled by \
one must not be divided by the other. In one optimizer there must be one, around the \
whole: jamp.dynamic_loss_scale(optax.multi_transform(...)). If these are several \
optimizers, pass only the state of the one that these gradients are for."""


def loss_scale(opt_state: PyTree) -> jax.Array:
    """The current loss scale, found anywhere in a nested optax state: float32 [].

    Args:
      opt_state: any pytree that holds one loss scale.

    Raises:
      ValueError: `opt_state` holds no loss scale, or more than one.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = optax.chain(jamp.dynamic_loss_scale(optax.adam(1e-3)), optax.scale(0.5))
      >>> print(jamp.loss_scale(tx.init(jnp.ones(3))))
      65536.0

    PyTorch: `scaler.get_scale()`.
    """
    return _only_scalars(opt_state).loss_scale


def metrics(
    opt_state: PyTree,
    *,
    floor_steps: int = 32,
    window: int = 32,
    skipped_share: float = 0.5,
) -> dict[str, jax.Array]:
    """The scalars worth logging, and alarms, found anywhere in a nested optax state.

    All stay on the device, inside jit and outside. Fetch them when you want to read
    them, or let `jamp.debug.History` do it. `jamp.debug.check` turns an alarm into an
    exception that lists likely causes.

    Args:
      opt_state: any pytree that holds one loss scale, after `tx.update`, or a
        `GradScaler`, after `update`.
      floor_steps: steps at the floor that raise `scale_at_floor`, >= 1.
      window: how many of the last steps `many_skips` looks at, 1 to 32.
      skipped_share: the share of these steps that raises `many_skips`, in [0, 1).

    Returns:
      A dict of scalars:

      - `loss_scale`: float32, for the next step.
      - `growth_tracker`: int32, finite steps since the scale moved.
      - `found_inf`: bool, whether the last step was skipped.
      - `skipped_steps`: int32, steps skipped so far.
      - `retried_steps`: int32, attempts that `jamp.retry` ran again so far.
      - `scale_at_floor`: bool, the scale has been at its floor (`min_scale`, or
        2**-126) for `floor_steps` steps since a step overflowed there.
      - `scale_below_one`: bool, the gradients overflow even without scaling.
      - `many_skips`: bool, as many steps were skipped as `skipped_share` of the last
        `window` steps, and at least one. So after 16 of the first 16, it is set.

    Raises:
      ValueError: `opt_state` holds no loss scale, or more than one, or a limit is out
        of its range.
      TypeError: a limit is not a number.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.adam(1e-3))
      >>> for name, value in jamp.metrics(tx.init(jnp.ones(3))).items():
      ...     print(name, value)
      loss_scale 65536.0
      growth_tracker 0
      found_inf False
      skipped_steps 0
      retried_steps 0
      scale_at_floor False
      scale_below_one False
      many_skips False

    PyTorch: `get_scale()` and `state_dict()`; torch does not report that a step was
    skipped (pytorch#67590).
    """
    state = _only_scalars(opt_state)
    limits = check_limits(floor_steps, window, skipped_share)
    alarms = _alarms(state.loss_scale, state.recent_skips, state.floor_steps, *limits)
    return {
        "loss_scale": state.loss_scale,
        "growth_tracker": state.growth_tracker,
        "found_inf": state.found_inf,
        "skipped_steps": state.skipped_steps,
        "retried_steps": state.retried_steps,
        **dict(zip(FLAGS, alarms, strict=True)),
    }


def is_scaler(opt_state: PyTree) -> bool:
    return isinstance(opt_state, imported(f"{__package__}.grad_scaler", "GradScaler"))


def _only_scalars(opt_state: PyTree) -> LossScaleState:
    if is_scaler(opt_state):
        scalars = scalars_of(opt_state)
        if opt_state.is_enabled():
            return scalars
        return scalars._replace(loss_scale=jnp.ones_like(scalars.loss_scale))
    found = find_states(opt_state)
    if len(found) == 1:
        return scalars_of(next(iter(found.values())))
    if found:
        raise ValueError(TWO_SCALES.format(len(found), ", ".join(found)))
    raise ValueError(
        f"opt_state holds no loss scale; found {describe(opt_state)}. Wrap the "
        "optimizer in jamp.dynamic_loss_scale and pass the state from its init, or "
        "pass the GradScaler."
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5))  # one call for a loop on the host
def _alarms(
    loss_scale: jax.Array,
    recent_skips: jax.Array,
    steps_at_floor: jax.Array,
    floor_steps: int,
    window: int,
    few: int,
) -> tuple[jax.Array, ...]:
    newest = recent_skips & np.uint32(2**window - 1)
    many_skips = jax.lax.population_count(newest) >= np.uint32(few)
    return steps_at_floor >= floor_steps, loss_scale < 1, many_skips


def fewest(window: int, skipped_share: float) -> int:
    """How many of the last steps must be skipped for an alarm.

    >>> fewest(32, 0.5), fewest(5, 0.5), fewest(32, 0.0)
    (16, 3, 1)
    """
    return max(1, math.ceil(skipped_share * window))


def check_limits(
    floor_steps: int, window: int, skipped_share: float
) -> tuple[int, int, int]:
    """`floor_steps`, `window`, and `fewest` of the last two, or an error for one."""
    floor_steps = _static("floor_steps", floor_steps, operator.index)
    check_range("floor_steps", floor_steps, ">= 1", 1, 2**31 - 1)
    window = _static("window", window, operator.index)
    check_range("window", window, f"in [1, {WINDOW}]", 1, WINDOW)
    skipped_share = _static("skipped_share", skipped_share, float)
    check_range("skipped_share", skipped_share, "in [0, 1)", 0.0, 1 - 2**-53)
    return floor_steps, window, fewest(window, skipped_share)


def _static(name: str, value: object, convert: Callable[[Any], float]) -> Any:
    if is_traced(value):
        raise TypeError(f"{name} must be a Python number; got a traced value.")
    return number(name, value, convert)
