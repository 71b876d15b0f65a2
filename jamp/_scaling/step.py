"""An optimizer step and the new parameters, in one call.

`step` exists for speed. `update` must return updates that the caller applies, so the
choice between running and skipping has to store them. `step` puts the optimizer and
`optax.apply_updates` behind one `lax.cond`, whose skipping branch returns its inputs:
without a copy, if the caller donates its buffers.
"""

from typing import Any

import optax

from .._tree import check_leaves
from .match import check_gradients_match, check_no_gradient
from .state import check_moved, explained, find_states
from .transformation import apply_updates, as_transformation
from .wrapper import loss_scaled


def step(
    tx: optax.GradientTransformation | optax.MultiSteps,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Updates the optimizer and applies the updates, in one call.

    It equals `tx.update` followed by `optax.apply_updates`, and is faster if `tx` is
    what `dynamic_loss_scale` or `static_loss_scale` returned: with donated buffers, a
    step then copies no parameters. For any other transformation, including one that
    holds a loss scale deeper inside, it makes those two calls.

    Args:
      tx: a gradient transformation.
      grads: scaled gradients, of the structure and shapes of `params`.
      opt_state: the state of `tx`.
      params: the parameters.
      **extra_args: passed on to the optimizer.

    Returns:
      The new parameters and the new optimizer state.

    Raises:
      ValueError: the gradients do not match the parameters. The message names the path.
      TypeError: `tx` is not a gradient transformation, or a gradient is not an array.

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
    if (scaled := loss_scaled(tx)) is not None:
        return scaled.step(grads, opt_state, params, **extra_args)
    tx = as_transformation(tx, "tx")
    check_leaves(grads, "jamp.step: the gradient")
    check_gradients_match(grads, params, "jamp.step", wrapped=True)
    with explained("jamp.step", tx.init, opt_state, params):
        updates, new = tx.update(grads, opt_state, params, **extra_args)
    check_moved("jamp.step", tx.init, new, opt_state, params)
    opt_state = new
    if find_states(opt_state):
        check_no_gradient(updates, grads, "jamp.step")
    return apply_updates(params, updates), opt_state
