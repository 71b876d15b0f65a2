"""An optimizer step and the new parameters, in one call.

`step` exists for speed. `update` must return updates that the caller applies, so the
choice between running and skipping has to store them. `step` puts the optimizer and
`optax.apply_updates` behind one `lax.cond`, whose skipping branch returns its inputs:
without a copy, if the caller donates its buffers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._tree import Flag, PyTree, dtype_of
from . import skip
from .foreign_state import Owner
from .state import check_places, find_states, is_scale, keeps_master_weights
from .state_types import as_made, extended
from .transformation import as_transformation, check_gradients_match
from .updates import apply_updates
from .wrapper import LossScaled


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
    step then copies no parameters. For any other transformation it makes those two
    calls. If that holds a loss scale deeper inside, a skipped step changes nothing else
    either: parameters and state are held, whatever stands behind the scale.

    Args:
      tx: a gradient transformation.
      grads: scaled gradients, of the structure and shapes of `params`.
      opt_state: the state of `tx`.
      params: the parameters.
      **extra_args: passed on to the optimizer.

    Returns:
      The new parameters and the new optimizer state.

    Raises:
      ValueError: the gradients do not match the parameters, or `tx` changes them before
        they reach its loss scale, or uses some that do not. The message names the path.
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
    scaled = getattr(getattr(tx, "update", None), "__self__", None)
    if isinstance(scaled, LossScaled):
        return scaled.step(grads, opt_state, params, **extra_args)
    tx = as_transformation(tx, "tx")
    check_gradients_match(grads, params, "jamp.step", wrapped=True)
    check_places(opt_state, "jamp.step")
    if keeps_master_weights(opt_state):
        opt_state = as_made(opt_state, tx.init, params)
    owner = Owner("jamp.step", tx.init, params)
    with owner.explained(opt_state):
        updates, new_state = tx.update(grads, opt_state, params, **extra_args)
    owner.check_moved(new_state, opt_state)
    new_params = apply_updates(params, updates)
    before, after = find_states(opt_state).values(), find_states(new_state).values()
    if len(after) != 1:
        return new_params, new_state
    # A scale that does not run in this step returns the `found_inf` of the last one.
    (old,), (new,) = before, after
    finite = new.skipped_steps == old.skipped_steps
    return held(finite, (new_params, new_state), (params, opt_state))


def held(finite: Flag, new: PyTree, old: PyTree) -> PyTree:
    """The new leaves if finite, otherwise the old ones. A loss scale always moves."""

    def chosen(new: PyTree, old: PyTree) -> PyTree:
        if new is old or is_scale(new) or jnp.shape(new) != jnp.shape(old):
            return new
        return skip.choose(finite, new, jnp.asarray(old, dtype_of(new)))

    old = extended(old, new)
    is_alike = jax.tree.structure(new) == jax.tree.structure(old)
    return jax.tree.map(chosen, new, old, is_leaf=is_scale) if is_alike else new
