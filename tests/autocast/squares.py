"""Two square arrays, and a region of float16, for functions of any kind."""

import functools

import jax
import jax.numpy as jnp

import jamp

half = functools.partial(jamp.autocast, dtype=jnp.float16)
N = 4


def arrays():
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.normal(keys[0], (N, N)), jax.random.normal(keys[1], (N, N)) / 2
