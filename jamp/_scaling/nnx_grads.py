"""The gradients of an NNX optimizer: select its own, check them, unscale them.

An optimizer owns the parameters that its `wrt` filter selects. As in torch, only their
gradients are checked and unscaled for it. So two optimizers may share one model and one
tree of gradients.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._checks import is_traced, shown
from .._tree import Flag, PyTree, T, check_leaves, dtype_of, is_inexact
from . import arithmetic, skip
from .arithmetic import InverseScale
from .state import check_not_scaled_yet
from .traced import chosen, only, reads
from .transformation import check_gradients_match

Own = nnx.State[Hashable, PyTree]


def own_gradients(optimizer: nnx.Optimizer[Any], grads: PyTree) -> Own:
    """The gradients that an optimizer will apply.

    Raises:
      TypeError: `optimizer` is not an `nnx.Optimizer`, or `grads` is not a tree.
      ValueError: a gradient is float16, none is a Variable as NNX makes them, or the
        optimizer unscales gradients itself.
      RuntimeError: there is no gradient at all.
    """
    is_pair = isinstance(optimizer, nnx.ModelAndOptimizer)
    if not isinstance(optimizer, nnx.Optimizer) or is_pair:
        raise TypeError(
            "optimizer must be an nnx.Optimizer (nnx.ModelAndOptimizer is not "
            f"supported); got {type(optimizer).__name__}."
        )
    if grads is None or jax.tree_util.all_leaves([grads]):
        raise TypeError(f"grads must be what nnx.grad returned; got {shown(grads)}.")
    check_not_scaled_yet(optimizer.opt_state, "optimizer")
    own: Own = nnx.state(grads, optimizer.wrt)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(own))
    for path, leaf in leaves:
        if dtype_of(leaf) == jnp.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients. The gradient at "
                f"{jax.tree_util.keystr(path) or 'the root'} is float16: keep the "
                "parameters in float32 and cast them on use, or use "
                "jamp.dynamic_loss_scale, which unscales in float32."
            )
    if not leaves and jax.tree.leaves(grads):
        raise ValueError(
            f"grads holds no gradient of {optimizer.wrt!r}, which the optimizer "
            "updates; pass what nnx.grad returned, not nnx.as_pure of it."
        )
    if not any(is_inexact(leaf) for _, leaf in leaves):
        raise RuntimeError("No inf checks were recorded for this optimizer.")
    return own


def check_own_gradients(
    optimizer: nnx.Optimizer[T], model: T, grads: PyTree, own: Own
) -> None:
    """Raises ValueError if gradients do not match the model's parameters.

    It raises TypeError if there is no model.
    """
    swapped = isinstance(model, nnx.State) and isinstance(grads, nnx.Module)
    is_module = isinstance(model, nnx.Module)
    is_leaf = model is None or jax.tree_util.all_leaves([model])
    if swapped or (is_leaf and not is_module):
        raise TypeError(
            f"model must be the NNX module to update; got {shown(model)}. Write "
            "scaler.step(optimizer, model, grads)."
        )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    check_leaves(params, "GradScaler.step: the parameter")
    check_gradients_match(nnx.as_pure(own), params, "GradScaler.step")


def unscale_own(
    optimizer: nnx.Optimizer[Any], grads: PyTree, inverse: InverseScale
) -> PyTree:
    """Gradients with the optimizer's own divided by the scale, in their dtypes."""
    own: Own = nnx.state(grads, optimizer.wrt)
    return with_own(grads, unscaled_as_before(own, inverse))


def unscaled_as_before(grads: T, inverse: InverseScale) -> T:
    def as_before(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if dtype_of(new) == dtype_of(old) else new.astype(dtype_of(old))

    return jax.tree.map(as_before, arithmetic.unscale(grads, inverse), grads)


def with_own(grads: PyTree, own: Own) -> PyTree:
    """The gradients with other ones for the optimizer's own."""
    result = jax.tree.map(lambda leaf: leaf, grads)  # new Variables
    nnx.update(result, own)
    return result


class ScaledStep:
    """The scaled gradients of one step, of which those that the update reads count.

    An argument named `grad`, of line searches, is a gradient like the others.
    """

    def __init__(
        self,
        optimizer: nnx.Optimizer[T],
        model: T,
        grads: PyTree,
        kwargs: dict[str, Any],
        axis_name: tuple[str, ...] | None,
    ):
        self._grads, self._kwargs = grads, kwargs
        derivatives = {name: kwargs[name] for name in kwargs if name == "grad"}
        self._given = nnx.state(grads, optimizer.wrt), derivatives
        if not any(map(is_traced, jax.tree.leaves(self._given))):
            finite = arithmetic.all_finite(self._given, axis_name)
            if not is_traced(finite) and finite:
                self.finite = finite
                return
        graph, state = nnx.split((optimizer, model))

        def update(given: tuple[Own, dict[str, PyTree]]) -> PyTree:
            optimizer, model = nnx.merge(graph, nnx.as_pure(state))  # new Variables
            optimizer.update(model, with_own(grads, given[0]), **(kwargs | given[1]))
            return nnx.as_pure(nnx.state((optimizer, model)))

        used = reads(update, self._given)
        self._given = only(used, self._given)
        self.finite = arithmetic.all_finite(chosen(used, self._given), axis_name)

    def unscaled(self, inverse: InverseScale) -> tuple[PyTree, dict[str, Any]]:
        """The gradients divided by the scale, and the arguments of the update."""
        own, derivatives = unscaled_as_before(self._given, inverse)
        return with_own(self._grads, own), self._kwargs | derivatives


def update_if(
    finite: Flag,
    optimizer: nnx.Optimizer[T],
    model: T,
    arguments: Callable[[], tuple[PyTree, dict[str, Any]]],
) -> None:
    """`optimizer.update(model, grads, **kwargs)` if finite, for `arguments()`."""

    def run(optimizer: nnx.Optimizer[T], model: T) -> None:
        grads, kwargs = arguments()
        optimizer.update(model, skip.harmless(finite, grads), **kwargs)

    if not is_traced(finite):
        if finite:
            run(optimizer, model)
        return
    graph, old = nnx.split((optimizer, model))
    old = nnx.as_pure(old)

    def run_on_copies() -> PyTree:
        copies = nnx.merge(graph, old)
        run(*copies)
        return nnx.as_pure(nnx.state(copies))

    new = skip.run_or_hold(finite, run_on_copies, lambda like: old)
    nnx.update((optimizer, model), new)
