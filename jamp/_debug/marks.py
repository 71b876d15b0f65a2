"""Marks of values that hold an inf or a nan: small arrays, and what each belongs to.

The arrays (`Marks`) are computed with everything else, eagerly or inside a trace. The
value that each belongs to is recorded once, in a `Program`. `run_marked.py` makes both,
and `sources.py` and `swallowed.py` read them.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import _jaxprs
from .op_location import Location, Site
from .traits import COMPARING, RANKING

RunValue = jax.Array | np.ndarray  # of a run; constants may be NumPy's

RECIPROCAL = "integer_pow -1"
TO_INTEGER = "convert_element_type to an integer"

# A mark: FINE, or bits.
FINE, INF, NAN = 0, 1, 2
FRESH = 4  # an elementwise op made an inf or nan from inputs that are all finite
SWALLOWED = 8  # an op of `SWALLOWING` made a finite number of an inf
MATTERS = 16  # and the number differs from that of the largest finite number
TAKEN = np.uint8(32)  # a select takes a part of it
ROOT_MATTERS = 64  # it differs from that of the root of the largest finite number
BAD = INF | NAN

# The level of an iteration: what was noted in it, and whether a carried value is bad.
NOTED = HIDDEN, MATTERED, CHECKED = 1, 2, 3
CARRIED = 4


def can_hold_nan(value: ArrayLike) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float)
    return jnp.issubdtype(dtype, jnp.inexact)


@functools.partial(jax.jit, static_argnames="by")
def mark_of(x: jax.Array, *inputs: jax.Array, by: str = "") -> jax.Array:
    """The mark of a value: uint8 [].

    Args:
      inputs: of the op that made it, if it is elementwise.
      by: the op, if it may make a finite number of an inf.
    """
    flags = []
    if can_hold_nan(x):
        is_bad, is_nan = bad_and_nan(x)
        flags = [(INF, is_bad & ~is_nan), (NAN, is_nan)]
        if inputs and by not in RANKING:
            given = [bad_and_nan(i)[0] for i in inputs]
            flags.append((FRESH, is_bad & ~functools.reduce(jnp.logical_or, given)))
    if inputs and by and not jnp.iscomplexobj(x):
        with jax.enable_x64(True):  # scalars of a loss scale are float64
            flags += swallows(by, x, inputs)
    bits = [bit for bit, _ in flags]
    several = [jnp.broadcast_to(flag, x.shape) for _, flag in flags]
    # One reduction of all: XLA compiles it faster than several.
    anywhere = lax.reduce(several, [False] * len(bits), either, range(x.ndim))
    pairs = zip(anywhere, bits, strict=True)
    set_bits = (flag.astype(jnp.uint8) * np.uint8(bit) for flag, bit in pairs)
    return functools.reduce(jnp.bitwise_or, set_bits)


def either(some: Sequence[jax.Array], more: Sequence[jax.Array]) -> list[jax.Array]:
    return [a | b for a, b in zip(some, more, strict=True)]


def swallows(
    by: str, x: jax.Array, inputs: Sequence[jax.Array]
) -> list[tuple[int, jax.Array]]:
    """Where an inf became a finite number, and where that is another number than that
    of a large one.

    The inverse of a large number, and its exponential, may be too small for the dtype,
    and then 0 is right.
    """
    if by in RANKING:
        n = x.shape[-1] if x.ndim == inputs[0].ndim else 1
        tied = jnp.any(tied_infs(inputs[0], n))
        return [(bit, tied) for bit in (SWALLOWED, ROOT_MATTERS, MATTERS)]
    if by in (TO_INTEGER, *COMPARING):
        return beyond(by, x, inputs)
    large, half = inputs[-1] if by == "div" else inputs[0], x.dtype == jnp.float16
    is_inf, _ = bad_and_nan(large)
    hidden, limits = is_inf & ~bad_and_nan(x)[0], jnp.finfo(x.dtype)
    matters = hidden
    if by == "div":
        smallest = limits.smallest_subnormal if half else limits.tiny
        bound = np.asarray(float(limits.max) * float(smallest), x.dtype)
        hidden = hidden & (inputs[0] != 0)
        matters = hidden & (jnp.abs(inputs[0]) > bound)
    elif by == "pow":
        exponent = inputs[1].astype(jnp.float32)
        hidden = hidden & (exponent < 0)
        matters = hidden & ((exponent > -1) | ((exponent == -1) & half))
    elif by != "rsqrt" and not (by == RECIPROCAL and half):
        return [(SWALLOWED, hidden)]
    return [(SWALLOWED, hidden), (MATTERS, matters)]


def beyond(
    by: str, x: jax.Array, inputs: Sequence[jax.Array]
) -> list[tuple[int, jax.Array]]:
    """Where an inf was compared with a number that may be larger than what it stands
    for: the largest finite number, its root or its logarithm, or more."""
    is_inf = functools.reduce(jnp.logical_or, (bad_and_nan(i)[0] for i in inputs))
    limit = float(min(jnp.finfo(i.dtype).max for i in inputs))
    if by == TO_INTEGER:  # of an inf it makes the largest integer
        number, counts = jnp.float32(jnp.iinfo(x.dtype).max), is_inf
    elif x.dtype == jnp.bool_:
        left, right = map(at_least_float32, inputs)
        counts = is_inf & ((left > 0) == (right > 0))
        number = jnp.minimum(jnp.abs(left), jnp.abs(right))
    else:
        number = jnp.abs(at_least_float32(x))
        is_positive = inputs[1] > 0 if by == "clamp" else by == "min"
        counts = is_inf & ~bad_and_nan(x)[0] & ((x > 0) == is_positive)
    levels = (MATTERS, limit), (ROOT_MATTERS, limit**0.5), (SWALLOWED, math.log(limit))
    return [(bit, counts & (number > level)) for bit, level in levels]


def at_least_float32(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def tied_infs(x: jax.Array, n: int) -> jax.Array:
    """Where two infs along the last axis are both among the n largest, or might be."""
    is_bad, is_nan = bad_and_nan(x)
    high, low = (is_bad & ~is_nan & sign for sign in (x > 0, x < 0))
    many = lambda is_inf: jnp.sum(is_inf, axis=-1) >= 2
    return many(high) | (many(low) & (jnp.sum(~low, axis=-1) < n))


def bad_and_nan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Elements that are inf or nan, and those that are nan.

    Half precision is read as bits: XLA might otherwise look at the float32 value that
    it is computed from, which has not overflowed.
    """
    if jnp.iscomplexobj(x):
        parts = bad_and_nan(x.real), bad_and_nan(x.imag)
        return parts[0][0] | parts[1][0], parts[0][1] | parts[1][1]
    if x.dtype in (jnp.float16, jnp.bfloat16):
        bits = lax.bitcast_convert_type(x, jnp.uint16) & np.uint16(0x7FFF)
        infinity = np.asarray(np.inf, x.dtype).view(np.uint16)
        return bits >= infinity, bits > infinity
    if x.dtype.itemsize < 2:
        x = lax.convert_element_type(x, jnp.float32)
    return ~lax.is_finite(x), lax.ne(x, x)


def known_mark(value: ArrayLike) -> int:
    """The mark of a number that is known when the function is traced."""
    value = np.asarray(value, np.complex128)
    return NAN if np.any(np.isnan(value)) else INF if np.any(np.isinf(value)) else FINE


class Node(NamedTuple):
    """One op of a Program. Values are known by number."""

    primitive: str
    at: Location | Site
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_check: bool  # whether a loss scaler checks here that gradients are finite
    is_single: bool  # whether it makes single numbers: then all its inputs count
    inner: "Inner | None" = None
    overflows: bool = False  # whether an inf that it makes is a number too large


class Inner(NamedTuple):
    """The bodies of a scan, while or cond."""

    kind: str
    programs: "tuple[Program, ...]"
    place: int = 0  # among the inner marks of the Program around it
    n_consts: int = 0  # inputs of the body that are the same in all iterations
    skipped: int = 0  # inputs of the op that the body does not get
    n_carry: int = 0
    reverse: bool = False

    @classmethod
    def of(cls, loop: _jaxprs.Loop, kind: str, programs: "Sequence[Program]") -> Self:
        sizes = loop.n_consts, loop.skipped, loop.n_carry
        return cls(kind, tuple(programs), 0, *sizes)


class Program:
    """The ops that ran, in order, and where the mark of each value is."""

    def __init__(self):
        self.nodes: list[Node] = []
        self.made_by: dict[int, Node] = {}
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.slots: dict[int, int] = {}  # value -> place in the marks
        self.constants: set[int] = set()
        self.unseen: list[Location | Site] = []  # ops that run code of their own
        self.numbers = 0  # of values so far

    def number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def all_unseen(self) -> Iterator[Location | Site]:
        """Those of loops and branches too."""
        yield from self.unseen
        for node in self.nodes:
            for program in node.inner.programs if node.inner else ():
                yield from program.all_unseen()

    def mark(self, marks: "Marks", number: int) -> int:
        """The mark of a value."""
        slot = self.slots.get(number)
        return FINE if slot is None else int(marks.values[slot])


class Marks(NamedTuple):
    """The marks of one Program, or of all iterations of one, stacked."""

    values: jax.Array  # uint8 [slots]
    inner: tuple["Marks | Loop | Branches", ...]  # per scan ([length]), while, cond


class Loop(NamedTuple):
    """One iteration of a while loop: the first from which on a carried value was bad,
    or else the last in which the most was noted."""

    level: jax.Array  # int32 []: what was noted, 0 for nothing, and `CARRIED`
    iteration: jax.Array  # int32 []
    marks: Marks  # of that iteration


class Branches(NamedTuple):
    chosen: jax.Array  # int32 []: which of the recorded branches ran
    marks: tuple[Marks, ...]  # of each; zeros if it did not


def marks_of(program: Program, marks: Marks, numbers: Sequence[int]) -> jax.Array:
    """The marks of some values: uint8 [values]."""
    slots = [program.slots.get(number) for number in numbers]
    fine = np.uint8(FINE)
    return jnp.stack([fine if s is None else marks.values[s] for s in slots])


def holds(marks: Marks, bits: int) -> bool:
    """Whether a value has one of the marks, also in loops and branches inside."""
    arrays = [leaf for leaf in jax.tree.leaves(marks) if leaf.dtype == np.uint8]
    return any(np.any(array & np.uint8(bits)) for array in arrays)


def at(marks: Marks, place: int) -> Marks:
    """The marks of one iteration, of those that are stacked."""
    return jax.tree.map(lambda array: array[place], marks)


def runs(
    inner: Inner, kept: Marks | Loop | Branches
) -> list[tuple[Program, Marks, int | None]]:
    """The bodies that ran, in order: each with its marks, and its iteration in a loop.

    Only iterations that hold an inf or nan. Of a while loop, the one that is kept.
    """
    if isinstance(kept, Branches):
        chosen = int(kept.chosen)
        return [(inner.programs[chosen], kept.marks[chosen], None)]
    if isinstance(kept, Loop):
        each = [(int(kept.iteration), kept.marks)]
    else:
        places = range(len(kept.values))
        places = reversed(places) if inner.reverse else places
        each = ((place, at(kept, place)) for place in places)
    body = inner.programs[0]
    return [(body, here, place) for place, here in each if holds(here, BAD)]
