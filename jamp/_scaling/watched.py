"""Scaled gradients: refused where they should not go, shown to `debug.check_step`.

Those of `value_and_grad` are recognized while they live. Those that reach a loss scale
are shown to who asks for them.
"""

import weakref

import jax
import numpy as np

from .._tree import PyTree, is_inexact, path_text
from .rule import LossScaleState

# Called where a step is traced, with its scaled gradients, the scale, and whether it is
# to count them; or None. JAX keys its caches by it: a jitted step is traced anew.
WATCHER = jax.make_user_context(None)
# `recent_skips` before a step, which shifts it if it uses the scale.
NOT_STEPPED, COUNTED = np.uint32(1), np.uint32(3)

NOT_SCALED = """{}: the gradient at {} is one that jamp.value_and_grad returned, and \
is scaled, but the optimizer has no loss scale that divides it again. Wrap it, \
jamp.dynamic_loss_scale(optimizer), and take the gradient with the state of that."""

SWAPPED = """{}: the parameter at {} is a gradient that jamp.value_and_grad returned. \
Pass jamp.step(tx, grads, opt_state, params), or tx.update(grads, opt_state, params)."""

_scaled: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def remember(grads: PyTree) -> None:
    """Makes scaled gradients recognizable, while they live."""
    for leaf in jax.tree.leaves(grads):
        if isinstance(leaf, jax.Array) and is_inexact(leaf):
            _scaled[id(leaf)] = leaf


def refuse_scaled(tree: PyTree, caller: str, problem: str) -> None:
    """Raises ValueError if a leaf is known to be a scaled gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _scaled.get(id(leaf)) is leaf:
            raise ValueError(problem.format(caller, path_text(path)))


def watch(grads: PyTree, scalars: LossScaleState) -> None:
    if (watcher := WATCHER.value) is not None:
        watcher(grads, scalars.loss_scale, scalars.recent_skips == COUNTED)
