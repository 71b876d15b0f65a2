"""Looks into jaxprs: which ops they have, in which dtypes."""

import jax
import jax.numpy as jnp

from shared.jaxprs import equations

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def products(function, *args):
    """The operands' dtypes of each floating matrix product and convolution."""
    return products_of(jax.make_jaxpr(function)(*args))


def products_of(jaxpr, outer=True):
    """With `outer=False`, leaves out those that contract nothing, and so multiply."""
    found = []
    for eqn in equations(jaxpr):
        if not outer and is_outer(eqn):
            continue
        dtypes = {v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")}
        floating = any(jnp.issubdtype(d, jnp.floating) for d in dtypes)
        if eqn.primitive.name in PRODUCTS and floating:
            found.append({d.name for d in dtypes})
    return found


def is_outer(eqn):
    if eqn.primitive.name != "dot_general":
        return False
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return not contracting and eqn.outvars[0].aval.dtype == jnp.float32


def all_half(function, *args, dtype="float16"):
    """Asserts that there are products, all in half precision; returns their number.

    A product in float32 that contracts nothing is a multiplication.
    """
    found = products_of(jax.make_jaxpr(function)(*args), outer=False)
    assert found
    assert all(dtypes == {dtype} for dtypes in found), found
    return len(found)
