"""A bias overflows as in torch, a mask stays what it is, a batch of one is a batch."""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jamp
from jamp._autocast import bias
from tests.bits import check_near, nudged
from tests.marks import mostly_slow

from . import ways

half = jamp.autocast(jnp.float16)
by_way = ways.given("live", "jit inside", region=half)
HUGE = jnp.array([jnp.inf, -jnp.inf, 1e5, -1e9, 2.0, jnp.nan])
IN_TORCH = np.array([np.inf, -np.inf, np.inf, -np.inf, 3.0, np.nan], np.float16)
x = jnp.full((2, 4), 0.5)
w = jnp.full((4, 6), 0.5)


def linen_dense(bias, x):
    return nn.Dense(6).apply({"params": {"kernel": w, "bias": bias}}, x)


def linen_conv(bias, x):
    params = {"kernel": w[None], "bias": bias}
    return nn.Conv(6, (1,)).apply({"params": params}, x[:, None])[:, 0]


def nnx_linear(bias, x):
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = w, bias
    return layer(x)


def equinox_linear(bias, x):
    layer = eqx.nn.Linear(4, 6, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w.T, bias))
    return jax.vmap(layer)(x)


def equinox_linear_of_one(bias, x):
    layer = eqx.nn.Linear(4, 6, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w.T, bias))
    return jnp.stack([layer(row) for row in x])


def haiku_linear(bias, x):
    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(6)(x)))
    return layer.apply({"linear": {"w": w, "b": bias}}, x)


LAYERS = [
    linen_dense,
    linen_conv,
    nnx_linear,
    equinox_linear,
    equinox_linear_of_one,
    haiku_linear,
]


@pytest.mark.parametrize(
    "layer",
    mostly_slow(LAYERS, linen_dense, equinox_linear),
    ids=lambda layer: layer.__name__,
)
def test_the_bias_of_a_layer_overflows_as_in_torch(layer, standard_promotion):
    for way in ("live", "jit around", "jit inside"):
        y = ways.WAYS[way](half, layer)(HUGE, x)
        assert y.dtype == jnp.float16
        np.testing.assert_array_equal(y, np.stack([IN_TORCH, IN_TORCH]))


@pytest.mark.parametrize(
    "layer",
    mostly_slow(LAYERS, nnx_linear, linen_conv),
    ids=lambda layer: layer.__name__,
)
def test_a_bias_that_is_inf_is_seen_by_the_scaler(layer, standard_promotion):
    bias = jnp.zeros(6).at[2].set(jnp.inf)

    def loss_fn(bias):
        with jamp.autocast(jnp.float16):
            return jnp.mean(layer(bias, x) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(bias)
    assert not np.isfinite(loss)
    assert not np.isfinite(np.asarray(grad)[2])
    report = jamp.debug.find_nonfinite(loss_fn)(bias)
    assert report.found


def plain(bias, x):
    return x @ w + bias


@by_way
def test_a_mask_of_finite_numbers_stays_finite(way, standard_promotion):
    y = np.asarray(way(plain)(HUGE, x))
    assert y.dtype == np.float16
    expected = np.array([np.inf, -np.inf, 16376, -16376, 3.0, np.nan], np.float16)
    np.testing.assert_array_equal(y, np.stack([expected, expected]))


@by_way
def test_gradients_of_a_bias_that_does_not_fit_are_kept(way, standard_promotion):
    bias = jnp.array([1e5, -1e9, 1.0, 2.0, 3.0, 4.0])
    loss_fn = way(lambda bias: jnp.sum(plain(bias, x)))
    np.testing.assert_array_equal(jax.grad(loss_fn)(bias), np.full(6, 2.0))


FILLED = {
    "bias": lambda x: x @ w + jnp.full((6,), 1e6),
    "row": lambda x: x @ w + jnp.full((6,), 1e6)[None],
    "multiples": lambda x: x @ w + (jnp.full((6,), 1e3) * 1e3)[None],
    "steps": lambda x: x @ w + (jnp.arange(6.0) * 1e6)[None],
}


@pytest.mark.parametrize("line", FILLED)
def test_an_array_that_was_filled_is_a_bias_everywhere(line, standard_promotion):
    exact = FILLED[line](x)
    expected = np.where(exact > 65504, 16376, exact).astype(np.float16)
    for name, way in ways.WAYS.items():
        y = way(half, FILLED[line])(x)
        assert y.dtype == jnp.float16, name
        np.testing.assert_array_equal(y, expected, name)


@pytest.mark.parametrize("jit", [False, True])
def test_a_bias_is_known_by_where_its_dimensions_went(jit, standard_promotion):
    x, w = jnp.ones((2, 3, 5)), jnp.ones((5, 4))
    p, q = jnp.ones((3, 4)), jnp.ones((2, 3))

    def sums(x):
        both = jnp.broadcast_to(p, (2, 3, 4))  # it varies along both sides
        turned = jnp.broadcast_to(p[:, :, None], (3, 4, 2)).transpose(2, 0, 1)
        rows = jnp.broadcast_to(q[:, :, None], (2, 3, 4))
        turned_rows = jnp.broadcast_to(q, (4, 2, 3)).transpose(1, 2, 0)
        return [x @ w + bias for bias in (both, turned, rows, turned_rows)]

    found = half(jax.jit(sums) if jit else sums)(x)
    assert [y.dtype for y in found] == [jnp.float32] * 2 + [jnp.float16] * 2


FUNCTIONS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda b, x: jax.vmap(f, (None, 0))(b, x[None])[0],
    "vmap of biases": lambda f: lambda b, x: jax.vmap(f, (0, None))(b[None], x)[0],
    "scan": lambda f: lambda b, x: lax.scan(lambda c, x: (c, f(c, x)), b, x[None])[1],
}
DERIVATIVES = {
    "vjp": lambda f: lambda b, x, t: jax.vjp(f, b, x)[1](f(b, x)),
    "jvp": lambda f: lambda b, x, t: jax.jvp(f, (b, x), (t, x)),
    "twice": lambda f: lambda b, x, t: jax.jacfwd(jax.grad(lambda b: f(b, x).sum()))(b),
    "vmap": lambda f: (
        lambda b, x, t: jax.vmap(jax.grad(lambda b: f(b, x).sum()))(jnp.stack([b, t]))
    ),
}


@pytest.fixture
def looped(monkeypatch):
    """A bias's gradient is summed as if this array were large, on one CPU device."""
    if jax.default_backend() != "cpu":
        pytest.skip("needs a CPU")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(bias, "LOOP_SIZES", (2**10, 2**13))
    yield monkeypatch
    jax.clear_caches()


def gelus(biases, x):
    kernels = jnp.eye(64) / 8
    with half:
        for bias in jnp.split(biases, 2):
            x = jax.nn.gelu(x @ kernels + bias)
    return x.astype(jnp.float32)


def program_of_gelus():
    """The optimized HLO of the gradients of two layers."""
    grad = jax.grad(lambda b, x: gelus(b, x).sum(), (0, 1))
    return jax.jit(grad).lower(jnp.ones(128), jnp.ones((8, 16, 64))).compile().as_text()


@pytest.mark.parametrize("way", mostly_slow(DERIVATIVES, "vjp", "jvp"))
@pytest.mark.parametrize("around", mostly_slow(FUNCTIONS, "jit", "vmap of biases"))
def test_a_loop_sums_what_one_sum_does(around, way, looped, standard_promotion):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (128,), (8, 16, 64), (128,)
    args = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def result():
        jax.clear_caches()
        program = jax.jit(DERIVATIVES[way](FUNCTIONS[around](gelus)))
        return jax.tree.map(np.asarray, program(*args)), program.trace(*args).jaxpr

    loop, traced = result()
    looped.setattr(jax, "device_count", lambda: 8)
    plain, untouched = result()
    scans = [str(jaxpr).count(" scan[") for jaxpr in (traced, untouched)]
    assert (scans[0] > scans[1]) == (around != "vmap")  # which has its own path
    # The products round to float16, so their inputs move by a unit in its last place.
    program = jax.jit(DERIVATIVES[way](FUNCTIONS[around](gelus)))
    check_near(loop, plain, [program(*args) for args in nudged(args, jnp.float16)])


def test_what_a_sum_reads_is_computed_once_on_a_cpu(looped, standard_promotion):
    """XLA fuses a gelu's gradient into each that reads it, but not into a loop."""
    looped.setattr(jax, "device_count", lambda: 8)
    plain = program_of_gelus()
    jax.clear_caches()
    looped.setattr(jax, "device_count", lambda: 1)
    loop = program_of_gelus()
    products = [
        len(re.findall(r"\[(?:8,16|128),64\]\S* multiply\(", p)) for p in (loop, plain)
    ]
    assert loop.count(" while(") == 2 and plain.count(" while(") == 0
    assert products[0] < 0.6 * products[1], products


@pytest.mark.parametrize(
    "name, value", [("default_backend", "gpu"), ("device_count", 2)]
)
def test_no_loop_on_a_gpu_or_over_devices(name, value, looped, standard_promotion):
    looped.setattr(jax, name, lambda: value)
    assert " while(" not in program_of_gelus()


@pytest.mark.parametrize("sizes", [(2**10 + 1, 1), (1, 2**13 + 1)])
def test_no_loop_for_small_arrays(sizes, looped, standard_promotion):
    looped.setattr(bias, "LOOP_SIZES", sizes)
    assert " while(" not in program_of_gelus()
