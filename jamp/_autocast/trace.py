"""The trace that casts: what happens to one op inside an autocast region."""

from typing import Any

import jax

from .. import _compat
from .._compat import array_dtype
from .bias import mark_results, narrowed, with_bias
from .casting import CastingTrace, Scope
from .conversion import convert, is_filled
from .custom import CUSTOM, bind_shard_map, custom_jvp, custom_vjp
from .decision import FLOAT32_DTYPE, Action, Kind, Op, Result, Values
from .input_casts import as_without, prepared, widens
from .nested import NESTED, Rule, leave_alone
from .notes import Note, passed_on, product_sides
from .ops import PRIMITIVES
from .products import for_product, is_wide, wide_product
from .refused import check_precision
from .sampling import check_drawn
from .scatters import summed
from .traits import FOLLOWED, GATHERING, PRODUCTS, UNMOVED

# For primitives that are not in a table.
RULES: dict[str, Rule] = NESTED | CUSTOM


class AutocastTrace(CastingTrace):
    """Casts the inputs of each op and binds it on the trace below.

    An op passes through five stages. `received`: what are its inputs, if those that
    arrive are not what Python saw? `decided`: which rule is it under? `prepared`: which
    casts does the rule ask for? `bind`: run it on the trace below. `remembered`: what
    is known about the result? An op that holds functions leaves after the first stage,
    for its own rule in `RULES`.
    """

    # What JAX calls.

    def process_primitive(self, primitive, tracers, params, /):
        return self.apply(Op(primitive, tracers, params))

    def process_call(self, primitive, fun, tracers, params, /):
        with self.current():
            return fun.call_wrapped(*tracers)

    def process_custom_jvp_call(self, primitive, fun, jvp, tracers, /, **params):
        return custom_jvp(self, primitive, fun, jvp, tracers, params)

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, tracers, /, **params):
        return custom_vjp(self, primitive, fun, fwd, bwd, tracers, params)

    def process_shard_map(self, primitive, fun, tracers, /, **params):
        return bind_shard_map(self, primitive, fun, tracers, params)

    def stage_value(self, val):
        return self.parent.stage_value(val)

    def cur_qdd(self, x):
        return self.parent.cur_qdd(x)  # pyright: ignore

    # One op.

    def apply(self, op: Op) -> Result:
        scope = self.scope()
        if scope.foreign:
            return self.left_to_another(op)
        if op.within is not None and self.settings.rules:
            codes = _compat.source_codes()
            within = self.decide.inside(op.within, op.primitive, codes, self.path)
            op = op._replace(within=within)
        op, action = self.received(op, scope)
        if (rule := RULES.get(op.name)) is not None:
            return rule(self, op)
        action = self.decided(op, action)
        if action is None or not self.decide.knows(op.primitive):
            check_drawn(op, action)
            return leave_alone(self, op)
        with self.noted(action):
            out = self.run(op, action)
            probe: Any = self.settings.probe
            return out if probe is None else probe(self, op, action, out)

    def left_to_another(self, op: Op) -> Result:
        """Runs an op that an inner region has decided about."""
        params = op.params
        if op.avals is not None:
            params = op.primitive.get_bind_params(params)
        return self.bind(op.primitive, self.as_traced(op.args, op.avals), params)

    def received(self, op: Op, scope: Scope) -> tuple[Op, Action | None]:
        """The op with the inputs that its rule gets, and its action if it was found."""
        action = op.within
        if self.baked or scope.differentiated:
            action = action or self.action(op.primitive)
            if action is None or action.table is not Kind.DRAW:
                args = self.as_traced(op.args, op.avals)
                baked = {"is_baked": True, "is_derived": not self.is_typed()}
                return op._replace(args=args, **baked), action
            # What is drawn is not differentiated.
        args = narrowed(self, op.primitive, op.args, op.within)
        if args is op.args:
            return op, action
        params, avals = op.params, op.avals
        if not self.decide.refines and is_wide(args, params):
            # Python saw the inputs in float32; the product is in half precision.
            params = params | {"preferred_element_type": self.settings.dtype}
        if avals is None and op.name != "convert_element_type":
            avals = list(map(jax.typeof, op.args))  # what Python saw
        return op._replace(args=args, params=params, avals=avals), action

    def decided(self, op: Op, action: Action | None) -> Action | None:
        action = action or self.action(op.primitive)
        check_precision(action, op.given)
        is_product = op.name in PRODUCTS
        return for_product(op, action, self.settings) if is_product else action

    def run(self, op: Op, action: Action) -> Result:
        """Runs an op that holds no function, as its rule says."""
        if op.params.get("update_jaxpr") is not None and op.name == "scatter":
            op = op._replace(args=self.as_traced(op.args, op.avals))
            action = Action(Kind.KEEP)  # lax.scatter_apply
        widened = action.kind is Kind.STATISTIC and widens(self, op)
        if action.kind is Kind.STATISTIC:
            action = Action(None, FLOAT32_DTYPE) if widened else Action(Kind.PROMOTE)
        if op.name == "convert_element_type":
            out = convert(self, op, action)
        elif op.name in PRODUCTS and action.recipe is not None:
            out = action.recipe._run(self, op)
            if op.is_baked:
                return as_without(self, out, op.args, op.params)
            self.remembered(op, op.args, op.params, out)
        elif (out := self.refined(op, action)) is not None:
            return out
        else:
            args, params = prepared(self, op, action)
            lowers = self.decide.lowers(op.primitive, action)
            if lowers and not op.is_baked and is_wide(args, params):
                return wide_product(self, op.primitive, args, params)
            if op.name in GATHERING:
                out = summed(self, op, args, params)
            else:
                out = self.bind(op.primitive, args, params)
            if op.is_baked:
                same = args is op.args
                return out if same else as_without(self, out, op.args, op.params)
            if op.name == "broadcast_in_dim" and is_filled(args[0]):
                return out  # the user's array, not a number
            self.remembered(op, args, params, out)
        if action.marks:
            mark_results(self, op, action, out)
        if widened:
            self.notes[out] = self.notes[out]._replace(statistic=True)
        return out

    def refined(self, op: Op, action: Action) -> Result | None:
        """The result of an op that is part of a layer, or None if it is not."""
        if not self.decide.refines or op.is_baked or action.dtype is not None:
            return None
        if op.name in FOLLOWED:
            narrow = self.notes.copy(op.args[0], self.settings.dtype)
            if narrow is not None and self.notes[op.args[0]].sides is not None:
                # Moved before it is widened, a product is still known as one.
                moved = [narrow, *op.args[1:]]
                out: Any = self.apply(Op(op.primitive, moved, op.params))
                return self.cast(out, array_dtype(op.args[0]))
        if op.name == "add" and op.within is None:
            return with_bias(self, op)
        return None

    def remembered(
        self, op: Op, args: Values, params: dict[str, Any], out: Result
    ) -> None:
        """Notes what is known about a result."""
        name = op.name
        if name in FOLLOWED:
            self.notes[out] = passed_on(name, args, params, self.notes)
        elif name in UNMOVED:
            for x, same in zip(args, jax.tree.leaves(out), strict=True):
                self.notes[same] = self.notes[x]
        elif PRIMITIVES[name].kind is Kind.LOWER:
            if array_dtype(out) == self.settings.dtype and name != "ragged_dot_general":
                self.notes[out] = Note(sides=product_sides(name, args, params))
