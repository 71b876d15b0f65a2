"""Loss scaling as an optax wrapper: `dynamic_loss_scale` and `static_loss_scale`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import axis_names, flag
from .._tree import Flag, PyTree, check_leaves, widen
from . import arithmetic, rule, skip
from .foreign_state import Owner, check_state
from .rule import LossScaleConfig, ScaleKind
from .state import (
    DynamicLossScaleState,
    check_not_scaled_yet,
    check_not_stacked,
    check_places,
    keeps_master_weights,
    scalars_of,
)
from .state_types import as_made, as_wide_as, check_same, grown, made_wide
from .traced import check_read
from .transformation import (
    as_transformation,
    check_gradients_match,
    is_hole,
    without_closures,
)
from .updates import apply_updates, cast_update, no_update, without_float0
from .watched import watch

Step = tuple[optax.Updates, optax.OptState]


def dynamic_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
    *,
    min_scale: float = 0.0,
    max_scale: float = float("inf"),
    hysteresis: int = 1,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes scaled gradients and skips overflows.

    `update` checks the scaled gradients, unscales them, runs `inner` on them and
    moves the scale. If any element is inf or nan, the updates are zeros and
    `inner_state` is held bit for bit: moments, schedule counts, everything. The scale
    follows `torch.amp.GradScaler` bit for bit:

        if found_inf: scale, growth_tracker = scale * backoff_factor, 0
        else:
            growth_tracker = growth_tracker + 1
            if growth_tracker == growth_interval:
                scale, growth_tracker = scale * growth_factor, 0   # unless it is inf

    Inside the wrapper everything is float32: half-precision gradients are unscaled in
    float32, and `inner` sees half-precision parameters as float32. The updates that
    come out have the dtype of the parameters (with `master_weights` inside, float32).

    Transformations that need unscaled gradients go inside, above all clipping:
    `dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.), optax.adamw(3e-4)))`.
    Around `optax.MultiSteps`, only the bad microbatch is dropped. The other way round
    raises an error where the state is used: `MultiSteps` would add scaled gradients
    unchecked, and keep an inf in its mean for good.
    `optax.masked`, `multi_transform` and `conditionally_transform` go inside too:
    around the wrapper, they pass on scaled gradients as updates of what they leave out.
    A gradient that `inner` does not read (`optax.set_to_zero`) is not checked.

    As in torch, an optimizer that differentiates the loss itself does not work: line
    searches (`optax.lbfgs`), Sophia and SAM's opaque mode.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      init_scale: first scale, in float32's normal range.
      growth_factor: above 1; the scale is multiplied by it to grow.
      backoff_factor: in (0, 1); the scale is multiplied by it after an overflow.
      growth_interval: finite steps in a row before the scale grows, >= 1.
      enabled: if False, the result is `inner` with a scale of 1: nothing is checked
        and nothing is skipped. A state may go from one kind to the other. The first
        step divides by the scale of the state, since the loss was multiplied by it.
        After that the scale is 1, or `init_scale`.
      min_scale: floor of the scale. At 0 the floor is 2**-126.
      max_scale: ceiling of the scale.
      hysteresis: how many overflows since the last growth it takes to back off
        (Megatron-LM's rule). Overflows before that are skipped at the same scale.
      axis_name: mapped axis or axes (`shard_map`, `pmap`) over which an overflow on
        one replica skips the step on all. Under plain jit, leave it out: a sharded
        gradient is one array there.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `DynamicLossScaleState` as state.

    Raises:
      ValueError: an argument is out of its range, `inner` already holds a loss scale,
        the gradients for `update` do not match the parameters, or `update` gets a
        function to differentiate.
      TypeError: `inner` is not a gradient transformation, or a number is not a number.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = {"w": jnp.ones(3)}
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.5), growth_interval=100)
      >>> opt_state = tx.init(params)
      >>> loss_fn = lambda params, x: jnp.sum(params["w"] * x)
      >>> x = jnp.arange(3.0)
      >>> loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
      >>> print(loss, grads["w"])
      3.0 [     0.  65536. 131072.]
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> print(optax.apply_updates(params, updates)["w"])
      [1.  0.5 0. ]

    PyTorch: `torch.amp.GradScaler`. The last four arguments are additions; their
    defaults change nothing.

    References:
      Micikevicius et al., Mixed Precision Training, 2018 (arXiv 1710.03740).
    """
    config = LossScaleConfig(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )
    kind = ScaleKind.DYNAMIC if flag("enabled", enabled) else ScaleKind.OFF
    inner, axes = as_transformation(inner), axis_names(axis_name)
    return LossScaled(inner, config, kind, axes).transformation()


def static_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: float,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a loss scale that never changes.

    It is like `dynamic_loss_scale`, with the same state, and it skips steps in the same
    way if gradients are not finite. A state with another scale has this one after the
    first step.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      loss_scale: the scale, in float32's normal range.
      axis_name: as in `dynamic_loss_scale`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `DynamicLossScaleState` as state.

    Raises:
      ValueError, TypeError: as in `dynamic_loss_scale`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.static_loss_scale(optax.sgd(0.1), loss_scale=1024.0)
      >>> print(jamp.loss_scale(tx.init({"w": jnp.ones(3)})))
      1024.0

    PyTorch: apex's `loss_scale=1024.0`; `torch.amp` has no counterpart.
    """
    rule.check_scale("loss_scale", loss_scale)
    config = LossScaleConfig(init_scale=loss_scale)
    inner, axes = as_transformation(inner), axis_names(axis_name)
    return LossScaled(inner, config, ScaleKind.STATIC, axes).transformation()


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaled:
    inner: optax.GradientTransformationExtraArgs
    config: LossScaleConfig
    kind: ScaleKind
    axis_name: tuple[str, ...] | None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init_fn, self.update_fn)

    def init_fn(self, params: optax.Params) -> DynamicLossScaleState:
        check_leaves(params, "dynamic_loss_scale's init: the parameter")
        inner_state = self.init_inner(params)
        check_not_scaled_yet(inner_state, "inner")
        scalars = rule.init(self.config, self.kind)
        return DynamicLossScaleState(**scalars._asdict(), inner_state=inner_state)

    @functools.cached_property  # one function, whose shapes JAX caches
    def init_inner(self) -> Callable[[optax.Params], optax.OptState]:
        if self.kind is ScaleKind.OFF:
            return self.inner.init
        return functools.partial(made_wide, self.inner.init)

    def update_fn(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> Step:
        caller = "dynamic_loss_scale's update"
        scaled = ScaledGradients(self, caller, updates, state, params, extra_args)

        def hold(like: Callable[[], Step]) -> Step:
            return jax.tree.map(no_update, like()[0]), scaled.held

        updates, inner_state = skip.run_or_hold(scaled.finite, scaled.run, hold)
        return updates, scaled.advanced(inner_state)

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Step:
        """`update_fn` and `apply_updates`, behind one choice: run or hold."""
        scaled = ScaledGradients(self, "jamp.step", grads, state, params, extra_args)

        def run() -> Step:
            updates, inner_state = scaled.run()
            return apply_updates(params, updates), inner_state

        hold = lambda _: (params, scaled.held)
        moved, inner_state = skip.run_or_hold(scaled.finite, run, hold)
        return moved, scaled.advanced(inner_state)


class ScaledGradients:
    """One step's scaled gradients, checked, with everything needed to use them."""

    def __init__(
        self,
        by: LossScaled,
        caller: str,
        grads: optax.Updates,
        state: PyTree,
        params: optax.Params | None,
        extra_args: dict[str, object],
    ):
        self.by, self.caller, self.params = by, caller, params
        check_state(state, DynamicLossScaleState, caller)
        self.scalars = scalars_of(state)
        check_not_stacked(self.scalars._asdict(), caller)
        check_gradients_match(grads, params, caller, wrapped=True)
        self.inverse = arithmetic.invert(self.scalars.loss_scale)
        if by.kind is not ScaleKind.OFF:
            extra_args = without_closures(extra_args, caller)
            watch(grads, self.scalars.loss_scale)
        self.extra_args = extra_args
        self.old = as_made(state.inner_state, by.init_inner, params)
        update = lambda grads: self.update(grads, self.old)
        check_places(self.old, caller)
        self.finite, update, shapes = check_read(update, grads, self.all_finite)
        self.held = grown(self.old, shapes and shapes[1])
        self.run = functools.partial(update, skip.harmless(self.finite, grads))

    def all_finite(self, grads: PyTree) -> Flag:
        is_scale = rule.usable(self.scalars.loss_scale, self.caller)
        if self.by.kind is ScaleKind.OFF:
            return np.True_
        finite = arithmetic.all_finite(grads, self.by.axis_name)
        return jnp.logical_and(finite, is_scale)

    def update(self, grads: optax.Updates, inner_state: optax.OptState) -> Step:
        """The inner optimizer's step, on gradients that this unscales first."""
        params = self.params
        owner = Owner(self.caller, self.by.init_inner, params, ".inner_state")
        is_off = self.by.kind is ScaleKind.OFF  # it does what the optimizer does alone
        unscale = arithmetic.unscale_as_before if is_off else arithmetic.unscale
        grads = unscale(grads, self.inverse)
        # Master weights must see the dtypes of the parameters, and be added unrounded.
        as_they_are = is_off or keeps_master_weights(inner_state)
        with owner.explained(inner_state):
            updates, new = self.by.inner.update(
                grads,
                inner_state,
                params if as_they_are else widen(params),
                **self.extra_args,
            )
        if params is not None:
            cast = without_float0 if as_they_are else cast_update
            updates = jax.tree_util.tree_map_with_path(
                cast, updates, params, is_leaf=is_hole
            )
        owner.check_moved(new, inner_state)
        if as_they_are:  # it may have put half parameters into the state
            new = as_wide_as(inner_state, new)
        with owner.explained(inner_state):
            before = grown(inner_state, new)
            check_same(new, before, f"{self.caller}: the optimizer")
        return updates, new

    def advanced(self, inner_state: optax.OptState) -> DynamicLossScaleState:
        found_inf, by = jnp.logical_not(self.finite), self.by
        scalars = rule.advance(self.scalars, found_inf, by.config, by.kind)
        return DynamicLossScaleState(**scalars._asdict(), inner_state=inner_state)
