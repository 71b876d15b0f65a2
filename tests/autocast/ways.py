"""Where a region stands around a function, and what is between the two: one table.

Each way takes a region and a function of arrays. Those with a `vmap` or `scan` add a
dimension to the function's inputs, and take it from the results.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp


def first(outs):
    return jax.tree.map(lambda out: out[0], outs)


def mapped(function):
    return lambda *args: first(jax.vmap(function)(*[x[None] for x in args]))


def scanned(function):
    def run(x, *rest):
        return first(lax.scan(lambda _, x: (_, function(x, *rest)), None, x[None])[1])

    return run


WAYS = {
    "live": lambda region, f: region(f),
    "jit around": lambda region, f: jax.jit(region(f)),
    "jit inside": lambda region, f: region(jax.jit(f)),
    "jit twice": lambda region, f: region(jax.jit(lambda *args: jax.jit(f)(*args))),
    "checkpoint": lambda region, f: region(jax.checkpoint(f)),
    "vmap around": lambda region, f: mapped(region(f)),
    "vmap inside": lambda region, f: region(mapped(f)),
    "scan": lambda region, f: region(scanned(f)),
}


def given(*names, region=None):
    """`pytest.mark.parametrize` over a few ways, of one region if it is given.

    Of the three ways to jit, the one around the region is last: no jaxpr is rewritten.
    """
    names = names or ("live", "jit inside", "jit around")
    ways = {n: functools.partial(WAYS[n], region) if region else WAYS[n] for n in names}
    return pytest.mark.parametrize("way", ways.values(), ids=list(ways))


# The same for a function of a product, which is in half precision.

eye = np.eye(4, dtype=np.float32)


def live(function, dtype):
    return jamp.autocast(dtype)(lambda x: function(jnp.matmul(x, eye)))


def jit_inside(function, dtype):
    return jamp.autocast(dtype)(jax.jit(lambda x: function(jnp.matmul(x, eye))))


def checkpointed(function, dtype):
    return jamp.autocast(dtype)(jax.checkpoint(lambda x: function(jnp.matmul(x, eye))))


def half_into_jit(function, dtype):
    """The function is traced in half precision."""
    return jamp.autocast(dtype)(lambda x: jax.jit(function)(jnp.matmul(x, eye)))


HALF_WAYS = [live, jit_inside, half_into_jit]
by_half_way = pytest.mark.parametrize(
    "way", [*HALF_WAYS, checkpointed], ids=lambda way: way.__name__
)
by_dtype = pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__
)


def rounded(x, dtype):
    return jnp.asarray(np.asarray(x).astype(dtype).astype(np.float32))
