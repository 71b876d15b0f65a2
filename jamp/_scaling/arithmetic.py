"""The arithmetic of a loss scale, equal to torch's bit for bit.

Three pure functions over a state of three scalars, with no optimizer and no module
in sight:

* `scale(x, loss_scale)` is `outputs * scale` in `torch.amp.GradScaler.scale`;
* `all_finite` and `unscale` are `torch._amp_foreach_non_finite_check_and_unscale_`;
* `update` is `torch._amp_update_scale_`.

torch holds the scale in float32 and its factors in float64 (C++ `double`), so the
product is formed in float64 and rounded once more to float32. With a factor such as
1.1 a float32 product differs in most steps. JAX has no float64 unless asked for, so
the few scalar operations that need it run under `jax.enable_x64`, which works inside
jit, scan, cond and vmap.

One difference is deliberate. XLA's CPU backend flushes float32 subnormals to zero,
and a scale of zero turns every later gradient into NaN. So the scale never falls
below 2**-126, float32's smallest normal number; torch's goes on to zero.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_range, is_traced, number
from .._tree import dtype_of, is_inexact, widened
from .mesh import everywhere, may_be_split

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # 2**-126
LARGEST_SCALE = float(np.finfo(np.float32).max)


class LossScaleState(NamedTuple):
    """What is carried from step to step."""

    loss_scale: jax.Array  # float32 []: what the loss is multiplied by
    growth_tracker: jax.Array  # int32 []: finite steps in a row, 0 after a growth
    hysteresis_tracker: jax.Array  # int32 []: overflows left before backing off


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
    are forgiven (their steps are skipped, the scale stays), the next one backs off,
    and so does each one after it until the scale has grown again. With
    `hysteresis=1`, `min_scale=0` and `max_scale=inf` this is torch's rule.

    Equality with the interval, not "at least", is torch's: a tracker that is already
    past a newly shortened interval keeps counting until an overflow resets it.

    Args:
      init_scale: first scale, finite, at least 2**-126.
      growth_factor: > 1.
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

    init_scale: Any = 2.0**16
    growth_factor: Any = 2.0
    backoff_factor: Any = 0.5
    growth_interval: Any = 2000
    min_scale: Any = 0.0
    max_scale: Any = math.inf
    hysteresis: Any = 1

    def __post_init__(self):
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


def check_scale(name: str, value: Any) -> float:
    """The value as a Python number, or ValueError if float32 cannot hold it."""
    value = number(name, value, float)
    allowed = "finite and > 0, in float32's normal range [2**-126, 3.4e38]"
    check_range(name, value, allowed, SMALLEST_SCALE, LARGEST_SCALE)
    return value


def is_scalable(x: Any) -> bool:
    """Whether `scale` takes it."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    if not is_array:
        return isinstance(x, int | float | complex) and not isinstance(x, bool)
    return x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)


def init(config: LossScaleConfig) -> LossScaleState:
    """The state before the first step."""
    init_scale = jnp.asarray(config.init_scale, jnp.float32)
    return LossScaleState(
        # Unchecked inside a trace: optax.inject_hyperparams may have cast it to inf.
        loss_scale=jnp.clip(init_scale, SMALLEST_SCALE, LARGEST_SCALE),
        growth_tracker=jnp.zeros([], jnp.int32),
        hysteresis_tracker=jnp.asarray(config.hysteresis, jnp.int32),
    )


def scale(x: Any, loss_scale: jax.Array) -> jax.Array:
    """`x * loss_scale` with torch's result dtype.

    The product is formed in float32 at least. An array with dimensions keeps its
    dtype; a scalar is promoted to float32, so that a float16 loss above 1 does not
    overflow at a scale of 2**16. Integers become float32. Wider dtypes stay.

    Args:
      x: array or scalar of any numeric dtype and shape.
      loss_scale: float32 [].

    Returns:
      An array of the shape of `x`.
    """
    dtype = dtype_of(x) if is_inexact(x) else jnp.dtype(jnp.float32)
    product = _times(jnp.asarray(x, widened(dtype)), loss_scale)
    return product if jnp.ndim(x) == 0 else lax.convert_element_type(product, dtype)


def all_finite(
    tree: Any, axis_name: str | Sequence[str] | None = None
) -> jax.Array | np.bool:
    """Whether no floating or complex leaf holds an inf or nan: bool [].

    The check belongs on *scaled* gradients, before the product with the inverse scale:
    an overflow in that product does not count in torch either.

    Args:
      tree: pytree of scaled gradients.
      axis_name: mapped axis or axes over which all replicas must be finite.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    finite = everywhere(_all_finite, leaves)
    if axis_name is None:
        return finite
    try:
        return lax.pmin(jnp.int32(finite), axis_name) == 1
    except NameError as error:
        names = axis_name if isinstance(axis_name, str) else ", ".join(axis_name)
        raise ValueError(
            f"axis_name {names!r} is not a mapped axis here. It is for shard_map and "
            "pmap; under plain jit leave it out: a sharded gradient is one array there."
        ) from error


def _all_finite(leaves: Sequence[Any]) -> jax.Array | np.bool:
    # Layers repeat: arrays of one shape take one reduction instead of one each.
    alike: dict[Any, list[Any]] = {}
    for index, leaf in enumerate(leaves):
        key = index if may_be_split(leaf) else jnp.shape(leaf)
        alike.setdefault(key, []).append(jnp.isfinite(leaf))
    checks = (jnp.all(functools.reduce(jnp.logical_and, c)) for c in alike.values())
    return functools.reduce(jnp.logical_and, checks, np.True_)


class InverseScale(NamedTuple):
    """`float32(1 / float64(loss_scale))` as two factors, neither of them subnormal.

    Above a scale of 2**126 the inverse is subnormal, and XLA's CPU backend would make
    it 0 and every update vanish. `shift` is a power of two, so that the product with
    both factors rounds as the product with their product does.
    """

    inverse: jax.Array  # float32 []
    shift: jax.Array  # float32 []: 1, or 2**-64 for a scale above 2**64


def invert(loss_scale: jax.Array) -> InverseScale:
    """The inverse of a scale, as torch rounds it."""
    with jax.enable_x64(True):
        exact = 1.0 / lax.convert_element_type(loss_scale, jnp.float64)
        # Below 2**-126 float32 has a fixed spacing of 2**-149: round as it would.
        coarse = lax.round(exact * 2.0**149, lax.RoundingMethod.TO_NEAREST_EVEN)
        exact = jnp.where(exact < SMALLEST_SCALE, coarse * 2.0**-149, exact)
        shift = jnp.where(exact < 2.0**-64, 2.0**-64, 1.0)
        return InverseScale(
            lax.convert_element_type(exact / shift, jnp.float32),
            lax.convert_element_type(shift, jnp.float32),
        )


def unscale(tree: Any, inverse: InverseScale) -> Any:
    """Multiplies gradients by the inverse scale, as torch does.

    Half-precision leaves come out float32: in float16 the product would flush to zero
    what the scale has saved. Complex leaves are multiplied part by part; integer,
    bool, `float0` and missing leaves pass.

    Args:
      tree: pytree of scaled gradients.
      inverse: from `invert`. Made outside a `skip.run_or_hold`, so that the scalar
        arithmetic is not repeated for every element inside.

    Returns:
      A tree of the same structure and shapes.
    """

    def unscale_leaf(leaf):
        if not is_inexact(leaf):
            return leaf
        wide = jnp.asarray(leaf, widened(dtype_of(leaf)))
        return _times(_times(wide, inverse.inverse), inverse.shift)

    return jax.tree.map(unscale_leaf, tree)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor` in the dtype of x, for a real scalar factor.

    A complex x is multiplied part by part: `(a + ib) * (f + 0i)` would turn an inf in
    one part into a nan in the other.
    """
    if jnp.iscomplexobj(x):
        return lax.complex(_times(x.real, factor), _times(x.imag, factor))
    return x * lax.convert_element_type(factor, x.dtype)


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

    loss_scale = jnp.where(grow & jnp.isfinite(grown), grown, state.loss_scale)
    return LossScaleState(
        loss_scale=jnp.where(back_off, shrunk, loss_scale),
        growth_tracker=jnp.where(found_inf | grow, 0, successes),
        hysteresis_tracker=jnp.where(
            found_inf,
            overflows_left,
            jnp.where(grow, _int32(config.hysteresis), state.hysteresis_tracker),
        ),
    )


def floor(config: LossScaleConfig) -> jax.Array:
    """Where backing off ends: float32 []."""
    return jnp.maximum(_float32(config.min_scale), np.float32(SMALLEST_SCALE))


def _float64_product(x: jax.Array, factor: Any) -> jax.Array:
    """`float32(float64(x) * float64(factor))`, the product that torch forms."""
    with jax.enable_x64(True):
        factor = factor if is_traced(factor) else np.float64(factor)
        wide = lax.convert_element_type(x, jnp.float64)
        product = wide * lax.convert_element_type(factor, jnp.float64)
        return lax.convert_element_type(product, jnp.float32)


def _float32(value: Any) -> Any:
    return value.astype(jnp.float32) if is_traced(value) else np.float32(value)


def _int32(value: Any) -> Any:
    return value.astype(jnp.int32) if is_traced(value) else np.int32(value)
