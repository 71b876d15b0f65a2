"""Looks into jaxprs: which ops there are, in which dtypes."""

import jax
import jax.numpy as jnp

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def equations(jaxpr):
    """All equations, those of inner jaxprs included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(inner)


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def products(function, *args):
    """The operands' dtypes of each floating matrix product and convolution."""
    return products_of(jax.make_jaxpr(function)(*args))


def products_of(jaxpr):
    found = []
    for eqn in equations(jaxpr):
        dtypes = {v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")}
        floating = any(jnp.issubdtype(d, jnp.floating) for d in dtypes)
        if eqn.primitive.name in PRODUCTS and floating:
            found.append({d.name for d in dtypes})
    return found


def all_half(function, *args, dtype="float16"):
    """Asserts that there are products, all of them in half precision; their number."""
    found = products(function, *args)
    assert found
    assert all(dtypes == {dtype} for dtypes in found), found
    return len(found)
