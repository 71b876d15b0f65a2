"""Gathers that pick one number of each row, as a loss picks the logit of its label.

The derivative of a gather is a scatter into zeros, and XLA fuses nothing with a
scatter: the zeros are written, read, added to and cast. Of one number in each row the
derivative is also `where(iota == index, cotangent, 0)`, the same numbers, which become
a part of the ops around them. The forward pass stays a gather.

Which gathers do so is told by their shapes: those of `take_along_axis`, and of an index
under `vmap`. In `x[jnp.arange(n), y]` the rows are indices too, which may be any.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .decision import CASTABLE, Op, Values

FEW = 8
Mode = lax.GatherScatterMode
MODES = Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS


class Pick(NamedTuple):
    """What a gather picks from an array: one element of each row along an axis."""

    axis: int
    # For each dimension of the indices but the last, the dimension of the array that it
    # is, or None for one of size 1.
    rows: tuple[int | None, ...]
    clips: bool


def pick_of(op: Op, args: Values) -> Pick | None:
    x, indices = args
    numbers, mode = param(op, "dimension_numbers"), param(op, "mode")
    if mode not in MODES or array_dtype(x) not in CASTABLE:
        return None
    if any(n != 1 for n in param(op, "slice_sizes")):
        return None
    shape, sizes = np.shape(x), np.shape(indices)[:-1]
    batching = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    rows = dict(zip(*batching, strict=True))
    if len(numbers.start_index_map) != 1:
        return None
    (axis,) = numbers.start_index_map
    of_rows = {*rows.values(), axis}
    is_one_each = all(n == 1 for d, n in enumerate(sizes) if d not in rows)
    if not is_one_each or any(n != 1 for d, n in enumerate(shape) if d not in of_rows):
        return None
    batched = _compat.is_batched(x) and _compat.is_batched(indices)
    if not batched and is_few(sizes):
        return None
    places = (rows.get(d) for d in range(len(sizes)))
    places = tuple(None if d is None else int(d) for d in places)
    return Pick(int(axis), places, mode == Mode.CLIP)


def is_few(sizes: tuple[Any, ...]) -> bool:
    """Whether indices of this shape are a few. A symbolic number may be large."""
    return all(isinstance(n, int) for n in sizes) and np.prod(sizes, dtype=int) <= FEW


def by_mask(x: jax.Array, indices: jax.Array, pick: Pick, shape: Any) -> jax.Array:
    """What a gather picks, in its result's shape, as a sum of what a mask leaves."""
    at = indices[..., 0]
    if at.dtype.itemsize < 4:  # too small to count along the axis, perhaps
        at = at.astype(jnp.int32)
    size = x.shape[pick.axis]
    if pick.clips:
        at = lax.clamp(jnp.zeros((), at.dtype), at, jnp.asarray(size - 1, at.dtype))
    rows = [d for d in pick.rows if d is not None]
    at = lax.squeeze(at, [d for d, row in enumerate(pick.rows) if row is None])
    order = sorted(range(len(rows)), key=rows.__getitem__)
    at = lax.transpose(at, order)
    at = lax.broadcast_in_dim(at, x.shape, sorted(rows))
    mask = lax.broadcasted_iota(at.dtype, x.shape, pick.axis) == at
    left = jnp.where(mask, x, jnp.zeros((), x.dtype))
    gone = [d for d in range(x.ndim) if d not in rows]
    left = lax.squeeze(
        lax.reduce_sum(left, [pick.axis]),
        [d - (d > pick.axis) for d in gone if d != pick.axis],
    )
    return lax.transpose(left, np.argsort(order)).reshape(shape)
