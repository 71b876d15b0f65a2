"""The rule of a loss scale: its state, and what one step does to it, as in torch.

`update` is `torch._amp_update_scale_`. torch holds the scale in float32 and its factors
in float64 (C++ `double`), so the product is formed in float64 and rounded once more to
float32. With a factor such as 1.1, a float32 product differs in most steps. JAX has no
float64 unless asked for it, so the few scalar operations that need float64 run under
`jax.enable_x64`, which works inside jit, scan, cond and vmap.

One difference is deliberate. XLA's CPU backend flushes float32 subnormals to zero,
and a scale of zero turns every later gradient into NaN. So the scale never falls
below 2**-126, float32's smallest normal number. torch's scale falls to zero.
"""

import dataclasses
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_range, is_traced, number

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # 2**-126
LARGEST_SCALE = float(np.finfo(np.float32).max)
SWITCHED_OFF = -1  # `hysteresis_tracker` of a disabled scale, which does not count


class LossScaleState(NamedTuple):
    """What steps carry: three scalars that decide, and five that report."""

    loss_scale: jax.Array  # what the loss is multiplied by
    growth_tracker: jax.Array  # finite steps in a row, 0 after a growth
    found_inf: jax.Array  # whether the last step was skipped
    skipped_steps: jax.Array  # steps skipped so far
    hysteresis_tracker: jax.Array  # overflows left before backing off
    recent_skips: jax.Array  # the last 32 steps, the newest lowest; 1 is a skip
    floor_steps: jax.Array  # steps at the floor since it overflowed there
    retried_steps: jax.Array  # attempts that `retry` ran again so far


DTYPES = dict(
    zip(
        LossScaleState._fields,
        ("float32", "int32", "bool", "int32", "int32", "uint32", "int32", "int32"),
        strict=True,
    )
)


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """The tunables of a dynamic loss scale, checked when made.

    The rule, for one step with `found_inf`:

        if found_inf:
            growth_tracker, hysteresis_tracker = 0, hysteresis_tracker - 1
            if hysteresis_tracker <= 0: scale = max(scale * backoff_factor, min_scale)
        else if growth_tracker + 1 == growth_interval:
            growth_tracker, hysteresis_tracker = 0, hysteresis
            if min(scale * growth_factor, max_scale) is finite: scale = that
        else: growth_tracker = growth_tracker + 1

    Hysteresis is Megatron-LM's rule: `hysteresis - 1` overflows since the last growth
    are forgiven (their steps are skipped, the scale stays). The next one backs off, and
    so does each one after it until the scale has grown again. With `hysteresis=1`,
    `min_scale=0` and `max_scale=inf`, this is torch's rule.

    As in torch, the tracker must equal the interval; "at least" is not enough. A
    tracker that is already past a newly shortened interval keeps counting until an
    overflow resets it.

    Args:
      init_scale: first scale, finite, at least 2**-126.
      growth_factor: above 1.
      backoff_factor: in (0, 1).
      growth_interval: finite steps in a row before the scale grows, >= 1.
      min_scale: floor for backing off, >= 0.
      max_scale: ceiling for growth, at least `min_scale`.
      hysteresis: overflows since the last growth at which the scale backs off, >= 1.

    Raises:
      ValueError: a value is out of its range. Arrays inside a trace are not checked.
      TypeError: a value is not a number.

    PyTorch: the constructor arguments of `torch.amp.GradScaler`; the last three have
    no counterpart there.
    """

    init_scale: float = 2.0**16  # it and the others may be traced scalars
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    max_scale: float = math.inf
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name, convert in (
            ("init_scale", float),
            ("growth_factor", float),
            ("backoff_factor", float),
            ("growth_interval", operator.index),
            ("min_scale", float),
            ("max_scale", float),
            ("hysteresis", operator.index),
        ):
            object.__setattr__(self, name, number(name, getattr(self, name), convert))
        huge = LARGEST_SCALE
        check_range("min_scale", self.min_scale, "in [0, 3.4e38]", 0.0, huge)
        if not is_traced(self.max_scale) and self.max_scale > huge:
            object.__setattr__(self, "max_scale", math.inf)
        check_scale("init_scale", self.init_scale)
        if not is_traced(self.min_scale):
            floor = f"at least min_scale ({self.min_scale})"
            check_range("max_scale", self.max_scale, floor, self.min_scale, math.inf)
            check_range("init_scale", self.init_scale, floor, self.min_scale, huge)
        if not is_traced(self.max_scale):
            ceiling = f"at most max_scale ({self.max_scale})"
            check_range("init_scale", self.init_scale, ceiling, 0.0, self.max_scale)
        above_one, below_one = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
        check_range(
            "growth_factor", self.growth_factor, "finite and > 1", above_one, huge
        )
        check_range(
            "backoff_factor", self.backoff_factor, "in (0, 1)", 5e-324, below_one
        )
        for name in ("growth_interval", "hysteresis"):
            check_range(name, getattr(self, name), ">= 1 and < 2**31", 1, 2**31 - 1)


def check_scale(name: str, value: object) -> float:
    """The value as a Python number; ValueError if float32 cannot hold it."""
    scale = number(name, value, float)
    allowed = "finite and > 0, in float32's normal range [2**-126, 3.4e38]"
    check_range(name, scale, allowed, SMALLEST_SCALE, LARGEST_SCALE)
    return scale


def init(config: LossScaleConfig) -> LossScaleState:
    """The state before the first step."""
    init_scale = jnp.asarray(config.init_scale, jnp.float32)
    zeros = LossScaleState(*(jnp.zeros([], dtype) for dtype in DTYPES.values()))
    return zeros._replace(
        # Unchecked inside a trace: optax.inject_hyperparams may have cast it to inf.
        loss_scale=jnp.clip(init_scale, SMALLEST_SCALE, LARGEST_SCALE),
        hysteresis_tracker=jnp.asarray(config.hysteresis, jnp.int32),
    )


def advance(
    state: LossScaleState, found_inf: jax.Array, config: LossScaleConfig
) -> LossScaleState:
    """The state after one step, with the scale moved and the step recorded."""
    return record(update(state, found_inf, config), found_inf, config)


def update(
    state: LossScaleState, found_inf: jax.Array, config: LossScaleConfig
) -> LossScaleState:
    """The next state, by the rule in `LossScaleConfig`.

    Args:
      state: the state that the gradients were scaled with.
      found_inf: bool [], whether a scaled gradient held an inf or nan.
      config: the tunables.

    PyTorch: `torch._amp_update_scale_`.
    """
    successes = state.growth_tracker + 1
    grow = ~found_inf & (successes == _int32(config.growth_interval))
    overflows_left = jnp.maximum(state.hysteresis_tracker - 1, 0)
    back_off = found_inf & (overflows_left == 0)

    grown = _float64_product(state.loss_scale, config.growth_factor)
    grown = jnp.minimum(grown, _float32(config.max_scale))
    shrunk = _float64_product(state.loss_scale, config.backoff_factor)
    shrunk = jnp.maximum(shrunk, floor(config))

    loss_scale = state.loss_scale
    if is_traced(config.max_scale) or config.max_scale < math.inf:
        loss_scale = jnp.minimum(loss_scale, _float32(config.max_scale))
    loss_scale = jnp.where(grow & jnp.isfinite(grown), grown, loss_scale)
    return state._replace(
        loss_scale=jnp.where(back_off, shrunk, loss_scale),
        growth_tracker=jnp.where(found_inf | grow, 0, successes),
        hysteresis_tracker=jnp.where(
            found_inf,
            overflows_left,
            jnp.where(grow, _int32(config.hysteresis), state.hysteresis_tracker),
        ),
    )


def record(
    state: LossScaleState, found_inf: jax.Array, config: LossScaleConfig
) -> LossScaleState:
    """Adds a step to the scalars that report; the scale is the one the step left.

    A scale may start at its floor without harm, so steps are counted from the first
    overflow on.
    """
    skipped, at_floor = jnp.asarray(found_inf), state.loss_scale <= floor(config)
    stuck = at_floor & (skipped | (state.floor_steps > 0))
    return state._replace(
        found_inf=skipped,
        skipped_steps=state.skipped_steps + skipped.astype(jnp.int32),
        recent_skips=(state.recent_skips << 1) | skipped.astype(jnp.uint32),
        floor_steps=jnp.where(stuck, state.floor_steps + 1, 0),
    )


def switched_off(state: LossScaleState) -> LossScaleState:
    """The state of a disabled scale, from any other: 1, and marked."""
    return state._replace(
        loss_scale=jnp.ones_like(state.loss_scale),
        found_inf=jnp.zeros_like(state.found_inf),
        hysteresis_tracker=jnp.full_like(state.hysteresis_tracker, SWITCHED_OFF),
    )


def started(
    new: LossScaleState, old: LossScaleState, config: LossScaleConfig
) -> LossScaleState:
    """The state after a step, started anew if the step came after a disabled scale.

    A scale that the user has set since then stays.
    """
    was_off = old.hysteresis_tracker == SWITCHED_OFF
    is_untouched = was_off & (old.loss_scale == 1)
    fresh = init(config)

    def choose(condition: jax.Array, name: str) -> jax.Array:
        return jnp.where(condition, getattr(fresh, name), getattr(new, name))

    return new._replace(
        loss_scale=choose(is_untouched, "loss_scale"),
        growth_tracker=choose(is_untouched, "growth_tracker"),
        hysteresis_tracker=choose(was_off, "hysteresis_tracker"),
    )


def floor(config: LossScaleConfig) -> jax.Array:
    """The scale at which backing off ends: float32 []."""
    return jnp.maximum(_float32(config.min_scale), np.float32(SMALLEST_SCALE))


def _float64_product(x: jax.Array, factor: float) -> jax.Array:
    """`float32(float64(x) * float64(factor))`, the product that torch forms."""
    with jax.enable_x64(True):
        factor = factor if is_traced(factor) else np.float64(factor)
        wide = lax.convert_element_type(x, jnp.float64)
        product = wide * lax.convert_element_type(factor, jnp.float64)
        return lax.convert_element_type(product, jnp.float32)


def _float32(value: float) -> jax.Array | np.float32:
    return value.astype(jnp.float32) if is_traced(value) else np.float32(value)


def _int32(value: int) -> jax.Array | np.int32:
    return value.astype(jnp.int32) if is_traced(value) else np.int32(value)
