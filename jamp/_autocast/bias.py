"""The ends of layers: sums that stay in half precision although float32 is added.

A bias is float32, and so are the mean and the scale of a BatchNorm. JAX promotes, so
the results of both would be float32, where torch's `linear`, `conv` and `batch_norm`
return half precision.

A sum of a half-precision product and a float32 value is a layer with a bias, if the
value is a number, or a vector along a dimension of the product's right operand. A
number for each row, `x @ w + e[:, None]`, is none: scores may be large, and torch adds
them in float32. In the code of a layer library a bias is what does not vary along both
operands, as a mask of queries and keys does.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._targets import rounded
from .._tree import HALVES
from .decision import FLOAT32_DTYPE, Op, Result, Value
from .notes import Sides
from .numbers import fits
from .trace import AutocastTrace
from .traits import REDUCTIONS

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
        in_layer = op.known.is_in_layer
        is_bias = is_of_layer if in_layer else is_vector
        if not is_bias(trace, bias, product, sides):
            continue
        sizes = zip(np.shape(product), np.shape(bias), strict=False)
        if any(size not in (1, of) for of, size in sizes):
            continue
        # What a layer adds to the scores of attention, which have a batch, is a mask.
        masks = not in_layer or bool(sides.batch)
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


def is_of_layer(
    trace: AutocastTrace, bias: jax.Array, product: Value, sides: Sides
) -> bool:
    """Whether a value in a layer's code does not vary along both operands."""
    varies = {d for d, n in enumerate(np.shape(bias)) if n != 1}
    if (along := trace.notes[bias].along) is not None:
        varies &= along
    return varies.isdisjoint(sides.left) or varies.isdisjoint(sides.right)


def is_vector(
    trace: AutocastTrace, bias: jax.Array, product: Value, sides: Sides
) -> bool:
    """Whether a value is a number, or a vector along the right operand's dimension."""
    along, n, each = trace.notes[bias].along, np.ndim(bias), _compat.is_batched(bias)
    if each and not sides.each:
        return False
    # `vmap` adds the batch to the product alone; a number is added to an array.
    if not each and (n == 0 < np.ndim(product) or n <= _compat.is_batched(product)):
        return True
    if along is None or not each <= len(along) <= 1 or len(along) == n:
        return False
    return along <= sides.right


def note_results(trace: AutocastTrace, op: Op, out: Result) -> None:
    """Remembers what may be a function's result, which is half precision outside.

    What is made of a reduction is a statistic: the module's state, which stays float32.
    """
    if op.name not in REDUCTIONS and any(is_or_was_half(trace, x) for x in op.args):
        for x in jax.tree.leaves(out):
            trace.notes[x] = trace.notes[x]._replace(result=True)


def is_or_was_half(trace: AutocastTrace, x: Value) -> bool:
    note = trace.notes[x]
    return array_dtype(x) in HALVES or note.widened or note.result
