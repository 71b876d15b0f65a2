"""The ends of layers: sums that stay in half precision although float32 is added.

A bias is float32, and so are the mean and the scale of a BatchNorm. JAX promotes, so
the results of both would be float32, where torch's `linear`, `conv` and `batch_norm`
return half precision.

A sum of a half-precision product and a float32 value is a layer with a bias, if the
value was broadcast from fewer dimensions and these are of one operand of the product
only. In the code of a layer library it may also have as many dimensions as the product,
and under `vmap` also vary along all that are of both operands.
Elsewhere that may be a batch of one, whose dtype must not differ from that of a batch
of two. So there a dimension of size 1 counts as one of any size.

The bias is broadcast in float32 and then cast, so that its gradient is summed in
float32. Then the sum is rounded to half precision, and overflows, as torch's does.

A user's own `x @ w + mask` may hold -1e9, which is out of float16's range, or the least
float32, which is out of bfloat16's too. What is finite and at most the least number of
the range becomes a quarter of that, so that the sum stays finite, and so does what a
temperature above a quarter makes of it. Such numbers keep their gradients. A positive
number or a scalar overflows as in a layer.

A BatchNorm computes in float32. Whether a value is its result, and not some value
inside, shows only when an op outside uses it. That op gets it in half precision. The
running statistics are not results: they stay float32.
"""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._targets import rounded
from .._tree import HALVES
from .call_stack import is_in_layer
from .decision import FLOAT32_DTYPE, Decision, Kind, Op, Result, Value
from .notes import BATCH, Sides
from .numbers import fits
from .trace import AutocastTrace
from .traits import OVER_AXES

# Part of the range that a mask becomes: there is room for logits, and a temperature.
MASK = 1 / 4


def with_bias(trace: AutocastTrace, op: Op) -> Value | None:
    """The sum of a half-precision product and a bias, or None for any other sum."""
    dtype = trace.settings.dtype
    for x, bias in (op.args, op.args[::-1]):
        if not isinstance(bias, jax.Array) or array_dtype(bias) != jnp.float32:
            continue
        product = x if array_dtype(x) == dtype else trace.notes.copy(x, dtype)
        sides, number = trace.notes[x].sides, trace.notes[bias].constant
        if product is None or sides is None:
            continue
        if number is not None and not fits(number, dtype):
            continue
        in_layer = is_in_layer(_compat.source_codes())
        varies = dimensions(trace, bias, product, in_layer)
        if varies is None:
            continue
        batch = {
            d for d, s in enumerate(sides) if s == BATCH and np.shape(product)[d] != 1
        }
        of_each = in_layer and batch <= set(varies)  # a layer's, under `vmap`
        if not is_one_side([sides[d] for d in varies if not (of_each and d in batch)]):
            continue
        if any(np.shape(product)[d] != np.shape(bias)[d] for d in varies):
            continue
        trace.effects.touched = True
        # What a layer adds to the scores of attention, which have a batch, is a mask.
        masks = not in_layer or BATCH in sides
        if _compat.is_batched(product):  # vmap would broadcast the bias in half
            bias = trace.call(prepared, [bias], {"dtype": dtype, "masks": masks})
            wide = trace.cast(product, FLOAT32_DTYPE)
            sum_ = trace.bind(op.primitive, [wide, bias], op.params)
            return trace.cast(sum_, dtype)
        return trace.call(biased, [product, bias], {"masks": masks})
    return None


def biased(product: jax.Array, bias: jax.Array, *, masks: bool) -> jax.Array:
    bias = prepared(bias, dtype=product.dtype, masks=masks)
    bias = lax.broadcast_in_dim(bias, product.shape, range(bias.ndim))
    return lax.add(product, lax.convert_element_type(bias, product.dtype))


def prepared(bias: jax.Array, *, dtype: np.dtype, masks: bool) -> jax.Array:
    """Rounds a bias, and its gradient, to half precision; both stay float32.

    Args:
      masks: whether the numbers of a mask that are out of range become one that is not.
    """
    if masks and bias.ndim:
        bias = within_range(bias, float(jnp.finfo(dtype).max))
    return rounded(bias, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def within_range(bias: jax.Array, largest: float) -> jax.Array:
    """Brings the numbers of a mask well into a range; the identity's gradient."""
    is_mask = (bias <= np.float32(-largest)) & lax.is_finite(bias)
    return lax.select(is_mask, lax.full_like(bias, -largest * MASK), bias)


@within_range.defjvp
def _(largest, primals, tangents):
    return within_range(*primals, largest), tangents[0]


def dimensions(
    trace: AutocastTrace, bias: jax.Array, product: Value, in_layer: bool
) -> Collection[int] | None:
    """The dimensions of a product along which a bias varies; None if it is not one."""
    note, wide = trace.notes[bias], {d for d, n in enumerate(np.shape(bias)) if n != 1}
    if note.raised and not in_layer:
        return note.varies
    # Under vmap it is the same for the whole batch.
    shared = _compat.is_batched(product) and not _compat.is_batched(bias)
    if in_layer or shared or np.ndim(bias) == 0:
        return wide if note.varies is None else wide & note.varies
    return None


def is_one_side(sides: Sides) -> bool:
    """Whether dimensions with these sides are all of one operand, or there are none."""
    known = [set(side) if isinstance(side, str) else set() for side in sides]
    return not sides or bool(set.intersection(*known) - {BATCH})


def note_results(trace: AutocastTrace, op: Op, decision: Decision, out: Result) -> None:
    """Remembers what may be a function's result, which is half precision outside.

    The result of a norm has the shape of its input. Its statistics have another shape,
    or are reduced over a mapped axis: they are the module's state, and stay float32.
    """
    is_norm = decision.row is Kind.FLOAT32_NORM
    if is_norm and op.name in OVER_AXES:
        return
    shapes = [np.shape(x) for x in op.args if is_or_was_half(trace, x)]
    for x in jax.tree.leaves(out):
        if np.shape(x) in shapes or (shapes and not is_norm):
            trace.notes[x] = trace.notes[x]._replace(result=True)


def is_or_was_half(trace: AutocastTrace, x: Value) -> bool:
    note = trace.notes[x]
    return array_dtype(x) in HALVES or note.widened or note.result
