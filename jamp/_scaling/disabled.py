"""`dynamic_loss_scale(enabled=False)`: the optimizer alone, with a state of both kinds.

The state has the structure of an enabled one, so a run may be saved with one kind and
resumed with the other. Both know the other's state by its scale and its mark (`rule`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._tree import PyTree, dtype_of
from . import arithmetic, rule
from .state import DynamicLossScaleState, check_state, scalars_of, state_of


def disabled(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer alone: nothing is checked or skipped, and the scale is 1."""

    def init_fn(params: optax.Params) -> DynamicLossScaleState:
        scalars = rule.init(rule.LossScaleConfig(init_scale=1.0))
        return state_of(rule.switched_off(scalars), inner.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        check_state(state, DynamicLossScaleState, "dynamic_loss_scale's update")
        scalars = scalars_of(state)
        updates = _plain(updates, scalars.loss_scale)
        if "grad" in extra_args:
            grad = _plain(extra_args["grad"], scalars.loss_scale)
            extra_args = {**extra_args, "grad": grad}
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        return updates, state_of(rule.switched_off(scalars), inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _plain(grads: PyTree, loss_scale: jax.Array) -> PyTree:
    """Gradients divided by the scale, in their dtypes, and untouched if it is 1.

    Only the first gradients after an enabled run are scaled.
    """

    def choose(old: ArrayLike, new: ArrayLike) -> ArrayLike:
        if new is old:
            return old
        return jnp.where(is_one, old, lax.convert_element_type(new, dtype_of(old)))

    is_one = loss_scale == 1
    unscaled = arithmetic.unscale(grads, arithmetic.invert(loss_scale))
    return jax.tree.map(choose, grads, unscaled)
