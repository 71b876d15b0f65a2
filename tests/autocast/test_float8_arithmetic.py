"""The numbers of float8: scales, casts, products and their gradients."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jamp
from jamp._autocast.low_precision import quantized
from tests.marks import cover

FORMATS = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LEAST = 1e-12  # what torchao takes for the largest number at least


def inverse_of(largest, limit):
    """The inverse scale, by arithmetic that has no bits in it: float64."""
    return 2.0 ** -np.floor(np.log2(limit / np.maximum(np.float64(largest), LEAST)))


def cast(x, dtype=jnp.float8_e4m3fn, axes=None):
    return quantized(x, dtype=jnp.dtype(dtype), axes=axes)


@pytest.mark.parametrize("dtype", FORMATS)
def test_scales_are_the_smallest_powers_of_two_that_bring_numbers_into_range(dtype):
    limit = FORMATS[dtype]
    edges = np.float32(1.75 * 2.0 ** np.arange(-126, 127))
    above = np.nextafter(edges, np.float32(np.inf))
    others = np.random.default_rng(0).lognormal(0, 25, 4000)
    special = [0, 1e-45, 1e-38, 1e-12, 3e38, np.finfo(np.float32).max]
    numbers = np.concatenate([edges, above, others, special])
    numbers = np.float32(numbers)
    inverse = np.asarray(cast(jnp.asarray(numbers)[:, None], dtype, (1,)).inverse)[:, 0]
    # XLA's CPU backend is not asked here: integers decide, and no number is flushed.
    np.testing.assert_array_equal(inverse, np.float32(inverse_of(numbers, limit)))
    assert np.all(numbers / inverse <= limit)


@cover(quick=6, ci=18)
@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("axes", [None, (0,), (1,)])
def test_numbers_are_rounded_to_the_nearest(dtype, source, axes):
    powers = np.arange(-36, 12)[:, None] / (3 if source is jnp.float16 else 1)
    x = np.random.default_rng(1).normal(size=(48, 64)) * 2.0**powers
    x = jnp.asarray(x, source)
    values, inverse = cast(x, dtype, axes)
    wide = np.asarray(x, np.float64)
    true = inverse_of(np.abs(wide).max(axes, keepdims=axes is not None), FORMATS[dtype])
    np.testing.assert_array_equal(np.asarray(inverse), np.float32(true))
    expected = np.float32(wide / true).astype(np.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(values), expected)
    assert values.dtype == dtype


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_makes_all_nan(bad):
    x = np.ones((4, 4), np.float32)
    x[1, 2] = bad
    values, inverse = cast(jnp.asarray(x))
    assert np.isnan(inverse) and np.isnan(np.asarray(values, np.float32)).all()
    rows = np.asarray(cast(jnp.asarray(x), axes=(1,)).inverse)
    assert np.isnan(rows[1]) and np.isfinite(np.delete(rows, 1, 0)).all()


def assert_rounded_once(result, truth):
    """Sums in float32, which are rounded to bfloat16 once."""
    tolerance = 2.0**-8 * np.abs(truth) + 1e-5 * np.abs(truth).max()
    assert np.all(np.abs(result - truth) <= tolerance)


def product(recipe, dims="ij,jk->ik"):
    def run(x, w):
        with jamp.autocast(jamp.Float8(recipe)):
            return jnp.einsum(dims, x, w)

    return run


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, x, w, g):
    y, pull = jax.vjp(function, x, w)
    return y, *pull(g)


def in_steps(x, dtype, axis):
    """What is left of a matrix that was quantized, in float64."""
    x = np.asarray(x, np.float64)
    scale = inverse_of(np.abs(x).max(axis, keepdims=axis is not None), FORMATS[dtype])
    return np.float64(np.float32(x / scale).astype(np.dtype(dtype))) * scale


def expected(recipe, x, w, g):
    """The product and both gradients, from what torchao says of its recipes."""
    e4m3, e5m2 = FORMATS
    if recipe == "tensorwise":
        x, w = (in_steps(a, e4m3, None) for a in (x, w))
        g = in_steps(g, e5m2, None)
        return x @ w, g @ w.T, x.T @ g
    forward = in_steps(x, e4m3, 1) @ in_steps(w, e4m3, 0)
    if recipe == "rowwise":
        dx = in_steps(g, e4m3, 1) @ in_steps(w, e4m3, 1).T
        return forward, dx, in_steps(x, e4m3, 0).T @ in_steps(g, e4m3, 0)
    dx = in_steps(g, e4m3, 1) @ in_steps(w, e4m3, None).T
    half = lambda a: np.float64(np.asarray(a, ml_dtypes.bfloat16))
    return forward, dx, half(x).T @ half(g)


@cover(quick=3, ci=6)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_are_those_of_the_recipe(recipe, dtype):
    rng = np.random.default_rng(2)
    rows = 2.0 ** rng.integers(-14, 14, size=(32, 1))  # more than a format holds
    columns = 2.0 ** rng.integers(-14, 14, size=(1, 48))
    x = jnp.asarray(rng.normal(size=(32, 64)) * rows, dtype)
    w = jnp.asarray(rng.normal(size=(64, 48)) * columns, dtype)
    g = jnp.asarray(rng.normal(size=(32, 48)) * rows * columns, jnp.bfloat16)
    results = with_gradients(product(recipe), x, w, g)
    assert [r.dtype for r in results] == [jnp.bfloat16, dtype, dtype]
    for result, truth in zip(results, expected(recipe, x, w, g), strict=True):
        assert_rounded_once(np.float64(np.asarray(result)), truth)


SIZES = {"i": 32, "j": 64, "k": 48, "a": 4, "b": 8, "c": 4, "d": 12}


def as_matrix(array, names, rows, columns):
    """An array of named dimensions as a matrix, in float64."""
    array = np.einsum(f"{names}->{rows}{columns}", np.asarray(array).astype(float))
    shape = [int(np.prod([SIZES[n] for n in names])) for names in (rows, columns)]
    return array.reshape(shape)


LAYOUTS = [
    "ji,jk->ik",
    "ij,kj->ik",
    "ji,kj->ik",
    "abj,jk->abk",
    "ajb,jcd->abcd",
    "abj,cjd->abcd",
]


@cover(quick=2, ci=len(RECIPES) * len(LAYOUTS))
@pytest.mark.parametrize("layout", [*reversed(LAYOUTS)])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
def test_dimensions_may_lie_anywhere(recipe, layout):
    left, right, out = layout.replace("->", ",").split(",")
    rng = np.random.default_rng(3)
    draw = lambda names: rng.normal(size=[SIZES[n] for n in names])
    x, w = (jnp.asarray(np.float32(draw(names))) for names in (left, right))
    g = jnp.asarray(draw(out), jnp.bfloat16)
    y, dx, dw = with_gradients(product(recipe, layout), x, w, g)
    rows, columns = (n.replace("j", "") for n in (left, right))
    of_x, of_w, of_y = (left, rows, "j"), (right, "j", columns), (out, rows, columns)
    matrices = as_matrix(x, *of_x), as_matrix(w, *of_w), as_matrix(g, *of_y)
    results = as_matrix(y, *of_y), as_matrix(dx, *of_x), as_matrix(dw, *of_w)
    for result, truth in zip(results, expected(recipe, *matrices), strict=True):
        assert_rounded_once(result, truth)
    found = jamp.debug.explain(product(recipe, layout))(x, w).matmul_flops
    assert list(found) == ["float8_e4m3fn"]


@pytest.mark.slow
def test_the_weight_of_equinox_stands_on_the_left():
    layer = eqx.nn.Linear(64, 48, use_bias=False, key=jax.random.key(0))
    rng = np.random.default_rng(5)
    x, g = rng.normal(size=(32, 64)), rng.normal(size=(32, 48))
    g = np.float64(np.asarray(g, ml_dtypes.bfloat16))

    def run(weight, x):
        with jamp.autocast(jamp.Float8("rowwise_with_gw_hp")):
            return jax.vmap(eqx.tree_at(lambda m: m.weight, layer, weight))(x)

    _, vjp = jax.vjp(run, layer.weight, jnp.float32(x))
    dw, dx = (np.float64(np.asarray(d)) for d in vjp(jnp.bfloat16(g)))
    truths = expected("rowwise_with_gw_hp", x, np.asarray(layer.weight).T, g)
    assert_rounded_once(dx, truths[1])
    assert_rounded_once(dw.T, truths[2])


def decibels(result, truth):
    error = np.linalg.norm(np.float64(np.asarray(result)) - truth)
    return 20 * np.log10(np.linalg.norm(truth) / error)


@cover()
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_is_that_of_the_formats(recipe):
    rng = np.random.default_rng(4)
    x, w, g = (rng.normal(size=s) for s in ((128, 256), (256, 192), (128, 192)))
    arrays = np.float32(x), np.float32(w), g.astype(jnp.bfloat16)
    y, dx, dw = with_gradients(product(recipe), *arrays)
    assert decibels(y, x @ w) >= 28
    assert decibels(dx, g @ w.T) >= 24.5
    assert decibels(dw, x.T @ g) >= 24.5


@cover(ci=6)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_no_inf_or_nan_is_lost(recipe, bad):
    x, w = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)
    g = np.ones((16, 16), jnp.bfloat16)
    x[3, 4] = bad
    y, dx, dw = with_gradients(product(recipe), x, w, g)
    assert not np.isfinite(np.asarray(y[3], np.float32)).any()
    assert not np.isfinite(np.asarray(dw[4])).any()
    g[2, 1] = bad
    _, dx, dw = with_gradients(product(recipe), w.T, w, g)
    assert not np.isfinite(np.asarray(dx[2])).any()
    assert not np.isfinite(np.asarray(dw[:, 1])).any()


@cover(quick=4, ci=18)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 3e18, 3e38])
def test_numbers_of_any_size_are_fine(recipe, size):
    x, w = np.full((16, 32), size, np.float32), np.full((32, 16), 2.0**-6, np.float32)
    g = np.full((16, 16), 1e-3, jnp.bfloat16)
    y, dx, dw = with_gradients(product(recipe), x, w, g)
    seen = size if size > 1e-12 else 0.0  # of which torchao makes 0, too
    np.testing.assert_allclose(np.float32(y), np.full(y.shape, seen / 2), rtol=0.05)
    np.testing.assert_allclose(dx, np.full(x.shape, 16e-3 / 64), rtol=0.1)
    seen = size if recipe == "rowwise_with_gw_hp" and size > 1e-30 else seen
    np.testing.assert_allclose(dw, np.full(w.shape, 16e-3 * seen), rtol=0.1)


@pytest.mark.slow
def test_a_float16_product_does_not_overflow_before_it_is_scaled_back():
    x, w = jnp.full((16, 1024), 100.0), jnp.full((1024, 16), 1e-4)

    def run(x, w):
        with jamp.autocast(jnp.float16, rules={jax.lax.dot_general_p: "float8"}):
            return x @ w

    g = np.full((16, 16), 4096, np.float16)
    y, dx, dw = with_gradients(run, x, w, g)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(np.float32(y), 10.24, rtol=0.05)
    np.testing.assert_allclose(dx, 16 * 4096 * 1e-4, rtol=0.1)
    assert np.isinf(dw).all()  # 16 * 4096 * 100: as in float16 without float8


def test_half_precision_that_is_to_give_float32_does():
    x, w = np.ones((16, 32), jnp.bfloat16), np.full((32, 16), 1 / 3, jnp.bfloat16)

    def run(x, w):
        with jamp.autocast("float8"):
            return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    y, dx, dw = with_gradients(run, x, w, np.ones((16, 16), np.float32))
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, np.full((16, 16), 32 * 0.34375))  # E4M3's 1/3
    assert dx.dtype == dw.dtype == jnp.bfloat16
