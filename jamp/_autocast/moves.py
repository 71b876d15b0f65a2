"""What stays known about a value when an op moves its elements."""

from collections.abc import Sequence

import numpy as np

from .decision import Params, Values
from .notes import NOTHING, Note, Notes


def product_sides(
    primitive_name: str, args: Values, params: Params
) -> tuple[str, ...] | None:
    """The sides of a matrix product's or convolution's result."""
    if primitive_name == "conv_general_dilated":
        feature = params["dimension_numbers"].out_spec[1]
        return tuple("r" if d == feature else "l" for d in range(np.ndim(args[0])))
    contracting, batch = params["dimension_numbers"]
    if batch[0]:
        return None
    left, right = (np.ndim(a) - len(c) for a, c in zip(args, contracting, strict=True))
    return ("l",) * left + ("r",) * right


def passed_on(primitive_name: str, args: Values, params: Params, notes: Notes) -> Note:
    """The note of the result of an op that moves elements."""
    x = args[0]
    note, ndim = notes[x], np.ndim(x)
    sides = note.sides
    if primitive_name == "transpose":
        return with_dimensions(note, params["permutation"])
    if primitive_name == "squeeze":
        gone = params["dimensions"]
        note = note._replace(raised=max(0, note.raised - len(gone)))
        return with_dimensions(note, [d for d in range(ndim) if d not in gone])
    if primitive_name == "broadcast_in_dim":
        to, shape = params["broadcast_dimensions"], params["shape"]
        new = [to[d] for d in range(ndim) if np.shape(x)[d] == shape[to[d]] != 1]
        raised = note.raised + len(shape) - ndim
        return Note(note.constant, varies=frozenset(new), raised=raised)
    if primitive_name == "reshape":
        old, new = np.shape(x), params["new_sizes"]
        varies = None
        if [n for n in old if n != 1] == [n for n in new if n != 1]:
            varies = frozenset(d for d, n in enumerate(new) if n != 1)
        raised = max(0, len(new) - len(old))
        varies = varies if raised else None
        return Note(note.constant, sides and reshaped(sides, old, new), varies, raised)
    if primitive_name in ("slice", "copy"):
        return note._replace(constant=None, varies=None, raised=0)
    return NOTHING


def with_dimensions(note: Note, kept: Sequence[int]) -> Note:
    """The note of a value with these dimensions of the noted one, in this order."""
    sides, varies = note.sides, note.varies
    if varies is not None:
        varies = frozenset(new for new, d in enumerate(kept) if d in varies)
    return note._replace(sides=sides and tuple(sides[d] for d in kept), varies=varies)


def reshaped(
    sides: tuple[str, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[str, ...] | None:
    """Sides after a reshape that merges and splits dimensions of one side only.

    >>> reshaped(("l", "l", "r"), (2, 3, 4), (6, 4))
    ('l', 'r')
    >>> reshaped(("l", "r"), (6, 4), (24,)) is None
    True
    """
    result, position = [], 0
    for size in new:
        if size == 1:
            result.append("l")
            continue
        group = set()
        while position < len(old) and size > 1:
            if old[position] == 1:
                position += 1
                continue
            group.add(sides[position])
            if old[position] % size == 0:  # a part of this dimension
                old = (*old[:position], old[position] // size, *old[position + 1 :])
                size = 1
            elif size % old[position] == 0:
                size //= old[position]
                position += 1
            else:
                return None
        if len(group) != 1:
            return None
        result += group
    return tuple(result)
