"""Scaled gradients that reach a loss scale, shown to `debug.check_step`."""

import jax

from .._tree import PyTree

# Called where a step is traced, with its scaled gradients and the scale; or None. JAX
# keys its caches by it: a jitted step is traced anew.
WATCHER = jax.make_user_context(None)


def watch(grads: PyTree, loss_scale: jax.Array) -> None:
    if (watcher := WATCHER.value) is not None:
        watcher(grads, loss_scale)
