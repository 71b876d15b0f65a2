"""Draws under `vmap` of keys, of what they are drawn from, and of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

import jamp

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
DRAWS = {
    "categorical": random.categorical,
    "categorical, high": functools.partial(random.categorical, mode="high"),
    "bernoulli": random.bernoulli,
    "bernoulli, high": functools.partial(random.bernoulli, mode="high"),
    "geometric": random.geometric,
    "choice": lambda key, p: random.choice(key, 5, (3,), p=p),
    "two draws": lambda key, p: (random.bernoulli(key, p), random.categorical(key, p)),
}
BATCHED = {
    "neither": lambda draw: lambda keys, p: draw(keys[0, 0], p[0, 0]),
    "keys": lambda draw: lambda keys, p: jax.vmap(draw, (0, None))(keys[0], p[0, 0]),
    "values": lambda draw: lambda keys, p: jax.vmap(draw, (None, 0))(keys[0, 0], p[0]),
    "both": lambda draw: lambda keys, p: jax.vmap(draw)(keys[0], p[0]),
    "both twice": lambda draw: jax.vmap(jax.vmap(draw)),
    "keys twice": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw, (0, None)), (0, None))(keys, p[0, 0])
    ),
    "both, and keys around": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw), (0, None))(keys, p[0])
    ),
    "keys, and values around": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw, (0, None)), (None, 0))(keys[0], p[0])
    ),
}
# A draw of two numbers for each element, with a key for each example, arrives in a form
# that the region does not take apart.
TAKEN = {"neither", "values", "keys, and values around"}
REFUSED = {("bernoulli, high", how) for how in BATCHED.keys() - TAKEN}


@pytest.mark.parametrize("name", DRAWS)
def test_a_batched_draw_is_that_of_float32_or_refused(name):
    keys = random.split(random.key(0), (2, 3))
    p = jax.nn.softmax(jnp.linspace(-2, 2, 30).reshape(2, 3, 5))
    wrong = []
    for how, batched in BATCHED.items():
        for dtype in HALVES.values():
            draw = batched(DRAWS[name])
            given = p.astype(dtype)
            expected = draw(keys, given.astype(jnp.float32))
            for way in (lambda f: f, jax.jit):
                run = jamp.autocast(dtype)(way(draw))
                try:
                    found = run(keys, given)
                except NotImplementedError as error:
                    assert "would draw in half precision" in str(error)
                    if (name, how) not in REFUSED:
                        wrong.append((how, dtype.__name__, "refused"))
                    continue
                if (name, how) in REFUSED:
                    wrong.append((how, dtype.__name__, "not refused"))
                same = jax.tree.map(np.array_equal, found, expected)
                if not all(jax.tree.leaves(same)):
                    wrong.append((how, dtype.__name__, found, expected))
    assert wrong == []
