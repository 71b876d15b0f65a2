"""`jax.lax.Precision` as the value of a rule: float32, with so many digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from shared.jaxprs import equations
from tests.autocast import ways
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


# By the context that JAX has for it, inside of a region.

highest = jax.default_matmul_precision("highest")
# No half precision has these numbers.
FINE = np.float32(1 + 2**-14) * np.ones((4, 4), np.float32)
SUM = FINE.astype(np.float64) @ FINE


def multiplied(x, y):
    return jnp.matmul(x, y)


def convolved(x, y):
    images, filters = x[:, :, None, None], y.T[:, :, None, None]
    return lax.conv(images, filters, (1, 1), "SAME")[:, :, 0, 0]


def with_vjp(function):
    """Its rules multiply in the context too."""
    exact = jax.custom_vjp(function)
    back = lambda kept, g: jax.vjp(function, *kept)[1](g)
    exact.defvjp(lambda *args: (function(*args), args), back)
    return exact


ASKED = {
    "decorator": highest(multiplied),
    "einsum": highest(functools.partial(jnp.einsum, "ij,jk")),
    "convolution": highest(convolved),
    "an algorithm": jax.default_matmul_precision("F32_F32_F32")(multiplied),
    "jit": jax.jit(highest(multiplied)),
    "around jit": highest(jax.jit(multiplied)),
    "custom_vjp": with_vjp(highest(multiplied)),
    "back to it": jax.default_matmul_precision("default")(highest(multiplied)),
}


@cover(quick=4)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("way", ways.WAYS)
def test_a_context_inside_of_the_region_asks_for_float32(way, asked):
    function = lambda x: (ASKED[asked](x, FINE), multiplied(x, FINE))
    exact, usual = ways.WAYS[way](jamp.autocast(jnp.bfloat16), function)(FINE)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(exact, SUM, rtol=1e-5)
    np.testing.assert_array_equal(usual.astype(np.float32), np.full((4, 4), 4.0))
    loss = lambda x: ways.WAYS[way](jamp.autocast(jnp.bfloat16), ASKED[asked])(x, FINE)
    grads = jax.grad(lambda x: loss(x).astype(jnp.float32).sum())(FINE)
    expected = np.ones((4, 4)) @ FINE.T.astype(np.float64)
    np.testing.assert_allclose(grads, expected, rtol=1e-5)


@cover(quick=2)
@pytest.mark.parametrize("way", ways.WAYS)
def test_the_default_around_the_region_is_for_all_products(way):
    around = highest(ways.WAYS[way](jamp.autocast(jnp.bfloat16), multiplied))
    assert around(FINE, FINE).dtype == jnp.bfloat16
    inner = lambda x: jamp.autocast(jnp.bfloat16)(multiplied)(x, FINE)
    both = ways.WAYS[way](jamp.autocast(jnp.float16), highest(inner))
    assert both(FINE).dtype == jnp.bfloat16
    usual = jax.default_matmul_precision("default")(multiplied)
    around = highest(ways.WAYS[way](jamp.autocast(jnp.bfloat16), usual))
    assert around(FINE, FINE).dtype == jnp.bfloat16


@cover(quick=2)
@pytest.mark.parametrize("way", ways.WAYS)
def test_a_context_inside_of_the_region_keeps_a_product_from_float8(way):
    wide = [np.ones((16, 16), np.float32)] * 2
    exact = ways.WAYS[way](jamp.autocast("float8"), highest(multiplied))
    assert exact(*wide).dtype == jnp.float32
    around = highest(ways.WAYS[way](jamp.autocast("float8"), multiplied))
    text = str(jax.make_jaxpr(around)(*wide))
    assert "f8_e4m3fn" in text
