"""Loss scaling as an optax wrapper.

The wrapper gets scaled gradients and passes unscaled ones to the optimizer inside it.
If a gradient is not finite, nothing inside moves: the updates are zero and
`inner_state` is the one that came in.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import axis_names, flag
from .._tree import KeyPath, PyTree, check_leaves, dtype_of, is_half, is_inexact, widen
from . import arithmetic, rule, skip
from .apart import Apart
from .disabled import disabled
from .match import check_gradients_match, check_update, is_hole
from .rule import LossScaleConfig
from .state import (
    DynamicLossScaleState,
    check_not_scaled_yet,
    check_not_stacked,
    check_state,
    explained,
    keeps_master_weights,
    scalars_of,
    state_of,
)
from .transformation import apply_updates, as_transformation

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
    `optax.masked` and `multi_transform` go inside too: around the wrapper, `masked`
    passes on scaled gradients as updates for the parameters that it leaves out.

    Line searches (`optax.lbfgs`) work: an extra argument named `grad` must be scaled
    like the gradients and is unscaled with them; `value` and `value_fn` are the plain
    loss. Do not use `optax.value_and_grad_from_state` with it: the gradients that it
    reads back are no longer scaled.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      init_scale: first scale, in float32's normal range.
      growth_factor: above 1; the scale is multiplied by it to grow.
      backoff_factor: in (0, 1); the scale is multiplied by it after an overflow.
      growth_interval: finite steps in a row before the scale grows, >= 1.
      enabled: if False, the result is `inner` with a scale of 1: nothing is checked
        and nothing is skipped. A state may go from one kind to the other: resumed with
        `enabled=True`, the scale is `init_scale` from the second step on.
      min_scale: floor when backing off. At 0 the floor is 2**-126.
      max_scale: ceiling when growing.
      hysteresis: how many overflows since the last growth it takes to back off
        (Megatron-LM's rule). Overflows before that are skipped at the same scale.
      axis_name: mapped axis or axes (`shard_map`, `pmap`) over which an overflow on
        one replica skips the step on all. Under plain jit, leave it out: a sharded
        gradient is one array there.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `DynamicLossScaleState` as state.

    Raises:
      ValueError: an argument is out of its range, `inner` already holds a loss scale,
        or the gradients for `update` do not match the parameters.
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
    if not flag("enabled", enabled):
        return disabled(as_transformation(inner))
    inner, axes = as_transformation(inner), axis_names(axis_name)
    return LossScaled(inner, config, True, axes).transformation()


def static_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: float,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a loss scale that never changes.

    It is like `dynamic_loss_scale`, with the same state, and it skips steps in the same
    way if gradients are not finite.

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
    return LossScaled(inner, config, False, axes).transformation()


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaled:
    """An optimizer behind a loss scale: `init_fn`, `update_fn`, and `step`."""

    inner: optax.GradientTransformationExtraArgs
    config: LossScaleConfig
    is_dynamic: bool
    axis_name: tuple[str, ...] | None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init_fn, self.update_fn)

    def init_fn(self, params: optax.Params) -> DynamicLossScaleState:
        check_leaves(params, "dynamic_loss_scale's init: the parameter")
        inner_state = self.init_inner(params)
        check_not_scaled_yet(inner_state, "inner")
        return state_of(rule.init(self.config), inner_state)

    def init_inner(self, params: optax.Params) -> optax.OptState:
        if any(map(is_half, jax.tree.leaves(params))):
            if not keeps_master_weights(jax.eval_shape(self.inner.init, params)):
                params = widen(params)
        return self.inner.init(params)

    def update_fn(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> Step:
        caller = "dynamic_loss_scale's update"
        scaled = Scaled(self, caller, updates, state, params)
        finite, grads, old = scaled.finite, scaled.grads, state.inner_state
        run = functools.partial(scaled.run_inner, extra_args)
        both = functools.partial(run, grads, old)

        def hold(like: Callable[[], Step]) -> Step:
            return jax.tree.map(_no_update, like()[0]), old

        if skip.way(finite) is skip.Way.BRANCH:
            parts = Apart(run, grads, old)
            both = functools.partial(parts.both, grads)
            if parts.is_free():
                new = functools.partial(parts.state, grads)
                new = skip.run_or_hold(finite, new, lambda like: old)
                made = parts.updates(skip.zeroed(finite, grads), new)
                none = jax.tree.map(_no_update, made)
                return skip.select(finite, made, none), scaled.advanced(new)
        updates, inner_state = skip.run_or_hold(finite, both, hold)
        return updates, scaled.advanced(inner_state)

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Step:
        """`update_fn` and `apply_updates`, behind one choice: run or hold."""
        scaled = Scaled(self, "jamp.step", grads, state, params)

        def run() -> Step:
            updates, inner_state = scaled.run_inner(
                extra_args, scaled.grads, state.inner_state
            )
            return apply_updates(params, updates), inner_state

        params, inner_state = skip.run_or_hold(
            scaled.finite, run, lambda _: (params, state.inner_state)
        )
        return params, scaled.advanced(inner_state)


class Scaled:
    """One step's scaled gradients, checked, with everything needed to use them."""

    def __init__(
        self,
        by: LossScaled,
        caller: str,
        grads: optax.Updates,
        state: PyTree,
        params: optax.Params | None,
    ):
        self.by, self.caller, self.state, self.params = by, caller, state, params
        check_state(state, DynamicLossScaleState, caller)
        self.scalars = scalars_of(state)
        check_not_stacked(self.scalars._asdict(), caller)
        check_leaves(grads, f"{caller}: the gradient")
        if params is not None:
            check_leaves(params, f"{caller}: the parameter")
            check_gradients_match(grads, params, caller, wrapped=True)
        self.finite = arithmetic.all_finite(grads, by.axis_name)
        self.inverse = arithmetic.invert(self.scalars.loss_scale)
        self.grads = skip.harmless(self.finite, grads)

    def run_inner(
        self,
        extra_args: dict[str, object],
        grads: optax.Updates,
        inner_state: optax.OptState,
    ) -> Step:
        """The inner optimizer's step, on gradients that this unscales first."""
        params = self.params
        if "grad" in extra_args:
            grad = arithmetic.unscale(extra_args["grad"], self.inverse)
            extra_args = {**extra_args, "grad": grad}
        grads = arithmetic.unscale(grads, self.inverse)
        # Master weights must see the dtypes of the parameters, and be added unrounded.
        as_they_are = keeps_master_weights(inner_state)
        with explained(self.caller, self.by.init_inner, inner_state, params):
            updates, inner_state = self.by.inner.update(
                grads,
                inner_state,
                params if as_they_are else widen(params),
                **extra_args,
            )
        if params is not None and not as_they_are:
            updates = jax.tree_util.tree_map_with_path(
                _cast_update, updates, params, is_leaf=is_hole
            )
        return updates, inner_state

    def advanced(self, inner_state: optax.OptState) -> DynamicLossScaleState:
        """The next state."""
        advance = rule.advance if self.by.is_dynamic else rule.record
        found_inf = jnp.logical_not(self.finite)
        scalars = advance(self.scalars, found_inf, self.by.config)
        started = rule.started(scalars, self.scalars, self.by.config)
        return state_of(started, inner_state)


def loss_scaled(tx: object) -> LossScaled | None:
    """The loss scale that a transformation belongs to, or None."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, LossScaled) else None


def _cast_update(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update in the dtype of its parameter."""
    if is_hole(update):
        return update
    check_update(path, update, param, "dynamic_loss_scale")
    if dtype_of(update) == jax.dtypes.float0:
        return jnp.zeros(jnp.shape(param), dtype_of(param))
    return lax.convert_element_type(update, dtype_of(param))


def _no_update(like: ArrayLike) -> jax.Array:
    """An update that keeps a parameter's bits: adding 0 would turn -0 into 0."""
    zeros = jnp.zeros_like(like)
    return -zeros if is_inexact(like) else zeros
