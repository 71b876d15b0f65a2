"""Sums of many numbers are those of float32: scatters, gathers, means, counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._autocast import scatters
from tests.marks import cover

from .squares import arrays
from .ways import HALF_WAYS, by_dtype, by_half_way, eye, live

pytestmark = pytest.mark.usefixtures("standard_promotion")

half = jamp.autocast(jnp.float16)
x, w = np.full((4, 8), 0.25, np.float32), np.full((8, 4), 0.5, np.float32)
N = 5000
hub = np.zeros(N, np.int32)
# In bfloat16, a sum of ones stops at 256, and in float16 at 2048.
IN_FLOAT32 = {
    "segment_sum": lambda h: jax.ops.segment_sum(h, hub, 2),
    "segment_sum of sorted": lambda h: jax.ops.segment_sum(
        h, hub, 2, indices_are_sorted=True
    ),
    "bincount": lambda h: jnp.bincount(hub, h[:, 0], length=2),
    "histogram": lambda h: jnp.histogram(h[:, 0], 3, weights=h[:, 0])[0].max(),
    "add to float32": lambda h: jnp.zeros((1, 4)).at[hub].add(h),
    "sum": lambda h: jnp.sum(h, 0),
    "nansum": lambda h: jnp.nansum(h, 0),
    "cumsum": lambda h: jnp.cumsum(h, 0)[-1],
}
ROUNDED = {
    "add": lambda h: jnp.zeros((2, 4), h.dtype).at[hub].add(h),
    "subtract": lambda h: jnp.zeros((2, 4), h.dtype).at[hub].subtract(h),
    "degree": lambda h: jnp.zeros((2, 4), h.dtype).at[hub].add(jnp.ones_like(h)),
    "gradient of a gather": lambda h: jax.vjp(lambda h: h[hub], h[:2])[1](h)[0],
    "product": lambda h: jnp.ones((1, N)).astype(h.dtype) @ h,
}
# Of so many numbers that a count in float16 is inf.
MEANS = {
    "mean": jnp.mean,
    "nanmean": jnp.nanmean,
    "average": lambda h: jnp.average(h, weights=h),
}


@cover(quick=16, ci=96)
@pytest.mark.parametrize("name", [*MEANS, *ROUNDED, *IN_FLOAT32])
@by_dtype
@pytest.mark.parametrize("way", HALF_WAYS, ids=lambda way: way.__name__)
def test_a_sum_of_many_is_that_of_float32(name, way, dtype):
    function = (IN_FLOAT32 | ROUNDED | MEANS)[name]
    ones = jnp.asarray(np.ones((70_000 if name in MEANS else N, 4), np.float32))
    found = way(function, dtype)(ones)
    if name in IN_FLOAT32:
        assert found.dtype == jnp.float32
    rtol = 0.01 if name in ROUNDED else 0
    assert np.allclose(np.float32(found), jax.jit(function)(ones), rtol, 0)


weights = np.random.default_rng(0).uniform(0, 2, (N, 4)).astype(np.float32)


@cover(ci=8)
@by_dtype
@by_half_way
def test_the_gradient_of_a_gather_is_that_of_float32(way, dtype):
    """The hub's features go to all nodes; the graph's weights come back to it."""
    receive = lambda h: jnp.sum(h[hub] * weights)
    expected = jax.jit(jax.grad(receive))(eye)
    loss = way(receive, dtype)
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(grad(eye), expected, rtol=5e-3)
    batched = jax.jit(jax.vmap(jax.grad(loss)))(np.stack([eye, 2 * eye]))
    np.testing.assert_allclose(batched[1], expected, rtol=5e-3)


def test_a_gather_with_indices_that_are_out_of_bounds_has_its_gradient():
    fill = lambda h: jnp.sum(h.at[jnp.array([0, 9, 0])].get(mode="fill", fill_value=7))
    for way in HALF_WAYS:
        value, grad = jax.jit(jax.value_and_grad(way(fill, jnp.float16)))(eye)
        assert float(value) == 2 + 4 * 7
        np.testing.assert_array_equal(grad, jax.jit(jax.grad(fill))(eye))


def test_some_gathers_are_what_they_were(monkeypatch):
    x, rows = jnp.ones((12, 4)), jnp.arange(12)
    unique = lambda h: h.at[rows].get(unique_indices=True)
    text = lambda take: str(jax.make_jaxpr(live(take, jnp.float16))(x))
    for take in (unique, lambda h: h[jnp.array([3])], lambda h: h[1:]):
        assert "custom_jvp" not in text(take)
    assert "custom_jvp" in text(lambda h: h[rows])
    monkeypatch.setattr(scatters, "gathered", None)
    with jamp.autocast(jnp.float16):  # computed at once, so not differentiated
        assert (x @ eye)[rows].dtype == jnp.float16


def test_a_few_indices_cost_no_float32_copy():
    def written(cache, i):
        return cache.at[jnp.array([i, i + 1])].add(jnp.ones((2, 4), cache.dtype)), i

    fill = lambda h: lax.scan(written, h, jnp.arange(3))[0]
    for function in (fill, jax.vmap(lambda h: h.at[jnp.array([0, 0])].add(h[:2]))):
        x = jnp.ones((2, 4, 4)) if function is not fill else eye
        text = str(jax.make_jaxpr(live(function, jnp.float16))(x))
        assert "f32[2,4] = convert" not in text and "f32[4,4] = convert" not in text


def test_a_symbolic_number_of_indices():
    (n,) = jax.export.symbolic_shape("n")
    indices = jax.ShapeDtypeStruct((n,), jnp.int32)
    for take in (lambda h, i: h[i], lambda h, i: h.at[i].add(1)):
        run = lambda x, i, take=take: live(lambda h: take(h, i), jnp.float16)(x)
        exported = jax.export.export(jax.jit(run))(eye, indices)
        assert exported.out_avals[0].dtype == jnp.float16


def test_a_scatter_in_a_function_that_was_jitted_promotes():
    buffer = jnp.zeros((4, 4))

    def write(buffer, x):
        return buffer.at[:2].set(jnp.matmul(x, w)[:2]), buffer.at[:2].add(
            jnp.matmul(x, w)[:2]
        )

    def write_into_half(x, rows):
        return jnp.matmul(x, w).at[:2].set(rows), jnp.matmul(x, w).at[:2].multiply(rows)

    for out in half(jax.jit(write))(buffer, x):
        assert out.dtype == jnp.float32
    for out in half(jax.jit(write_into_half))(x, jnp.full((2, 4), 1e5)):
        assert float(out[0, 0]) == 1e5


def test_a_scatter_that_applies_a_function():
    apply = lambda x: jnp.matmul(x, w).at[:2].apply(jnp.sin)
    expected = apply(x)
    for function in (half(apply), half(jax.jit(apply))):
        np.testing.assert_allclose(function(x), expected, rtol=1e-3)


def test_gradients_of_a_scatter_have_the_dtypes_of_the_parameters():
    def loss(buffer, x, dtype):
        with jamp.autocast(dtype):
            function = lambda b, x: jnp.sum(
                b.at[jnp.array([0, 0])].add(jnp.matmul(x, w)[:2])
            )
            return jax.jit(function)(buffer, x)

    buffer = jnp.zeros((4, 4))
    grads = jax.grad(loss, (0, 1))(buffer, x, jnp.float16)
    expected = jax.grad(lambda b, x: jnp.sum(b) + 0.5 * 4 * jnp.sum(x[:2]), (0, 1))
    for grad, wanted in zip(grads, expected(buffer, x), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_array_equal(grad, wanted)


ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))


@pytest.mark.parametrize(
    "scatter",
    [lax.scatter, lax.scatter_add, lax.scatter_max, lax.scatter_min, lax.scatter_mul],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("jit", [False, True])
def test_a_scatter_of_two_dtypes_promotes(scatter, jit):
    x, w = arrays()

    def function(x, w):
        return scatter(x, jnp.array([[1]]), jnp.matmul(x, w)[:1], ROWS)

    with half:
        found = (jax.jit(function) if jit else function)(x, w)
        product = jnp.matmul(x, w)
        assert scatter(product, jnp.array([[1]]), x[:1], ROWS).dtype == jnp.float32
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, function(x, w), rtol=0.01, atol=0.01)
