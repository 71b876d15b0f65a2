"""Rules of primitives that hold no function: casts by their rows, and more for a few.

To support another such primitive, give it a row in `ops.py`. It needs a rule here only
if it does more than its row says.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import set_current_trace

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from . import attention
from .activations import MADE, SAVED_ONCE, run_gated, run_inside
from .bias import mark_results, with_bias
from .conversion import convert, is_filled
from .decision import (
    FLOAT32_DTYPE,
    Action,
    Kind,
    Op,
    Params,
    Reason,
    Result,
    Settings,
    Source,
    Value,
    Values,
)
from .input_casts import as_without, prepared, widens
from .libraries import warn_of_unknown
from .notes import Note, added_to_all, is_float, passed_on, product_sides
from .ops import PRIMITIVES
from .picks import index_note
from .products import for_product, is_dot, is_wide
from .scatters import SCATTERS, looked_up, scattered, summed
from .trace import RULES, AutocastTrace, Rule, register
from .traits import ALIGNED, FOLLOWED, GATHERING, PRODUCTS, UNMOVED

PROMOTED, KEPT = Action(Kind.PROMOTE), Action(Kind.KEEP)


def with_row(rule: Callable[[AutocastTrace, Op, Action], Result]) -> Rule:
    """What is done around the rule of each primitive that has a row."""

    @functools.wraps(rule)
    def reported(trace: AutocastTrace, op: Op) -> Result:
        action = op.action
        assert action is not None  # or it has no row
        with trace.noted(action):
            widened = action.kind is Kind.STATISTIC and widens(trace, op)
            if action.kind is Kind.STATISTIC:
                action = Action(None, FLOAT32_DTYPE) if widened else PROMOTED
            out = rule(trace, op, action)
            if action.marks and not op.is_baked:
                mark_results(trace, op, action, out)
            if widened and not op.is_baked:
                trace.notes[out] = trace.notes[out]._replace(statistic=True)
            probe: Any = trace.settings.probe
            return out if probe is None else probe(trace, op, out)

    return reported


def bound(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Result:
    return trace.bind(op.primitive, args, params)


def by_row(
    trace: AutocastTrace,
    op: Op,
    action: Action,
    run: Callable[[AutocastTrace, Op, Values, Params], Result] = bound,
) -> Result:
    """Casts the inputs as the row says. Where dtypes are fixed, so is the result's."""
    args, params = prepared(trace, op, action)
    out = run(trace, op, args, params)
    if op.is_baked:
        out = as_without(trace, op, args, out)
    if op.name in ALIGNED and trace.settings.listed:
        if added := added_to_all(op, trace.notes):
            trace.notes[out] = trace.notes[out]._replace(added=added)
    if op.is_baked:
        return out
    if action.why.name in SAVED_ONCE:
        return run_inside(trace, op, args, params, out)
    return run_gated(trace, op, args, out) if op.name == "mul" else out


register("convert_element_type")(with_row(convert))


@register(*FOLLOWED)
@with_row
def move(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Moves elements, about which something may be known."""
    # Under a policy, the casts around a module settle what is a layer's result.
    is_in_layer = trace.settings.listed and not op.is_baked and action.dtype is None
    if is_in_layer and trace.notes[op.args[0]].sides is not None:
        narrow = trace.notes.copy(op.args[0], trace.settings.dtype)
        if narrow is not None:
            # Moved before it is widened, a product is still known as one.
            moved = [narrow, *op.args[1:]]
            out: Any = trace.apply(Op(op.primitive, moved, op.params))
            return trace.cast(out, array_dtype(op.args[0]))
    args, params = prepared(trace, op, action)
    out = trace.bind(op.primitive, args, params)
    if op.is_baked:
        out = as_without(trace, op, args, out)
    if op.name == "broadcast_in_dim" and is_filled(args[0]):
        return out  # the user's array, not a number
    note = passed_on(op._replace(args=args), trace.notes)
    if op.is_baked:  # no layer ends here
        trace.notes[out] = Note(added=note.added)
        return out
    trace.notes[out] = note
    if op.name == "copy":  # the last op of an exact gelu
        trace.notes.remember(out, MADE, trace.notes.copy(args[0], MADE))
    return out


@register(*UNMOVED)
@with_row
def same(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Returns its inputs."""
    args, params = prepared(trace, op, action)
    out = trace.bind(op.primitive, args, params)
    if op.is_baked:
        return as_without(trace, op, args, out)
    for x, same in zip(args, jax.tree.leaves(out), strict=True):
        trace.notes[same] = trace.notes[x]
    return out


@register("add")
@with_row
def add(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Adds, perhaps a bias to the product of a layer."""
    is_alone = op.within is None and action.dtype is None and not op.is_baked
    if trace.settings.listed and is_alone:
        if (out := with_bias(trace, op)) is not None:
            return out
    return by_row(trace, op, action)


def lowers(op: Op) -> bool:
    """Whether a product that may be lowered has float32 inputs, and is not a `dot`."""
    return any(array_dtype(x) == jnp.float32 for x in op.args) and not is_dot(op)


@register(*PRODUCTS)
def product(trace: AutocastTrace, op: Op) -> Result:
    """Multiplies matrices, perhaps by a recipe."""
    activations = tuple(map(trace.is_activation, op.args[:2]))
    op = op._replace(activations=activations)
    action = for_product(op, op.action, trace.settings, trace.notes)
    if action is not None and Kind.LOWER in (action.kind, action.table) and lowers(op):
        warn_of_unknown(_compat.source_codes())
    return multiply(trace, op._replace(action=action))


@with_row
def multiply(trace: AutocastTrace, op: Op, action: Action) -> Result:
    if action.recipe is not None:
        out = action.recipe._run(trace, op)
        if op.is_baked:
            return as_without(trace, op, None, out)
    else:
        args, params = prepared(trace, op, action)
        if action.precision is not None:
            trace.effects.touched = True
            params = params | {"precision": (action.precision, action.precision)}
        lowers = action.kind is Kind.LOWER or not trace.settings.listed
        prepared_op = op._replace(args=args, params=params)
        if lowers and not op.is_baked and is_wide(prepared_op):
            return wide_product(trace, prepared_op)
        out = trace.bind(op.primitive, args, params)
        if op.is_baked:
            return as_without(trace, op, args, out)
    if array_dtype(out) == trace.settings.dtype and op.name != "ragged_dot_general":
        trace.notes[out] = Note(sides=product_sides(op))
    return out


# Algorithms that say what the dtypes of such a product say already. No compiler knows
# them all: a TPU's and a CPU's refuse the first.
IMPLIED = lax.DotAlgorithmPreset.F16_F16_F32, lax.DotAlgorithmPreset.BF16_BF16_F32


def wide_product(trace: AutocastTrace, op: Op) -> Value:
    """A product of half-precision inputs that was asked for in float32.

    Its own derivative would multiply float32 by float16. This one casts the
    (co)tangent first, so that the backward pass runs in half precision too.
    """
    trace.effects.touched = True
    params, bind = op.params, op.primitive.bind
    if param(op, "precision") in IMPLIED:
        params = params | {"precision": None}
    narrow = params | {"preferred_element_type": array_dtype(op.args[0])}
    wide = param(op, "preferred_element_type")

    @jax.custom_jvp
    def product(x, y):
        return bind(x, y, **params)

    @product.defjvp
    def _(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        tangent = bind(dx, y, **narrow) + bind(x, dy, **narrow)
        return product(x, y), lax.convert_element_type(tangent, wide)

    with set_current_trace(trace.parent):
        return product(*op.args)


@register("gather")
@with_row
def gather(trace: AutocastTrace, op: Op, action: Action) -> Result:
    return by_row(trace, op, action, looked_up)


@register(*SCATTERS)
@with_row
def scatter_together(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Combines numbers that are written into one place."""
    return by_row(trace, op, action, summed if op.name in GATHERING else scattered)


@register("scatter")
@with_row
def scatter(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Writes numbers into an array, or what a function (`lax.scatter_apply`) makes."""
    if param(op, "update_jaxpr") is not None:
        op = op._replace(args=trace.as_traced(op.args, op.avals))
        action = KEPT
    return by_row(trace, op, action)


@register(*attention.PRODUCTS_IN)
def attend(trace: AutocastTrace, op: Op) -> Result:
    """Attention as one op, or op by op where its products are decided about."""
    why = Reason("lower", Source.PRIMITIVE, op.name)
    action = op.action or Action(Kind.LOWER, why=why)
    if op.name != attention.attention_p.name or op.is_baked:
        return as_one_op(trace, op._replace(action=action))
    if decides_products(trace.settings) or action.precision is not None:
        with trace.current():
            return attention.attention(attention.OP_BY_OP, *op.args, **op.params)
    if trace.settings.observed:
        args, _ = prepared(trace, op, action)
        note = attention.chosen(args, op.params)
        action = action._replace(why=action.why._replace(note=note))
    return as_one_op(trace, op._replace(action=action))


def decides_products(settings: Settings) -> bool:
    """Whether a region may run the products of an attention in different ways."""
    if settings.probe is not None:
        return True
    if settings.recipe is not None and settings.recipe._takes_activations:
        return True
    return any(rule.test is lax.dot_general_p for rule in settings.rules)


@with_row
def as_one_op(trace: AutocastTrace, op: Op, action: Action) -> Result:
    def run(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Result:
        if op.name == attention.attention_p.name:  # JAX adds a bias to float32 scores
            args = [*args[:3], *op.args[3:]]
        return trace.bind(op.primitive, args, params)

    return by_row(trace, op, action, run)


@register("iota")
def count(trace: AutocastTrace, op: Op) -> Result:
    out = trace.left_alone(op)
    trace.notes[out] = index_note(op, out, trace.notes)
    return out


@register("concatenate", "lt", "select_n")
@with_row
def maybe_of_indices(trace: AutocastTrace, op: Op, action: Action) -> Result:
    """Runs an op by its row, of which an index may be made."""
    out = by_row(trace, op, action)
    if not is_float(op.args[-1]):
        trace.notes[out] = index_note(op, out, trace.notes)
    return out


register(*(PRIMITIVES.keys() - RULES.keys()))(with_row(by_row))
