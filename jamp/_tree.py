"""Pytree helpers: what counts as a gradient leaf, and how two trees differ."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer


def is_traced(value: Any) -> bool:
    """Whether a value is known only when the traced function runs."""
    return isinstance(value, Tracer)


def dtype_of(leaf: Any) -> Any:
    """Dtype of an array, NumPy array or Python scalar, `float0` included."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is floating or complex, and so takes part in scaling."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def is_hole(node: Any) -> bool:
    """Whether a node stands for "no gradient here"."""
    return node is None or isinstance(node, optax.MaskedNode)


def widened(dtype: Any) -> Any:
    """float32 for floating dtypes narrower than it, every other dtype unchanged."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def widen(tree: Any) -> Any:
    """Casts the half-precision leaves of a tree to float32."""

    def widen_leaf(leaf):
        wide = widened(dtype_of(leaf))
        return leaf if dtype_of(leaf) == wide else jnp.asarray(leaf, wide)

    return jax.tree.map(widen_leaf, tree)


def check_gradients_match(grads: Any, params: Any, caller: str) -> None:
    """Raises ValueError naming the first path where gradients and parameters differ.

    `None` and `optax.MaskedNode` stand for "no gradient here", and so does a
    parameter that is one of them. Shapes must agree, but for a leading axis of
    examples, which optax's differentially private transformations take.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast  # lookahead takes gradients of its fast parameters alone

    def leaves_by_path(tree):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_hole)
        return {
            jax.tree_util.keystr(path): None if is_hole(leaf) else jnp.shape(leaf)
            for path, leaf in leaves
        }

    found, expected = leaves_by_path(grads), leaves_by_path(params)
    for path in found.keys() - expected.keys():
        raise ValueError(
            f"{caller}: the gradients have a leaf at {path or 'the root'} and the "
            f"parameters have none there; pass the gradients of these parameters. "
            f"Parameter paths: {_some(expected)}."
        )
    for path, shape in expected.items():
        if path not in found:
            raise ValueError(
                f"{caller}: the parameters have a leaf at {path or 'the root'} and "
                f"the gradients have none there; pass the gradients of all parameters, "
                f"or mask the optimizer (optax.masked). Gradient paths: {_some(found)}."
            )
        got = found[path]
        if shape is None or got is None:
            continue
        if shape not in (got, got[1:]):
            raise ValueError(
                f"{caller}: at {path or 'the root'} the gradient has shape "
                f"{got} and the parameter has shape {shape}; pass the gradients of "
                f"these parameters."
            )


def _some(paths: Any, most: int = 8) -> str:
    shown = ", ".join(path or "the root" for path in list(paths)[:most])
    return shown + (f", and {len(paths) - most} more" if len(paths) > most else "")
