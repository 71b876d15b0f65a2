"""An optimizer in a wrapper, and gradients that match its parameters."""

from collections.abc import Collection
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._checks import shown
from .._tree import PyTree, check_leaves, dtype_of, path_text

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


def without_closures(extra_args: dict[str, Any], caller: str) -> dict[str, Any]:
    """The arguments, of which an optimizer may ignore those that it must not use."""

    def refused(name: str) -> Any:
        message = NO_CLOSURES.format(caller=caller, name=name)
        return jax.tree.map(lambda _: Unusable(message), extra_args[name])

    given = {name for name in CLOSURES if extra_args.get(name) is not None}
    return extra_args | {name: refused(name) for name in given}


class Unusable:
    """In the place of a function or an array: whoever uses it gets an error."""

    def __init__(self, message: str):
        self._message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(self._message)

    # What JAX and Python ask of an array.
    dtype = shape = property(__call__)
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __call__
    __truediv__ = __rtruediv__ = __matmul__ = __pow__ = __neg__ = __abs__ = __call__


def check_gradients_match(
    grads: PyTree, params: PyTree, caller: str, *, wrapped: bool = False
) -> None:
    """Raises ValueError naming the first path where gradients and parameters differ.

    It raises TypeError for a leaf that is not an array.

    Args:
      params: or None if the caller has none. `None` and `optax.MaskedNode` in it match
        anything.
      wrapped: whether an optax transformation in between may accept gradients unlike
        parameters: `None` or `optax.MaskedNode` for "no gradient here", and a leading
        axis of examples (differential privacy).
    """
    check_leaves(grads, f"{caller}: the gradient")
    if params is None:
        return
    check_leaves(params, f"{caller}: the parameter")
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # lookahead takes gradients of its fast parameters only
    if grads is None:
        raise ValueError(f"{caller}: the gradients must be a pytree; got None.")

    def leaves_by_path(tree: PyTree) -> dict[str, ArrayLike | None]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hole)
        return {path_text(path): None if is_hole(x) else x for path, x in leaves}

    found, expected = leaves_by_path(grads), leaves_by_path(params)
    for path in [path for path in found if path not in expected]:
        raise ValueError(
            f"{caller}: the gradients have a leaf at {path} and the parameters have "
            f"none there; pass the gradients of these parameters. "
            f"Parameter paths: {_some(expected)}."
        )
    for path, param in expected.items():
        grad = found.get(path)
        if param is None or (wrapped and path in found and grad is None):
            continue
        if grad is None:
            raise ValueError(
                f"{caller}: the parameters have a leaf at {path} and the gradients "
                f"have none there; pass the gradients of all parameters, "
                f"{FROZEN if wrapped else NOT_OWN}. Gradient paths: {_some(found)}."
            )
        got, shape = jnp.shape(grad), jnp.shape(param)
        of, dtype = dtype_of(grad), dtype_of(param)
        if shape != got and not (wrapped and shape == got[1:]):
            has, wants = f"has shape {got}", f"has shape {shape}"
        elif not _is_gradient(of, dtype):
            has, wants = f"is {of}", f"is {dtype}"
        else:
            continue
        raise ValueError(
            f"{caller}: at {path} the gradient {has} and the parameter {wants}; "
            "pass the gradients of these parameters."
        )


def _is_gradient(dtype: np.dtype, of: np.dtype) -> bool:
    """Whether a gradient can have this dtype; integers would not be unscaled."""
    if jnp.issubdtype(of, jnp.complexfloating):
        return jnp.issubdtype(dtype, jnp.inexact)
    if jnp.issubdtype(of, jnp.floating):
        return jnp.issubdtype(dtype, jnp.floating)
    return True


def _some(paths: Collection[str], most: int = 8) -> str:
    shown = ", ".join(list(paths)[:most])
    return shown + (f", and {len(paths) - most} more" if len(paths) > most else "")
