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
import numpy as np
import optax

from .._tree import PyTree, T, dtype_of, is_half, widen
from .state import is_master, keeps_master_weights


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


def settled(update: Callable[[T], T], state: T) -> T:
    """A state in the dtypes that an update returns, as far as these are wider.

    Args:
      update: from a state to the next one. It is traced.
      state: of any run.
    """
    while any(map(_is_half_array, jax.tree.leaves(state))):
        new = jax.eval_shape(update, state)
        if jax.tree.structure(new) != jax.tree.structure(state):
            break  # it is refused when it is used
        wider = jax.tree.map(_as_wide_as, state, new)
        if not _changed(wider, state):
            break
        state = wider
    return state


def _as_wide_as(leaf: PyTree, new: Any) -> PyTree:
    if not (_is_half_array(leaf) and jnp.issubdtype(new.dtype, jnp.floating)):
        return leaf
    dtype = jnp.promote_types(dtype_of(leaf), new.dtype)
    return leaf if dtype == dtype_of(leaf) else jnp.asarray(leaf, dtype)


def _changed(new: PyTree, old: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return any(a is not b for a, b in pairs)


def _is_half_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and is_half(leaf)
