"""Eager ops that repeat earlier ones: their tapes are played.

A key holds everything that decides about an op (`tapes.py`). An op without an exact key
is not recorded.
"""

import functools
import math
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from jax.extend.core import Primitive

from .. import _compat
from .caches import are_used
from .casting import CastingTrace
from .decision import Op, Result, Settings
from .notes import Notes
from .rules import Decider
from .tapes import NUMBERS, Recorder, Tape

# What is known of an op: its tape, or None if it cannot be played, and the jaxpr in its
# key.
Known = tuple[Tape | None, weakref.ref[Any] | None]
Table = dict[Hashable, Known]
LIMIT = 4096  # tapes per kind of region; at the limit, all are dropped
UNSEEN: Known = None, None


class Counts:
    """Counts of what was done, for tests."""

    played = recorded = 0


class Tapes:
    """The tapes of a region."""

    def __init__(self, settings: Settings, decide: Decider):
        self.settings, self.decide = settings, decide
        self.given: tuple[Hashable, Hashable] | None = None
        self.table: Table | None = None

    def current(self) -> Table | None:
        """The tapes for the current libraries and JAX settings, or None."""
        self.decide.look()
        given = self.decide.modules, _compat.trace_context()
        if given != self.given:
            self.given, self.table = given, None
            if are_used() and _compat.runs_plainly() and not looks(self.settings):
                self.table = table(self.settings, *given)
        return self.table


def looks(settings: Settings) -> bool:
    """Whether a region decides by more than a key holds, or its ops are watched."""
    recipes = [settings.recipe, *(rule.action.recipe for rule in settings.rules)]
    return any(recipes) or settings.observed or settings.probe is not None


@functools.lru_cache(maxsize=64)
def table(settings: Settings, modules: Hashable, context: Hashable) -> Table:
    """The tapes of all regions with these settings, in these settings of JAX."""
    del settings, modules, context
    return {}


class Key(NamedTuple):
    """Everything that decides about an eager op, except settings of region and JAX."""

    primitive: Primitive
    # With their names. A jaxpr is in it by its id, and its tape is dropped with it.
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[Hashable, ...]  # what is known of each array, and each number
    same: tuple[int, ...]  # which inputs are the same object
    source: Any  # the functions that the op comes from, and their lines
    path: str  # of modules, if a rule of the region needs it


def played(trace: Any, op: Op) -> Result:
    """Runs an eager op as it ran before, if it has."""
    if trace.recorder is not None or (table := trace.tapes.current()) is None:
        return trace.apply(op)
    jaxpr = op.params["jaxpr"] if op.name == "jit" else None
    if any(trace.scope()) or (jaxpr is None and not trace.decide.knows(op.primitive)):
        return trace.apply(op)
    if (key := key_of(op, trace.notes, trace.path())) is None:
        return trace.apply(op)
    try:
        known = table.get(key, UNSEEN)
    except TypeError:  # a parameter that has no hash
        return trace.apply(op)
    tape, held = known
    if known is UNSEEN or (held is not None and held() is not jaxpr):
        return record(trace, op, table, key)
    if tape is None:
        return trace.apply(op)
    Counts.played += 1
    return tape.play(trace, op.args)


def key_of(op: Op, notes: Notes, path: str) -> Key | None:
    """The key of an op, or None if something that decides about it is unknown."""
    args, places = op.args, {}
    same = tuple([places.setdefault(id(x), len(places)) for x in args])
    inputs = []
    for x in args:
        if type(x) is _compat.ArrayImpl:
            signature = notes.signature(x, places)
            if signature is None:
                return None
        elif isinstance(x, NUMBERS):
            sign = math.copysign(1.0, x) if isinstance(x, float) else None
            signature = type(x), getattr(x, "dtype", None), x, sign
        else:
            return None
        inputs.append(signature)
    params = op.params.items()
    if op.name == "jit":
        params = [(n, id(v) if n == "jaxpr" else v) for n, v in params]
    source = _compat.current_traceback()
    return Key(op.primitive, tuple(params), tuple(inputs), same, source, path)


def record(trace: CastingTrace, op: Op, table: Table, key: Hashable) -> Result:
    """Runs an op, and keeps what it did."""
    hits = trace.effects.hits
    before = set(hits)
    hits.clear()
    trace.recorder = recorder = Recorder(op.args, trace.notes)
    try:
        out = trace.apply(op)
        tape = recorder.tape(out, hits)
    finally:
        trace.recorder = None
        hits |= before
    held = None
    if op.name == "jit":
        # The tape is dropped with the jaxpr, before another jaxpr gets its id.
        held = weakref.ref(op.params["jaxpr"], lambda _: table.pop(key, None))
    if len(table) >= LIMIT:
        table.clear()
    table[key] = tape, held
    Counts.recorded += 1
    return out
