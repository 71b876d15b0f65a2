"""Recordings of what eager ops did, so that the next op like one costs one look-up.

In an eager region, Python decides about each op, which takes longer than the op. It
decides on facts that are known before: the op itself and its parameters, the dtype and
shape of each input and all that the region remembers about it (`notes.py`), the Python
functions that the op comes from, the region's settings, and JAX's settings. So what the
op did is recorded under all of these: which programs ran, on which values, and what was
noted about the results. The next time, the recording is played.

Uncertain cases are not recorded, and take the long way: an op that made an array itself
(`Recorder.failed`), inputs that are not plain arrays or numbers, regions that look at
their ops (`jamp.debug`) or that have recipes for products.

A tape holds neither arrays nor the jaxpr that it is kept for.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun, set_current_trace

from .. import _compat
from .decision import Hit, Out, Params, Result, Value, Values
from .notes import NOTHING, Note, Notes
from .sources import holds_jaxpr

NUMBERS = (bool, int, float)
RUN_AT_ONCE = ("custom_jvp_call", "custom_vjp_call")


class Step(NamedTuple):
    """A program that runs on the values in some slots.

    Without a program it is the copy of an input that the region keeps under a key.
    """

    run: Callable[..., object] | None
    slots: tuple[int, ...]
    out: int  # the first slot of the results
    key: Hashable = None


class Meta(NamedTuple):
    """What is known about a result."""

    slot: int
    note: Note
    copies: tuple[tuple[Hashable, int], ...]  # keys, and the slots of the copies


class Tape:
    """What one op did. The first slots are its inputs."""

    def __init__(
        self,
        steps: Sequence[Step],
        numbers: Sequence[Value | None],
        outs: int | tuple[int, ...],
        metas: Sequence[Meta],
        hits: frozenset[Hit],
    ):
        self.steps, self.numbers, self.outs = steps, numbers, outs
        self.metas, self.hits = metas, hits

    def play(self, trace: Any, args: Values) -> Result:
        notes = trace.notes
        values: list[Any] = [*args, *self.numbers]
        with set_current_trace(trace.parent):
            for run, slots, out, key in self.steps:
                if run is None:
                    x = values[slots[0]]
                    copy = notes.copy(x, key)
                    values[out] = trace.cast(x, key) if copy is None else copy
                    continue
                new = run(*[values[slot] for slot in slots])
                if isinstance(new, list | tuple):
                    values[out : out + len(new)] = new
                else:
                    values[out] = new
        for slot, note, copies in self.metas:
            notes[values[slot]] = note
            for key, at in copies:
                notes.remember(values[slot], key, values[at])
        if self.hits:
            trace.effects.hits.update(self.hits)
        if isinstance(self.outs, int):
            return values[self.outs]
        return [values[slot] for slot in self.outs]


class Recorder:
    """Writes a tape while an op runs."""

    def __init__(self, args: Values, notes: Notes):
        self.notes = notes
        self.values: list[Any] = list(args)  # of all slots; this keeps them alive
        self.n_args = len(args)
        self.slots: dict[int, int] = {}
        for slot, x in enumerate(args):
            self.slots.setdefault(id(x), slot)
        self.constants: set[int] = set()  # slots of numbers
        self.steps: list[Step] = []
        self.failed = False

    def slot(self, x: object) -> int:
        """The slot of a value."""
        if (found := self.slots.get(id(x))) is not None:
            return found
        if isinstance(x, jax.Array):
            for place, value in enumerate(self.values[: self.n_args]):
                for key, copy in self.notes.copies(value).items():
                    if copy is x:
                        return self.add(None, (place,), [x], key)
            self.failed = True  # an array of unknown origin
        elif not isinstance(x, (*NUMBERS, np.generic, np.ndarray)) or np.ndim(x):
            self.failed = True
        self.values.append(x)
        self.slots[id(x)] = slot = len(self.values) - 1
        self.constants.add(slot)
        return slot

    def add(
        self,
        run: Callable[..., object] | None,
        slots: tuple[int, ...],
        outs: Sequence[object],
        key: Hashable = None,
    ) -> int:
        first = len(self.values)
        self.steps.append(Step(run, slots, first, key))
        self.values.extend(outs)
        for slot, out in enumerate(outs, first):
            self.slots.setdefault(id(out), slot)
        return first

    def run(self, run: Callable[..., Out], args: Values) -> Out:
        """Runs a program, and records it."""
        slots = tuple(map(self.slot, args))
        out = run(*args)
        self.add(run, slots, out if isinstance(out, list | tuple) else [out])
        return out

    def bind(self, primitive: Primitive, args: Values, params: Params) -> Result:
        """Runs an op, and records it."""
        if primitive.name in RUN_AT_ONCE:  # the ops inside are recorded
            return primitive.bind(*args, **params)
        if (run := program(primitive, params)) is not None:
            return self.run(run, args)
        self.failed = True
        return primitive.bind(*args, **params)

    def casts(self, x: object, notes: Notes) -> bool:
        """Whether a value is an input, whose copy the region keeps."""
        return notes is self.notes and self.slots.get(id(x), self.n_args) < self.n_args

    def cast(self, x: object, dtype: np.dtype, copy: Value) -> None:
        self.add(None, (self.slots[id(x)],), [copy], dtype)

    def tape(self, out: Result, hits: set[Hit]) -> Tape | None:
        """What was recorded, or None if it cannot be played."""
        is_one = not isinstance(out, list | tuple)
        outs = [out] if is_one else out
        if not all(isinstance(x, jax.Array) for x in outs):
            return None
        places = tuple([self.slot(x) for x in outs])
        metas, left = {}, list(places)
        while left and not self.failed:
            if (slot := left.pop()) in metas or slot < self.n_args:
                continue
            copies = self.notes.copies(self.values[slot])
            known = tuple((key, self.slot(copy)) for key, copy in copies.items())
            metas[slot] = Meta(slot, self.notes[self.values[slot]], known)
            left.extend(place for _, place in known)
        if self.failed:
            return None
        rest = enumerate(self.values[self.n_args :], self.n_args)
        numbers = [x if slot in self.constants else None for slot, x in rest]
        kept = [m for m in metas.values() if m.copies or m.note != NOTHING]
        return Tape(
            self.steps, numbers, places[0] if is_one else places, kept, frozenset(hits)
        )


# Programs: the same for all tapes, so that each is compiled once.

LAUNCHED: weakref.WeakKeyDictionary[ClosedJaxpr, dict[str, Callable[..., Result]]]
LAUNCHED = weakref.WeakKeyDictionary()


def program(primitive: Primitive, params: Params) -> Callable[..., Result] | None:
    """An op as a function of arrays that can be called again, or None."""
    if primitive.name != "jit":
        run = _compat.eager_function(primitive, params)
        if run is None and not holds_jaxpr(tuple(params.values())):
            run = functools.partial(primitive.bind, **params)
        return run
    if not _compat.is_plain_jit(params):
        return None
    jaxpr, name = params["jaxpr"], params["name"]
    named = LAUNCHED.setdefault(jaxpr, {})
    if name not in named:
        named[name] = launched(weakref.ref(jaxpr), name)
    return named[name]


def launched(jaxpr: weakref.ref[ClosedJaxpr], name: str) -> Callable[..., Result]:
    def run(*args):
        closed: Any = jaxpr()  # alive, because it is being called
        return jaxpr_as_fun(closed)(*args)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)
