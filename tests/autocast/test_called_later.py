"""What a region has left behind and another one calls: backward passes, jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from tests.jaxprs import products

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jnp.linspace(0, 1, 16).reshape(4, 4)
W = jnp.linspace(-1, 2, 16).reshape(4, 4)


def function(x, w):
    return jnp.sin(x @ w) @ w


FORWARD = {
    "bfloat16": {"dtype": jnp.bfloat16},
    "off": {"enabled": False},
    "float8": {"dtype": "float8"},
    "scaled": {"dtype": jnp.float16, "recipe": "scaled"},
}
AROUND = {
    "eagerly": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}


def backward(run, later):
    out, pull_back = jax.vjp(run, X, W)
    return later(pull_back)(jnp.ones_like(out))


def forward(run, later):
    _, push = jax.linearize(run, X, W)
    return later(push)(X, W)


def again(run, later):
    made = jax.make_jaxpr(run)(X, W)
    return later(lambda x, w: jaxpr_as_fun(made)(x, w))(X, W)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in FORWARD
        for what in (backward, forward, again)
        if (name, what) != ("scaled", forward)  # which has no forward mode
    ],
)
def test_another_region_leaves_it_as_it_is(name, what):
    later = jamp.autocast(jnp.bfloat16 if name == "scaled" else jnp.float16)
    wrong = []
    for around, wrap in AROUND.items():
        region = wrap(jamp.autocast(**FORWARD[name])(function))
        for how in (lambda f: f, jax.jit):
            run = how(lambda wrapped=region: what(wrapped, lambda f: f))
            expected = run()
            found = how(lambda wrapped=region: what(wrapped, later))()
            pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
            for x, y in pairs:
                if x.dtype != y.dtype or not np.array_equal(x, y):
                    wrong.append((around, how is jax.jit, str(x.dtype), str(y.dtype)))
            if name in ("bfloat16", "off"):
                dtypes = products(lambda wrapped=region: what(wrapped, later))
                if {"float16"} in dtypes:
                    wrong.append((around, dtypes))
    assert wrong == []
