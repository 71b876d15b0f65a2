"""Updates of an optimizer in a wrapper: in their dtypes, and added to parameters."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._tree import KeyPath, PyTree, dtype_of, is_half, is_inexact, path_text
from .mesh import zeros_like
from .transformation import is_hole


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


def check_shape(path: KeyPath, update: PyTree, param: PyTree) -> None:
    at = f"dynamic_loss_scale: at {path_text(path)}"
    if is_hole(param):
        raise ValueError(
            f"{at} there is an update but no parameter; pass the gradients of these "
            "parameters."
        )
    if jnp.shape(update) != jnp.shape(param):
        raise ValueError(
            f"{at} the optimizer made an update of shape {jnp.shape(update)} for a "
            f"parameter of shape {jnp.shape(param)}; were the gradients averaged over "
            "their first axis?"
        )


def without_float0(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update, but zeros of the parameter's dtype for `float0`."""
    if is_hole(update) or dtype_of(update) != jax.dtypes.float0:
        return update
    check_shape(path, update, param)
    return jnp.zeros(jnp.shape(param), dtype_of(param))


def cast_update(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update in the dtype of its parameter."""
    update = without_float0(path, update, param)
    if is_hole(update):
        return update
    check_shape(path, update, param)
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
