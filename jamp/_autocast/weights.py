"""Which values are activations and which are weights, where a recipe asks.

An activation is made from the result of a product, of this region or of one around it.
A recipe for layers leaves a product of two activations to half precision.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from .._jaxprs import inside, param
from .casting import CastingTrace
from .decision import Op, Value, Values
from .notes import Note
from .traits import ANNOTATED, LEFT_ALONE, PICKS, PRODUCTS, UNMOVED


def is_activation(trace: CastingTrace, x: Value) -> bool:
    if trace.notes[x].activation:
        return True
    outer = trace.parent
    return isinstance(outer, CastingTrace) and is_activation(outer, x)


def are_activations(trace: CastingTrace, values: Values) -> list[bool]:
    return [is_activation(trace, x) for x in values]


def makes_activations(trace: CastingTrace, op: Op, is_foreign: bool) -> Iterable[bool]:
    """Which results of an op are made from the result of a product.

    Args:
      is_foreign: whether an inner region decides about the op.
    """
    if op.name in PRODUCTS:
        return itertools.repeat(True)
    if op.name in ANNOTATED and not is_foreign:
        return ()
    inputs = op.args[:1] if picks_matrices(op) else op.args
    known = are_activations(trace, inputs)
    if op.name in UNMOVED:
        return known
    is_unseen = is_foreign or op.name in LEFT_ALONE
    if any(known) or (is_unseen and holds_product(op)):
        return itertools.repeat(True)
    return ()


def note_activations(trace: CastingTrace, outs: Values, made: Iterable[bool]) -> None:
    """Notes which results are activations. A single number, as a norm, is none."""
    for x, is_made in zip(outs, made, strict=False):
        if is_made and not is_single(x):
            trace.notes[x] = trace.notes[x]._replace(activation=True)


def activations_in(
    trace: CastingTrace, args: Values, changed: Sequence[bool] = ()
) -> list[Note]:
    """Which arguments are activations: of a loop, also all that it changes."""
    if not trace.tells_weights:
        return []
    pairs = itertools.zip_longest(args, changed, fillvalue=False)
    known = [is_activation(trace, x) or (c and not is_single(x)) for x, c in pairs]
    return [Note(activation=is_known) for is_known in known]


def picks_matrices(op: Op) -> bool:
    """Whether an op picks matrices out of its first input, as those of an expert.

    They are made of that input alone. One-hot vectors, though, are made of indices.
    """
    sizes = param(op, "slice_sizes") if op.name in PICKS else ()
    return sum(1 for n in sizes if n != 1) > 1


def holds_product(op: Op) -> bool:
    return any(eqn.primitive.name in PRODUCTS for eqn in inside(op))


def is_single(x: Value) -> bool:
    return all(n == 1 for n in np.shape(x))
