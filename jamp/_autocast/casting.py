"""The part of an autocast trace that rules use: casts, binding, and what it knows."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import AbstractValue, Tracer
from jax.extend.core import Primitive, set_current_trace

from .. import _compat
from .._compat import array_dtype
from .._tree import HALVES
from . import retracing
from .call_stack import is_jamps, marks_in, written
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Action,
    Hit,
    Op,
    Out,
    Params,
    Result,
    Settings,
    Value,
    Values,
)
from .notes import SOURCE, Notes, unrounded
from .rules import Decider

DIFFERENTIATION = ("jvp", "transpose", "linearize")
SCATTERS = {  # how they combine two numbers is recorded in the dtype of the numbers
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}
MakeTrace = Callable[[], "CastingTrace"]
# The settings of the innermost region, or None. JAX keys its caches by it, so that a
# function is traced anew in a region of another kind.
REGION = jax.make_user_context(None)
# Whether regions are entered to be explained.
OBSERVED = jax.make_user_context(False)
# The function that watches each op of a region, or None: see `Settings.probe`.
PROBE = jax.make_user_context(None)


class Effects:
    """What a region, or the rewriting of a jaxpr, did."""

    def __init__(self) -> None:
        self.hits: set[Hit] = set()  # of the user's rules
        self.touched = False  # whether anything was changed


class Scope(NamedTuple):
    """Where an op is called."""

    foreign: bool  # an inner region decides about it
    differentiated: bool  # a derivative is being taken


class CastingTrace(_compat.Trace):
    """Casts values and binds ops on the trace below.

    Values are those of that trace: nothing is boxed. On a `baked` trace, each result
    gets the dtype that it would have without autocast. A trace is baked in a derivative
    or, if it is `typed` too, only because JAX has fixed the dtypes.
    """

    def __init__(
        self,
        parent: _compat.Trace,
        settings: Settings,
        effects: Effects,
        baked: bool = False,
        prefix: str = "",
        typed: bool = False,
        around: frozenset[int] = frozenset(),
    ):
        super().__init__()
        self.parent, self.settings = parent, settings
        self.baked, self.typed = baked, typed
        self.requires_low = parent.requires_low
        self.seen = retracing.seen_on(parent) if retracing.CACHED.value else None
        # Flax NNX refuses to update a Variable on another trace than the one that made
        # it, and compares traces by this reference. Values are valid on both.
        self._weakref = parent._weakref
        self.prefix = prefix  # the module path at which a jaxpr's own paths begin
        self.effects = effects
        self.scopes = _compat.scopes()  # those around the code that runs on this trace
        self.last_stack, self.last_scope = None, Scope(False, False)
        self.decide = Decider(settings, effects.hits, around)
        self.notes = Notes()

    def apply(self, op: Op) -> Result:
        """Runs one op by the region's rules."""
        raise NotImplementedError

    def spawner(
        self,
        baked: bool = False,
        effects: Effects | None = None,
        typed: bool = False,
        of_tangents: bool = False,
    ) -> MakeTrace:
        """Returns a function that makes traces with these settings.

        It puts them on the trace that is current when it is called, and holds neither
        this trace nor the values that this trace remembers.

        Args:
          of_tangents: for code that is linear in tangents and must stay so: no number
            is divided by its own size.
        """
        make = functools.partial(
            type(self),
            settings=self.settings._replace(linear=of_tangents or self.settings.linear),
            effects=effects or self.effects,
            baked=self.baked or baked,
            prefix=self.path(),
            typed=typed,
            around=self.around(),
        )
        return lambda: make(_compat.current_trace())

    def as_typed(self) -> "CastingTrace":
        """The same trace for code whose dtypes JAX has fixed."""
        typed = self.is_typed() or not (self.baked or self.scope().differentiated)
        with set_current_trace(self.parent):
            return self.spawner(baked=True, typed=typed)()

    def is_typed(self) -> bool:
        """Whether an op here is baked, and not because of a derivative."""
        return self.typed and not self.scope().differentiated

    @contextlib.contextmanager
    def current(self) -> Iterator["CastingTrace"]:
        """Runs Python code on this trace, perhaps after its region has ended."""
        with REGION(self.settings), set_current_trace(self):
            yield self

    # Where an op is, and what decides about it.

    def path(self) -> str:
        """The module path, such as "GPT/block_3/attention"."""
        if not self.decide.uses_paths:
            return ""
        names = [name for transform, name in _compat.scopes() if not transform]
        names = [name for name in names if not is_jamps(name)]
        return "/".join([self.prefix, *names] if self.prefix else names)

    def around(self) -> frozenset[int]:
        """The user's rules for functions that are running here."""
        return self.decide.calling(_compat.source_codes)

    def scope(self) -> Scope:
        stack = _compat.current_name_stack()
        if stack is not self.last_stack:  # the same for op after op
            self.last_stack, self.last_scope = stack, self.read_scope()
        return self.last_scope

    def read_scope(self) -> Scope:
        entries, depth = _compat.scopes(), len(self.scopes)
        is_part = entries[:depth] != self.scopes  # of what JAX differentiates
        if not is_part:
            entries = entries[depth:]
        marks = marks_in(name for transform, name in entries if not transform)
        depth, own = self.settings.depth, self.settings.dtype.name
        # At the same depth and with another dtype: the region has ended, and what it
        # has left, such as its backward pass, is called here.
        ended = self.settings.dtype in HALVES
        foreign = any(
            at > depth or (ended and at == depth and d != own) for at, d in marks
        )
        differentiated = any(t and name in DIFFERENTIATION for t, name in entries)
        return Scope(foreign, is_part or differentiated)

    def action(self, primitive: Primitive, source: str | None = None) -> Action | None:
        """The action for an op that is called here, or None if it is in no table."""
        return self.decide(primitive, _compat.source_codes(), self.path, source)

    def noted(self, action: Action) -> contextlib.AbstractContextManager[object]:
        """Writes an op's reason into its name stack, if the region is observed."""
        if not self.settings.observed:
            return contextlib.nullcontext()
        return jax.named_scope(written(action.why))

    # Running and casting.

    def bind(self, primitive: Primitive, args: Values, params: Params) -> Any:
        """Runs an op on the trace below, unchanged."""
        if (scatter := SCATTERS.get(primitive.name)) is not None:
            names = ("update_jaxpr", "update_consts")
            params = {k: v for k, v in params.items() if k not in names}
            return self.call(scatter, args, params)
        seen = self.seen if self.decide.knows(primitive) else None
        return retracing.run(self.parent, primitive.bind, args, params, seen)

    def call(self, function: Callable[..., Out], args: Values, params: Params) -> Out:
        """Runs a function of arrays on the trace below."""
        return retracing.run(self.parent, function, args, params, self.seen)

    def cast(self, x: Value, dtype: np.dtype) -> Value:
        """`x` in `dtype` if it is of a castable dtype. Each copy is made once."""
        given = array_dtype(x)
        if given == dtype or given not in CASTABLE:
            return x
        if not isinstance(x, jax.Array):
            if dtype == FLOAT32_DTYPE:
                return unrounded(x)
            with np.errstate(over="ignore"):  # a mask of -1e10 is -inf, as in JAX
                return np.asarray(x, dtype)
        if (copy := self.kept(x, dtype)) is None:
            copy = self.call(lax.convert_element_type, [x], {"new_dtype": dtype})
            self.effects.touched = True
            widened = dtype == FLOAT32_DTYPE
            note = self.notes[x]
            # Under a policy, Python goes on to ask for float32 products of the copy.
            result = note.result and not self.decide.refines
            self.notes[copy] = note._replace(widened=widened, result=result)
            if widened:
                self.notes.remember_widened(copy, x)
            if not widened or isinstance(x, Tracer):  # or they keep each other alive
                self.notes.remember(x, dtype, copy)
        return copy

    def kept(self, x: jax.Array, dtype: np.dtype) -> Value | None:
        """The copy of a value, unless each op is to have its own."""
        copy = self.notes.copy(x, dtype)
        if self.settings.cached or copy is None or dtype == FLOAT32_DTYPE:
            return copy
        is_source = self.notes.copy(x, SOURCE) is not None  # `x` was made of the copy
        return copy if is_source or not isinstance(x, Tracer) else None

    def as_traced(self, args: Values, avals: Sequence[AbstractValue] | None) -> Values:
        """The values in the dtypes that they were traced with."""
        if avals is None:
            return args
        pairs = zip(args, dtypes_of(avals), strict=True)
        return [x if dtype is None else self.cast(x, dtype) for x, dtype in pairs]


def avals_of(args: Values) -> list[AbstractValue]:
    return [jax.typeof(x) for x in args]


def dtypes_of(avals: Sequence[AbstractValue]) -> list[np.dtype | None]:
    return [getattr(aval, "dtype", None) for aval in avals]
