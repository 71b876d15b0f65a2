"""`jax.lax.Precision` as the value of a rule: float32, with so many digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from shared.jaxprs import equations
from tests.jaxprs import PRODUCTS
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion", "default_precision")

X, W, IMAGES, FILTERS = (
    np.ones(shape, np.float32) for shape in ((4, 8), (8, 8), (1, 8, 8, 2), (3, 3, 2, 2))
)
HIGHEST = lax.Precision.HIGHEST


def products(function, *args):
    found = equations(jax.make_jaxpr(function)(*args))
    return [eqn for eqn in found if eqn.primitive.name in PRODUCTS]


def layer(x, w):
    with jax.named_scope("head"):
        return jnp.sum(jnp.sin(x @ w))


def convolution(x, w):
    with jax.named_scope("head"):
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.sum(jnp.sin(y))


WAYS = {
    "grad around": lambda region, f: jax.grad(region(f), (0, 1)),
    "grad inside": lambda region, f: region(jax.grad(f, (0, 1))),
    "jit inside": lambda region, f: jax.grad(region(jax.jit(f)), (0, 1)),
    "checkpoint": lambda region, f: jax.grad(region(jax.checkpoint(f)), (0, 1)),
    "half inputs": lambda region, f: jax.grad(
        region(lambda x, w: f(x.astype("float16"), w)), (0, 1)
    ),
}


@cover(quick=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.float16, "float8", jamp.ScaledFloat16()])
def test_all_products_of_the_rule_have_the_precision(dtype, way):
    region = jamp.autocast(dtype, rules={"head": HIGHEST})
    for function, args in ((layer, (X, W)), (convolution, (IMAGES, FILTERS))):
        found = products(WAYS[way](region, function), *args)
        assert len(found) == 3 + (way == "checkpoint")
        for eqn in found:
            assert eqn.params["precision"] == (HIGHEST, HIGHEST)
            assert all(v.aval.dtype == jnp.float32 for v in eqn.invars)


def test_other_products_keep_their_own():
    region = jamp.autocast(jnp.float16, rules={"head": HIGHEST})
    found = products(region(lambda x, w: layer(x @ w, w)), X, W)
    assert [eqn.params["precision"] for eqn in found] == [None, (HIGHEST, HIGHEST)]
    assert [eqn.invars[0].aval.dtype for eqn in found] == ["float16", "float32"]


def test_explain_shows_it():
    region = jamp.autocast(jnp.float16, rules={"head": HIGHEST})
    text = str(jamp.debug.explain(region(layer))(X, W))
    assert "precision HIGHEST" in text
