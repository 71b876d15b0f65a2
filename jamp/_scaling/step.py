"""An optimizer step and the new parameters, in one.

`step` exists for speed. `update` must return updates that somebody else applies, so
the choice between running and skipping has to store them. `step` puts the optimizer and
`optax.apply_updates` behind one `lax.cond`, whose skipped side returns its inputs: no
copy, if the caller donates its buffers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import shown
from .._tree import check_leaves, dtype_of, is_half
from .match import check_gradients_match, check_no_gradient, is_hole
from .state import DynamicLossScaleState, explained, find_states


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """A gradient transformation that can also apply its updates, for `step`."""

    fused_step: Callable[..., tuple[optax.Params, DynamicLossScaleState]] | None = None


def as_transformation(
    inner: Any, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """What a wrapper takes, with `**extra_args`."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    has_both = hasattr(inner, "init") and hasattr(inner, "update")
    if isinstance(inner, type) or not has_both:
        advice = " Call it first, with its arguments." if callable(inner) else ""
        raise TypeError(
            f"{name} must be an optax.GradientTransformation or an optax.MultiSteps; "
            f"got {shown(inner)}.{advice}"
        )
    return optax.with_extra_args_support(inner)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, but a missing update leaves its parameter."""

    def apply(update, param):
        if is_hole(update) or dtype_of(update) == jax.dtypes.float0:
            return param
        if is_half(param) and dtype_of(update) == jnp.float32:  # of master weights
            moved = lax.convert_element_type(param, jnp.float32) + update
            return lax.convert_element_type(moved, dtype_of(param))
        return optax.apply_updates(param, update)

    return jax.tree.map(apply, updates, params, is_leaf=is_hole)


def step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Updates the optimizer and applies the updates, in one.

    Equal to `tx.update` followed by `optax.apply_updates`, and faster when `tx` is
    what `dynamic_loss_scale` or `static_loss_scale` returned: with donated buffers a
    step then copies no parameters. For any other transformation, one that holds a
    loss scale deeper inside included, it is those two calls.

    Args:
      tx: a gradient transformation.
      grads: scaled gradients, of the structure and shapes of `params`.
      opt_state: the state of `tx`.
      params: the parameters.
      **extra_args: passed on to the optimizer.

    Returns:
      The new parameters and the new optimizer state.

    Raises:
      ValueError: the gradients do not match the parameters; the path is named.
      TypeError: `tx` is not a gradient transformation; a gradient is no array.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = {"w": jnp.ones(2)}
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=8.0)
      >>> opt_state = tx.init(params)
      >>> grads = {"w": jnp.array([8.0, jnp.inf])}
      >>> params, opt_state = jamp.step(tx, grads, opt_state, params)
      >>> print(params["w"], jamp.loss_scale(opt_state))
      [1. 1.] 4.0

    PyTorch: `scaler.step(optimizer); scaler.update()`.
    """
    if params is None:
        raise ValueError("params must be the parameters to step; got None.")
    if isinstance(tx, LossScaledTransformation) and tx.fused_step is not None:
        return tx.fused_step(grads, opt_state, params, **extra_args)
    tx = as_transformation(tx, "tx")
    check_leaves(grads, "jamp.step: the gradient")
    check_gradients_match(grads, params, "jamp.step", wrapped=True)
    with explained("jamp.step", tx.init, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    if find_states(opt_state):
        check_no_gradient(updates, grads, "jamp.step")
    return apply_updates(params, updates), opt_state
