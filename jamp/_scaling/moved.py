"""How far each leaf of a state moved in two runs of a step."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._tree import PyTree, dtype_of, is_inexact, path_text, widened
from .state import is_scale

FACTOR = 2.0**0.25  # between the sizes of a change at one scale and at half of it
PARALLEL = 0.94  # the least cosine of two changes of a step that is wrong


class Moved(NamedTuple):
    """How far one leaf moved in two runs, a and b. Sizes are norms."""

    path: str
    size: int  # in elements
    a: float
    b: float
    apart: float  # of a - b
    cosine: float  # of the angle between a and b; 0 if it did not move in one of them
    broken: bool  # whether b has an inf or nan where there was none

    @property
    def factor(self) -> float:
        """How much farther it moved in b; 1 if it did not move in one of them."""
        return self.b / self.a if self.a and self.b else 1.0

    @property
    def difference(self) -> float:
        return self.apart / max(self.a, self.b) if self.apart else 0.0

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
        (path, jnp.size(start), jax.block_until_ready(measured(start, first, second)))
        for (path, start), (_, first), (_, second) in rows
        if is_inexact(start) and jnp.size(start)
    ]
    for path, size, numbers in jax.device_get(floating):
        one, two, apart, inner, broken = map(float, numbers)
        cosine = inner / (one * two) if one and two else 0.0
        yield Moved(path, size, one, two, apart, cosine, bool(broken))


@jax.jit
def measured(old: jax.Array, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """The numbers of a `Moved`, in units of the largest element of both changes."""

    def change(new: jax.Array) -> jax.Array:
        is_known = jnp.isfinite(new) & jnp.isfinite(old)
        wide = widened(dtype_of(old))
        return jnp.where(is_known, new.astype(wide) - old.astype(wide), 0)

    one, two = change(a), change(b)
    top = jnp.maximum(jnp.max(jnp.abs(one)), jnp.max(jnp.abs(two)))
    unit = jnp.where(top > 0, top, 1)
    one, two = one / unit, two / unit
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.abs(x) ** 2))
    inner = jnp.sum(jnp.real(jnp.conj(one) * two))
    is_same = (a == b) | ((a != a) & (b != b))  # it may have been inf before
    broken = jnp.any(~jnp.isfinite(b) & jnp.isfinite(old) & ~is_same)
    return [norm(one), norm(two), norm(one - two), inner, broken]


@jax.jit
def same(a: jax.Array, b: jax.Array) -> jax.Array:
    is_nan = (a != a) & (b != b) if is_inexact(a) else False
    return jnp.all((a == b) | is_nan)
