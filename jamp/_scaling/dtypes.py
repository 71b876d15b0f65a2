"""The dtypes of an optimizer's state: those that its update returns, from the start.

A loss scale gives its optimizer float32 gradients, also for half-precision parameters.
So a state that was made for these parameters, by `init` beside master weights or by a
run without a loss scale, would change its dtypes in the first step. A conditional, a
scan and a donated buffer need a state that does not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._tree import PyTree, T, dtype_of, is_half, widen
from .state import is_master, keeps_master_weights
from .unread import NEEDS_VALUES


def made_wide(init: Callable[[optax.Params], PyTree], params: optax.Params) -> PyTree:
    """`init(params)` with float32 in place of half precision.

    Master weights must see the parameters themselves. What stands beside them gets
    float32 gradients, as without them.
    """
    if not any(map(is_half, jax.tree.leaves(params))):
        return init(params)
    shapes = jax.eval_shape(init, params)
    if not keeps_master_weights(shapes):
        return init(widen(params))
    own = init(params)
    beside = jax.tree.leaves(shapes, is_leaf=is_master)
    if not any(is_half(leaf) for leaf in beside if not is_master(leaf)):
        return own
    choose = lambda own, wide: own if is_master(own) else wide
    return jax.tree.map(choose, own, init(widen(params)), is_leaf=is_master)


def as_made(
    state: T, init: Callable[[optax.Params], PyTree], params: optax.Params | None
) -> T:
    """A state of any run in the dtypes that `init` makes, as far as these are wider."""
    if params is None or not any(map(_is_half_array, jax.tree.leaves(state))):
        return state
    try:
        like = jax.eval_shape(init, params)
    except NEEDS_VALUES:
        return state
    return as_wide_as(like, state)


def as_wide_as(like: PyTree, state: T) -> T:
    """A state whose half-precision leaves have the wider dtypes of another one.

    If the two have other structures, it does not change, and is refused elsewhere.
    """

    def cast(leaf: PyTree, like: Any) -> PyTree:
        if not (_is_half_array(leaf) and jnp.issubdtype(like.dtype, jnp.floating)):
            return leaf
        dtype = jnp.promote_types(dtype_of(leaf), like.dtype)
        return leaf if dtype == dtype_of(leaf) else jnp.asarray(leaf, dtype)

    if jax.tree.structure(like) != jax.tree.structure(state):
        return state
    return jax.tree.map(cast, state, like)


def _is_half_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_half(leaf)
