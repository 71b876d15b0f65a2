"""The constructs of `test_constructs` in `autocast("float8")`."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.autocast.test_constructs import (
    CONSTRUCTS,
    RUNS,
    WAYS,
    batch,
    dtypes,
    jitted,
    loss_of,
    params,
)
from tests.jaxprs import products

N = 32  # rows, and numbers in a row
FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
# Those that have no product that qualifies: one with batch dimensions, one of a single
# row, those in a derivative that the construct takes or writes itself.
WITHOUT = {
    "associative_scan": "batch dimensions",
    "map": "32x32x1",
}
IN_A_DERIVATIVE = ("custom_jvp", "custom_jvp in jit", "custom_vjp", "custom_vjp in scan")


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


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "way"), RUNS)
def test_a_construct_runs_in_float8(name, way):
    p, x = params(N), batch(N, N)
    step = WAYS[way](loss_of(in_float8(CONSTRUCTS[name])))
    value, gradients = step(p, x)
    assert dtypes(gradients) == dtypes(p)
    true_value, true_gradients = in_float32(name)
    print("ZZZ", name, way, float(value/true_value-1), apart(gradients, true_gradients))
    found = products(step, p, x)
    print("ZZZ", len([f for f in found if f<=FLOAT8]), found)
