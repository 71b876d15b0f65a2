"""What an autocast trace remembers of the values that it has seen.

By identity of the value and as long as the value lives:

    casts      the copy of a float32 value in half precision, so that it is made once
               and saved for the backward pass once; and for a value that was widened,
               the half-precision value that it was made of
    constant   the number that a scalar or an array filled with it holds
    sides      for the result of a matrix product or convolution, which operand each
               dimension comes from
    varies     for a broadcast value, the dimensions along which it varies. A sum of it
               and a product is a layer's bias if it varies along one side alone
    raised     it had fewer dimensions before: `b[None]`, and not a (1, n) array
    widened    float32 only because JAX promoted a half-precision value
    result     float32, and half precision for ops outside of the function it is from
"""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import dtype_of
from .._tree import HALVES
from .sources import called_function, code_of


class Note(NamedTuple):
    constant: float | None = None
    sides: tuple[str, ...] | None = None  # "l" or "r" for each dimension
    varies: frozenset[int] | None = None  # the dimensions along which it varies
    raised: bool = False
    widened: bool = False
    result: bool = False


NOTHING = Note()


class Memory:
    """Facts about values, by identity, each forgotten when its value dies."""

    def __init__(self):
        self.facts: dict[int, tuple[weakref.ref, Any]] = {}

    def get(self, value, default):
        reference, fact = self.facts.get(id(value), (None, default))
        return fact if reference is not None and reference() is value else default

    def set(self, value, fact):
        key, facts = id(value), weakref.ref(self)

        def forget(reference):
            if (memory := facts()) is not None:
                if memory.facts.get(key, (None,))[0] is reference:
                    del memory.facts[key]

        self.facts[key] = weakref.ref(value, forget), fact


class Notes:
    """Notes and casts of one trace."""

    def __init__(self):
        self._notes, self._casts = Memory(), Memory()

    def __getitem__(self, value) -> Note:
        if not isinstance(value, jax.Array):
            return Note(constant=scalar(value))
        return self._notes.get(value, NOTHING)

    def __setitem__(self, value, note: Note):
        if note != NOTHING and isinstance(value, jax.Array):
            self._notes.set(value, note)

    def cast(self, value, dtype):
        """The copy of `value` in `dtype`, or None."""
        return self._casts.get(value, {}).get(dtype)

    def remember_cast(self, value, copy):
        copies = self._casts.get(value, None)
        if copies is None:
            self._casts.set(value, copies := {})
        copies[copy.dtype] = copy

    def clear(self):
        self._notes, self._casts = Memory(), Memory()


def scalar(value) -> float | None:
    """The number in a literal; arrays are not read, for that would wait for them."""
    if isinstance(value, jax.Array) or not hasattr(value, "dtype"):
        return None
    if dtype_of(value) is None or np.ndim(value):  # None for a reference or a token
        return None
    return float(value) if jnp.issubdtype(value.dtype, np.floating) else None


def parameters_of(function) -> tuple[str, ...]:
    code = code_of(function)
    n = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    return () if code is None else code.co_varnames[:n]


# Functions by which a user makes an array of one number.
FILLING = frozenset(
    map(code_of, (jnp.zeros, jnp.ones, jnp.full, jnp.empty, jnp.broadcast_to, lax.full))
)


def is_filled(number) -> bool:
    """Whether the broadcast of a number is an array that a user made.

    In torch a number follows the arrays that it meets, and `torch.zeros(4)` does not:
    an accumulator that starts with it stays float32.
    """
    if np.ndim(number) or dtype_of(number) != jnp.float32:
        return False
    return called_function(_compat.source_codes()) in FILLING


# Functions that give the dtype that they are asked for, and those that do not.
STACKING = ("block", "concatenate", "dstack", "hstack", "stack", "vstack")
TYPED = frozenset(
    code_of(function)
    for name, function in vars(jnp).items()
    if name not in STACKING and "dtype" in parameters_of(function)
)


def is_weak_array(x) -> bool:
    """Whether JAX is about to cast an array as if it were a Python number.

    To JAX `jnp.full((4,), 2.0)` and `jnp.arange(4) * 0.1` are float32 for want of a
    better dtype, and take that of the arrays that they meet. To torch they are float32.
    """
    if np.ndim(x) == 0 or dtype_of(x) != jnp.float32 or not jax.typeof(x).weak_type:
        return False
    return called_function(_compat.source_codes()) not in TYPED


def fits(number: float, dtype) -> bool:
    """Whether the number survives in `dtype`: a literal such as -1e10 or 1e-9 may not.

    >>> fits(0.5, jnp.float16), fits(-1e10, jnp.float16), fits(1e-9, jnp.float16)
    (True, False, False)
    """
    limits = jnp.finfo(dtype)
    usual = float(limits.tiny) <= abs(number) <= float(limits.max)
    return usual or number == 0 or not np.isfinite(number)


def holds(dtype, number) -> bool:
    """Whether a number stays finite in half precision, as a mask of -1e10 does not.

    >>> number = np.float32(-1e10)
    >>> holds(jnp.float16, number), holds(jnp.bfloat16, number)
    (False, True)
    """
    if dtype not in HALVES or scalar(number) is None or not np.isfinite(number):
        return True
    return abs(float(number)) <= float(jnp.finfo(dtype).max)


# Numbers in JAX's own functions, of log10 and of norms whose order is no power of 2, by
# what they are rounded to.
NUMBERS = (1 / np.log(10), *(1 / n for n in (3, 5, 6, 7, 9, 10)))
EXACT = {
    jnp.dtype(half): {float(np.asarray(x, half)): x for x in NUMBERS} for half in HALVES
}


def unrounded(number: Any) -> Any:
    """A number of a jaxpr in float32, as it was before JAX rounded it for its array.

    >>> bool(unrounded(np.float16(1 / 3)) == np.float32(1 / 3))
    True
    """
    number = np.asarray(number)
    if number.ndim == 0:
        number = EXACT.get(number.dtype, {}).get(float(number), number)
    return np.asarray(number, np.float32)


def product_sides(primitive_name: str, args, params) -> tuple[str, ...] | None:
    """The sides of a matrix product's or convolution's result."""
    if primitive_name == "conv_general_dilated":
        feature = params["dimension_numbers"].out_spec[1]
        return tuple("r" if d == feature else "l" for d in range(np.ndim(args[0])))
    contracting, batch = params["dimension_numbers"]
    if batch[0]:
        return None
    left, right = (np.ndim(a) - len(c) for a, c in zip(args, contracting, strict=True))
    return ("l",) * left + ("r",) * right


def passed_on(primitive_name: str, args, params, notes: Notes) -> Note:
    """The note of the result of an op that moves values about."""
    x = args[0]
    note, ndim = notes[x], np.ndim(x)
    sides = note.sides
    if primitive_name == "transpose":
        order = params["permutation"]
        return note._replace(sides=sides and tuple(sides[d] for d in order))
    if primitive_name == "squeeze":
        kept = [d for d in range(ndim) if d not in params["dimensions"]]
        return note._replace(sides=sides and tuple(sides[d] for d in kept))
    if primitive_name == "broadcast_in_dim":
        to, shape = params["broadcast_dimensions"], params["shape"]
        new = [to[d] for d in range(ndim) if np.shape(x)[d] == shape[to[d]] != 1]
        raised = note.raised or ndim < len(shape)
        return Note(note.constant, varies=frozenset(new), raised=raised)
    if primitive_name == "reshape":
        old, new = np.shape(x), params["new_sizes"]
        varies = None
        if [n for n in old if n != 1] == [n for n in new if n != 1]:
            varies = frozenset(d for d, n in enumerate(new) if n != 1)
        raised = len(new) > len(old)
        varies = varies if raised else None
        return Note(note.constant, sides and reshaped(sides, old, new), varies, raised)
    if primitive_name in ("slice", "copy", "neg", "optimization_barrier"):
        return note._replace(constant=None, varies=None, raised=False)
    return NOTHING


def reshaped(sides, old, new) -> tuple[str, ...] | None:
    """Sides after a reshape that merges and splits dimensions of one side alone.

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
