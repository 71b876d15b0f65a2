"""The rule of a loss scale: its state, and what one step does to it, as in torch.

torch holds the scale in float32 and its factors in float64 (C++ `double`), so the
product is formed in float64 and rounded once more to float32. With a factor such as
1.1, a float32 product differs in most steps. JAX has no float64 unless asked for it, so
a few scalar operations run under `jax.enable_x64`, also in jit, scan, cond and vmap.

XLA's CPU backend flushes float32 subnormals to zero, and a scale of zero turns every
later gradient into nan. So the scale never falls below 2**-126, where torch's does.
"""

import dataclasses
import enum
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import PROVES, check_range, is_traced, number

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # 2**-126
LARGEST_SCALE = float(np.finfo(np.float32).max)
SWITCHED_OFF = -1  # the `hysteresis_tracker` of a disabled loss scale

NO_SCALE = """{caller}: the loss scale of the state is {scale}, which is not a \
positive normal number. The state is of a run whose scale collapsed, or it was cast to \
half precision. Set one: optax.tree.set(opt_state, loss_scale=jnp.float32(2.0**16)), \
or scaler.update(2.0**16)."""


class ScaleKind(enum.Enum):
    DYNAMIC = enum.auto()
    STATIC = enum.auto()  # it is always the argument
    OFF = enum.auto()  # it is always 1


class LossScaleState(NamedTuple):
    """What steps carry: three scalars that decide, and five that report."""

    loss_scale: jax.Array  # what the loss is multiplied by
    growth_tracker: jax.Array  # finite steps in a row, 0 after a growth
    found_inf: jax.Array  # whether the last step was skipped
    skipped_steps: jax.Array  # steps skipped so far
    hysteresis_tracker: jax.Array  # overflows forgiven since a growth
    recent_skips: jax.Array  # the last 32 steps, the newest lowest; 1 is a skip
    floor_steps: jax.Array  # steps at the floor since it overflowed there
    retried_steps: jax.Array  # attempts that `retry` ran again so far


SCALAR_DTYPES = dict(
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
            growth_tracker = 0
            if forgiven < hysteresis - 1: forgiven += 1
            else: scale = max(scale * backoff_factor, min_scale)
        else if growth_tracker + 1 == growth_interval:
            growth_tracker, forgiven = 0, 0
            if min(scale * growth_factor, max_scale) is finite: scale = that
        else: growth_tracker = growth_tracker + 1

    Hysteresis is Megatron-LM's rule: `hysteresis - 1` overflows since the last growth
    are forgiven (their steps are skipped, the scale stays). The next one backs off, and
    so does each one after it until the scale has grown again. With `hysteresis=1`,
    `min_scale=0` and `max_scale=inf`, this is torch's rule.

    As in torch, the tracker must equal the interval; "at least" is not enough. A
    tracker that is already past a newly shortened interval keeps counting until an
    overflow resets it.

    The fields are the arguments of `dynamic_loss_scale`.

    Raises:
      ValueError: a value is out of its range. Arrays inside a trace are not checked.
      TypeError: a value is not a number.
    """

    init_scale: float = 2.0**16  # it and the others may be traced scalars
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    max_scale: float = math.inf
    hysteresis: int = 1

    def __post_init__(self) -> None:
        counts = ("growth_interval", "hysteresis")
        for name, value in vars(self).items():
            convert = operator.index if name in counts else float
            object.__setattr__(self, name, number(name, value, convert))
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
        for name in counts:
            check_range(name, getattr(self, name), ">= 1 and < 2**31", 1, 2**31 - 1)


def check_scale(name: str, value: object) -> float:
    scale = number(name, value, float)
    allowed = "finite and > 0, in float32's normal range [2**-126, 3.4e38]"
    check_range(name, scale, allowed, SMALLEST_SCALE, LARGEST_SCALE)
    return scale


def usable(scale: jax.Array, caller: str = "") -> jax.Array:
    """Whether a state's number is a scale: bool []. A step at another one is skipped.

    A run that collapsed saves 0 in torch, and a state cast to float16 has inf. With a
    caller, it raises ValueError for what is known outside of a trace.
    """
    highest = math.inf if PROVES.value else LARGEST_SCALE
    is_scale = (scale >= SMALLEST_SCALE) & (scale <= highest)
    if caller and not is_traced(is_scale) and not np.all(is_scale):
        raise ValueError(NO_SCALE.format(caller=caller, scale=scale))
    return is_scale


def as_scale(name: str, value: object) -> jax.Array:
    return jnp.asarray(one_number(name, value, check_scale), jnp.float32)


def one_number(
    name: str, value: Any, check: Callable[[str, object], float]
) -> float | jax.Array:
    """A number from a user, or from an array of one."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.size != 1:
            raise ValueError(f"{name} must be one number; got shape {value.shape}.")
        value = jnp.reshape(value, []) if is_traced(value) else value.item()
    return check(name, value)


def init(
    config: LossScaleConfig, kind: ScaleKind = ScaleKind.DYNAMIC
) -> LossScaleState:
    zeros = LossScaleState(*(jnp.zeros([], dtype) for dtype in SCALAR_DTYPES.values()))
    off = zeros._replace(
        loss_scale=jnp.ones([], jnp.float32),
        hysteresis_tracker=jnp.full([], SWITCHED_OFF, jnp.int32),
    )
    return adopted(off, config, kind)


def adopted(
    state: LossScaleState, config: LossScaleConfig, kind: ScaleKind = ScaleKind.DYNAMIC
) -> LossScaleState:
    """Any state as one of a run with these arguments.

    States outlive their arguments: a run is resumed with other bounds, another
    hysteresis, another kind of scale. Each step begins with this, so that no number
    that contradicts an argument survives it. What it returns does not change if it is
    adopted again.

    A dynamic scale goes on from any other, within its bounds, but from `init_scale`
    after a disabled one, unless the user has set the scale since then, and after what
    is not a scale.
    """
    old, tracker = state.loss_scale, state.hysteresis_tracker
    # Unchecked inside a trace: optax.inject_hyperparams may have cast it to inf.
    first = jnp.clip(_float32(config.init_scale), SMALLEST_SCALE, LARGEST_SCALE)
    match kind:
        case ScaleKind.DYNAMIC:
            is_new = (tracker == SWITCHED_OFF) & (old == 1)
            highest = jnp.minimum(_float32(config.max_scale), np.float32(LARGEST_SCALE))
            kept = jnp.clip(old, floor(config), highest)
            loss_scale = jnp.where(is_new | ~usable(old), first, kept)
            old_form = -2 - tracker  # of versions that counted down from -2
            tracker = jnp.where(tracker < SWITCHED_OFF, old_form, tracker)
            tracker = jnp.clip(tracker, 0, _int32(config.hysteresis) - 1)
        case ScaleKind.STATIC:
            loss_scale, tracker = first, jnp.zeros_like(tracker)
        case ScaleKind.OFF:
            loss_scale, tracker = 1.0, jnp.full_like(tracker, SWITCHED_OFF)
    is_same = loss_scale == old
    return state._replace(
        loss_scale=jnp.where(is_same, old, loss_scale),
        growth_tracker=jnp.where(is_same, state.growth_tracker, 0),
        hysteresis_tracker=tracker,
        floor_steps=jnp.where(is_same, state.floor_steps, 0),
    )


def advance(
    state: LossScaleState,
    found_inf: jax.Array,
    config: LossScaleConfig,
    kind: ScaleKind = ScaleKind.DYNAMIC,
) -> LossScaleState:
    """The state after one step, with the scale moved and the step recorded.

    What a step found at a scale that is not adopted does not move the adopted one.
    """
    start = adopted(state, config, kind)
    if kind is ScaleKind.OFF:
        return start._replace(found_inf=found_inf)
    if kind is ScaleKind.DYNAMIC:
        is_same = start.loss_scale == state.loss_scale
        choose = lambda moved, start: jnp.where(is_same, moved, start)
        start = LossScaleState(*map(choose, update(start, found_inf, config), start))
    return record(start, found_inf, config)


def update(
    state: LossScaleState, found_inf: jax.Array, config: LossScaleConfig
) -> LossScaleState:
    """The next state, by the rule in `LossScaleConfig`: `torch._amp_update_scale_`."""
    successes = state.growth_tracker + 1
    grow = ~found_inf & (successes == _int32(config.growth_interval))
    tracker = state.hysteresis_tracker
    forgives = tracker < _int32(config.hysteresis) - 1
    after_overflow = tracker + forgives.astype(jnp.int32)

    grown = _float64_product(state.loss_scale, config.growth_factor)
    grown = jnp.minimum(grown, _float32(config.max_scale))
    shrunk = _float64_product(state.loss_scale, config.backoff_factor)
    shrunk = jnp.maximum(shrunk, floor(config))

    loss_scale = jnp.where(grow & jnp.isfinite(grown), grown, state.loss_scale)
    return state._replace(
        loss_scale=jnp.where(found_inf & ~forgives, shrunk, loss_scale),
        growth_tracker=jnp.where(found_inf | grow, 0, successes),
        hysteresis_tracker=jnp.where(
            found_inf, after_overflow, jnp.where(grow, 0, tracker)
        ),
    )


def record(
    state: LossScaleState, found_inf: jax.Array, config: LossScaleConfig
) -> LossScaleState:
    """Adds a step to the scalars that report; the scale is the one the step left."""
    # A scale may start at its floor without harm: counted from the first overflow on.
    skipped, at_floor = jnp.asarray(found_inf), state.loss_scale <= floor(config)
    stuck = at_floor & (skipped | (state.floor_steps > 0))
    return state._replace(
        found_inf=skipped,
        skipped_steps=state.skipped_steps + skipped.astype(jnp.int32),
        recent_skips=(state.recent_skips << 1) | skipped.astype(jnp.uint32),
        floor_steps=jnp.where(stuck, state.floor_steps + 1, 0),
    )


def floor(config: LossScaleConfig) -> jax.Array:
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
