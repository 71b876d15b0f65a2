"""Scaled losses, and the gradients of scaled losses, around any optimizer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._checks import imported, shown
from .._tree import PyTree, T, check_leaves, dtype_of
from . import arithmetic
from .metrics import is_scaler, loss_scale
from .state import STACKED

ARRAYS_AND_REST = """ Differentiate arrays alone; for an Equinox model, write \
params, static = eqx.partition(model, eqx.is_inexact_array), pass params, and call \
eqx.combine(params, static) in the loss function."""

GOT_MODULE = """jamp.value_and_grad got an nnx.Module, and jax.grad would lose the \
changes of its forward pass; use nnx.grad, with has_aux=True, of a function of the \
model that returns ({}, loss)."""


def value_and_grad(
    fun: Callable[..., T],
    opt_state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., tuple[T, PyTree]]:
    """`jax.value_and_grad` of the scaled loss: plain loss, scaled gradients.

    The loss comes back as `fun` returned it. The gradients are those of
    `scale_loss(loss, opt_state)`. Pass them to `tx.update` or `step` without unscaling.

    The scale is the one in `opt_state` at the time of the call. So call it inside the
    training step, with that step's state, not once before the loop.

    Args:
      fun: returns a floating scalar loss, or `(loss, aux)` with `has_aux`.
      opt_state: any pytree that holds one loss scale, such as the state of an
        `optax.chain` with `dynamic_loss_scale` inside, or a whole `TrainState`.
      argnums: which arguments to differentiate, as in JAX.
      has_aux: whether `fun` returns a pair.
      allow_int: whether integer arguments are allowed, as in JAX.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)` with `has_aux`.

    Raises:
      ValueError: `opt_state` holds no loss scale, or more than one.
      TypeError: the loss is not a floating scalar, `fun` does not return a pair with
        `has_aux`, a leaf to differentiate is not an array (an Equinox model holds
        functions: partition it), or an argument is an `nnx.Module`, whose state JAX
        would lose: use `nnx.grad` of `scale_loss` for modules.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = jnp.float16(3.0)
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=1024.0)
      >>> opt_state = tx.init(params)
      >>> loss, grads = jamp.value_and_grad(lambda p: p * p, opt_state)(params)
      >>> print(loss, float(grads))
      9.0 6144.0

    PyTorch: `scaler.scale(loss).backward()`.
    """
    current = _one_scale(opt_state)
    if not callable(fun):
        raise TypeError(
            f"fun must be a function that returns the loss; got {shown(fun)}."
        )

    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, T]:
        result = fun(*args, **kwargs)
        loss: Any = result
        if has_aux:
            if not (isinstance(loss, tuple) and len(loss) == 2):
                raise TypeError(
                    "with has_aux=True, fun must return (loss, aux); got "
                    f"{type(loss).__name__}."
                )
            loss = loss[0]
        _check_loss(loss)
        return arithmetic.scale(loss, current), result

    grad_fn: Callable[..., tuple[PyTree, T]] = jax.grad(
        scaled, argnums, has_aux=True, allow_int=allow_int
    )

    @functools.wraps(fun)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[T, PyTree]:
        modules = imported("flax.nnx", "Module")
        if any(isinstance(arg, modules) for arg in (*args, *kwargs.values())):
            write = "jamp.scale_loss(loss, opt_state)"
            if is_scaler(opt_state):
                write = "scaler.scale(loss)"
            raise TypeError(GOT_MODULE.format(write))
        try:
            grads, result = grad_fn(*args, **kwargs)
        except TypeError:
            for index in np.atleast_1d(argnums):
                if -len(args) <= index < len(args):
                    what = f"jamp.value_and_grad: argument {index}"
                    check_leaves(args[index], what, ARRAYS_AND_REST)
            raise
        return result, grads

    return value_and_grad_fn


def _check_loss(loss: object) -> None:
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, float)):
        raise TypeError(f"fun must return a floating scalar loss; got {shown(loss)}.")
    if not jnp.issubdtype(dtype_of(loss), jnp.floating):
        raise TypeError(
            "fun must return a floating scalar loss; got an array of dtype "
            f"{dtype_of(loss)}."
        )


def scale_loss(loss: ArrayLike, opt_state: PyTree) -> jax.Array:
    """The loss times the scale, if you call `jax.grad` yourself.

    A scalar is promoted to float32 at least, and an array with dimensions keeps its
    dtype. In both cases the product is formed in float32, as in torch.

    Args:
      loss: number or array of any shape.
      opt_state: any pytree that holds one loss scale.

    Raises:
      TypeError: `loss` is neither a number nor an array.
      ValueError: `opt_state` holds no loss scale, or more than one.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> opt_state = jamp.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jamp.scale_loss(jnp.float16(2.0), opt_state)
      Array(131072., dtype=float32)

    PyTorch: `scaler.scale(loss)`.
    """
    current = _one_scale(opt_state)
    if not arithmetic.is_scalable(loss):
        raise TypeError(f"loss must be an array or a number; got {shown(loss)}.")
    return arithmetic.scale(loss, current)


def unscale(grads: PyTree, opt_state: PyTree) -> PyTree:
    """Scaled gradients divided by the scale, for logging.

    `tx.update` does this itself, so pass it the scaled gradients. Half-precision leaves
    come out in float32. Leaves that are not floating or complex pass.

    Args:
      grads: pytree of scaled gradients.
      opt_state: the state they were scaled with, from before `tx.update`.

    Raises:
      ValueError: `opt_state` holds no loss scale, or more than one.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=8.0)
      >>> jamp.unscale({"w": jnp.float16(4.0)}, tx.init({"w": jnp.float32(0.0)}))
      {'w': Array(0.5, dtype=float32)}

    PyTorch: `scaler.unscale_(optimizer)`, without its bookkeeping.
    """
    current = _one_scale(opt_state)
    check_leaves(grads, "jamp.unscale: the gradient")
    return arithmetic.unscale(grads, arithmetic.invert(current))


def _one_scale(opt_state: PyTree) -> jax.Array:
    current = loss_scale(opt_state)
    if jnp.shape(current) != ():
        raise ValueError(
            "the loss scale in opt_state must be one number; got shape "
            f"{jnp.shape(current)}. {STACKED}"
        )
    return current
