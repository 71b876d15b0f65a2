"""Leaves: what takes part in scaling, in which dtype, and what is traced."""

from typing import Any

import jax
import jax.numpy as jnp
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


def widened(dtype: Any) -> Any:
    """float32 for floating dtypes narrower than it, every other dtype unchanged."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def is_half(leaf: Any) -> bool:
    """Whether a leaf is floating and narrower than float32."""
    return widened(dtype_of(leaf)) != dtype_of(leaf)


def widen(tree: Any) -> Any:
    """Casts the half-precision leaves of a tree to float32."""

    def widen_leaf(leaf):
        wide = widened(dtype_of(leaf))
        return leaf if dtype_of(leaf) == wide else jnp.asarray(leaf, wide)

    return jax.tree.map(widen_leaf, tree)
