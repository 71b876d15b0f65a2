"""Rules of primitives that hold no function: casts by their rows, and more for a few.

To support another such primitive, give it a row in `ops.py`. It needs a rule here only
if it does more than its row says.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import set_current_trace

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from . import attention
from .bias import note_results, with_bias
from .decision import (
    FLOAT32_DTYPE,
    Decision,
    Kind,
    Op,
    Params,
    Result,
    Value,
    Values,
)
from .input_casts import as_without, dtype_for, prepared, widens
from .libraries import warn_of_unknown
from .notes import Note, passed_on, product_sides
from .numbers import is_filled
from .one_op import WIDE, of_primitive, run_gelu
from .ops import PRIMITIVES
from .products import for_product, is_dot, is_wide
from .scatters import SCATTERS, looked_up, scattered, summed
from .trace import RULES, AutocastTrace, Rule, register
from .traits import CURVED, FOLLOWED, GATHERING, PRODUCTS, UNMOVED
from .weights import are_activations
from .written_casts import convert

KEPT = Decision(Kind.KEEP)
# Their parameters say which dtype they return.
AS_ASKED = ("convert_element_type", attention.ATTENTION)


def with_row(rule: Callable[[AutocastTrace, Op, Decision], Result]) -> Rule:
    """What is done around the rule of each primitive that has a row."""

    @functools.wraps(rule)
    def reported(trace: AutocastTrace, op: Op) -> Result:
        decision = op.decision
        assert decision is not None  # or it has no row
        with trace.noted(decision):
            widened = decision.row is Kind.STATISTIC and widens(trace, op)
            if widened:
                decision = decision._replace(cast=FLOAT32_DTYPE)
            out = rule(trace, op, decision)
            if op.is_baked:
                if op.name not in AS_ASKED:
                    out = as_without(trace, op, out)
            elif decision.inside:
                note_results(trace, op, out)
            elif widened:
                trace.notes[out] = trace.notes[out]._replace(statistic=True)
            probe: Any = trace.settings.probe
            return out if probe is None else probe(trace, op, out)

    return reported


def bound(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Result:
    return trace.bind(op.primitive, args, params)


def by_row(
    trace: AutocastTrace,
    op: Op,
    decision: Decision,
    run: Callable[[AutocastTrace, Op, Values, Params], Result] = bound,
) -> Result:
    """Casts the inputs as the row says."""
    args, params = prepared(trace, op, decision)
    name, is_free = op.primitive.name, not op.is_baked
    if name in CURVED and is_free and decision.row is not Kind.ONE_OP:
        if name in WIDE or not _compat.is_eager(trace.parent):
            if (one := of_primitive(op, args, params)) is not None:
                return trace.call(one, args, {})[0]
    out = run(trace, op, args, params)
    is_of_gelu = is_free and decision.why.name == "jax.nn.gelu"
    return run_gelu(trace, op, args, out) if is_of_gelu else out


register("convert_element_type")(with_row(convert))


@register(*FOLLOWED)
@with_row
def move(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    """Moves elements, about which something may be known."""
    is_free = not op.is_baked and decision.cast is None
    if is_free and trace.notes[op.args[0]].sides is not None:
        narrow = trace.notes.copy(op.args[0], trace.settings.dtype)
        if narrow is not None:
            # Moved before it is widened, a product is still known as one.
            moved = [narrow, *op.args[1:]]
            out: Any = trace.apply(Op(op.primitive, moved, op.params))
            return trace.cast(out, array_dtype(op.args[0]))
    args, params = prepared(trace, op, decision)
    out = trace.bind(op.primitive, args, params)
    if op.is_baked:
        return out  # no layer ends here
    if op.name == "broadcast_in_dim" and is_filled(op, args[0]):
        return out  # the user's array, not a number
    trace.notes[out] = passed_on(op._replace(args=args), trace.notes)
    return out


@register(*UNMOVED)
@with_row
def same(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    args, params = prepared(trace, op, decision)
    out = trace.bind(op.primitive, args, params)
    if op.is_baked:
        return out
    for x, same in zip(args, jax.tree.leaves(out), strict=True):
        trace.notes[same] = trace.notes[x]
    return out


@register("add")
@with_row
def add(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    """Adds, perhaps a bias to the product of a layer."""
    if not op.is_baked and decision.cast is None and op.within is None:
        if (out := with_bias(trace, op)) is not None:
            return out
    return by_row(trace, op, decision)


def lowers(op: Op) -> bool:
    """Whether a product that may be lowered has float32 inputs, and is not a `dot`."""
    return FLOAT32_DTYPE in map(array_dtype, op.args) and not is_dot(op)


@register(*PRODUCTS)
def product(trace: AutocastTrace, op: Op) -> Result:
    """Multiplies matrices, perhaps by a recipe."""
    if trace.tells_weights:
        activations = tuple(are_activations(trace, op.args[:2]))
        op = op._replace(activations=activations)
    decision = for_product(op, op.decision, trace.settings)
    if decision is not None and decision.row is Kind.LOWER and lowers(op):
        warn_of_unknown(op.known.codes)
    return multiply(trace, op._replace(decision=decision))


@with_row
def multiply(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    if decision.recipe is not None:
        out = decision.recipe._run(trace, op)
    else:
        args, params = prepared(trace, op, decision)
        if decision.precision is not None:
            params = params | {"precision": (decision.precision, decision.precision)}
        lowers = decision.row is Kind.LOWER or trace.settings.is_policy
        prepared_op = op._replace(args=args, params=params)
        if lowers and not op.is_baked and is_wide(prepared_op):
            return wide_product(trace, prepared_op)
        out = trace.bind(op.primitive, args, params)
    # Under a policy, the casts around a module settle what is a layer's result.
    if op.is_baked or trace.settings.is_policy or op.name == "ragged_dot_general":
        return out
    if array_dtype(out) == trace.settings.dtype:
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
def gather(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    return by_row(trace, op, decision, looked_up)


@register(*SCATTERS)
@with_row
def scatter_together(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    """Combines numbers that are written into one place."""
    return by_row(trace, op, decision, summed if op.name in GATHERING else scattered)


@register("scatter")
@with_row
def scatter(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    """Writes numbers into an array, or what a function (`lax.scatter_apply`) makes."""
    if param(op, "update_jaxpr") is not None:
        op = op._replace(args=trace.as_traced(op.args, op.avals))
        decision = KEPT
    return by_row(trace, op, decision)


@register(attention.ATTENTION)
def attend(trace: AutocastTrace, op: Op) -> Result:
    """Attention as one op, or op by op where its products are not just lowered."""
    settings, decision = trace.settings, op.decision
    params: Any = op.params
    assert decision is not None  # that of a product
    inputs = op._replace(args=op.args[:3])  # a bias is added to float32 scores
    recipes = [r for r in (decision.recipe, settings.recipe) if r is not None]
    takes = any(recipe._takes_activations for recipe in recipes)
    if takes or settings.probe is not None or decision.precision is not None:
        with trace.current():
            arrays: Any = op.args
            return attention.op_by_op(*arrays, **params)
    dtype = dtype_for(trace, inputs, decision, [*map(array_dtype, inputs.args)])
    params = params | {"dtype": dtype}
    if settings.observed:
        note = attention.chosen(*op.args, **params)
        decision = decision._replace(why=decision.why._replace(note=note))
    if not op.is_baked and dtype is not None:
        cast = [trace.cast(x, dtype) for x in inputs.args]
        op, params = op._replace(args=[*cast, *op.args[3:]]), op.params
    return as_one_op(trace, op._replace(params=params, decision=decision))


@with_row
def as_one_op(trace: AutocastTrace, op: Op, decision: Decision) -> Result:
    return bound(trace, op, op.args, op.params)


register(*(PRIMITIVES.keys() - RULES.keys()))(with_row(by_row))
