"""What is made in float32 stays float32: accumulators, sums by scatter, counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.marks import slow

N = 50_000
half = jamp.autocast(jnp.float16)
x, w = jnp.full((4, 8), 0.25), jnp.full((8, 4), 0.5)


def live(function):
    return half(function)


def jit_around(function):
    return jax.jit(half(function))


def jit_inside(function):
    return half(jax.jit(function))


WAYS = pytest.mark.parametrize(
    "way", [live, slow(jit_around), jit_inside], ids=lambda way: way.__name__
)

MADE_IN_FLOAT32 = {
    "zeros": lambda h: jnp.zeros((4, 4)) + h,
    "zeros_on_the_right": lambda h: h + jnp.zeros((4, 4)),
    "full": lambda h: jnp.full((4, 4), 2.0) * h,
    "ones": lambda h: jnp.ones((4, 4)) * h,
    "lax_full": lambda h: lax.full((4, 4), 2.0) + h,
    "broadcast_to": lambda h: jnp.broadcast_to(2.0, (4, 4)) * h,
    "dynamic_update_slice": lambda h: jax.jit(
        lambda h: lax.dynamic_update_slice(jnp.zeros((4, 4)), h, (0, 0))
    )(h.astype(jnp.float32)),
    "set": lambda h: jnp.zeros((4, 4)).at[0].set(h[0]),
    "where": lambda h: jnp.where(h > 0, h, jnp.zeros((4, 4))),
    "weak": lambda h: jnp.arange(4)[:, None] * 0.1 + h,
    "weak_stack": lambda h: jnp.concatenate([jnp.arange(4)[:, None] * 0.1, h], 1),
    "loop": lambda h: sum([h, h], start=jnp.zeros((4, 4))),
}


@WAYS
@pytest.mark.parametrize("name", MADE_IN_FLOAT32)
def test_an_array_of_one_number_is_an_array(name, way, standard_promotion):
    function = MADE_IN_FLOAT32[name]
    y = way(lambda x: function(x @ w))(x)
    assert y.dtype == jnp.float32
    assert (y + y.astype(jnp.float16)).dtype == jnp.float32  # after the region too
    assert way(lambda x: function(jnp.tanh(x @ w)))(x).dtype == jnp.float32


def test_a_loop_does_not_change_the_type_of_its_carry(standard_promotion):
    c = jnp.full((4, 4), 0.25)  # it is weakly typed: it follows other arrays
    body = lambda c: c @ c + c
    loops = (
        lambda c: lax.scan(lambda c, _: (body(c), None), c, None, 3)[0],
        lambda c: lax.fori_loop(0, 3, lambda i, c: body(c), c),
        lambda c: lax.while_loop(lambda c: c[0, 0] < 9, body, c),
    )
    for loop in loops:
        assert jax.typeof(half(loop)(c)) == jax.typeof(loop(c)) == jax.typeof(c)


FOLLOWS = {
    "number": lambda h: 2.0 * h + 1.0,
    "zeros_like": lambda h: jnp.zeros_like(h) + h,
    "full_like": lambda h: jnp.full_like(h, 3.0) * h,
    "where": lambda h: jnp.where(h > 0, h, 0.0),
    "maximum": lambda h: jnp.maximum(h, 0.0),
    "bias": lambda h: h + jnp.zeros(4)[None],
    "pad": lambda h: jnp.pad(h, 1),
}


@WAYS
@pytest.mark.parametrize("name", FOLLOWS)
def test_what_follows_half_precision_still_does(name, way, standard_promotion):
    function = FOLLOWS[name]
    assert way(lambda x: function(x @ w))(x).dtype == jnp.float16


@WAYS
def test_an_array_that_asks_for_half_precision_gets_it(way, standard_promotion):
    asks = [
        lambda x: jnp.linspace(0.0, 1.0, 5, dtype=jnp.float16) * x[0, 0],
        lambda x: jnp.full((4,), x[0, 0], jnp.float16),
        lambda x: (jnp.arange(4) * 0.1).astype(jnp.float16),
        lambda x: jnp.asarray(jnp.arange(4) * 0.1, jnp.float16),
    ]
    for ask in asks:
        assert way(ask)(jnp.ones((1, 1), jnp.float16)).dtype == jnp.float16


@WAYS
def test_a_loop_keeps_its_small_terms(way, standard_promotion):
    def total(x):
        acc = jnp.zeros((4, 4))
        for _ in range(8):
            acc = acc + x @ w  # each adds 1
            acc = acc + 512 * (x @ w)
        return acc + 0.25 * (x @ w)

    assert float(way(total)(x)[0, 0]) == 8 + 8 * 512 + 0.25  # float16: 4104


ids = jnp.zeros(N, jnp.int32)
SUMS = {
    "segment_sum": lambda h: jax.ops.segment_sum(h, ids, 1)[0],
    "segment_sum_of_sorted": lambda h: jax.ops.segment_sum(
        h, ids, 1, indices_are_sorted=True
    )[0],
    "bincount": lambda h: jnp.bincount(ids, weights=h, length=1)[0],
    "histogram": lambda h: jnp.histogram(h, 3, weights=h)[0].max(),
    "at_add": lambda h: jnp.zeros(1).at[ids].add(h)[0],
    "nansum": jnp.nansum,
    "sum": jnp.sum,
}
MEANS = {
    "nanmean": jnp.nanmean,
    "mean": jnp.mean,
    "average": lambda h: jnp.average(h, weights=h),
}


@WAYS
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_many(name, way, standard_promotion):
    h = jnp.ones(N, jnp.float16)
    total = way(SUMS[name])(h)
    assert total.dtype == jnp.float32
    assert float(total) == N  # float16: 2048


@WAYS
@pytest.mark.parametrize("name", MEANS)
def test_means_of_many(name, way):
    h = jnp.ones(2 * N, jnp.float16)
    assert float(way(MEANS[name])(h)) == 1.0  # a count in float16 is inf


def test_segment_sum_of_a_product_in_a_function_that_was_jitted(standard_promotion):
    rows = jnp.full((N, 4), 0.25)

    def degrees(rows):
        return jax.ops.segment_sum(rows @ jnp.ones((4, 2)), ids, 1)

    for function in (half(degrees), half(jax.jit(degrees))):
        np.testing.assert_array_equal(function(rows), np.full((1, 2), N, np.float32))


def test_a_scatter_in_a_function_that_was_jitted_promotes(standard_promotion):
    buffer = jnp.zeros((4, 4))

    def write(buffer, x):
        return buffer.at[:2].set((x @ w)[:2]), buffer.at[:2].add((x @ w)[:2])

    def write_into_half(x, rows):
        return (x @ w).at[:2].set(rows), (x @ w).at[:2].multiply(rows)

    for out in half(jax.jit(write))(buffer, x):
        assert out.dtype == jnp.float32
    for out in half(jax.jit(write_into_half))(x, jnp.full((2, 4), 1e5)):
        assert float(out[0, 0]) == 1e5


def test_a_scatter_that_applies_a_function(standard_promotion):
    apply = lambda x: (x @ w).at[:2].apply(jnp.sin)
    expected = apply(x)
    for function in (half(apply), half(jax.jit(apply))):
        np.testing.assert_allclose(function(x), expected, rtol=1e-3)


def test_gradients_of_a_scatter_have_the_dtypes_of_the_parameters(standard_promotion):
    def loss(buffer, x, dtype):
        with jamp.autocast(dtype):
            function = lambda b, x: jnp.sum(b.at[jnp.array([0, 0])].add((x @ w)[:2]))
            return jax.jit(function)(buffer, x)

    buffer = jnp.zeros((4, 4))
    grads = jax.grad(loss, (0, 1))(buffer, x, jnp.float16)
    expected = jax.grad(lambda b, x: jnp.sum(b) + 0.5 * 4 * jnp.sum(x[:2]), (0, 1))
    for grad, wanted in zip(grads, expected(buffer, x), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, wanted)


QUANTILES = {
    "median": jnp.median,
    "quantile": lambda h: jnp.quantile(h, jnp.float32(0.5)),
    "percentile": lambda h: jnp.percentile(h, jnp.float32(50.0)),
}


@WAYS
@pytest.mark.parametrize("name", QUANTILES)
def test_a_quantile_of_more_than_half_precision_counts(name, way, standard_promotion):
    h = jnp.linspace(0, 1, 10_000).astype(jnp.float16)
    with pytest.raises(TypeError, match=rf"(?s){name}.*Cast the input"):
        way(QUANTILES[name])(h)
    assert abs(float(way(QUANTILES[name])(h[::100])) - 0.5) < 0.01
    assert abs(float(way(QUANTILES[name])(h.astype(jnp.float32))) - 0.5) < 0.001
