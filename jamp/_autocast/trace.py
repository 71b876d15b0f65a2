"""The trace that casts: where JAX hands over each op, and what rules do with it."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import AbstractValue, Tracer
from jax.extend.core import Primitive, set_current_trace

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import bound, called, held, inside, param, with_functions
from .._tree import HALVES
from . import retracing
from .call_stack import is_jamps, marks_in, written
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Action,
    Hit,
    Kind,
    Op,
    Out,
    Params,
    Reason,
    Result,
    Settings,
    Source,
    Value,
    Values,
)
from .notes import SOURCE, Note, Notes, unrounded
from .ops import PRIMITIVES
from .products import is_wide
from .refused import check_precision
from .rules import Decider
from .traits import ANNOTATED, LEFT_ALONE, PICKS, PRODUCTS, UNMOVED

DIFFERENTIATION = ("jvp", "transpose", "linearize")

NO_RULE = """autocast has no rule for the primitive {name!r}, which holds a function \
({params}).
Put the code around it under `with jamp.autocast(enabled=False):`, or register a rule \
in jamp/_autocast/nested.py (or add the name to LEFT_ALONE, in traits.py)."""

MakeTrace = Callable[[], "AutocastTrace"]
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


Rule = Callable[["AutocastTrace", Op], Result]
# How each primitive is run, by its name.
RULES: dict[str, Rule] = {}
# The primitives that stand for one function.
STANDS_FOR: set[str] = set()


def register(*names: str, is_function: bool = False) -> Callable[[Rule], Rule]:
    """Makes a function the rule of primitives. Each may stand for a function."""

    def registered(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
            if is_function:
                STANDS_FOR.add(name)
        return rule

    return registered


class AutocastTrace(_compat.Trace):
    """Casts the inputs of each op and binds it on the trace below.

    `apply` asks which rule an op is under (`decided`), and which inputs it has, if
    those that arrive are not what Python saw (`received`). Then it calls the function
    that is registered for the primitive.

    Values are those of the trace below: nothing is boxed. On a `baked` trace, each
    result gets the dtype that it would have without autocast. A trace is baked in a
    derivative or, if it is `typed` too, only because JAX has fixed the dtypes.
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
        self._weakref = _compat.reference_of(parent)
        self.prefix = prefix  # the module path at which a jaxpr's own paths begin
        self.effects = effects
        self.scopes = _compat.scopes()  # those around the code that runs on this trace
        self.last_stack, self.last_scope = None, Scope(False, False)
        self.decide = Decider(settings, effects.hits, around)
        self.notes = Notes()
        self.tells_weights = settings.tells_weights

    # What JAX calls.

    def process_primitive(self, primitive, tracers, params, /):
        return self.apply(Op(primitive, tracers, params))

    def process_call(self, primitive, fun, tracers, params, /):
        with self.current():
            return fun.call_wrapped(*tracers)

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
        return self.apply(Op(primitive, tracers, with_functions(params, fun, jvp)))

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, tracers, /, **params):
        params = with_functions(params, fun, fwd, bwd)
        return self.apply(Op(primitive, tracers, params))

    def process_shard_map(self, primitive, fun, tracers, /, **params):
        return self.apply(Op(primitive, tracers, with_functions(params, fun)))

    def stage_value(self, val):
        return self.parent.stage_value(val)

    def cur_qdd(self, x):
        return self.parent.cur_qdd(x)  # pyright: ignore

    # One op.

    def apply(self, op: Op) -> Result:
        scope = self.scope()
        # Asked first: where nothing is to be done, results are the inputs themselves.
        made = self.makes_activations(op, scope) if self.tells_weights else ()
        if scope.foreign:
            out = self.left_to_another(op)
        else:
            op = self.received(self.decided(op), scope)
            check_precision(op.action, op.given)
            rule = RULES.get(op.primitive.name)
            out = self.left_alone(op) if rule is None else rule(self, op)
        if made:
            outs: Any = out if op.primitive.multiple_results else [out]
            self.note_activations(outs, made)
        return out

    def makes_activations(self, op: Op, scope: Scope) -> Iterable[bool]:
        """Which results of an op are made from the result of a product."""
        if op.name in PRODUCTS:
            return itertools.repeat(True)
        if op.name in ANNOTATED and not scope.foreign:
            return ()
        inputs = op.args[:1] if picks_matrices(op) else op.args
        found = [*map(self.is_activation, inputs)]
        if op.name in UNMOVED:
            return found
        is_unseen = scope.foreign or op.name in LEFT_ALONE
        if any(found) or (is_unseen and holds_product(op)):
            return itertools.repeat(True)
        return ()

    def is_activation(self, x: Value) -> bool:
        """Whether a value is an activation, of this region or of one around it."""
        if self.notes[x].activation:
            return True
        outer = self.parent
        return isinstance(outer, AutocastTrace) and outer.is_activation(x)

    def note_activations(self, outs: Values, made: Iterable[bool]) -> None:
        """Notes which results are activations. A single number, as a norm, is none."""
        for x, is_made in zip(outs, made, strict=False):
            if is_made and not is_single(x):
                self.notes[x] = self.notes[x]._replace(activation=True)

    def decided(self, op: Op) -> Op:
        """The op with the answer to which rule it is under."""
        primitive, args, params, avals, within, *_ = op
        if within is not None and not self.settings.rules:
            return Op(primitive, args, params, avals, within, within)
        source = source_of(op)
        place = _compat.source_codes(), self.path, source
        action = self.decide(primitive, *place, within)
        if within is not None or source is not None:
            within = action
        return Op(primitive, args, params, avals, within, action)

    def received(self, op: Op, scope: Scope) -> Op:
        """The op with the inputs that its rule gets."""
        action = op.action
        if self.baked or scope.differentiated:
            if action is None or action.table is not Kind.DRAW:
                args = self.as_traced(op.args, op.avals)
                baked = {"is_baked": True, "is_derived": not self.is_typed()}
                return op._replace(args=args, **baked)
            # What is drawn is not differentiated.
        if action is not None and action.marks:
            return op  # still inside of a norm, whose results are float32 there
        args = self.narrowed(op.args)
        if args is op.args:
            return op
        params, avals = op.params, op.avals
        if not self.settings.listed and is_wide(op._replace(args=args)):
            # Python saw the inputs in float32; the product is in half precision.
            params = params | {"preferred_element_type": self.settings.dtype}
        if avals is None and op.name != "convert_element_type":
            avals = avals_of(op.args)  # what Python saw
        return op._replace(args=args, params=params, avals=avals)

    def narrowed(self, args: Values) -> Values:
        """The inputs of an op, with results of a norm cast to half precision."""
        dtype, notes = self.settings.dtype, [self.notes[x] for x in args]
        if not any(note.result for note in notes):
            return args
        return [
            self.cast(x, dtype) if note.result or note.widened else x
            for x, note in zip(args, notes, strict=True)
        ]

    def left_to_another(self, op: Op) -> Result:
        """Runs an op that an inner region has decided about."""
        params = op.params
        if op.avals is not None:
            params = op.primitive.get_bind_params(params)
        return self.bind(op.primitive, self.as_traced(op.args, op.avals), params)

    def left_alone(self, op: Op) -> Result:
        """Runs an op that has no rule with the inputs that it was traced with.

        Raises NotImplementedError for one of JAX's with a function inside.
        """
        primitive, params = op.primitive, op.params
        inputs = self.as_traced(op.args, op.avals)
        if op.name not in LEFT_ALONE and _compat.is_jax_primitive(primitive):
            if names := ", ".join(dict(held(op))):
                raise NotImplementedError(NO_RULE.format(name=op.name, params=names))
            return self.bind(primitive, inputs, params)
        why = Reason("left_alone", Source.PRIMITIVE, op.name)
        with self.noted(Action(Kind.KEEP, why=why)):
            return self.bind(primitive, inputs, params)

    def activations_in(self, args: Values, changed: Sequence[bool] = ()) -> list[Note]:
        """Which arguments are activations: of a loop, also all that it changes."""
        if not self.tells_weights:
            return []
        pairs = itertools.zip_longest(args, changed, fillvalue=False)
        found = [self.is_activation(x) or (c and not is_single(x)) for x, c in pairs]
        return [Note(activation=is_activation) for is_activation in found]

    def follow(self, args: Values, notes: Sequence[Note]) -> None:
        """Notes what another trace knew about the arguments of a function."""
        for x, note in zip(args, notes, strict=False):
            self.notes[x] = note

    # Other traces like this one.

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

    def is_typed(self) -> bool:
        """Whether an op here is baked, and not because of a derivative."""
        return self.typed and not self.scope().differentiated

    @contextlib.contextmanager
    def current(self) -> Iterator["AutocastTrace"]:
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

    def noted(self, action: Action) -> contextlib.AbstractContextManager[object]:
        """Writes an op's reason into its name stack, if the region is observed."""
        if not self.settings.observed:
            return contextlib.nullcontext()
        return jax.named_scope(written(action.why))

    # Running and casting.

    def bind(self, primitive: Primitive, args: Values, params: Params) -> Any:
        """Runs an op on the trace below, unchanged."""
        seen = self.seen if primitive.name in PRIMITIVES else None
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
            result = note.result and not self.settings.listed
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


def source_of(op: Op) -> str | None:
    """ "name at file:line" of the function that an op stands for, or None."""
    if op.primitive.name not in STANDS_FOR:
        return None
    jaxpr = called(op)
    function = bound(op)[1][0] if jaxpr is None else jaxpr.jaxpr
    return _compat.source_name(function.debug_info)


def picks_matrices(op: Op) -> bool:
    """Whether an op picks matrices out of its first input, as those of an expert.

    They are made of that input alone. One-hot vectors, though, are made of indices.
    """
    sizes = param(op, "slice_sizes") if op.name in PICKS else ()
    return sum(1 for n in sizes if n != 1) > 1


def holds_product(op: Op) -> bool:
    """Whether a function that an op holds multiplies matrices."""
    return any(eqn.primitive.name in PRODUCTS for eqn in inside(op))


def is_single(x: Value) -> bool:
    return all(n == 1 for n in np.shape(x))


def avals_of(args: Values) -> list[AbstractValue]:
    return [jax.typeof(x) for x in args]


def dtypes_of(avals: Sequence[AbstractValue]) -> list[np.dtype | None]:
    return [getattr(aval, "dtype", None) for aval in avals]
