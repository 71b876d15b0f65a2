"""The structure and dtypes of a state: what a step must keep, and what it may add."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._tree import (
    HALF_NAMES,
    KeyPath,
    PyTree,
    T,
    dtype_of,
    is_half,
    is_inexact,
    other_node,
    path_text,
    widen,
)
from .master_form import keep, master_of
from .mesh import zeros_like
from .state import is_master
from .traced import NEEDS_VALUES
from .transformation import is_hole

OTHER_RUN = """ If the state is of another run, cast it first: jax.tree.map(\
lambda old, new: jnp.asarray(old, new.dtype), opt_state, tx.init(params))."""
FIRST_STEP = """ If the first step of an optimizer adds to its state, take that step \
on its own before this one."""

NO_ARRAY = "no array"


def check_same(new: PyTree, old: PyTree, step: str) -> None:
    """Raises TypeError unless a step returned a state like the one it was given."""
    typed = lambda leaf: f"{dtype_of(leaf)}{[*jnp.shape(leaf)]}"
    is_alike = jax.tree.structure(new) == jax.tree.structure(old)
    rows = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=is_alike)
    if is_alike and all(itertools.starmap(has_type_of, rows)):
        return
    if not (found := difference(new, old, typed)):
        return
    path, has, was = found
    is_wider = has.startswith("float32") and was.startswith(HALF_NAMES)
    adds = has != NO_ARRAY and len(jax.tree.leaves(new)) > len(jax.tree.leaves(old))
    raise TypeError(
        f"{step} must return a state of the structure, dtypes and shapes that it was "
        f"given; at {path or 'the root'} it returned {has}, and was given {was}."
        f"{OTHER_RUN if is_wider else FIRST_STEP if adds else ''}"
    )


def has_type_of(now: ArrayLike, was: ArrayLike) -> bool:
    if dtype_of(was) == jax.dtypes.float0:
        return True
    return dtype_of(now) == dtype_of(was) and jnp.shape(now) == jnp.shape(was)


def difference(
    given: PyTree, wanted: PyTree, shown: Callable[[Any], str]
) -> tuple[str, str, str] | None:
    """The first place where two trees differ: its path, and what each has there."""
    if node := other_node(given, wanted):
        path, has, wants = node
        return path, f"a node of type {has}", f"one of type {wants}"

    def leaves_of(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): shown(leaf) for path, leaf in leaves}

    found, expected = leaves_of(given), leaves_of(wanted)
    for path in expected | found:
        has, wants = found.get(path, NO_ARRAY), expected.get(path, NO_ARRAY)
        if has != wants:
            return path, has, wants
    if jax.tree.structure(given) == jax.tree.structure(wanted):
        return None
    return "", "static attributes of its own", "others"


def _paths(tree: PyTree) -> dict[str, ArrayLike]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_text(path): leaf for path, leaf in leaves}


def as_wide_as(like: PyTree, state: T) -> T:
    """A state whose leaves are as wide as those in the same places of another one."""
    places = _paths(like)

    def widened(path: KeyPath, leaf: ArrayLike) -> ArrayLike:
        match = places.get(path_text(path), leaf)
        if match is leaf or not (is_inexact(leaf) and is_inexact(match)):
            return leaf
        given, dtype = dtype_of(leaf), dtype_of(match)
        is_wider = given != dtype and np.can_cast(given, dtype)
        return jnp.asarray(leaf, dtype) if is_wider else leaf

    return jax.tree_util.tree_map_with_path(widened, state)


def grown(old: T, new: T | None) -> T:
    """The state before a step, in the types of the one after it: for a skip of it.

    A step may add to its state, as the first one of `optax.monitor` does, or widen a
    leaf. What it adds is zero here. What it drops or narrows is as it was.

    Args:
      new: the state after it, or its shapes; None if they are not known.
    """
    return old if new is None else as_wide_as(new, extended(old, new))


def extended(old: T, new: T) -> T:
    """`old` with zeros for the leaves that `new` adds.

    If `new` also drops some, or has a node of another type, it is `old`. But a node
    without leaves may become any other.
    """
    if jax.tree.structure(old) == jax.tree.structure(new):
        return old
    given, is_empty = _paths(old), lambda node: not jax.tree.leaves(node)
    nodes = jax.tree.map(lambda _: 0, old, is_leaf=is_empty)
    if not given.keys() <= _paths(new).keys() or other_node(new, nodes):
        return old

    def of(path: KeyPath, new: ArrayLike) -> ArrayLike:
        name = path_text(path)
        return given[name] if name in given else zeros_like(new)

    return jax.tree_util.tree_map_with_path(of, new)


def made_wide(init: Callable[[optax.Params], PyTree], params: optax.Params) -> PyTree:
    """`init(params)` with float32 in place of half precision.

    A loss scale gives its optimizer float32 gradients, so that a state in the dtypes of
    half-precision parameters would change its dtypes in the first step. A conditional,
    a scan and a donated buffer need a state that does not. Master weights see the
    parameters themselves.
    """
    state = init(params)
    if not any(map(is_half, jax.tree.leaves(params))):
        return state
    return as_wide_as(jax.eval_shape(lambda p: init(widen(p)), params), state)


def as_made(
    state: T, init: Callable[[optax.Params], PyTree], params: optax.Params | None
) -> T:
    """A state of any run in the dtypes that `init` makes, as far as these are wider.

    Master weights take the form that `init` makes.
    """
    may_differ = lambda x: is_master(x) or (hasattr(x, "dtype") and is_half(x))
    nodes = jax.tree.leaves(state, is_leaf=is_master)
    if params is None or not any(map(may_differ, nodes)):
        return state
    try:
        like = jax.eval_shape(init, params)
    except NEEDS_VALUES:
        return state
    masters = jax.tree_util.tree_leaves_with_path(like, is_leaf=is_master)
    forms = {path_text(path): node.master for path, node in masters if is_master(node)}

    def converted(kept: PyTree, like: Any, param: PyTree) -> PyTree:
        same = is_hole(kept) or dtype_of(kept) == like.dtype
        return kept if same else keep(master_of(kept, param), like.dtype)

    def in_form(path: KeyPath, node: PyTree) -> PyTree:
        form = forms.get(path_text(path)) if is_master(node) else None
        if form is None or jax.tree.structure(form) != jax.tree.structure(node.master):
            return node
        trees = node.master, form, params
        return node._replace(master=jax.tree.map(converted, *trees, is_leaf=is_hole))

    state = as_wide_as(like, state)
    return jax.tree_util.tree_map_with_path(in_form, state, is_leaf=is_master)
