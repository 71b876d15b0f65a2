"""Functions that an optimizer differentiates itself, differentiated at the loss scale.

A line search and Sophia take derivatives of a loss that they are given. In float16
these need the scale like the gradients of the step: the cotangent of the loss is
multiplied by it and the gradient is divided by it again. If one element of that
gradient is not finite, all of it is nan, so that no optimizer can hide the overflow.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._tree import PyTree, dtype_of, is_inexact, partition
from . import arithmetic
from .arithmetic import InverseScale

LOSSES = ("value_fn", "obj_fn")  # functions that return the plain loss
CLOSURES = {*LOSSES, "grad_fn", "closure"}

TAKES_GRADIENTS = """{caller}: grad_fn is not supported: the optimizer would take \
gradients that the loss scale neither divides nor checks. Leave it out. With \
opaque_mode=False, optax.contrib.sam takes one gradient of jamp.value_and_grad in each \
step."""


def check_no_gradient_function(extra_args: dict[str, object], caller: str) -> None:
    """Raises ValueError for an argument that is a function of gradients."""
    if extra_args.get("grad_fn") is not None:
        raise ValueError(TAKES_GRADIENTS.format(caller=caller))


def at_scale(
    extra_args: dict[str, Any], loss_scale: jax.Array, inverse: InverseScale
) -> dict[str, Any]:
    """The functions among an optimizer's arguments, to be differentiated at a scale."""
    return {
        name: _at_scale(arg, loss_scale, inverse)
        for name, arg in extra_args.items()
        if name in LOSSES and callable(arg)
    }


def _at_scale(
    loss_fn: Callable[..., PyTree], loss_scale: jax.Array, inverse: InverseScale
) -> Callable[..., PyTree]:
    @functools.wraps(loss_fn)
    def scaled(params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        inexact, rebuilt = partition(params, is_inexact)
        value = loss_fn(rebuilt(_unscaling(inexact, inverse)), *args, **kwargs)
        return jax.tree.map(
            lambda v: _scaling(v, loss_scale) if is_inexact(v) else v, value
        )

    return scaled


@jax.custom_vjp
def _scaling(loss: jax.Array, loss_scale: jax.Array) -> jax.Array:
    """The loss, whose cotangent is multiplied by the scale."""
    del loss_scale
    return loss


def _scaling_backward(loss_scale: jax.Array, ct: jax.Array) -> tuple[PyTree, PyTree]:
    scaled = lax.convert_element_type(arithmetic.scale(ct, loss_scale), dtype_of(ct))
    return scaled, jnp.zeros_like(loss_scale)


_scaling.defvjp(lambda loss, loss_scale: (loss, loss_scale), _scaling_backward)


@jax.custom_vjp
def _unscaling(params: list[jax.Array], inverse: InverseScale) -> list[jax.Array]:
    """The parameters, whose cotangents are divided by the scale, or nan."""
    del inverse
    return params


def _unscaling_backward(
    inverse: InverseScale, cts: list[jax.Array]
) -> tuple[PyTree, PyTree]:
    finite = arithmetic.all_finite(cts)

    def unscaled(ct: jax.Array) -> jax.Array:
        wide = arithmetic.unscale(ct, inverse)
        # A product, because the tangent of a selected nan would be 0.
        checked = wide * jnp.where(finite, 1, jnp.nan).astype(wide.dtype)
        return lax.convert_element_type(checked, dtype_of(ct))

    return list(map(unscaled, cts)), jax.tree.map(jnp.zeros_like, inverse)


_unscaling.defvjp(lambda params, inverse: (params, inverse), _unscaling_backward)


def stays_finite(new: PyTree, old: PyTree) -> jax.Array:
    """Whether no derivative that a step took itself overflowed: bool [].

    Such a derivative is nan, and so is what follows from it: updates, and states of the
    shapes of parameters. A value of a line search may be inf or nan without it.

    Args:
      new, old: parameters or updates, and a state, after the step and without it.
    """
    shapes = set(map(jnp.shape, jax.tree.leaves(new[0])))
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    fine = lambda new, old: jnp.all(~jnp.isnan(new) | jnp.isnan(old))
    kept = [fine(*p) for p in pairs if is_inexact(p[0]) and jnp.shape(p[0]) in shapes]
    return functools.reduce(jnp.logical_and, kept, jnp.bool_(True))
