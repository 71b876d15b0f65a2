"""A bias overflows as in torch, a mask stays what it is, a batch of one is a batch."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jamp
from tests.marks import cover

from . import ways

half = jamp.autocast(jnp.float16)
by_way = ways.given("live", "jit inside", region=half)
HUGE = np.array([np.inf, -np.inf, 1e5, -1e9, 2.0, np.nan], np.float32)
IN_TORCH = np.array([np.inf, -np.inf, np.inf, -np.inf, 3.0, np.nan], np.float16)
x = np.full((2, 4), 0.5, np.float32)
w = np.full((4, 6), 0.5, np.float32)


# Layers of four inputs, with as many outputs as there are biases.


def kernel(bias):
    return jnp.asarray(np.full((4, bias.size), 0.5, np.float32))


def linen_dense(bias, x):
    params = {"kernel": kernel(bias), "bias": bias}
    return nn.Dense(bias.size).apply({"params": params}, x)


def linen_conv(bias, x):
    params = {"kernel": kernel(bias)[None], "bias": bias}
    return nn.Conv(bias.size, (1,)).apply({"params": params}, x[:, None])[:, 0]


def nnx_linear(bias, x):
    layer = nnx.Linear(4, bias.size, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = kernel(bias), bias
    return layer(x)


def equinox_layer(bias):
    layer = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (kernel(bias).T, bias))


def equinox_linear(bias, x):
    return jax.vmap(equinox_layer(bias))(x)


def equinox_linear_of_one(bias, x):
    return jnp.stack([equinox_layer(bias)(row) for row in x])


def haiku_linear(bias, x):
    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(bias.size)(x)))
    return layer.apply({"linear": {"w": kernel(bias), "b": bias}}, x)


def plain(bias, x):
    return x @ kernel(bias) + bias


LAYERS = [
    linen_dense,
    linen_conv,
    nnx_linear,
    equinox_linear,
    equinox_linear_of_one,
    haiku_linear,
]


by_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)


@cover(quick=3, ci=3 * len(LAYERS))
@by_layer
@ways.given(region=half)
def test_the_bias_of_a_layer_overflows_as_in_torch(layer, way, standard_promotion):
    y = way(layer)(jnp.asarray(HUGE), jnp.asarray(x))
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, np.stack([IN_TORCH, IN_TORCH]))


def with_inf(layer):
    """The loss of a layer by its bias, and such a bias of which one number is inf."""

    def loss_fn(bias):
        with jamp.autocast(jnp.float16):
            return jnp.mean(layer(bias, x) ** 2)

    return loss_fn, np.array([0, 0, np.inf, 0, 0, 0], np.float32)


@cover(quick=2)
@by_layer
def test_a_bias_that_is_inf_is_seen_by_the_scaler(layer, standard_promotion):
    loss_fn, bias = with_inf(layer)
    loss, grad = jax.jit(jax.value_and_grad(loss_fn))(bias)
    assert not np.isfinite(loss)
    assert not np.isfinite(np.asarray(grad)[2])


@pytest.mark.slow
@by_layer
def test_a_bias_that_is_inf_is_found(layer, standard_promotion):
    loss_fn, bias = with_inf(layer)
    assert jamp.debug.find_nonfinite(loss_fn)(bias).found


@by_way
def test_a_mask_of_finite_numbers_stays_finite(way, standard_promotion):
    y = np.asarray(way(plain)(HUGE, x))
    assert y.dtype == np.float16
    expected = np.array([np.inf, -np.inf, np.inf, -16376, 3.0, np.nan], np.float16)
    np.testing.assert_array_equal(y, np.stack([expected, expected]))


@by_way
def test_gradients_of_a_bias_that_does_not_fit_are_kept(way, standard_promotion):
    bias = np.array([1e5, -1e9, 1.0, 2.0, 3.0, 4.0], np.float32)
    loss_fn = way(lambda bias: jnp.sum(plain(bias, x)))
    np.testing.assert_array_equal(jax.grad(loss_fn)(bias), np.full(6, 2.0))


FILLED = {
    "bias": lambda x: jnp.matmul(x, w) + jnp.full((6,), 1e6),
    "row": lambda x: jnp.matmul(x, w) + jnp.full((6,), 1e6)[None],
    "multiples": lambda x: jnp.matmul(x, w) + (jnp.full((6,), 1e3) * 1e3)[None],
    "steps": lambda x: jnp.matmul(x, w) + (jnp.arange(6.0) * 1e6)[None],
}


@cover(quick=4, ci=len(FILLED) * len(ways.WAYS))
@pytest.mark.parametrize("line", FILLED)
@pytest.mark.parametrize("way", ways.WAYS)
def test_an_array_that_was_filled_is_a_bias_everywhere(line, way, standard_promotion):
    exact = jax.jit(FILLED[line])(x)
    expected = np.where(exact > 65504, np.inf, exact).astype(np.float16)
    y = ways.WAYS[way](half, FILLED[line])(x)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("jit", [False, True])
def test_a_bias_is_known_by_where_its_dimensions_went(jit, standard_promotion):
    shapes = (2, 3, 5), (5, 4), (3, 4), (3,), (4,)
    x, w, p, q, b = (jnp.asarray(np.ones(shape, np.float32)) for shape in shapes)

    def sums(x):
        both = jnp.broadcast_to(p, (2, 3, 4))  # it varies along both sides
        turned = jnp.broadcast_to(p[:, :, None], (3, 4, 2)).transpose(2, 0, 1)
        rows = jnp.broadcast_to(q[:, None], (2, 3, 4))
        turned_rows = jnp.broadcast_to(q, (4, 2, 3)).transpose(1, 2, 0)
        known = jnp.broadcast_to(b, (2, 3, 4))
        known_turned = jnp.broadcast_to(b[:, None], (4, 3)).T[None]
        biases = both, turned, rows, turned_rows, known, known_turned
        return [x @ w + bias for bias in biases]

    found = jax.eval_shape(half(jax.jit(sums) if jit else sums), x)
    assert [y.dtype for y in found] == [jnp.float32] * 4 + [jnp.float16] * 2


# All numbers of a 16-bit format are the biases of a layer, and then the cotangents.
FORMATS = ["float16", "bfloat16"]


def all_numbers(dtype):
    return np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))


def between(numbers):
    """float32 numbers just above those of a format, and the ties between them."""
    wide = np.float32(numbers)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.nextafter(wide, np.float32(np.inf)), (wide + np.roll(wide, 1)) / 2


def equal(found, expected):
    """In every bit, but those of a nan, and of what is subnormal in float32."""
    found = np.asarray(found)
    assert found.dtype == expected.dtype
    compared = ~(np.abs(np.float32(expected)) < np.finfo(np.float32).tiny)
    found, expected = found[compared], expected[compared]
    width = f"uint{8 * found.dtype.itemsize}"
    differ = found.view(width) != expected.view(width)
    differ &= ~(np.isnan(found) & np.isnan(expected))
    assert not differ.any(), (found[differ], expected[differ])


@cover(quick=3, ci=4 * len([*LAYERS, plain]))
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layer", [plain, *LAYERS], ids=lambda layer: layer.__name__)
def test_every_bias_and_its_gradient_are_rounded_as_a_cast_does(
    layer, dtype, jit, standard_promotion
):
    # torch casts the bias, adds in float32, rounds once; the gradient is cast back.
    numbers, region = all_numbers(dtype), jamp.autocast(dtype)
    x = jnp.asarray(np.zeros((1, 4), np.float32))

    def with_gradient(bias, ct):
        out, vjp = jax.vjp(lambda bias: region(layer)(bias, x), bias)
        return out[0], vjp(ct[None])[0]

    run = jax.jit(with_gradient) if jit else with_gradient
    largest = np.float32(jnp.finfo(dtype).max)
    for bias in (np.float32(numbers), *between(numbers)):
        out, grad = run(jnp.asarray(bias), jnp.asarray(numbers))
        with np.errstate(over="ignore", invalid="ignore"):
            expected = bias.astype(numbers.dtype) + numbers.dtype.type(0)
        # Elsewhere than in a layer, what does not fit may be a mask.
        fits = ~(np.abs(bias) > 0.8 * largest) | (layer is not plain)
        equal(np.asarray(out)[fits], expected[fits])
        equal(grad, np.float32(numbers))


# One number for each row of `x`, which is no layer's bias: torch adds it in float32.
ROWS, COLUMNS = 12, 8
rng = np.random.default_rng(0)
OF_ROWS = {
    "column": lambda x, w, e: x @ w + e[:, None],
    "on the left": lambda x, w, e: e[:, None] + x @ w,
    "reshaped": lambda x, w, e: x @ w + e.reshape(-1, 1),
    "broadcast": lambda x, w, e: x @ w + jnp.broadcast_to(e[:, None], (ROWS, COLUMNS)),
    "transposed": lambda x, w, e: ((x @ w).T + e).T,
    "einsum": lambda x, w, e: jnp.einsum("ij,jk->ik", x, w) + e[:, None],
    "einsum, turned": lambda x, w, e: (jnp.einsum("ij, jk -> ki", x, w) + e).T,
    "matvec": lambda x, w, e: jnp.matvec(w.T, x) + e[:, None],
    "beams": lambda x, w, e: (
        (x @ w).reshape(3, 4, COLUMNS) + e.reshape(3, 4)[..., None]
    ).reshape(ROWS, COLUMNS),
    "of a batch": lambda x, w, e: (x[:, None] @ w + e[:, None, None])[:, 0],
    "convolution": lambda x, w, e: (
        jax.lax.conv_general_dilated(
            *(x[:, None], w[None], (1,), "SAME"),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[:, 0]
        + e[:, None]
    ),
    "vmap": lambda x, w, e: jax.vmap(lambda x, e: x @ w + e)(x, e),
    "vmap of numbers": lambda x, w, e: jax.vmap(
        lambda x, e: jnp.stack([(x @ w)[i] + e for i in range(COLUMNS)])
    )(x, e),
    "after vmap": lambda x, w, e: (jax.vmap(lambda x: x @ w)(x).T + e).T,
    "inside of vmap": lambda x, w, e: jax.vmap(lambda x: (x @ w).T + e)(x[None])[0].T,
}


@cover(quick=4, ci=2 * len(OF_ROWS))
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("way", ["live", "jit inside", "jit around"])
@pytest.mark.parametrize("number", [-900.0, -14975.2, -101234.0, -1e5])
@pytest.mark.parametrize("form", OF_ROWS)
def test_one_number_for_each_row_is_added_in_float32(
    form, number, way, dtype, standard_promotion
):
    x, w = rng.normal(size=(ROWS, 5)), rng.normal(size=(5, COLUMNS))
    e = np.float32(number + rng.normal(size=ROWS))
    x, w = (np.asarray(a, np.float32) for a in (x, w))
    y = ways.WAYS[way](jamp.autocast(dtype), OF_ROWS[form])(x, w, e)
    expected = np.float64(x) @ np.float64(w) + np.float64(e)[:, None]
    assert y.dtype == jnp.float32
    error = 0.01 if dtype == "float16" else 0.1  # of the product alone
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=error)


def test_torch_adds_one_number_for_each_row_in_float32():
    torch = pytest.importorskip("torch")
    x, w, e = torch.ones(3, 4), torch.ones(4, 5), torch.full((3,), -14975.2)
    with torch.autocast("cpu", torch.float16):
        assert (x @ w + e[:, None]).dtype == torch.float32
