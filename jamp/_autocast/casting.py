"""The trace below autocast's: ops run on it, and values are cast on it, each once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import AbstractValue, Tracer
from jax.extend.core import Primitive

from .. import _compat
from .._compat import array_dtype
from . import retracing
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Out,
    Params,
    Settings,
    Value,
    Values,
)
from .notes import SOURCE, Notes
from .numbers import unrounded
from .ops import PRIMITIVES


class CastingTrace(_compat.Trace):
    """Runs ops on the trace below, unchanged, and casts values there.

    Values are those of the trace below: nothing is boxed.
    """

    def __init__(self, parent: _compat.Trace, settings: Settings):
        super().__init__()
        self.parent, self.settings = parent, settings
        self.requires_low = parent.requires_low
        self.derived = retracing.kept_for(parent) if retracing.CACHED.value else None
        # Flax NNX refuses to update a Variable on another trace than the one that made
        # it, and compares traces by this reference. Values are valid on both.
        self._weakref = _compat.reference_of(parent)
        self.notes, self.tells_weights = Notes(), settings.tells_weights

    def stage_value(self, val):
        return self.parent.stage_value(val)

    def cur_qdd(self, x):
        return self.parent.cur_qdd(x)  # pyright: ignore

    def bind(self, primitive: Primitive, args: Values, params: Params) -> Any:
        derived = self.derived if primitive.name in PRIMITIVES else None
        return retracing.run(self.parent, primitive.bind, args, params, derived)

    def call(self, function: Callable[..., Out], args: Values, params: Params) -> Out:
        return retracing.run(self.parent, function, args, params, self.derived)

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
            widened = dtype == FLOAT32_DTYPE
            note = self.notes[x]
            # Under a policy, Python goes on to ask for float32 products of the copy.
            result = note.result and self.settings.is_policy
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
        if avals is None:
            return args
        pairs = zip(args, dtypes_of(avals), strict=True)
        return [x if dtype is None else self.cast(x, dtype) for x, dtype in pairs]

    def narrowed(self, args: Values) -> Values:
        """The inputs of an op, with results of a norm cast to half precision."""
        if not self.notes.have_results:
            return args
        notes = [self.notes[x] for x in args]
        if not any(note.result for note in notes):
            return args
        dtype = self.settings.dtype
        return [
            self.cast(x, dtype) if note.result or note.widened else x
            for x, note in zip(args, notes, strict=True)
        ]


def avals_of(args: Values) -> list[AbstractValue]:
    return [jax.typeof(x) for x in args]


def dtypes_of(avals: Sequence[AbstractValue]) -> list[np.dtype | None]:
    return [getattr(aval, "dtype", None) for aval in avals]
