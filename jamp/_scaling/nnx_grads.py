"""The gradients that an NNX optimizer selects: check them, and update with them.

They are those of the parameters that its `wrt` filter selects. As in torch, no others
are checked and unscaled for it, so two optimizers may share one model and one tree of
gradients.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._checks import shown
from .._tree import PyTree, T, dtype_of, is_inexact, path_text
from .state import check_not_scaled_yet
from .transformation import check_gradients_match

Selected = nnx.State[Hashable, PyTree]


def select_gradients(optimizer: nnx.Optimizer[Any], grads: PyTree) -> Selected:
    is_pair = isinstance(optimizer, nnx.ModelAndOptimizer)
    if not isinstance(optimizer, nnx.Optimizer) or is_pair:
        raise TypeError(
            "optimizer must be an nnx.Optimizer (nnx.ModelAndOptimizer is not "
            f"supported); got {type(optimizer).__name__}."
        )
    if grads is None or jax.tree_util.all_leaves([grads]):
        raise TypeError(f"grads must be what nnx.grad returned; got {shown(grads)}.")
    check_not_scaled_yet(optimizer.opt_state, "optimizer")
    selected: Selected = nnx.state(grads, optimizer.wrt)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(selected))
    for path, leaf in leaves:
        if dtype_of(leaf) == jnp.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients. The gradient at "
                f"{path_text(path)} is float16: keep the "
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
    return selected


def check_selected(
    optimizer: nnx.Optimizer[T], model: T, grads: PyTree, selected: Selected
) -> None:
    """Raises ValueError if gradients do not match the model's parameters."""
    swapped = isinstance(model, nnx.State) and isinstance(grads, nnx.Module)
    is_module = isinstance(model, nnx.Module)
    is_leaf = model is None or jax.tree_util.all_leaves([model])
    if swapped or (is_leaf and not is_module):
        raise TypeError(
            f"model must be the NNX module to update; got {shown(model)}. Write "
            "scaler.step(optimizer, model, grads)."
        )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    check_gradients_match(nnx.as_pure(selected), params, "GradScaler.step")


def with_selected(grads: PyTree, selected: Selected) -> PyTree:
    result = jax.tree.map(lambda leaf: leaf, grads)  # new Variables
    nnx.update(result, selected)
    return result


CONTEXT = "jamp"  # of an `nnx.update_context`


class Update:
    """`optimizer.update(model, grads, **kwargs)` as a function of its gradients.

    NNX refuses to write into objects of an outer trace, so copies are updated. What an
    update adds to them, such as a Variable, `write` adds to the objects.
    """

    def __init__(
        self,
        optimizer: nnx.Optimizer[T],
        model: T,
        grads: PyTree,
        kwargs: dict[str, Any],
    ):
        self._objects, self._grads, self._kwargs = (optimizer, model), grads, kwargs
        with nnx.split_context(CONTEXT) as context:
            self._graph, state = context.split(self._objects)
        self._after = self._graph
        self.old = nnx.as_pure(state)

    def run(self, selected: Selected) -> PyTree:
        with nnx.merge_context(CONTEXT, inner=True) as context:
            optimizer, model = context.merge(self._graph, self.old)
        optimizer.update(model, with_selected(self._grads, selected), **self._kwargs)
        with nnx.split_context(CONTEXT) as context:
            self._after, state = context.split((optimizer, model))
        return nnx.as_pure(state)

    def write(self, state: PyTree) -> None:
        with nnx.merge_context(CONTEXT, inner=False) as context:
            context.merge(self._after, state)
