"""Loss scaling as an optax wrapper.

The wrapper gets scaled gradients and passes unscaled ones to the optimizer inside it.
If a gradient is not finite, nothing inside moves: the updates are zero and
`inner_state` is the one that came in.
"""

from collections.abc import Sequence

import optax

from .._checks import axis_names, flag
from . import rule
from .rule import Kind, LossScaleConfig
from .scaled import LossScaled
from .transformation import (
    as_transformation,
)

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

    Line searches (`optax.lbfgs`) work: an extra argument named `grad` must be scaled
    like the gradients, and is checked and unscaled with them; `value`, `value_fn` and
    `obj_fn` are the plain loss, and derivatives of the latter two are taken at the
    scale. Do not use `optax.value_and_grad_from_state` with it: the gradients that it
    reads back are no longer scaled.

    Args:
      inner: the optimizer, or an `optax.MultiSteps`.
      init_scale: first scale, in float32's normal range.
      growth_factor: above 1; the scale is multiplied by it to grow.
      backoff_factor: in (0, 1); the scale is multiplied by it after an overflow.
      growth_interval: finite steps in a row before the scale grows, >= 1.
      enabled: if False, the result is `inner` with a scale of 1: nothing is checked
        and nothing is skipped. A state may go from one kind to the other. The first
        step is checked, and divides by the scale of the state, since the loss was
        multiplied by it. After that the scale is 1, or `init_scale`.
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
        `grad_fn`.
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
    kind = Kind.DYNAMIC if flag("enabled", enabled) else Kind.OFF
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
    return LossScaled(inner, config, Kind.STATIC, axes).transformation()
