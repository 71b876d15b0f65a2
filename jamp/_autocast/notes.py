"""What an autocast trace remembers about values: what they are made of, and copies.

Some facts are carried through reshapes, transposes and slices (`passed_on`). All are
kept by the identity of the value, for as long as the value lives:

    copies     the copy of a float32 value in half precision, so that it is made once
               and saved for the backward pass once, and copies in float8; for a value
               that was widened, the half-precision value that it was made of
    constant   the number that a scalar or an array filled with it holds
    sides      for the result of a matrix product or convolution, which dimensions are
               of the left operand, of the right one and of both, also after its
               elements were moved
    along      for a value that was moved, the dimensions that it had before
    widened    float32 only because JAX promoted a half-precision value
    counted    float32 only because JAX promoted integers or bools
    result     float32, and half precision for ops outside of the function it is from
    statistic  a part of a statistic that is computed in float32, and given in it
    activation made from the result of a product, and so no weight. It is noted only
               where a recipe asks
"""

import functools
import re
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .. import _compat
from .._jaxprs import param
from .call_stack import code_of
from .decision import Op
from .numbers import scalar

Dims = frozenset[int]


class Sides(NamedTuple):
    left: Dims
    right: Dims
    batch: Dims = frozenset()
    each: bool = False  # `vmap` gives each example a right operand of its own

    def turned(self) -> "Sides":
        return self._replace(left=self.right, right=self.left)


class Note(NamedTuple):
    constant: float | None = None
    sides: Sides | None = None
    along: Dims | None = None
    widened: bool = False
    counted: bool = False
    result: bool = False
    statistic: bool = False
    activation: bool = False


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
            self.have_results |= note.result
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
        self.have_results = False


# Facts about products and biases, carried through the ops that move elements.


MATVEC, EINSUM = code_of(jnp.matvec), re.compile("([^,]+),([^,]+)->([^,]*)")


def product_sides(op: Op) -> Sides:
    if op.name == "conv_general_dilated":
        right = frozenset([param(op, "dimension_numbers").out_spec[1]])
        return Sides(frozenset(range(np.ndim(op.args[0]))) - right, right)
    (contracted, _), (batch, _) = param(op, "dimension_numbers")
    n, n_left = len(batch), np.ndim(op.args[0]) - len(contracted)
    n_result = n_left + np.ndim(op.args[1]) - len(contracted) - n
    parts = range(n, n_left), range(n_left, n_result), range(n)
    left, right, batch = map(frozenset, parts)
    sides, turned = Sides(left, right, batch), is_turned(op)
    sides = sides.turned() if turned else sides
    return sides._replace(each=_compat.is_batched(op.args[0 if turned else 1]))


def is_turned(op: Op) -> bool:
    """Whether the user's right operand is the left one of a product.

    So it may be in an einsum whose result has the dimensions in another order; JAX
    writes the subscripts into the name stack. In `matvec` the matrix is the left one.
    """
    if op.known.called is MATVEC:
        return True
    names = (name.replace(" ", "") for _, name in _compat.scopes())
    for form in filter(None, map(EINSUM.fullmatch, names)):
        first, second, out = form.groups()
        free = (set(first) ^ set(second)) & set(out)
        if not out.endswith("".join(c for c in first + second if c in free)):
            return True
    return False


def passed_on(op: Op, notes: Notes) -> Note:
    """The note of the result of an op that moves elements."""
    x, name = op.args[0], op.name
    note, move = notes[x], functools.partial(moved, op)
    before = frozenset(range(np.ndim(x))) if note.along is None else note.along
    along = move(before)
    known: dict[str, Any] = {"along": along if len(along) >= len(before) else None}
    if (sides := note.sides) is not None:
        left, right, batch = map(move, sides[:3])
        made = Sides(left, right, batch, sides.each)
        if name == "transpose" and left == {np.ndim(x) - 1} and is_mapped(x):
            made = made.turned()  # the left one is the matrix, the right one the batch
        known["sides"] = made if right or not sides.right else None
    if name in ("broadcast_in_dim", "reshape"):
        return Note(note.constant, counted=note.counted, **known)
    if name in ("slice", "copy"):
        known["constant"] = None
    return note._replace(**known)


def is_mapped(x: object) -> bool:
    """Whether `vmap` was traced, and moves its own dimension to the front."""
    return not _compat.is_batched(x) and (True, "vmap") in _compat.scopes()


def moved(op: Op, dims: Dims) -> Dims:
    """Where dimensions are after an op that moves elements; one that is gone is not.

    A dimension of size 1 may be in two places after a reshape.
    """
    old = np.shape(op.args[0])
    match op.name:
        case "transpose":
            pairs = zip(param(op, "permutation"), range(len(old)), strict=True)
        case "squeeze":
            kept = [d for d in range(len(old)) if d not in param(op, "dimensions")]
            pairs = zip(kept, range(len(kept)), strict=True)
        case "broadcast_in_dim":
            new = param(op, "shape")
            to = enumerate(param(op, "broadcast_dimensions"))
            pairs = [(d, int(place)) for d, place in to if old[d] == new[place]]
        case "reshape":
            new = param(op, "new_sizes")
            start, end = equal(old, new), len(old) - equal(old[::-1], new[::-1])
            more = len(new) - len(old)
            pairs = [(d, d) for d in range(start)]
            pairs += [(d, d + more) for d in range(end, len(old))]
            if start < end and dims.issuperset(range(start, end)):  # all of one side
                pairs += [(start, d) for d in range(start, end + more)]
        case _:
            pairs = zip(range(len(old)), range(len(old)), strict=True)
    return frozenset([place for d, place in pairs if d in dims])


def equal(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many of the first dimensions are equal. A size may be symbolic."""
    n = 0
    while n < min(len(old), len(new)) and old[n] == new[n]:
        n += 1
    return n
