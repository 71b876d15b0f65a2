"""Scales on a mesh: whose largest number makes them, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from shared.collectives import COLLECTIVE
from tests.marks import cover

RECIPES = {
    **{n: jamp.Float8(n) for n in ("tensorwise", "rowwise", "rowwise_with_gw_hp")},
    "scaled": jamp.ScaledFloat16(),
}
DEVICES = 2
WHOLE, BY_ROWS = P(None, None), P("data", None)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def operands():
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (64, 32))
    return jax.random.normal(keys[1], (32, 48)) / 6, x.at[:32].mul(8.0)


def loss(dtype):
    def run(w, x):
        with jamp.autocast(dtype):
            y = jnp.tanh(x @ w) @ w.T
        return jnp.mean(jnp.float32(y) ** 2)

    return run


def gradients(dtype):
    return jax.jit(jax.grad(loss(dtype), (0, 1)))


def count(function, *args):
    return len(COLLECTIVE.findall(function.lower(*args).compile().as_text()))


def mesh_of(axis_type):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(axis_type,))


def placed(mesh, w_spec=WHOLE, x_spec=BY_ROWS):
    w, x = operands()
    w = jax.device_put(w, NamedSharding(mesh, w_spec))
    return w, jax.device_put(x, NamedSharding(mesh, x_spec))


def assert_near(results, truth, tolerance):
    for a, b in zip(results, truth, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


NAMES = sorted(RECIPES, key=["scaled", *RECIPES].index)


@cover()
@pytest.mark.parametrize("recipe", NAMES)
def test_a_scale_is_that_of_the_whole_array(recipe):
    run = gradients(RECIPES[recipe])
    on_one = run(*operands())
    assert_near(run(*placed(mesh_of(AxisType.Auto))), on_one, 0.01)


@cover()
@pytest.mark.parametrize("recipe", NAMES)
def test_all_reduces_are_those_of_scales_over_the_mesh(recipe):
    arguments = placed(mesh_of(AxisType.Auto))
    plain = count(gradients(jnp.bfloat16), *arguments)
    found = count(gradients(RECIPES[recipe]), *arguments)
    # Of two activations and two cotangents, or of the cotangents alone. The gradient
    # of the weight contracts what lies on several devices: rowwise has their maxima in
    # one. Whole rows need none.
    more = {"tensorwise": 4, "rowwise": 1, "rowwise_with_gw_hp": 0, "scaled": 2}
    assert found - plain == more[recipe]


@cover(ci=8)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("recipe", NAMES)
def test_shard_map_has_a_scale_for_each_device_and_no_collective_more(recipe, check):
    mesh = mesh_of(AxisType.Auto)

    def mapped(dtype):
        step = jax.shard_map(
            lambda w, x: jax.lax.pmean(jax.grad(loss(dtype))(w, x), "data"),
            mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check,
        )  # fmt: skip
        return jax.jit(step)

    w, x = operands()
    run = mapped(RECIPES[recipe])
    assert count(run, w, x) == count(mapped(jnp.bfloat16), w, x)
    alone = jax.jit(jax.grad(loss(RECIPES[recipe])))
    parts = [alone(w, part) for part in jnp.split(x, DEVICES)]
    factor = DEVICES if check else 1  # the gradient of what is not mapped is summed
    assert_near([run(w, x)], [factor * sum(parts) / DEVICES], 0.02)
