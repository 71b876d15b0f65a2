"""What an autocast trace remembers about values: what they are made of, and copies.

Some facts are carried through reshapes, transposes and slices (`passed_on`). All are
kept by the identity of the value, for as long as the value lives:

    copies     the copy of a float32 value in half precision, so that it is made once
               and saved for the backward pass once, and copies in float8; for a value
               that was widened, the half-precision value that it was made of
    constant   the number that a scalar or an array filled with it holds
    sides      for the result of a matrix product or convolution, which operand each
               dimension comes from, also after its elements were moved
    varies     for a broadcast value, the dimensions that it had before, along which it
               varies. A sum of it and a product is a layer's bias if it varies along
               one side only
    raised     how many dimensions it has more than before: 1 for `b[None]`, and 0 for a
               (1, n) array
    added      the dimensions that it did not have before, and that ops of each element
               left as they were
    widened    float32 only because JAX promoted a half-precision value
    counted    float32 only because JAX promoted integers or bools
    result     float32, and half precision for ops outside of the function it is from
    statistic  a part of a statistic that is computed in float32, and given in it
    activation made from the result of a product, and so no weight. It is noted only
               where a recipe asks
    arange     the integers 0, 1, 2 ... along the one dimension in `varies`
    columns    for integers that were concatenated, the dimension of each that is such
"""

import itertools
import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._jaxprs import param
from .decision import Op
from .numbers import scalar

# For each dimension "l" or "r", or "lr" for a new one of size 1, or BATCH for one of
# both operands. A merged one has the sizes and sides of its parts, and None is unknown.
Sides = Sequence[Any]


class Note(NamedTuple):
    constant: float | None = None
    sides: Sides | None = None
    varies: frozenset[int] | None = None  # the dimensions that it had before
    raised: int = 0
    added: frozenset[int] = frozenset()
    widened: bool = False
    counted: bool = False
    result: bool = False
    statistic: bool = False
    activation: bool = False
    arange: bool = False
    columns: tuple[int | None, ...] = ()

    @property
    def along(self) -> int | None:
        return next(iter(self.varies or ()), None) if self.arange else None


NOTHING = Note()
NOTED = jax.Array, jax.Ref, Tracer
SOURCE = "source"
Fact = TypeVar("Fact")
Default = TypeVar("Default")


class Reference(weakref.ref[object]):
    """A weak reference that knows where its value was."""

    __slots__ = ("key",)
    key: int


class Memory(Generic[Fact]):
    """Facts about values, by identity, each forgotten when its value dies."""

    def __init__(self) -> None:
        self.facts: dict[int, tuple[Reference, Fact]] = {}
        memory = weakref.ref(self)

        def forget(reference: Reference) -> None:  # one for all: few objects to collect
            if (known := memory()) is not None:
                if known.facts.get(reference.key, (None,))[0] is reference:
                    del known.facts[reference.key]

        self.forget = forget

    def get(self, value: object, default: Default) -> Fact | Default:
        reference, fact = self.facts.get(id(value), (None, default))
        return fact if reference is not None and reference() is value else default

    def set(self, value: object, fact: Fact) -> None:
        reference = Reference(value, self.forget)
        reference.key = id(value)
        self.facts[reference.key] = reference, fact


class Notes:
    """Notes and copies of one trace."""

    _notes: Memory[Note]
    _copies: Memory[dict[Hashable, Any]]  # by dtype, and by other keys

    def __init__(self) -> None:
        self.clear()

    def __getitem__(self, value: object) -> Note:
        if not isinstance(value, NOTED):
            return Note(constant=scalar(value))
        return self._notes.get(value, NOTHING)

    def __setitem__(self, value: object, note: Note) -> None:
        if note != NOTHING and isinstance(value, NOTED):
            self._notes.set(value, note)

    def copy(self, value: object, key: Hashable) -> Any:
        """The copy of `value` in a dtype, or another value made of it, or None."""
        return self._copies.get(value, {}).get(key)

    def remember(self, value: object, key: Hashable, copy: object) -> None:
        copies = self._copies.get(value, None)
        if copies is None:
            if not isinstance(value, jax.Array):
                return
            self._copies.set(value, copies := {})
        copies[key] = copy

    def remember_widened(self, copy: jax.Array, value: Any) -> None:
        """Remembers the half-precision value that a float32 copy was made of."""
        self.remember(copy, value.dtype, value)
        self.remember(copy, SOURCE, value)

    def source(self, value: ArrayLike) -> ArrayLike:
        """The half-precision value that a float32 one was made of, or the value."""
        narrow = self.copy(value, SOURCE)
        return value if narrow is None else narrow

    def is_promoted(self, value: object, dtype: np.dtype) -> bool:
        """Whether JAX widened a value, which was of this dtype or not floating."""
        note = self[value]
        return note.counted or (note.widened and self.copy(value, dtype) is not None)

    def clear(self) -> None:
        self._notes, self._copies = Memory(), Memory()


# Facts about products and biases, carried through the ops that move elements.

Shape = tuple[int, ...]
EITHER, BATCH = "lr", "b"


def product_sides(op: Op) -> Sides:
    numbers = param(op, "dimension_numbers")
    if op.name == "conv_general_dilated":
        feature = numbers.out_spec[1]
        return tuple("r" if d == feature else "l" for d in range(np.ndim(op.args[0])))
    contracting, batch = numbers
    gone = map(len, contracting)
    shared = len(batch[0])
    left, right = (np.ndim(x) - n - shared for x, n in zip(op.args, gone, strict=True))
    return (BATCH,) * shared + ("l",) * left + ("r",) * right


def passed_on(op: Op, notes: Notes) -> Note:
    """The note of the result of an op that moves elements."""
    x, name = op.args[0], op.primitive.name
    note, old = notes[x], np.shape(x)
    if note.columns:
        note = note._replace(columns=())
    if name == "transpose":
        return with_dimensions(note, param(op, "permutation"))
    if name == "squeeze":
        gone = param(op, "dimensions")
        note = note._replace(raised=max(0, note.raised - len(gone)))
        return with_dimensions(note, [d for d in range(len(old)) if d not in gone])
    sides, varies = note.sides, note.varies
    if varies is None:
        varies = range(len(old))
    if name == "broadcast_in_dim":
        to, new = param(op, "broadcast_dimensions"), param(op, "shape")
        if sides is not None:
            kept = {to[d]: side for d, side in enumerate(sides) if old[d] == new[to[d]]}
            sides = tuple(map(kept.get, range(len(new))))
        arange = note.arange and all(old[d] == new[to[d]] for d in varies)
        varies = frozenset(map(to.__getitem__, varies))
        raised = note.raised + len(new) - len(old)
        held = {d for before, d in enumerate(to) if before not in note.added}
        added = frozenset(range(len(new))) - held
        made = Note(note.constant, sides, varies, raised, added, counted=note.counted)
        return made._replace(arange=True) if arange else made
    if name == "reshape":
        new = param(op, "new_sizes")
        raised = max(0, len(new) - len(old))
        is_same = [n for n in old if n != 1] == [n for n in new if n != 1]
        vary = reshaped(tuple(map(varies.__contains__, range(len(old)))), old, new)
        varies = frozenset(d for d, is_varying in enumerate(vary) if is_varying is True)
        varies = varies if is_same and raised else None
        sides = sides and reshaped(sides, old, new)
        added = added_by_reshape(note.added, old, new)
        made = Note(note.constant, sides, varies, raised, added, counted=note.counted)
        return made._replace(arange=True) if note.arange and varies else made
    if name in ("slice", "copy"):
        if sides is not None and name == "slice":
            sides = tuple(None if isinstance(side, tuple) else side for side in sides)
        gone = {"constant": None, "varies": None, "raised": 0, "arange": False}
        return note._replace(sides=sides, **gone)
    return NOTHING


def with_dimensions(note: Note, kept: Sequence[int]) -> Note:
    """The note of a value with these dimensions of the noted one, in this order."""
    sides = note.sides and tuple(note.sides[d] for d in kept)
    moved = lambda dims: frozenset(new for new, d in enumerate(kept) if d in dims)
    varies = None if note.varies is None else moved(note.varies)
    return note._replace(sides=sides, varies=varies, added=moved(note.added))


def added_by_reshape(added: Collection[int], old: Shape, new: Shape) -> frozenset[int]:
    """The dimensions that were added to a value, after a reshape.

    Where one of size 1 is new, those of size 1 beside it may be the new one too.

    >>> sorted(added_by_reshape((), (6,), (2, 3, 1)))
    [2]
    >>> sorted(added_by_reshape((), (1,), (1, 1)))
    [0, 1]
    """
    names = reshaped(["added" if d in added else "" for d in range(len(old))], old, new)
    result = {d for d, name in enumerate(names) if name in ("added", EITHER)}
    for order in (range(len(new)), reversed(range(len(new)))):
        for d in order:
            if new[d] == 1 and result & {d - 1, d + 1}:
                result.add(d)
    return frozenset(result)


def added_to_all(op: Op, notes: Notes) -> frozenset[int]:
    """The dimensions that were added to all inputs of an op, apart from numbers."""
    added = None
    for x in op.args:
        if dims := notes[x].added:
            added = dims if added is None else added & dims
        elif np.ndim(x):
            return frozenset()
    if op.name == "stack":
        axis = param(op, "axis")
        return frozenset(d + (d >= axis) for d in added or ())
    return added or frozenset()


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
