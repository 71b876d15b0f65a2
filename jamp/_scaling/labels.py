"""Gradients and updates that have a name in a step's program, for who reads that."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from .._checks import called_at
from .._jaxprs import param
from .._tree import PyTree, T, is_inexact, path_text

# Whether loss scales label what they get. JAX keys its caches by it: without, a jitted
# update would be taken from a cache, with the labels or without them.
LABELLED = jax.make_user_context(False)
GIVEN, RETURNED = "jamp: to a loss scale", "jamp: from a loss scale"
# What these functions return, with the line that calls them, for `proof`.
SCALED, UNSCALED, UNSCALED_ = "jamp: scaled", "jamp: unscaled", "jamp: by unscale_"
OF_MASTERS = "jamp: from master weights"
LABELS = (GIVEN, RETURNED, SCALED, UNSCALED, UNSCALED_, OF_MASTERS)


def labelled(what: str, tree: T) -> T:
    """The same gradients or updates, with a name that `label_of` finds.

    Args:
      what: one of `LABELS`. The path of a leaf follows, or the line of the call.
    """
    if not LABELLED.value:
        return tree
    is_of_leaf = what in (GIVEN, RETURNED, OF_MASTERS)
    line = "" if is_of_leaf else called_at()

    def label(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        name = what + (path_text(path) if is_of_leaf else line)
        return checkpoint_name(leaf, name) if is_inexact(leaf) else leaf

    return jax.tree_util.tree_map_with_path(label, tree)


def label_of(eqn: JaxprEqn) -> tuple[str, str] | None:
    """Which label a value gets, and the path or the line of the call after it."""
    name = param(eqn, "name") or ""
    found = [label for label in LABELS if name.startswith(label)]
    return (found[0], name.removeprefix(found[0])) if found else None
