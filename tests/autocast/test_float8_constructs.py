"""The constructs of `test_constructs` in `autocast("float8")`."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.autocast.test_constructs import (
    CONSTRUCTS,
    KEEPING,
    WAYS,
    batch,
    dtypes,
    jitted,
    loss_of,
    params,
)
from tests.jaxprs import products
from tests.marks import mostly_slow

N = 32  # rows, and numbers in a row
FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
# Products in a derivative that the construct takes, or that its user wrote, and those
# of a single row, are none that qualify.
NONE = {
    "grad inside",
    "vjp",
    "linearize",
    "map",
    "custom_jvp",
    "custom_vjp",
    "custom_vjp in scan",
}
SOME = {"jvp", "associative_scan", "custom_jvp in jit"}
# The plain one is run in every way, the others as a training step is.
RUNS = [(name, "jit") for name in CONSTRUCTS] + [("plain", "eager"), ("plain", "vmap")]
QUICK = [
    ("plain", "eager"),
    ("plain", "vmap"),
    *((n, "jit") for n in ("scan", "cond", "remat", "custom_vjp", "shard_map in jit")),
]


@cache
def in_float32(name):
    return jitted(loss_of(CONSTRUCTS[name]))(params(N), batch(N, N))


def in_float8(construct):
    def autocast(p, x):
        with jamp.autocast("float8"):
            return construct(p, x)

    return autocast


def apart(result, truth):
    """The relative distance of two trees, as vectors."""
    result, truth = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (result, truth)
    )
    return np.linalg.norm(result - truth) / np.linalg.norm(truth)


def in_float8_and_near(name, step, p, x):
    """For each product whether it is in float8; the numbers are near float32's."""
    value, gradients = step(p, x)
    assert dtypes(gradients) == dtypes(p)
    true_value, true_gradients = in_float32(name)
    np.testing.assert_allclose(value, true_value, rtol=0.05)
    assert apart(gradients, true_gradients) < 0.15
    return [operands <= FLOAT8 for operands in products(step, p, x)]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "way"), mostly_slow(RUNS, *QUICK))
def test_a_construct_runs_in_float8(name, way):
    p, x = params(N), batch(N, N)
    step = WAYS[way](loss_of(in_float8(CONSTRUCTS[name])))
    found = in_float8_and_near(name, step, p, x)
    assert any(found) == (name not in NONE)
    assert all(found) == (name not in NONE | SOME)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", mostly_slow(CONSTRUCTS, "scan"))
def test_a_jitted_function_is_rewritten(name):
    p, x = params(N), batch(N, N)
    compiled = jax.jit(loss_of(CONSTRUCTS[name]))

    def around(p, x):
        with jamp.autocast("float8"):
            return jnp.float32(compiled(p, x))

    step = jax.value_and_grad(around)
    found = in_float8_and_near(name, step, p, x)
    assert any(found) == (name not in NONE)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", mostly_slow(KEEPING, "remat"))
def test_nothing_leaks(name, checking_leaks):
    step = jitted(loss_of(in_float8(CONSTRUCTS[name])))
    jax.make_jaxpr(step)(params(N), batch(N, N))
