"""Loss scaling as an optax wrapper.

The wrapper sees scaled gradients and hands unscaled ones to the optimizer inside it.
When a gradient is not finite nothing inside moves: the updates are zero and
`inner_state` is the one that came in.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import axis_names, flag
from .._tree import check_leaves, dtype_of, is_half, is_inexact, widen
from . import arithmetic
from . import health as _health
from .arithmetic import LossScaleConfig, LossScaleState
from .health import Health
from .match import check_gradients_match, check_update, is_hole
from .skip import harmless, run_or_hold
from .state import (
    DynamicLossScaleState,
    check_not_scaled_yet,
    check_not_stacked,
    check_state,
    explained,
    keeps_master_weights,
    part,
)
from .step import LossScaledTransformation, apply_updates, as_transformation


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
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

    Inside the wrapper all is float32: half-precision gradients are unscaled in
    float32, and `inner` sees half-precision parameters as float32. The updates that
    come out have the dtype of the parameters (with `master_weights` inside, float32).

    What must see unscaled gradients goes inside, clipping above all:
    `dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.), optax.adamw(3e-4)))`.
    Around `optax.MultiSteps`, a bad microbatch is dropped alone. The other way round
    `MultiSteps` adds scaled gradients unchecked, and keeps an inf in its mean for good.
    `optax.masked` and `multi_transform` go inside too: around the wrapper, `masked`
    hands on scaled gradients as updates of what it leaves out.

    Line searches (`optax.lbfgs`) work: an extra argument named `grad` is taken to be
    scaled like the gradients and is unscaled with them; `value` and `value_fn` are
    the plain loss. Do not use `optax.value_and_grad_from_state` with it: what that
    reads back is no longer scaled.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      init_scale: first scale, in float32's normal range.
      growth_factor: > 1; what the scale is multiplied by when it grows.
      backoff_factor: in (0, 1); what it is multiplied by after an overflow.
      growth_interval: finite steps in a row before the scale grows, >= 1.
      enabled: if False, the result is `inner` with a scale of 1 beside it: nothing is
        checked and nothing is skipped.
      min_scale: floor when backing off. At 0 the floor is 2**-126.
      max_scale: ceiling when growing.
      hysteresis: how many overflows since the last growth it takes to back off
        (Megatron-LM's rule). Overflows before that are skipped at the same scale.
      axis_name: mapped axis or axes (`shard_map`, `pmap`) over which an overflow on
        one replica skips the step on all. Under plain jit leave it out: a sharded
        gradient is one array there.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `DynamicLossScaleState` as state.

    Raises:
      ValueError: an argument is out of its range; `inner` holds a loss scale already;
        the gradients given to `update` do not match the parameters.
      TypeError: `inner` is not a gradient transformation, or a number is not one.

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
        return _disabled(inner)

    def next_scale(state, found_inf):
        return arithmetic.update(state, found_inf, config)

    return _loss_scaled(inner, config, next_scale, axis_name)


def static_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: float,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a loss scale that never changes.

    The fixed sibling of `dynamic_loss_scale`: the same state, the same skipping of
    steps whose gradients are not finite.

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
    arithmetic.check_scale("loss_scale", loss_scale)
    config = LossScaleConfig(init_scale=loss_scale)
    return _loss_scaled(inner, config, lambda state, found_inf: state, axis_name)


def _loss_scaled(inner, config, next_scale, axis_name):
    inner = as_transformation(inner)

    axis_name = axis_names(axis_name)

    def init_inner(params):
        if any(map(is_half, jax.tree.leaves(params))):
            if not keeps_master_weights(jax.eval_shape(inner.init, params)):
                params = widen(params)
        return inner.init(params)

    def init_fn(params):
        check_leaves(params, "dynamic_loss_scale's init: the parameter")
        inner_state = init_inner(params)
        check_not_scaled_yet(inner_state, "inner")
        return _initial_state(config, inner_state)

    def check(caller, grads, state, params):
        check_state(state, DynamicLossScaleState, caller)
        scaling = LossScaleState(*part(state, LossScaleState))
        health = Health(*part(state, Health))
        check_not_stacked(scaling._asdict() | health._asdict(), caller)
        check_leaves(grads, f"{caller}: the gradient")
        if params is not None:
            check_leaves(params, f"{caller}: the parameter")
            check_gradients_match(grads, params, caller, wrapped=True)
        return scaling, health

    def run_inner(caller, grads, inverse, state, params, extra_args):
        if "grad" in extra_args:
            grad = arithmetic.unscale(extra_args["grad"], inverse)
            extra_args = {**extra_args, "grad": grad}
        grads = arithmetic.unscale(grads, inverse)
        # Master weights must see the dtypes of the parameters, and be added unrounded.
        as_they_are = keeps_master_weights(state.inner_state)
        with explained(caller, init_inner, state.inner_state, params):
            updates, inner_state = inner.update(
                grads,
                state.inner_state,
                params if as_they_are else widen(params),
                **extra_args,
            )
        if params is not None and not as_they_are:
            updates = jax.tree_util.tree_map_with_path(
                _cast_update, updates, params, is_leaf=is_hole
            )
        return updates, inner_state

    def advance(scaling, health, finite, inner_state):
        found_inf = jnp.logical_not(finite)
        scaling = next_scale(scaling, found_inf)
        health = _health.record(health, found_inf, scaling.loss_scale, config)
        return DynamicLossScaleState(
            **scaling._asdict(), **health._asdict(), inner_state=inner_state
        )

    def update_fn(updates, state, params=None, **extra_args):
        caller = "dynamic_loss_scale's update"
        scaling, health = check(caller, updates, state, params)
        finite = arithmetic.all_finite(updates, axis_name)
        inverse = arithmetic.invert(scaling.loss_scale)
        grads = harmless(finite, updates)
        run = lambda: run_inner(caller, grads, inverse, state, params, extra_args)

        def skip(like):
            return jax.tree.map(_no_update, like()[0]), state.inner_state

        updates, inner_state = run_or_hold(finite, run, skip)
        return updates, advance(scaling, health, finite, inner_state)

    def fused_step(grads, state, params, **extra_args):
        scaling, health = check("jamp.step", grads, state, params)
        finite = arithmetic.all_finite(grads, axis_name)
        inverse = arithmetic.invert(scaling.loss_scale)
        grads = harmless(finite, grads)

        def run():
            updates, inner_state = run_inner(
                "jamp.step", grads, inverse, state, params, extra_args
            )
            return apply_updates(params, updates), inner_state

        params, inner_state = run_or_hold(
            finite, run, lambda _: (params, state.inner_state)
        )
        return params, advance(scaling, health, finite, inner_state)

    tx = LossScaledTransformation(init_fn, update_fn)
    tx.fused_step = fused_step
    return tx


def _initial_state(
    config: LossScaleConfig, inner_state: optax.OptState
) -> DynamicLossScaleState:
    scaling, health = arithmetic.init(config), _health.init()
    return DynamicLossScaleState(
        **scaling._asdict(), **health._asdict(), inner_state=inner_state
    )


def _cast_update(path: Any, update: Any, param: Any) -> Any:
    """The update in the dtype of its parameter."""
    if is_hole(update):
        return update
    check_update(path, update, param, "dynamic_loss_scale")
    if dtype_of(update) == jax.dtypes.float0:
        return jnp.zeros(jnp.shape(param), dtype_of(param))
    return lax.convert_element_type(update, dtype_of(param))


def _disabled(inner: Any) -> optax.GradientTransformationExtraArgs:
    inner = as_transformation(inner)

    def init_fn(params):
        return _initial_state(LossScaleConfig(init_scale=1.0), inner.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        check_state(state, DynamicLossScaleState, "dynamic_loss_scale's update")
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, state._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _no_update(like: Any) -> jax.Array:
    """What added to any parameter leaves its bits: 0 would turn -0 into 0."""
    zeros = jnp.zeros_like(like)
    return -zeros if is_inexact(like) else zeros
