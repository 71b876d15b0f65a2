"""Gathers that pick one number of each row, as a loss picks the logit of its label.

The derivative of a gather is a scatter into zeros, and XLA fuses nothing with a
scatter: the zeros are written, read, added to and cast. Of one number in each row the
derivative is also `where(iota == index, cotangent, 0)`, the same numbers, which become
a part of the ops around them. The forward pass stays a gather.

Which gathers do so is told by their shapes. Where an index column counts the rows, as
in `x[jnp.arange(n), y]`, notes tell it (`index_note`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .decision import CASTABLE, Op, Values
from .notes import NOTED, NOTHING, Note, Notes
from .traits import names

FEW = 8
Mode = lax.GatherScatterMode
MODES = Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS


class Pick(NamedTuple):
    """What a gather picks from an array: one element of each row along an axis."""

    axis: int
    column: int  # of the indices, which has the places along the axis
    # For each dimension of the indices but the last, the dimension of the array that it
    # is, or None for one of size 1.
    rows: tuple[int | None, ...]
    clips: bool


def pick_of(op: Op, args: Values, notes: Notes) -> Pick | None:
    x, indices = args
    numbers, mode = param(op, "dimension_numbers"), param(op, "mode")
    if mode not in MODES or array_dtype(x) not in CASTABLE:
        return None
    if any(n != 1 for n in param(op, "slice_sizes")):
        return None
    shape, sizes = np.shape(x), np.shape(indices)[:-1]
    batching = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    rows = dict(zip(*batching, strict=True))
    columns = notes[indices].columns or [None] * len(numbers.start_index_map)
    indexed = []
    for column, (axis, row) in enumerate(
        zip(numbers.start_index_map, columns, strict=True)
    ):
        if row not in (None, *rows) and sizes[row : row + 1] == (shape[axis],):
            rows[row] = axis
        else:
            indexed.append((axis, column))
    if len(indexed) != 1:
        return None
    ((axis, column),) = indexed
    of_rows = {*rows.values(), axis}
    is_one_each = all(n == 1 for d, n in enumerate(sizes) if d not in rows)
    if not is_one_each or any(n != 1 for d, n in enumerate(shape) if d not in of_rows):
        return None
    batched = _compat.is_batched(x) and _compat.is_batched(indices)
    if not batched and is_few(sizes):
        return None
    places = (rows.get(d) for d in range(len(sizes)))
    places = tuple(None if d is None else int(d) for d in places)
    return Pick(int(axis), column, places, mode == Mode.CLIP)


def is_few(sizes: tuple[Any, ...]) -> bool:
    """Whether indices of this shape are a few. A symbolic number may be large."""
    return all(isinstance(n, int) for n in sizes) and np.prod(sizes, dtype=int) <= FEW


def picked(
    x: jax.Array, indices: jax.Array, *, pick: Pick, **params: object
) -> jax.Array:
    return _picked(x, indices, pick, tuple(params.items()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _picked(
    x: jax.Array,
    indices: jax.Array,
    pick: Pick,
    params: tuple[tuple[str, object], ...],
) -> jax.Array:
    return lax.gather_p.bind(x, indices, **dict(params))


@_picked.defjvp
def _(pick, params, primals, tangents):
    (x, indices), (tangent, _) = primals, tangents
    out = _picked(x, indices, pick, params)
    # A loop keeps the indices for the backward pass, and makes the mask anew.
    masked = functools.partial(by_mask, pick=pick, shape=np.shape(out))
    return out, jax.checkpoint(masked, prevent_cse=False)(tangent, indices)


def by_mask(x: jax.Array, indices: jax.Array, pick: Pick, shape: Any) -> jax.Array:
    """What a gather picks, in its result's shape, as a sum of what a mask leaves."""
    at = indices[..., pick.column]
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


# Arrays of integers that count the rows, on their way into an index.


INDEXING = names("concatenate convert_element_type iota lt select_n")


def index_note(op: Op, out: Any, notes: Notes) -> Note:
    """The note of the result of an op of which an index may be made.

    JAX writes `i < 0`, `i + n` and a choice between the last and `i` around each index
    of a user, and then concatenates the indices of all dimensions.
    """
    known = [notes[x] if isinstance(x, NOTED) else note_of(x) for x in op.args]
    match op.name:
        case "iota":
            note = Note(along=frozenset([param(op, "dimension")]), counts=True)
            return note if holds_count(note, out) else NOTHING
        case "convert_element_type" if holds_count(known[0], out):
            return known[0]
        case "lt" if known[0].counts and known[1].constant == 0:
            return Note(constant=0.0)
        case "select_n" if known[0].constant == 0:
            return known[1]
        case "concatenate" if any(note.counts for note in known):
            last = param(op, "dimension") == np.ndim(out) - 1
            if last and all(np.shape(x)[-1] == 1 for x in op.args):
                return Note(columns=tuple(note.row for note in known))
    return notes[out]


def holds_count(note: Note, out: Any) -> bool:
    """Whether integers count, and their dtype holds all of them."""
    if note.row is None or not jnp.issubdtype(out.dtype, jnp.integer):
        return False
    size = np.shape(out)[note.row]
    return isinstance(size, int) and size <= jnp.iinfo(out.dtype).max


def note_of(x: Any) -> Note:
    """The note of an array of NumPy's that `jnp.arange` or `jnp.zeros` could make."""
    if not np.any(x):
        return Note(constant=0.0)
    counts = np.ndim(x) == 1 and np.array_equal(x, np.arange(np.size(x)))
    return Note(along=frozenset([0]), counts=True) if counts else NOTHING
