"""Leaves of trees: which take part in scaling, and in which dtype."""

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._checks import shown

T = TypeVar("T")
PyTree = Any  # a tree of arrays
KeyPath = tuple[Any, ...]  # to a leaf
Flag = jax.Array | np.bool  # bool []
NUMBERS = (bool, int, float, complex)
HALVES = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
HALF_NAMES = tuple(map(str, HALVES))
ARRAYS_ALONE = (
    " Pass arrays alone; for an Equinox model, eqx.filter(model, eqx.is_inexact_array)."
)


def path_text(path: KeyPath) -> str:
    return jax.tree_util.keystr(path) or "the root"


def other_node(
    given: PyTree, made: PyTree, path: KeyPath = ()
) -> tuple[str, str, str] | None:
    """The first node that has another type in one of two trees.

    Returns:
      Its path and the names of both types, or None.

    >>> other_node({"a": [1, (2,)]}, {"a": [1, [2]]})
    ("['a'][1]", 'tuple', 'list')
    """
    if jax.tree_util.all_leaves([given]) or jax.tree_util.all_leaves([made]):
        return None
    if type(given) is not type(made):
        names = type(given).__name__, type(made).__name__
        return jax.tree_util.keystr(path), *names
    left, right = children(given), children(made)
    for key in (key for key in left if key in right):
        if found := other_node(left[key], right[key], (*path, *key)):
            return found
    return None


def children(node: PyTree) -> dict[KeyPath, Any]:
    is_child = lambda x: x is not node
    return dict(jax.tree_util.tree_leaves_with_path(node, is_leaf=is_child))


def dtype_of(leaf: Any) -> np.dtype:
    """Dtype of an array, NumPy array or Python scalar, `float0` included."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.dtypes.canonicalize_dtype(leaf.dtype)  # 64 bits are 32 without x64
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    if not isinstance(leaf, NUMBERS):
        raise TypeError(f"a leaf must be an array or a number; got {shown(leaf)}.")
    return jnp.result_type(leaf)


def partition(
    tree: PyTree, is_chosen: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Iterable[Any]], PyTree]]:
    """Some leaves of a tree, and a function that puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_chosen(leaf)]

    def rebuilt(chosen: Iterable[Any]) -> PyTree:
        filled = dict(enumerate(leaves)) | dict(zip(places, chosen, strict=True))
        return structure.unflatten(filled.values())

    return [leaves[i] for i in places], rebuilt


def cast_floating(
    tree: T,
    dtype: np.dtype,
    kept: tuple[type, ...] = (),
    of: Container[np.dtype] | None = None,
) -> T:
    """Casts the floating arrays of a pytree, without copying those that have the dtype.

    Args:
      kept: classes of nodes that pass with everything inside.
      of: the dtypes that are cast, or None for all floating ones.
    """
    is_kept = lambda x: isinstance(x, kept)

    def cast(x: PyTree) -> PyTree:
        is_array = isinstance(
            x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
        )
        if is_kept(x) or not (is_array and jnp.issubdtype(x.dtype, jnp.floating)):
            return x
        if of is not None and x.dtype not in of:
            return x
        if x.dtype == dtype and not getattr(x, "weak_type", False):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=dtype, weak_type=False)
        return x.astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=is_kept)


def check_leaves(tree: PyTree, what: str, cure: str = ARRAYS_ALONE) -> None:
    """Raises TypeError naming the first leaf that is not an array.

    Args:
      what: the call and the argument, which begin the message.
      cure: what to do if the leaf is in a tree, which ends the message.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        of = getattr(leaf, "dtype", np.dtype(object))
        is_array = getattr(of, "kind", "V") not in "OSU"  # neither objects nor text
        if not (is_array or isinstance(leaf, NUMBERS)):
            at = path_text(path)
            raise TypeError(
                f"{what} at {at} must be an array or a number; got {shown(leaf)}."
                f"{cure if path else ''}"
            )


def is_inexact(leaf: ArrayLike) -> bool:
    """Whether a leaf is floating or complex, and so takes part in scaling."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def cloned(tree: T) -> T:
    """The same in new containers, with keys that may be used again, on purpose."""

    def clone(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array)
        is_key = is_array and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.clone(leaf) if is_key else leaf

    return jax.tree.map(clone, tree)


def widened(dtype: np.dtype) -> np.dtype:
    """float32 for floating dtypes narrower than it, every other dtype unchanged."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def is_half(leaf: ArrayLike) -> bool:
    """Whether a leaf is floating and narrower than float32."""
    return widened(dtype_of(leaf)) != dtype_of(leaf)


def widen(tree: PyTree) -> PyTree:
    """Casts the half-precision leaves of a tree to float32."""
    wide = lambda leaf: jnp.asarray(leaf, jnp.float32) if is_half(leaf) else leaf
    return jax.tree.map(wide, tree)
