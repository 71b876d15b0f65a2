"""Trees that must agree in every bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree, with numbers in the place of random keys."""
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def check_same_bits(got: Any, expected: Any) -> None:
    """Raises AssertionError unless two trees have one structure and the same bits."""
    paths, structure = jax.tree_util.tree_flatten_with_path(got)
    assert structure == jax.tree.structure(expected)
    for (path, _), a, b in zip(paths, numbers(got), numbers(expected), strict=True):
        at = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert a.tobytes() == b.tobytes(), f"{at}: {a} is not {b}"
