"""How far each leaf of a state moved in two runs of a step."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.typing import ArrayLike

from .._tree import PyTree, T, dtype_of, is_inexact, path_text, widened
from .state import is_scale

FACTOR = 2.0**0.25  # between the sizes of a change at one scale and at half of it
IN_NUMPY = 2**20  # elements, from which a compiled program is worth it
PARALLEL = 0.94  # the least cosine of two changes of a step that is wrong


class Moved(NamedTuple):
    """How far one leaf moved in two runs, a and b. Sizes are norms."""

    path: str
    size: int  # in elements
    a: float
    b: float
    difference: float  # the mean size of a - b, over that of a or b, the larger one
    cosine: float  # of the angle between a and b; 0 if it did not move in one of them
    broken: bool  # whether b has an inf or nan where there was none

    @property
    def factor(self) -> float:
        """How much farther it moved in b; 1 if it did not move in one of them."""
        return self.b / self.a if self.a and self.b else 1.0

    def is_scaled(self) -> bool:
        return not 1 / FACTOR < self.factor < FACTOR

    def is_parallel(self) -> bool:
        return self.cosine > PARALLEL

    def is_power(self) -> bool:
        """Whether the factor is a power of two other than 1, but for rounding."""
        power = math.log2(self.factor)
        return abs(power - round(power)) < 2.0**-6 and round(power) != 0


def leaves_of(tree: PyTree) -> Iterator[tuple[str, ArrayLike]]:
    """The leaves of a state, with their paths, without those of loss scales."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scale)
    for path, node in nodes:
        if is_scale(node):
            for inner, leaf in leaves_of(node.inner_state):
                at = path_text(path) if path else ""
                yield f"{at}.inner_state{'' if inner == 'the root' else inner}", leaf
        else:
            yield path_text(path), node


def moves(old: PyTree, a: PyTree, b: PyTree) -> Iterator[Moved]:
    rows = zip(leaves_of(old), leaves_of(a), leaves_of(b), strict=True)
    floating = [
        # One after the other: several CPU devices may wait for each other's sums.
        (path, jnp.size(start), by(measured, start, first, second))
        for (path, start), (_, first), (_, second) in rows
        if is_inexact(start) and jnp.size(start)
    ]
    for path, size, numbers in jax.device_get(floating):
        one, two, difference, inner, broken = map(float, numbers)
        cosine = inner / (one * two) if one and two else 0.0
        yield Moved(path, size, one, two, difference, cosine, bool(broken))


def parameters(tree: PyTree) -> list[PyTree]:
    """The floating leaves of a state outside of loss scales; all if there is none."""
    nodes = jax.tree.leaves(tree, is_leaf=is_scale)
    return [x for x in nodes if not is_scale(x) and is_inexact(x)] or nodes


def equal(one: PyTree, two: PyTree) -> bool:
    rows = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(bool(by(same, *row)) for row in rows)


def by(function: Callable[..., T], *arrays: ArrayLike) -> T:
    """A function of NumPy or of JAX, which has to be compiled: what is done sooner."""
    x = arrays[-1]
    if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, dtypes.extended):
        if x.size < IN_NUMPY and x.is_fully_addressable:
            with np.errstate(all="ignore"):
                return function(np, *map(np.asarray, arrays))
    return jax.block_until_ready(COMPILED[function](*arrays))


def measured(xp: Any, old: Any, a: Any, b: Any) -> list[Any]:
    """The numbers of a `Moved`, in units of the largest element of both changes."""

    def change(new: Any) -> Any:
        wide = widened(dtype_of(old))
        start = xp.where(xp.isfinite(old), old, 0).astype(wide)  # the best, from inf
        return xp.where(xp.isfinite(new), new.astype(wide) - start, 0)

    one, two = change(a), change(b)
    top = xp.maximum(xp.max(xp.abs(one)), xp.max(xp.abs(two)))
    unit = xp.where(top > 0, top, 1)
    one, two = one / unit, two / unit
    norm = lambda x: xp.sqrt(xp.sum(xp.abs(x) ** 2))
    # Not of norms: of few elements, whose signs are rounding, a norm is large.
    mean = lambda x: xp.mean(xp.abs(x))
    difference = mean(one - two) / xp.maximum(xp.maximum(mean(one), mean(two)), 1e-30)
    inner = xp.sum(xp.real(xp.conj(one) * two))
    is_same = (a == b) | ((a != a) & (b != b))  # it may have been inf before
    broken = xp.any(~xp.isfinite(b) & xp.isfinite(old) & ~is_same)
    return [norm(one), norm(two), difference, inner, broken]


def same(xp: Any, a: Any, b: Any) -> Any:
    is_nan = (a != a) & (b != b) if is_inexact(a) else False
    return xp.all((a == b) | is_nan)


COMPILED = {f: jax.jit(functools.partial(f, jnp)) for f in (measured, same)}
