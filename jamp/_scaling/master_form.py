"""What is kept of a float32 master beside its half-precision parameter: all, or a rest.

A full master is the float32 number itself. A remainder is the sixteen bits that a
bfloat16 parameter lacks, as int16: how many float32 numbers the master lies above the
parameter, in the order of their bit patterns.

    joined(rounded(x, bfloat16), remainder_of(x)) == x   # every bit, unless x is nan

So the parameter is `x` rounded to nearest, with ties away from zero. `astype` rounds
ties to even: 65,537 numbers then go to each even bfloat16, and sixteen bits cannot tell
them apart. float16 has no remainder: all 1.7e9 float32 numbers within 2**-25 of zero go
to its zeros. In both forms a parameter is rounded alike, and one can become the other.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._tree import PyTree, dtype_of
from .mesh import typed_as
from .transformation import is_hole

REMAINDER = jnp.dtype(jnp.int16)
QUIET = np.int32(0x0040)  # the bit of a bfloat16 that keeps a nan from being an inf


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype != jnp.bfloat16:
        return lax.convert_element_type(x, dtype)
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    # A carry goes from the fraction to the exponent, and from the largest to inf.
    nearest = (pattern + np.int32(0x8000)) >> np.int32(16)
    nan = (pattern >> np.int32(16)) | QUIET
    high = lax.select(jnp.isnan(x), nan, nearest)
    return lax.bitcast_convert_type(lax.convert_element_type(high, jnp.int16), dtype)


def remainder_of(x: jax.Array) -> jax.Array:
    pattern = lax.bitcast_convert_type(x, jnp.int32)
    low = (pattern << np.int32(16)) >> np.int32(16)  # with its sign
    return lax.convert_element_type(low, REMAINDER)


def joined(param: ArrayLike, remainder: ArrayLike) -> jax.Array:
    """The float32 numbers of bfloat16 parameters and their remainders.

    If the parameter was changed since, it is the number that has the old remainder and
    rounds to the parameter. There is none at zeros and infinities with some remainders,
    where the sum of the patterns is a nan: there it is the parameter.
    """
    pattern = lax.bitcast_convert_type(param, jnp.int16)
    high = lax.convert_element_type(pattern, jnp.int32) << np.int32(16)
    both = high + lax.convert_element_type(remainder, jnp.int32)
    x = lax.bitcast_convert_type(both, jnp.float32)
    is_nan = jnp.isnan(x)
    alone = typed_as(lax.bitcast_convert_type(high, jnp.float32), x)
    return lax.select(is_nan, alone, x)


def master_of(kept: PyTree, param: PyTree) -> PyTree:
    """The float32 master of a parameter, from what the state keeps of it.

    A copy that the parameter was not rounded from is out of date, because other code
    has changed the parameter since: the master is then the parameter.
    """
    if is_hole(kept):
        return kept
    of, given = dtype_of(kept), dtype_of(param)
    if of == REMAINDER:
        if given != jnp.bfloat16:
            raise ValueError(f"a parameter with a remainder is {given}, not bfloat16.")
        return joined(param, kept)
    if not jnp.issubdtype(given, jnp.floating):
        raise ValueError(f"a parameter with a float32 copy is {given}.")
    if of != jnp.float32:
        raise ValueError(
            f"master_weights's update: a copy in the state is {of}, not float32 or "
            "int16; pass the state that init made."
        )
    limits, wide = jnp.finfo(given), lax.convert_element_type(param, jnp.float32)
    step = jnp.maximum(abs(wide) * float(limits.eps), float(limits.smallest_subnormal))
    off = abs(kept - wide)
    return jnp.where(off <= step, *(typed_as(x, off) for x in (kept, wide)))


def keep(master: PyTree, dtype: np.dtype) -> PyTree:
    """What a state keeps of a master: float32, or int16 for a remainder."""
    is_whole = is_hole(master) or dtype == jnp.float32
    return master if is_whole else remainder_of(master)
