"""Ops that write a value into a place whose dtype is fixed: the value is cast to it.

torch's `buffer[...] = h` casts h to the dtype of the buffer. JAX requires the value to
have the dtype of the `Ref` that it is written to. In a region, the Ref may be float32
and the value the result of a matrix product.
"""

import jax

from .casting import CastingTrace
from .decision import CASTABLE, Op, Result
from .traits import REF_WRITES


def write(trace: CastingTrace, op: Op) -> Result:
    place, *values = trace.as_traced(op.args, op.avals)
    dtype = getattr(jax.typeof(place), "dtype", None)
    if dtype is not None and dtype in CASTABLE:
        values = [trace.cast(value, dtype) for value in values]
    return trace.bind(op.primitive, [place, *values], op.params)


WRITES = dict.fromkeys(REF_WRITES, write)
