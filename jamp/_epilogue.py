"""The ends of layers: what stays in half precision though float32 is added to it.

A bias is float32, and so are the mean and the scale of a BatchNorm. JAX promotes, so
the results of both would be float32, where torch's `linear`, `conv` and `batch_norm`
give half precision.

A sum of a half-precision product and a float32 value is a layer with a bias, if the
value varies along dimensions of one operand of the product alone. The bias is broadcast
in float32 and then cast, so that its gradient is summed in float32; then the sum is
rounded to half precision, and overflows, as torch's does.

A BatchNorm computes in float32. That its result, and not some value inside, is at hand
shows only when an op outside uses it. That op gets it in half precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat
from ._compat import dtype_of
from ._provenance import fits


def with_bias(trace, add, args, params):
    """The sum of a product in half precision and a bias, or None if it is another."""
    dtype = trace.settings.dtype
    for x, bias in (args, args[::-1]):
        if not isinstance(bias, jax.Array) or dtype_of(bias) != jnp.float32:
            continue
        product = x if dtype_of(x) == dtype else trace.notes.cast(x, dtype)
        sides, number = trace.notes[x].sides, trace.notes[bias].constant
        if product is None or sides is None:
            continue
        if number is not None and not fits(number, dtype):
            continue
        varies = dimensions(trace, bias, product)
        if varies is None:
            continue
        if len({sides[d] for d in varies if np.shape(product)[d] != 1}) > 1:
            continue
        trace.record.touched = True
        if _compat.is_batched(product):  # vmap would broadcast the bias in half
            bias = trace.call(rounded, [bias], {"dtype": dtype})
            wide = trace.cast(product, jnp.dtype("float32"))
            return trace.cast(trace.bind(add, [wide, bias], params), dtype)
        return trace.call(biased, [product, bias], {})
    return None


def biased(product, bias):
    bias = rounded(bias, product.dtype)
    bias = lax.broadcast_in_dim(bias, product.shape, range(bias.ndim))
    return lax.add(product, lax.convert_element_type(bias, product.dtype))


def rounded(bias, dtype):
    """A bias rounded to half precision, and so its gradient; both stay float32.

    XLA may drop a pair of casts, but not this.
    """
    info = jnp.finfo(dtype)
    if dtype == jnp.float16:  # a mask of -1e9 must not become -inf
        limit = np.float32(info.max)
        bias = lax.clamp(-limit, bias, limit)
    return lax.reduce_precision(bias, info.nexp, info.nmant)


def dimensions(trace, bias, product):
    """The dimensions of a product along which a value varies, or None if unknown."""
    if np.shape(bias) != np.shape(product):
        return {d for d, size in enumerate(np.shape(bias)) if size != 1}
    varies = trace.notes[bias].varies
    if varies is None and _compat.is_batched(product) and not _compat.is_batched(bias):
        return range(np.ndim(product))  # under vmap: the same for the whole batch
    return varies


def narrowed(trace, primitive, args, forced):
    """The inputs of an op, those that are results of a BatchNorm in half precision."""
    marked = [trace.notes[x].result for x in args]
    if not any(marked):
        return args
    action = forced or trace.action(primitive)
    if action is not None and action.marks:
        return args  # still inside
    dtype, notes = trace.settings.dtype, trace.notes
    return [
        trace.cast(x, dtype) if mark or notes[x].widened else x
        for x, mark in zip(args, marked, strict=True)
    ]
