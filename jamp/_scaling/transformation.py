"""An optimizer in a wrapper: the gradients that it takes, the updates that it makes."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import shown
from .._tree import KeyPath, PyTree, dtype_of, is_half, is_inexact, path_text
from .mesh import zeros_like

FROZEN = "or None for a frozen one, with optax.masked inside the wrapper, not around it"
NOT_OWN = "or make the optimizer with a filter (wrt) that leaves this one out"

# What an optimizer differentiates, and a gradient from elsewhere.
CLOSURES = "closure", "grad", "grad_fn", "obj_fn", "value_fn"
NO_CLOSURES = """{caller}: {name} is not supported: as in torch, an optimizer under a \
loss scale cannot take derivatives itself, which nothing would scale and check. Train \
in float32 without a loss scale, or use an optimizer that takes none. \
optax.contrib.sam with opaque_mode=False takes one gradient of jamp.value_and_grad in \
each step."""


def is_hole(node: object) -> bool:
    """Whether a node stands for "no gradient here"."""
    return node is None or isinstance(node, optax.MaskedNode)


def as_transformation(
    inner: optax.GradientTransformation | optax.MultiSteps, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """The optimizer for a wrapper, with `**extra_args`."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    has_both = hasattr(inner, "init") and hasattr(inner, "update")
    if isinstance(inner, type) or not has_both:
        advice = " Call it first, with its arguments." if callable(inner) else ""
        raise TypeError(
            f"{name} must be an optax.GradientTransformation or an optax.MultiSteps; "
            f"got {shown(inner)}.{advice}"
        )
    return optax.with_extra_args_support(inner)


def check_no_closures(extra_args: dict[str, object], caller: str) -> None:
    """Raises ValueError if an optimizer is to take derivatives itself."""
    for name in CLOSURES:
        if extra_args.get(name) is not None:
            raise ValueError(NO_CLOSURES.format(caller=caller, name=name))


def check_gradients_match(
    grads: PyTree, params: PyTree, caller: str, *, wrapped: bool = False
) -> None:
    """Raises ValueError naming the first path where gradients and parameters differ.

    Args:
      grads: pytree of gradients.
      params: pytree of parameters. `None` and `optax.MaskedNode` in it match anything.
      caller: the beginning of the message.
      wrapped: whether an optax transformation in between may accept gradients unlike
        parameters: `None` or `optax.MaskedNode` for "no gradient here", and a leading
        axis of examples (differential privacy).
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # lookahead takes gradients of its fast parameters only

    if grads is None and params is not None:
        raise ValueError(f"{caller}: the gradients must be a pytree; got None.")

    def leaves_by_path(tree: PyTree) -> dict[str, ArrayLike | None]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hole)
        return {
            jax.tree_util.keystr(path): None if is_hole(leaf) else leaf
            for path, leaf in leaves
        }

    found, expected = leaves_by_path(grads), leaves_by_path(params)
    for path in [path for path in found if path not in expected]:
        raise ValueError(
            f"{caller}: the gradients have a leaf at {path or 'the root'} and the "
            f"parameters have none there; pass the gradients of these parameters. "
            f"Parameter paths: {_some(expected)}."
        )
    for path, param in expected.items():
        grad = found.get(path)
        if param is None or (wrapped and path in found and grad is None):
            continue
        if grad is None:
            raise ValueError(
                f"{caller}: the parameters have a leaf at {path or 'the root'} and "
                f"the gradients have none there; pass the gradients of all parameters, "
                f"{FROZEN if wrapped else NOT_OWN}. Gradient paths: {_some(found)}."
            )
        got, shape = jnp.shape(grad), jnp.shape(param)
        if shape != got and not (wrapped and shape == got[1:]):
            raise ValueError(
                f"{caller}: at {path or 'the root'} the gradient has shape {got} and "
                f"the parameter has shape {shape}; pass the gradients of these "
                "parameters."
            )
        if not _is_gradient(dtype_of(grad), dtype_of(param)):
            raise ValueError(
                f"{caller}: at {path or 'the root'} the gradient is {dtype_of(grad)} "
                f"and the parameter is {dtype_of(param)}; pass the gradients of these "
                "parameters."
            )


def _is_gradient(dtype: np.dtype, of: np.dtype) -> bool:
    """Whether a gradient can have this dtype; integers would not be unscaled."""
    if jnp.issubdtype(of, jnp.complexfloating):
        return jnp.issubdtype(dtype, jnp.inexact)
    if jnp.issubdtype(of, jnp.floating):
        return jnp.issubdtype(dtype, jnp.floating)
    return True


def check_update(path: KeyPath, update: PyTree, param: PyTree, caller: str) -> None:
    """Raises ValueError if an update does not have the shape of its parameter."""
    if is_hole(param):
        raise ValueError(
            f"{caller}: at {path_text(path)} there is an "
            "update but no parameter; pass the gradients of these parameters."
        )
    if jnp.shape(update) != jnp.shape(param):
        raise ValueError(
            f"{caller}: at {path_text(path)} the optimizer "
            f"made an update of shape {jnp.shape(update)} for a parameter of shape "
            f"{jnp.shape(param)}; were the gradients averaged over their first axis?"
        )


def _some(paths: Collection[str], most: int = 8) -> str:
    shown = ", ".join(path or "the root" for path in list(paths)[:most])
    return shown + (f", and {len(paths) - most} more" if len(paths) > most else "")


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates`, but a missing update leaves its parameter."""

    def apply(update: PyTree, param: PyTree) -> PyTree:
        if is_hole(update) or dtype_of(update) == jax.dtypes.float0:
            return param
        if is_half(param) and dtype_of(update) == jnp.float32:  # of master weights
            moved = lax.convert_element_type(param, jnp.float32) + update
            return lax.convert_element_type(moved, dtype_of(param))
        return optax.apply_updates(param, update)

    return jax.tree.map(apply, updates, params, is_leaf=is_hole)


def without_float0(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update, but zeros of the parameter's dtype for `float0`."""
    if is_hole(update) or dtype_of(update) != jax.dtypes.float0:
        return update
    check_update(path, update, param, "dynamic_loss_scale")
    return jnp.zeros(jnp.shape(param), dtype_of(param))


def cast_update(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update in the dtype of its parameter."""
    update = without_float0(path, update, param)
    if is_hole(update):
        return update
    check_update(path, update, param, "dynamic_loss_scale")
    given, dtype = dtype_of(update), dtype_of(param)
    if jnp.issubdtype(given, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        # The sum is rounded, as by optax, and not the update.
        moved = lax.convert_element_type(param, given) + update
        return lax.convert_element_type(moved, dtype) - param
    return lax.convert_element_type(update, dtype)


def no_update(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An update that keeps a parameter's bits: adding 0 would turn -0 into 0."""
    zeros = zeros_like(like)
    return -zeros if is_inexact(zeros) else zeros
