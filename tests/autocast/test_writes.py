"""References in a region: writes of another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.marks import cover

from .squares import N, arrays, half

pytestmark = [pytest.mark.usefixtures("standard_promotion")]


def assigned(x, w):
    ref = jax.new_ref(jnp.zeros((N, N)))
    ref[...] = x @ w
    ref[0] = (w @ x)[0]
    return ref[...]


def added(x, w):
    ref = jax.new_ref(jnp.ones((N, N)))
    jax.ref.addupdate(ref, ..., x @ w)
    jax.ref.addupdate(ref, (slice(0, 2),), (x @ w)[:2])
    return jax.ref.freeze(ref)


def swapped(x, w):
    ref = jax.new_ref(x)
    before = jax.ref.swap(ref, ..., x @ w)
    return before + ref[...]


def number(x, w):
    ref = jax.new_ref(jnp.float32(1.0))
    ref[...] += jnp.sum(x @ w)
    ref[...] = (x @ w)[0, 0] + ref[...]
    return ref[...]


def scanned(x, w):
    ref = jax.new_ref(jnp.zeros((N, N)))

    def body(carry, _):
        ref[...] += carry @ w
        return jnp.tanh(carry @ w), None

    lax.scan(body, x, None, length=3)
    return ref[...]


def chosen(x, w):
    ref = jax.new_ref(x)

    def write():
        ref[...] = x @ w

    lax.cond(jnp.sum(x) > -1e3, write, lambda: None)
    return ref[...]


def mapped(x, w):
    def row(x):
        ref = jax.new_ref(jnp.zeros(N))
        ref[...] = x @ w
        return ref[...]

    return jax.vmap(row)(x)


def as_argument(x, w):
    ref = jax.new_ref(jnp.zeros((N, N)))

    @jax.jit
    def write(ref, x):
        ref[...] = x @ w

    write(ref, x)
    return ref[...]


FUNCTIONS = (assigned, added, swapped, number, scanned, chosen, mapped, as_argument)


@cover(quick=8, ci=24)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["eager", "jit inside", "jit outside"])
def test_half_precision_is_written_into_a_float32_reference(function, way):
    x, w = arrays()
    expected = function(x, w)
    inside = half()(jax.jit(function) if way == "jit inside" else function)
    found = (jax.jit(inside) if way == "jit outside" else inside)(x, w)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01)
    assert not np.array_equal(found, expected)  # the products are rounded


@pytest.mark.parametrize(
    "function", [assigned, added, number, mapped], ids=lambda f: f.__name__
)
def test_references_are_differentiated(function):
    x, w = arrays()

    def gradient(function):
        return jax.jit(jax.grad(lambda w: jnp.sum(function(x, w) ** 2)))(w)

    found, expected = gradient(half()(function)), gradient(function)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


def test_a_reference_of_half_precision_takes_float32():
    x, w = arrays()
    with half():
        ref = jax.new_ref(x @ w)
        ref[...] = x
    assert ref.dtype == jnp.float16
    np.testing.assert_array_equal(ref[...], x.astype(jnp.float16))


def test_tokens_pass_through_jit():
    x, w = arrays()

    @jax.jit
    def product(token, x):
        return lax.after_all(token), x @ w

    with half():
        _, y = product(lax.create_token(), x)
    assert y.dtype == jnp.float16
