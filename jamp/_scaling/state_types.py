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
    other_node,
    path_text,
    widen,
)
from .master_form import keep, master_of
from .mesh import zeros_like
from .state import is_master, keeps_master_weights
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


def grown(old: T, new: T | None) -> T:
    """The state before a step, in the types of the one after it: for a skip of it.

    A step may add to its state, as the first one of `optax.monitor` does, or widen a
    leaf. What it adds is zero here. What it drops or narrows is as it was.

    Args:
      new: the state after it, or its shapes; None if they are not known.
    """

    def as_wide(old: ArrayLike, new: ArrayLike) -> ArrayLike:
        dtypes = of, dtype = dtype_of(old), dtype_of(new)
        is_plain = of != dtype and all(isinstance(x, np.dtype) for x in dtypes)
        return jnp.asarray(old, dtype) if is_plain and np.can_cast(*dtypes) else old

    old = old if new is None else extended(old, new)
    is_alike = jax.tree.structure(old) == jax.tree.structure(new)
    return jax.tree.map(as_wide, old, new) if is_alike else old


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
    a scan and a donated buffer need a state that does not. Master weights must see the
    parameters themselves. What stands beside them gets float32 gradients too.
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
    """A state of any run in the dtypes that `init` makes, as far as these are wider.

    Master weights take the form that `init` makes.
    """
    may_differ = lambda node: is_master(node) or _is_half_array(node)
    nodes = jax.tree.leaves(state, is_leaf=is_master)
    if params is None or not any(map(may_differ, nodes)):
        return state
    try:
        like = jax.eval_shape(init, params)
    except NEEDS_VALUES:
        return state
    like = extended(like, state)
    if jax.tree.structure(like) != jax.tree.structure(state):
        return state

    def converted(kept: PyTree, like: Any, param: PyTree) -> PyTree:
        same = is_hole(kept) or dtype_of(kept) == like.dtype
        return kept if same else keep(master_of(kept, param), like.dtype)

    def in_form(node: PyTree, like: PyTree) -> PyTree:
        if not is_master(node):
            return node
        trees = node.master, like.master, params
        return node._replace(master=jax.tree.map(converted, *trees, is_leaf=is_hole))

    return jax.tree.map(in_form, as_wide_as(like, state), like, is_leaf=is_master)


def as_wide_as(like: PyTree, state: T) -> T:
    """A state whose half-precision leaves have the wider dtypes of another one.

    It may have leaves that the other one lacks. If it lacks some, it does not change,
    and is refused elsewhere.
    """
    like = extended(like, state)

    def cast(leaf: PyTree, like: Any) -> PyTree:
        if not (_is_half_array(leaf) and jnp.issubdtype(like.dtype, jnp.floating)):
            return leaf
        dtype = jnp.promote_types(dtype_of(leaf), like.dtype)
        return leaf if dtype == dtype_of(leaf) else jnp.asarray(leaf, dtype)

    is_alike = jax.tree.structure(like) == jax.tree.structure(state)
    return jax.tree.map(cast, state, like) if is_alike else state


def _is_half_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_half(leaf)
