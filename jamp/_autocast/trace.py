"""The trace that casts: what happens to one op inside an autocast region."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import Tracer, dtype_of
from .bias import mark_results, narrowed, with_bias
from .custom import CUSTOM, CallingTrace
from .draws import check_drawn
from .left_alone import leave_alone
from .nested import NESTED, differs
from .notes import (
    Note,
    Notes,
    fits,
    holds,
    is_filled,
    is_weak_array,
    passed_on,
    product_sides,
    unrounded,
)
from .ops import DRAW, FLOAT32, INTO, KEEP, LOWER, PRIMITIVES, PROMOTE, STATISTIC
from .products import for_product, is_dot, is_wide, wide_product
from .reasons import MARK, RULE
from .refused import check_precision
from .rules import ACTIONS, CASTABLE, REGION, Action, Decider, Settings, code_of
from .thunks import THUNKS
from .writes import WRITES

RULES = NESTED | CUSTOM | THUNKS | WRITES  # for primitives that are not in a table
DIFFERENTIATION = ("jvp", "transpose", "linearize")
PASSED_ON = ("transpose", "squeeze", "broadcast_in_dim", "reshape", "slice", "copy")
KEPT = Action(KEEP)
SCATTERS = {  # what they do with two numbers is recorded in the dtype of the numbers
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}
# A user who calls one of these on a product wants what it gives: see `with_bias`.
EXPLICIT = frozenset(
    map(code_of, (jnp.astype, jnp.asarray, jnp.array, lax.convert_element_type))
)


class Record:
    """What a region, or the rewriting of a jaxpr, did."""

    def __init__(self):
        self.hits: set[int] = set()  # the user's rules that were used
        self.touched = False  # whether anything was changed


class AutocastTrace(CallingTrace):
    """Casts the inputs of each op and binds it on the parent trace.

    Values are those of the parent: nothing is boxed. With `baked`, each result gets the
    dtype that it would have without autocast, for code whose dtypes are fixed already:
    the rules of a derivative, and what they were derived from.
    """

    def __init__(
        self,
        parent: _compat.Trace,
        settings: Settings,
        record: Record,
        baked: bool = False,
        prefix: str = "",
    ):
        super().__init__()
        self.parent, self.settings, self.baked = parent, settings, baked
        self.requires_low = parent.requires_low
        self.seen = _compat.seen_on(parent)
        # Flax NNX refuses to update a Variable on another trace than the one that made
        # it, and compares traces by this reference. Values live on both alike.
        self._weakref = parent._weakref
        self.prefix = prefix  # the module path at which a jaxpr's own paths begin
        self.record = record
        self.scopes = _compat.scopes()  # those around the code that runs on this trace
        self.last_stack, self.last_scope = None, (False, False)
        self.decide = Decider(settings, record.hits)
        self.notes = Notes()

    def spawner(self, baked=False, record=None):
        """Makes traces with these settings on the trace that is current by then.

        It does not hold this trace, nor the values that it remembers.
        """
        make = functools.partial(
            AutocastTrace,
            settings=self.settings,
            record=record or self.record,
            baked=self.baked or baked,
            prefix=self.path(),
        )
        return lambda: make(_compat.current_trace())

    def as_baked(self) -> "AutocastTrace":
        with _compat.set_current_trace(self.parent):
            return self.spawner(baked=True)()

    @contextlib.contextmanager
    def current(self):
        """Runs Python code on this trace, perhaps after its region has ended."""
        with REGION(self.settings), _compat.set_current_trace(self):
            yield self

    def bind(self, primitive, args, params):
        if (scatter := SCATTERS.get(primitive.name)) is not None:
            names = ("update_jaxpr", "update_consts")
            params = {k: v for k, v in params.items() if k not in names}
            return self.call(scatter, args, params)
        seen = self.seen if primitive.name in PRIMITIVES else None
        return _compat.run(self.parent, primitive.bind, args, params, seen)

    def call(self, function, args, params):
        """Runs a function of arrays on the parent trace."""
        return _compat.run(self.parent, function, args, params, self.seen)

    def path(self) -> str:
        """The module path, such as "GPT/block_3/attention"."""
        if not self.decide.uses_paths:
            return ""
        names = [n for transform, n in _compat.scopes() if not transform]
        names = [n for n in names if not (MARK.match(n) or n.startswith(RULE))]
        return "/".join([self.prefix, *names] if self.prefix else names)

    # What JAX calls.

    def process_primitive(self, primitive, tracers, params, /):
        return self.apply(primitive, tracers, params)

    def stage_value(self, val):
        return self.parent.stage_value(val)

    def cur_qdd(self, x):
        return self.parent.cur_qdd(x)  # pyright: ignore

    # One op.

    def scope(self) -> tuple[bool, bool]:
        """Whether an inner region decides, and whether a derivative is being taken."""
        stack = _compat.current_name_stack()
        if stack is not self.last_stack:  # the same for op after op
            self.last_stack, self.last_scope = stack, self.read_scope()
        return self.last_scope

    def read_scope(self) -> tuple[bool, bool]:
        entries, depth = _compat.scopes(), len(self.scopes)
        is_part = entries[:depth] != self.scopes  # of what JAX differentiates
        if not is_part:
            entries = entries[depth:]
        marks = [MARK.match(name) for transform, name in entries if not transform]
        foreign = any(m and int(m[1] or 0) > self.settings.depth for m in marks)
        differentiated = any(t and name in DIFFERENTIATION for t, name in entries)
        return foreign, is_part or differentiated

    def action(self, primitive, source=None) -> Action | None:
        return self.decide(primitive, _compat.source_codes(), self.path, source)

    def apply(self, primitive, args, params, avals=None, forced=None):
        """Runs one op.

        Args:
          avals: the abstract values that the op was traced with, where it comes from a
            jaxpr. By now its inputs may have other floating dtypes.
          forced: the action for all ops of the function that this one is part of.
        """
        foreign, differentiated = self.scope()
        if foreign:
            if avals is not None:
                params = primitive.get_bind_params(params)
            return self.bind(primitive, self.as_traced(args, avals), params)
        action, baked = forced, self.baked or differentiated
        if baked:
            action = action or self.action(primitive)
            # What is drawn is not differentiated.
            baked = action is None or action.table is not DRAW
        if baked:
            args = self.as_traced(args, avals)
        else:
            given, args = args, narrowed(self, primitive, args, forced)
            if args is not given:
                if not self.settings.listed:
                    params = self.as_if_given(args, params)
                if avals is None and primitive.name != "convert_element_type":
                    avals = list(map(jax.typeof, given))  # what Python saw
        if (nested := RULES.get(primitive.name)) is not None:
            return nested(self, primitive, args, params, avals, forced, baked)
        action = action or self.action(primitive)
        check_precision(action, avals or args)
        action = for_product(action, primitive, avals or args, params)
        if primitive.name not in PRIMITIVES:
            check_drawn(primitive, params, action)
            return leave_alone(self, primitive, args, params, avals)
        with self.noted(action):
            return self.run(primitive, args, params, avals, action, forced, baked)

    def noted(self, action):
        """Writes an op's rule into its name stack, if the region is observed."""
        if not self.settings.observed:
            return contextlib.nullcontext()
        return jax.named_scope(RULE + action.why)

    def run(self, primitive, args, params, avals, action, forced, baked):
        """Runs an op that holds no function, as its rule says."""
        if params.get("update_jaxpr") is not None and primitive.name == "scatter":
            args, action = self.as_traced(args, avals), KEPT  # lax.scatter_apply
        if action.kind is STATISTIC:
            widen = avals is not None and any(map(differs, args, avals))
            action = Action(None, jnp.dtype("float32")) if widen else Action(PROMOTE)
        if primitive.name == "convert_element_type":
            out = self.convert(primitive, args, params, avals, action, baked)
            if action.marks:
                mark_results(self, primitive, action, args, out)
            return out
        if action.kind is KEEP and avals is not None:  # dtypes may be mixed by now
            action = Action(PROMOTE)
        refined = self.settings.listed and not baked
        if primitive.name in PASSED_ON and refined and action.dtype is None:
            narrow = self.notes.cast(args[0], self.settings.dtype)
            if narrow is not None and self.notes[args[0]].sides is not None:
                # Moved before it is widened, a product is still known as one.
                out = self.apply(primitive, [narrow, *args[1:]], params)
                return self.cast(out, dtype_of(args[0]))
        if primitive.name == "add" and refined and not (forced or action.dtype):
            if (out := with_bias(self, primitive, args, params)) is not None:
                return out
        inputs, new_params = self.prepare(primitive, args, params, avals, action)
        is_product = PRIMITIVES[primitive.name].kind is LOWER
        lowers = action.kind is LOWER or (is_product and not self.settings.listed)
        if lowers and not baked and is_wide(inputs, new_params):
            return wide_product(self, primitive, inputs, new_params)
        out = self.bind(primitive, inputs, new_params)
        if baked:
            return out if inputs is args else self.as_without(out, args, params)
        if primitive.name == "broadcast_in_dim" and is_filled(inputs[0]):
            return out  # no number, but the user's array
        self.take_note(primitive, inputs, params, out)
        if action.marks:
            mark_results(self, primitive, action, args, out)
        return out

    def prepare(self, primitive, args, params, avals, action):
        """The inputs and parameters in the dtypes that the action asks for."""
        name, dtype = primitive.name, action.dtype
        floats = [x for x in args if is_float(x)]
        kind = action.kind
        if kind is LOWER:
            castable = all(dtype_of(x) in CASTABLE for x in floats)
            kind = LOWER if castable and not is_dot(name, args, params) else PROMOTE
        if kind is LOWER:
            dtype = self.settings.dtype
        elif kind is FLOAT32:
            dtype = jnp.dtype("float32")
        elif kind is PROMOTE:
            dtype = self.widest(floats)
        elif kind is INTO and is_float(args[0]):
            dtype = dtype_of(args[0])
        if dtype is None:
            return args, params
        preferred = params.get("preferred_element_type")
        dtypes = [dtype_of(x) for x in floats]
        dtypes += [getattr(a, "dtype", None) for a in avals or ()]
        widens = jnp.dtype("float32") in dtypes
        if preferred in CASTABLE and (widens or kind is None):
            # Recorded for float32 inputs; for half-precision ones the user's wish.
            self.record.touched |= preferred != dtype
            params = params | {"preferred_element_type": dtype}
        return [self.cast(x, dtype) for x in args], params

    def as_if_given(self, args, params):
        """Parameters for inputs that Python saw in float32, in half precision."""
        if is_wide(args, params):
            return params | {"preferred_element_type": self.settings.dtype}
        return params

    def widest(self, floats):
        """The dtype to promote to, or None. Numbers follow arrays where they fit."""
        if len({dtype_of(x) for x in floats}) < 2:
            return None
        half = self.settings.dtype
        known = (x for x in floats if dtype_of(x) != half)
        if all(
            self.notes[x].widened and self.notes.cast(x, half) is not None
            for x in known
        ):
            return half  # float32 only as the others were, when this was traced
        free = [x for x in floats if self.notes[x].constant is None]
        dtype = _compat.widest(frozenset(map(dtype_of, free or floats)))
        numbers = (self.notes[x].constant for x in floats)
        if all(n is None or fits(n, dtype) for n in numbers):
            return dtype
        return _compat.widest(frozenset(map(dtype_of, floats)))

    def cast(self, x, dtype):
        """`x` in `dtype` if it is of a castable dtype. Each copy is made once."""
        if dtype_of(x) == dtype or dtype_of(x) not in CASTABLE:
            return x
        if not isinstance(x, jax.Array):
            return unrounded(x) if dtype == jnp.float32 else np.asarray(x, dtype)
        if (copy := self.notes.cast(x, dtype)) is None:
            copy = self.call(lax.convert_element_type, [x], {"new_dtype": dtype})
            self.record.touched = True
            widened = dtype == jnp.float32
            self.notes[copy] = self.notes[x]._replace(widened=widened)
            if widened:
                self.notes.remember_cast(copy, x)
            if not widened or isinstance(x, Tracer):  # else they keep each other alive
                self.notes.remember_cast(x, copy)
        return copy

    def convert(self, primitive, args, params, avals, action, baked):
        (x,), dtype = args, jnp.dtype(params["new_dtype"])
        if avals is not None and not isinstance(x, jax.Array):  # stays a known number
            return np.asarray(x).astype(dtype) if holds(dtype, x) else x
        if not is_float(x) or dtype_of(x) not in CASTABLE or dtype not in CASTABLE:
            if action.dtype is not None and dtype in CASTABLE and not baked:
                self.record.touched |= dtype != action.dtype
                params = params | {"new_dtype": action.dtype}
            return self.bind(primitive, args, params)
        explicit = not EXPLICIT.isdisjoint(_compat.source_codes())
        if not baked:
            # Under a policy, a norm that casts its result back is believed.
            kept = explicit and action.marks and dtype == self.settings.dtype
            if action.dtype is not None and not (kept and not self.settings.listed):
                self.record.touched |= dtype != action.dtype
                dtype = action.dtype
            elif avals is not None and avals[0].dtype == dtype != dtype_of(x):
                return x  # nothing was converted when this was traced
        promotes = action is ACTIONS[primitive.name] and not (explicit or baked)
        if promotes and dtype == self.settings.dtype and is_weak_array(x):
            self.record.touched = True
            out = self.call(lax.convert_element_type, [x], {"new_dtype": x.dtype})
            self.notes[out] = self.notes[x]._replace(constant=None)  # but may be a bias
            return out
        if isinstance(x, jax.Array) and params["sharding"] is None and not explicit:
            if dtype != dtype_of(x):
                return self.cast(x, dtype)
        out = self.bind(primitive, args, params | {"new_dtype": dtype})
        self.notes[out] = self.notes[x]._replace(sides=None)
        if dtype == jnp.float32:
            self.notes.remember_cast(out, x)
        return out

    def take_note(self, primitive, args, params, out):
        name = primitive.name
        if name in PASSED_ON:
            self.notes[out] = passed_on(name, args, params, self.notes)
        elif PRIMITIVES[name].kind is LOWER and dtype_of(out) == self.settings.dtype:
            if name != "ragged_dot_general":
                self.notes[out] = Note(sides=product_sides(name, args, params))

    def as_traced(self, args, avals):
        """The values in the dtypes that they were traced with."""
        if avals is None:
            return args
        pairs = zip(args, avals, strict=True)
        return [self.cast(x, a.dtype) if hasattr(a, "dtype") else x for x, a in pairs]

    def as_without(self, out, args, params):
        """Results in the dtype that they would have without autocast."""
        dtypes = [dtype_of(x) for x in args if dtype_of(x) in CASTABLE]
        preferred = params.get("preferred_element_type")
        if preferred is None and not dtypes:
            return out
        dtype = _compat.widest(frozenset(dtypes)) if preferred is None else preferred
        return jax.tree.map(lambda x: self.cast(x, dtype), out)


def is_float(x) -> bool:
    dtype = dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
