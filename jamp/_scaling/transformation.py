"""The optimizers that the wrappers take, and how their updates are applied."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import shown
from .._tree import KeyPath, PyTree, dtype_of, is_half, is_inexact
from .check_gradients import check_update, is_hole
from .mesh import varying_like


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


def no_update(like: ArrayLike | jax.ShapeDtypeStruct) -> jax.Array:
    """An update that keeps a parameter's bits: adding 0 would turn -0 into 0."""
    if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None:
        # In `shard_map` over a part of the axes, JAX does not take it for an array.
        zeros = varying_like(jnp.zeros(like.shape, like.dtype), like)
    else:
        zeros = jnp.zeros_like(like)
    return -zeros if is_inexact(like) else zeros
