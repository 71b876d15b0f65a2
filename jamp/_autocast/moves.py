"""What stays known about a value when an op moves its elements."""

import itertools
from collections.abc import Sequence

import numpy as np

from .decision import Params, Values
from .notes import NOTHING, Note, Notes, Sides

Shape = tuple[int, ...]
EITHER = "lr"


def product_sides(primitive_name: str, args: Values, params: Params) -> Sides:
    """The sides of a matrix product's or convolution's result."""
    if primitive_name == "conv_general_dilated":
        feature = params["dimension_numbers"].out_spec[1]
        return tuple("r" if d == feature else "l" for d in range(np.ndim(args[0])))
    contracting, batch = params["dimension_numbers"]
    gone = map(len, contracting)
    shared = len(batch[0])
    left, right = (np.ndim(x) - n - shared for x, n in zip(args, gone, strict=True))
    return (None,) * shared + ("l",) * left + ("r",) * right


def passed_on(primitive_name: str, args: Values, params: Params, notes: Notes) -> Note:
    """The note of the result of an op that moves elements."""
    x = args[0]
    note, old = notes[x], np.shape(x)
    if primitive_name == "transpose":
        return with_dimensions(note, params["permutation"])
    if primitive_name == "squeeze":
        gone = params["dimensions"]
        note = note._replace(raised=max(0, note.raised - len(gone)))
        return with_dimensions(note, [d for d in range(len(old)) if d not in gone])
    sides, varies = note.sides, note.varies
    if varies is None:
        varies = range(len(old))
    if primitive_name == "broadcast_in_dim":
        to, new = params["broadcast_dimensions"], params["shape"]
        if sides is not None:
            kept = {to[d]: side for d, side in enumerate(sides) if old[d] == new[to[d]]}
            sides = tuple(map(kept.get, range(len(new))))
        varies = frozenset(map(to.__getitem__, varies))
        raised = note.raised + len(new) - len(old)
        return Note(note.constant, sides, varies, raised, counted=note.counted)
    if primitive_name == "reshape":
        new = params["new_sizes"]
        raised = max(0, len(new) - len(old))
        is_same = [n for n in old if n != 1] == [n for n in new if n != 1]
        marks = reshaped(tuple(map(varies.__contains__, range(len(old)))), old, new)
        varies = frozenset(d for d, mark in enumerate(marks) if mark is True)
        varies = varies if is_same and raised else None
        sides = sides and reshaped(sides, old, new)
        return Note(note.constant, sides, varies, raised, counted=note.counted)
    if primitive_name in ("slice", "copy"):
        if sides is not None and primitive_name == "slice":
            sides = tuple(None if isinstance(side, tuple) else side for side in sides)
        return note._replace(constant=None, sides=sides, varies=None, raised=0)
    return NOTHING


def with_dimensions(note: Note, kept: Sequence[int]) -> Note:
    """The note of a value with these dimensions of the noted one, in this order."""
    sides, varies = note.sides, note.varies
    if varies is not None:
        varies = frozenset(new for new, d in enumerate(kept) if d in varies)
    return note._replace(sides=sides and tuple(sides[d] for d in kept), varies=varies)


def reshaped(sides: Sides, old: Shape, new: Shape) -> Sides:
    """What is known of each dimension, after a reshape.

    A dimension that was merged has the sizes and sides of its parts. One of size 1
    stays the last of those of size 1 beside it, and a new one may be of either side.

    >>> reshaped(("l", "l", "r"), (2, 3, 4), (6, 4))
    ('l', 'r')
    >>> reshaped(("l", "r"), (6, 1), (6, 1, 1))
    ('l', 'lr', 'r')
    >>> reshaped(("l", "r"), (6, 4), (24,))
    (((6, 'l'), (4, 'r')),)
    >>> reshaped((((6, "l"), (4, "r")),), (24,), (6, 4))
    ('l', 'r')
    >>> reshaped((), (), ())
    ()
    """
    if not {*map(type, old), *map(type, new)} <= {int}:
        return around_symbolic(sides, old, new)
    parts = []
    for n, side in zip(old, sides, strict=True):
        parts += side if isinstance(side, tuple) else [(n, side)]
    result = []
    for size in reversed(new):
        left, group = size, []
        while parts and (left > 1 or (not group and parts[-1][0] == 1)):
            n, side = parts.pop()
            if n > left > 0 and n % left == 0:
                parts.append((n // left, side))
                n = left
            elif n == 0 or left % n:
                return (None,) * len(new)
            if n > 1 or size == 1:
                group.insert(0, (n, side))
            left //= n
        ends = {side for _, side in group if side is not None or size > 1}
        side = EITHER if size == 1 else None
        result.insert(0, tuple(group) if len(ends) > 1 else next(iter(ends), side))
    return tuple(result)


def around_symbolic(sides: Sides, old: Shape, new: Shape) -> Sides:
    """`reshaped` where a size is symbolic, and cannot be compared or divided.

    The first and the last dimensions that are equal keep their sides. What lies between
    is of one side, or of known sizes, or nothing is known of it.
    """
    first = _equal(old, new)
    last = _equal(old[first:][::-1], new[first:][::-1])
    part = lambda x: x[first : len(x) - last]
    known = set(part(sides))
    if len(known) == 1:
        made = (*known,) * len(part(new))
    elif all(isinstance(n, int) for n in (*part(old), *part(new))):
        made = reshaped(part(sides), part(old), part(new))
    else:
        made = (None,) * len(part(new))
    return (*sides[:first], *made, *sides[len(sides) - last :])


def _equal(old: Shape, new: Shape) -> int:
    """How many of the first dimensions are equal."""
    pairs = itertools.zip_longest(old, new)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
