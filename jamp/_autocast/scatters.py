"""Sums that scatters, and the gradients of gathers, make of half precision.

`x.at[i].add(y)` adds many numbers into one place, and XLA rounds after each of them: a
float16 count stops at 2048, a bfloat16 one at 256. The gradient of `h[i]` is the same
kind of sum, for the row of an embedding or the hub of a graph. A region computes both
in float32 and rounds once; the dtypes of the results stay. Where an op says that its
indices are unique, or has only a few, it runs as it was given.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .._tree import HALVES
from .decision import FLOAT32_DTYPE, Op, Params, Result, Value, Values
from .picks import Pick, by_mask, is_few, pick_of
from .trace import AutocastTrace

# How they combine two numbers is recorded in the dtype of the numbers.
SCATTERS = {
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}


def summed(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Result:
    """The result of a scatter that sums.

    Args:
      args: the op's inputs in the dtypes that it is to run in.
    """
    half = array_dtype(args[0])
    if half not in HALVES or param(op, "unique_indices") or not repeats(args[1]):
        return scattered(trace, op, args, params)
    wide = [trace.cast(x, FLOAT32_DTYPE) for x in args]
    return trace.cast(scattered(trace, op, wide, params), half)


def looked_up(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Result:
    """The result of a gather, whose gradient is such a sum, or a mask."""
    # What is computed at once is not differentiated.
    if op.is_baked or _compat.is_eager(trace.parent):
        return trace.bind(op.primitive, args, params)
    sums = array_dtype(args[0]) in HALVES and repeats(args[1])
    pick = pick_of(op, args)
    if pick is None and (param(op, "unique_indices") or not sums):
        return trace.bind(op.primitive, args, params)
    return trace.call(gathered, args, params | {"pick": pick})


def scattered(trace: AutocastTrace, op: Op, args: Values, params: Params) -> Value:
    """The result of a scatter of numbers in any dtype."""
    made = "update_jaxpr", "update_consts"
    params = {name: value for name, value in params.items() if name not in made}
    return trace.call(SCATTERS[op.name], args, params)


def repeats(indices: Value) -> bool:
    """Whether so many indices may be equal that a sum in half precision goes wrong.

    Of a few, as one step of a loop writes into a cache, the sum is right to within
    their number of roundings, and a float32 copy of all that they point into costs more
    than the step.
    """
    return not is_few(np.shape(indices)[:-1])


def gathered(
    x: jax.Array, indices: jax.Array, *, pick: Pick | None, **params: object
) -> jax.Array:
    return _gathered(x, indices, pick, tuple(params.items()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _gathered(
    x: jax.Array,
    indices: jax.Array,
    pick: Pick | None,
    params: tuple[tuple[str, object], ...],
) -> jax.Array:
    return lax.gather_p.bind(x, indices, **dict(params))


@_gathered.defjvp
def _(pick, params, primals, tangents):
    (x, indices), (tangent, _) = primals, tangents
    out = _gathered(x, indices, pick, params)
    if pick is not None:
        # A loop keeps the indices for the backward pass, and makes the mask anew.
        masked = functools.partial(by_mask, pick=pick, shape=np.shape(out))
        return out, jax.checkpoint(masked, prevent_cse=False)(tangent, indices)

    def in_float32(x):
        wide = lax.convert_element_type(x, jnp.float32)
        wide = lax.gather_p.bind(wide, indices, **dict(params))
        return lax.convert_element_type(wide, x.dtype)

    return out, jax.jvp(in_float32, [x], [tangent])[1]
