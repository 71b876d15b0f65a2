"""The structure and dtypes of a state: what a step must keep, and what it may add."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import brief
from .._tree import (
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


def check_same(new: PyTree, old: PyTree, step: str) -> None:
    """Raises TypeError unless a step returned a state like the one it was given."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        problem = f"{step} must return a state of the structure that it was given; "
        if node := _other_node(new, old):
            path, has, had = node
            raise TypeError(
                f"{problem}at {path or 'the root'} it returned a node of type {has}, "
                f"and was given one of type {had}."
            )
        given, got = _paths(old), _paths(new)
        lacks = ", ".join([path for path in given if path not in got][:3])
        adds = ", ".join([path for path in got if path not in given][:3])
        raise TypeError(
            f"{problem}the state it returned lacks {lacks or 'nothing'} and adds "
            f"{adds or 'nothing'}, as {brief(jax.tree.structure(new))}."
            f"{'' if lacks else FIRST_STEP}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(old)
    for (path, was), now in zip(leaves, jax.tree.leaves(new), strict=True):
        if dtype_of(was) == jax.dtypes.float0:
            continue
        for kind, of in (("dtype", dtype_of), ("shape", jnp.shape)):
            if of(now) != of(was):
                cure = OTHER_RUN if kind == "dtype" and is_half(was) else ""
                raise TypeError(
                    f"{step} must keep the {kind} of each leaf of its state; "
                    f"{jax.tree_util.keystr(path) or 'the state'} became {of(now)} "
                    f"from {of(was)}.{cure}"
                )


def _paths(tree: PyTree) -> dict[str, ArrayLike]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_text(path): leaf for path, leaf in leaves}


def _other_node(new: PyTree, old: PyTree) -> tuple[str, str, str] | None:
    """`other_node`, but a node without leaves may become any other in a step."""
    is_empty = lambda node: not jax.tree.leaves(node)
    return other_node(new, jax.tree.map(lambda _: 0, old, is_leaf=is_empty))


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

    If `new` also drops some, or has a node of another type, it is `old`.
    """
    if jax.tree.structure(old) == jax.tree.structure(new):
        return old
    given = _paths(old)
    if not given.keys() <= _paths(new).keys() or _other_node(new, old):
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
