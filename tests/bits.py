"""Trees that must agree in every bit, or as nearly as two programs can."""

from collections.abc import Sequence
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


# Two programs that compute the same may round differently: XLA fuses, and takes sums in
# an order, as the processor and the rest of the program suggest. How far apart they may
# be follows from the arithmetic, or is measured.


def check_rounded(
    got: Any, expected: Any, roundings: int, largest: float | None = None
) -> None:
    """Raises AssertionError if two trees are further apart than roundings explain.

    Each of two programs rounds by half a unit in the last place, so together they move
    by a unit each time. What is not floating has to be equal.

    Args:
      roundings: how often a number is rounded on its way: for a sum of n terms, n.
      largest: the largest number that is rounded; by default, of each leaf expected.
    """
    for a, b in zip(*map(numbers, (got, expected)), strict=True):
        bound = 0.0
        if jnp.issubdtype(a.dtype, jnp.inexact):
            most = np.max(np.abs(b), initial=0) if largest is None else largest
            bound = roundings * float(jnp.finfo(a.dtype).eps) * float(most)
            a, b = (np.asarray(x, np.result_type(x, np.float64)) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def nudged(tree: Any, dtype: Any = jnp.float32, times: int = 4) -> list[Any]:
    """Trees with each floating number moved by a unit in the last place of a dtype.

    They move up or down at random, as roundings do. The dtype is the narrowest in which
    the program rounds.
    """

    def move(rng: np.random.Generator, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        up = rng.choice([-1, 1], leaf.shape) * float(jnp.finfo(dtype).eps)
        return jax.device_put((leaf * (1 + up)).astype(leaf.dtype), leaf.sharding)

    seeds = map(np.random.default_rng, range(times))
    return [jax.tree.map(lambda x, rng=rng: move(rng, x), tree) for rng in seeds]


def check_near(got: Any, expected: Any, nearby: Sequence[Any]) -> None:
    """Raises AssertionError if two programs are further apart than roundings explain.

    The bound is measured, leaf by leaf: twice as far as the largest element moves in
    `nearby`, which one program gives for inputs that are `nudged`, and one unit in the
    last place of the result. What is not floating has to have the same bits.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    for path, a, b, *moved in zip(
        paths, *map(numbers, (got, expected, *nearby)), strict=True
    ):
        at = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        if not jnp.issubdtype(b.dtype, jnp.floating):
            assert a.tobytes() == b.tobytes(), f"{at}: {a} is not {b}"
            continue
        unit = float(jnp.finfo(b.dtype).eps)
        a, b, *moved = (np.asarray(x, np.float64) for x in (a, b, *moved))
        largest = np.max(np.abs(b), initial=0)
        most = max(np.max(np.abs(x - b), initial=0) for x in moved)
        assert most <= largest / 64, f"{at}: the bound {most} says nothing of {b}"
        np.testing.assert_allclose(a, b, 0, 2 * most + unit * largest, err_msg=at)
