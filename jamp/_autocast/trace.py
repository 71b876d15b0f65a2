"""The trace that casts: where JAX hands over each op, and what rules do with it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, set_current_trace

from .. import _compat
from .._jaxprs import bound, called, held, with_functions
from .casting import CastingTrace, avals_of
from .decision import Decision, Kind, Op, Reason, Result, Settings, Source, Values
from .name_stack import Place, Scope, written
from .notes import Note
from .products import is_wide
from .refused import check
from .rules import Decider, known_here
from .traits import LEFT_ALONE, NAMED
from .weights import makes_activations, note_activations

NO_RULE = """autocast has no rule for the primitive {name!r}, which holds a function \
({params}).
Put the code around it under `with jamp.autocast(enabled=False):`, or register a rule \
in jamp/_autocast/nested.py (or add the name to LEFT_ALONE, in traits.py)."""

MakeTrace = Callable[[], "AutocastTrace"]
# The settings of the innermost region, None outside, and False where one is switched
# off. JAX keys its caches by it: a function is traced anew in a region of another kind.
REGION = jax.make_user_context(None)
# Whether regions are entered to be explained.
OBSERVED = jax.make_user_context(False)
# The function that watches each op of a region, or None: see `Settings.probe`.
PROBE = jax.make_user_context(None)


Rule = Callable[["AutocastTrace", Op], Result]
# How each primitive is run, by its name.
RULES: dict[str, Rule] = {}
# The primitives that are decided about as another one.
DECIDED_AS: dict[str, Primitive] = {}


def register(*names: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of primitives."""

    def registered(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        return rule

    return registered


class AutocastTrace(CastingTrace):
    """Casts the inputs of each op and binds it on the trace below.

    `apply` asks which rule an op is under (`decided`), and which inputs it has, if
    those that arrive are not what Python saw (`received`). Then it calls the function
    that is registered for the primitive.

    On a `baked` trace, each result gets the dtype that it would have without autocast.
    A trace is baked in a derivative, and where JAX has fixed the dtypes.
    """

    def __init__(
        self,
        parent: _compat.Trace,
        settings: Settings,
        hits: set[int],
        baked: bool = False,
        prefix: str = "",
        around: frozenset[int] = frozenset(),
    ):
        super().__init__(parent, settings)
        self.baked = baked
        self.place = Place(settings, prefix)
        self.hits = hits  # the places of the user's rules that decided
        self.decide = Decider(settings, self.place.path, hits, around)

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

    # One op.

    def apply(self, op: Op) -> Result:
        scope = self.place.scope()
        # Asked first: where nothing is to be done, results are the inputs themselves.
        weighs = self.tells_weights
        made = makes_activations(self, op, scope.foreign) if weighs else ()
        out: Any
        if scope.foreign:
            out = self.left_to_another(op)
        else:
            op = self.received(self.decided(op), scope)
            if (decision := op.decision) and decision.refuses is not None:
                check(decision.why.name, decision.refuses, op.avals or op.args)
            rule = RULES.get(op.primitive.name)
            out = self.left_alone(op) if rule is None else rule(self, op)
        if made:
            outs: Any = out if op.primitive.multiple_results else [out]
            note_activations(self, outs, made)
        return out

    def decided(self, op: Op) -> Op:
        """The op with the answer to which rule it is under."""
        primitive, args, params, avals, within, *_ = op
        source, asked_as = source_of(op), DECIDED_AS.get(primitive.name, primitive)
        known = known_here(source)
        decision = self.decide(asked_as, known, within)
        if within is not None or source is not None:
            within = decision
        return Op(primitive, args, params, avals, within, decision, known=known)

    def received(self, op: Op, scope: Scope) -> Op:
        """The op with the inputs that its rule gets."""
        decision = op.decision
        row = None if decision is None else decision.row
        if row is Kind.ONE_OP and decision.cast is not None:  # pyright: ignore
            return op  # inside of a function that is one op
        if self.baked or scope.differentiated:
            args = self.as_traced(op.args, op.avals)
            return op._replace(args=args, is_baked=True)
        if decision is not None and decision.inside:
            return op  # still inside of a norm, whose results are float32 there
        args = self.narrowed(op.args)
        if args is op.args:
            return op
        params, avals = op.params, op.avals
        if self.settings.is_policy and is_wide(op._replace(args=args)):
            # Python saw the inputs in float32; the product is in half precision.
            params = params | {"preferred_element_type": self.settings.dtype}
        if avals is None and op.name != "convert_element_type":
            avals = avals_of(op.args)  # what Python saw
        return op._replace(args=args, params=params, avals=avals)

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
        with self.noted(Decision(Kind.KEEP, why=why)):
            return self.bind(primitive, inputs, params)

    def follow(self, args: Values, notes: Sequence[Note]) -> None:
        """Notes what another trace knew about the arguments of a function."""
        for x, note in zip(args, notes, strict=False):
            self.notes[x] = note

    # Other traces like this one.

    def spawner(
        self,
        baked: bool = False,
        hits: set[int] | None = None,
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
            hits=self.hits if hits is None else hits,
            baked=self.baked or baked,
            prefix=self.place.path(),
            around=self.decide.running_here(),
        )
        return lambda: make(_compat.current_trace())

    @contextlib.contextmanager
    def current(self) -> Iterator["AutocastTrace"]:
        """Runs Python code on this trace, perhaps after its region has ended."""
        with REGION(self.settings), set_current_trace(self):
            yield self

    def noted(self, decision: Decision) -> contextlib.AbstractContextManager[object]:
        """Writes an op's reason into its name stack, if the region is observed."""
        if not self.settings.observed:
            return contextlib.nullcontext()
        return jax.named_scope(written(decision.why))


def source_of(op: Op) -> str | None:
    """ "name at file:line" of the function that an op stands for, or None."""
    if op.primitive.name not in NAMED:
        return None
    jaxpr = called(op)
    function = bound(op)[1][0] if jaxpr is None else jaxpr.jaxpr
    return _compat.source_name(function.debug_info)
