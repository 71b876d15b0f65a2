"""autocast: regions, layers, rules, errors."""

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from functools import partial

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun

import jamp
from jamp import _compat
from shared.jaxprs import equations
from tests.jaxprs import all_half, products
from tests.marks import mostly_slow, slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

f16, bf16, f32 = jnp.float16, jnp.bfloat16, jnp.float32
half = partial(jamp.autocast, dtype=f16)
off = partial(jamp.autocast, enabled=False)
N = 8


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.normal(key, (N, N)) for key in keys[:2])
    return x, w / N**0.5, jax.random.normal(keys[2], (N,))


# Regions


def test_region_is_known_inside_and_gone_outside():
    assert not jamp.is_autocast_enabled()
    assert jamp.get_autocast_dtype() == bf16  # the default on a CPU
    with half():
        assert jamp.is_autocast_enabled() and jamp.get_autocast_dtype() == f16
        with off():
            assert not jamp.is_autocast_enabled()
            with jamp.autocast(dtype=bf16):
                assert jamp.get_autocast_dtype() == bf16
        assert jamp.get_autocast_dtype() == f16
    assert not jamp.is_autocast_enabled()
    x, w, _ = arrays()
    assert (x @ w).dtype == f32


def test_a_region_that_is_off_takes_float32_as_in_torch():
    x, w, _ = arrays()
    for dtype in ("float32", "bfloat16", "float16"):
        with jamp.autocast(dtype=dtype, enabled=dtype != "float32"):
            assert (x @ w).dtype == dtype
    with pytest.raises(ValueError, match="must be float16 or bfloat16"):
        jamp.autocast(dtype="float32")
    with pytest.raises(ValueError, match="must be float16 or bfloat16"):
        jamp.autocast(dtype="float64", enabled=False)


def test_default_dtype_is_bfloat16_on_a_cpu():
    x, w, _ = arrays()
    with jamp.autocast():
        assert (x @ w).dtype == bf16


def test_decorator():
    @half()
    def product(x, w):
        """Multiplies."""
        return x @ w

    x, w, _ = arrays()
    assert product(x, w).dtype == f16
    assert product.__name__ == "product" and product.__doc__ == "Multiplies."


def test_one_object_can_be_entered_again_and_inside_itself():
    region, (x, w, _) = half(), arrays()
    for _ in range(2):
        with region:
            with region:
                assert (x @ w).dtype == f16
            assert (x @ w).dtype == f16
        assert (x @ w).dtype == f32


def test_an_exception_ends_the_region():
    x, w, _ = arrays()
    with pytest.raises(ZeroDivisionError), half(rules={"no such module": f32}):
        raise ZeroDivisionError
    assert not jamp.is_autocast_enabled()
    assert (x @ w).dtype == f32


def test_regions_of_threads_do_not_mix():
    x, w, _ = arrays()
    region, inside, outside = half(), threading.Barrier(2), threading.Barrier(2)
    seen = {}

    def work(name, dtype):
        with region if dtype == f16 else jamp.autocast(dtype=dtype):
            inside.wait()
            seen[name] = (x @ w).dtype, jamp.get_autocast_dtype()
            outside.wait()

    threads = [threading.Thread(target=work, args=a) for a in (("a", f16), ("b", bf16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": (f16, f16), "b": (bf16, bf16)}
    assert (x @ w).dtype == f32


def test_jitted_functions_are_not_confused_by_regions():
    x, w, _ = arrays()

    @jax.jit
    def product(x, w):
        return x @ w

    for _ in range(2):
        assert product(x, w).dtype == f32
        with half():
            assert product(x, w).dtype == f16
            assert product(x, w).dtype == f16
            with off():
                assert product(x, w).dtype == f32
        with jamp.autocast(dtype=bf16):
            assert product(x, w).dtype == bf16
        with half(rules={lax.dot_general_p: f32}):
            assert product(x, w).dtype == f32


def test_one_jaxpr_in_regions_of_several_dtypes():
    x, w, _ = arrays()
    run = jaxpr_as_fun(jax.make_jaxpr(jax.jit(lambda x: x @ w))(x))
    for _ in range(2):
        for dtype in (f16, bf16):
            with jamp.autocast(dtype=dtype):
                assert run(x)[0].dtype == dtype
        assert run(x)[0].dtype == f32


def test_a_jitted_function_sees_whether_it_is_in_a_region():
    @jax.jit
    def seen(x):
        return x + float(jamp.is_autocast_enabled())

    assert seen(0.0) == 0
    with half():
        assert seen(0.0) == 1
    assert seen(0.0) == 0


def test_an_inner_function_is_traced_once_per_dtype():
    x, w, _ = arrays()
    traces = []

    @jax.jit
    def inner(x, w):
        traces.append(jamp.get_autocast_dtype())
        return jnp.tanh(x @ w)

    @jax.jit
    def outer(x, w):
        with half():
            for _ in range(4):
                x = inner(x, w)
        with jamp.autocast(dtype=bf16):
            return inner(inner(x.astype(f32), w).astype(f32), w)

    for _ in range(2):
        outer(x, w)
    # Under float16 with float32 input, with float16 input, under bfloat16.
    assert traces == [f16, f16, bf16]


def test_a_step_is_traced_once_and_runs_without_the_host():
    x, w, b = arrays()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(w, x):
        def loss(w):
            with half():
                return jnp.mean(jax.nn.gelu(x @ w + b).astype(f32))

        return w - jax.grad(loss)(w)

    w = step(w, x)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            w = step(w, x)
    assert w.dtype == f32


def test_no_value_outlives_its_use():
    x, w, b = arrays()
    with half():
        y = jax.nn.softmax(x @ w + b)
        kept = weakref.ref(y)
        del y
        assert kept() is None  # already in the region
        z = x @ w
        kept = weakref.ref(z)
    del z
    gc.collect()
    assert kept() is None


# Nested regions


def enclosed(region):
    """Runs a product in an inner region, and one around it."""

    def product(x, w):
        with region:
            return x @ w

    return product


def carried(wrapped):
    """What a function returns, through another transformation."""

    @jax.custom_vjp
    def custom(x, w):
        return wrapped(x, w)

    custom.defvjp(
        lambda x, w: (wrapped(x, w), w),
        lambda w, g: (wrapped(g, w.T), jnp.zeros_like(w)),
    )
    return {
        "plain": wrapped,
        "jit": jax.jit(wrapped),
        "vmap": lambda x, w: jax.vmap(wrapped, in_axes=(0, None))(x[None], w)[0],
        "scan": lambda x, w: lax.scan(
            lambda c, _: (c, wrapped(c, w)), x, None, length=1
        )[1][0],
        "remat": jax.checkpoint(wrapped),
        "custom_vjp": custom,
    }


@pytest.mark.parametrize("outer_jit", [False, slow(True)])
@pytest.mark.parametrize("way", ["plain", "jit", "vmap", "scan", "remat", "custom_vjp"])
@pytest.mark.parametrize("inner", ["off", "bfloat16"])
def test_the_inner_region_wins(inner, way, outer_jit):
    x, w, _ = arrays()
    region = off() if inner == "off" else jamp.autocast(dtype=bf16)
    inner_dtype = "float32" if inner == "off" else "bfloat16"
    function = carried(enclosed(region))[way]

    def both(x, w):
        with half():
            return function(x, w), x @ w

    both = jax.jit(both) if outer_jit else both
    inside, outside = both(x, w)
    assert inside.dtype == inner_dtype and outside.dtype == f16
    found = sorted(map(sorted, products(both, x, w)))
    assert found == sorted([[inner_dtype], ["float16"]])

    def loss(x, w):
        inside, outside = both(x, w)
        return jnp.sum(inside.astype(f32)) + jnp.sum(outside.astype(f32))

    gradient = jax.grad(loss)(x, w)
    assert gradient.dtype == f32
    np.testing.assert_allclose(
        gradient, jax.grad(lambda x, w: 2 * jnp.sum(x @ w))(x, w), rtol=0.03, atol=0.03
    )
    found = products(jax.grad(loss), x, w)
    assert {inner_dtype} in found and {"float16"} in found
    assert all(len(dtypes) == 1 for dtypes in found)


def test_a_region_inside_a_disabled_one_in_a_region():
    x, w, _ = arrays()

    def function(x, w):
        with half():
            a = x @ w
            with off():
                b = x @ w
                with jamp.autocast(dtype=bf16):
                    c = x @ w
        return a, b, c

    for run in (function, jax.jit(function), half()(jax.jit(function))):
        assert [y.dtype for y in run(x, w)] == [f16, f32, bf16]


# Layers


def linen(module, x):
    variables = jax.jit(module.init)(jax.random.key(0), x)
    return partial(module.apply, variables)


IMAGES = (2, N, N, 3)
LAYERS = {
    "linen Dense": (lambda x: linen(nn.Dense(5), x), (4, N), f16),
    "linen Dense, batch of 1": (lambda x: linen(nn.Dense(5), x), (1, N), f16),
    "linen Dense, sequence": (lambda x: linen(nn.Dense(5), x), (2, 3, N), f16),
    "linen DenseGeneral": (lambda x: linen(nn.DenseGeneral((2, 3)), x), (4, N), f16),
    "linen DenseGeneral, axes": (
        lambda x: linen(nn.DenseGeneral(5, axis=(-2, -1)), x),
        (4, 2, N),
        f16,
    ),
    "linen Conv": (lambda x: linen(nn.Conv(4, (3, 3)), x), IMAGES, f16),
    "linen Conv, one image": (lambda x: linen(nn.Conv(4, (3, 3)), x), (N, N, 3), f16),
    "linen ConvTranspose": (
        lambda x: linen(nn.ConvTranspose(4, (3, 3)), x),
        IMAGES,
        f16,
    ),
    "linen attention": (
        lambda x: linen(nn.MultiHeadDotProductAttention(2), x),
        (2, 3, N),
        f16,
    ),
    "linen Einsum": (
        lambda x: linen(nn.Einsum((N, 2, 3), "bi,ijk->bjk"), x),
        (4, N),
        f16,
    ),
    "linen LayerNorm": (lambda x: linen(nn.LayerNorm(), x), (4, N), f32),
    "linen LayerNorm, bare": (
        lambda x: linen(nn.LayerNorm(use_bias=False, use_scale=False), x),
        (4, N),
        f32,
    ),
    "linen RMSNorm": (lambda x: linen(nn.RMSNorm(), x), (4, N), f32),
    "linen GroupNorm": (lambda x: linen(nn.GroupNorm(2), x), (4, N), f32),
    "nnx Linear": (lambda x: nnx.Linear(N, 5, rngs=nnx.Rngs(0)), (4, N), f16),
    "nnx Conv": (lambda x: nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), IMAGES, f16),
    "nnx attention": (
        lambda x: nnx.MultiHeadAttention(2, N, decode=False, rngs=nnx.Rngs(0)),
        (2, 3, N),
        f16,
    ),
    "nnx LayerNorm": (lambda x: nnx.LayerNorm(N, rngs=nnx.Rngs(0)), (4, N), f32),
    "equinox Linear": (
        lambda x: jax.vmap(eqx.nn.Linear(N, 5, key=jax.random.key(0))),
        (4, N),
        f16,
    ),
    "equinox Conv": (
        lambda x: jax.vmap(eqx.nn.Conv2d(3, 4, 3, key=jax.random.key(0))),
        (2, 3, N, N),
        f16,
    ),
    "equinox LayerNorm": (lambda x: jax.vmap(eqx.nn.LayerNorm(N)), (4, N), f32),
    "plain": (lambda x: lambda x: x @ jnp.ones((N, 5)) + jnp.ones(5), (4, N), f16),
}


@pytest.mark.parametrize(
    ("name", "input_dtype"),
    mostly_slow(
        itertools.product(LAYERS, [f32, f16]),
        ("linen Dense", f16),
        ("linen Conv", f16),
        ("linen LayerNorm", f16),
        ("nnx Linear", f16),
        ("equinox Linear", f16),
        ("plain", f16),
    ),
)
def test_dtype_of_a_layer(name, input_dtype):
    make, shape, dtype = LAYERS[name]
    x = jax.random.normal(jax.random.key(1), shape)
    layer = make(x)
    with half():
        y = layer(x.astype(input_dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(f32), layer(x), rtol=0.02, atol=0.02)
    assert jax.jit(half()(layer))(x.astype(input_dtype)).dtype == dtype


@pytest.mark.parametrize("layer", mostly_slow(["Linear", "Conv"], "Conv"))
def test_equinox_layers_with_the_region_under_vmap(layer):
    key = jax.random.key(0)
    if layer == "Linear":
        module, x = eqx.nn.Linear(N, 5, key=key), jnp.ones((4, N))
    else:
        module, x = eqx.nn.Conv2d(3, 4, 3, key=key), jnp.ones((2, 3, N, N))

    def forward(module):
        y = jax.vmap(half()(lambda x: module(x)))(x)
        assert y.dtype == f16
        return y

    def loss(module):
        return jnp.sum(forward(module).astype(f32))

    forward(module)

    gradients = eqx.filter_jit(eqx.filter_grad(loss))(module)
    assert gradients.weight.dtype == gradients.bias.dtype == f32


def test_a_bias_gradient_is_summed_in_float32():
    rows = 4096  # more than the integers that float16 can count
    x, w = jnp.ones((rows, 2)), jnp.ones((2, N))

    def loss(b):
        with half():
            y = x @ w + b
        assert y.dtype == f16
        return jnp.sum(y.astype(f32))

    gradient = jax.grad(loss)(jnp.ones(N))
    np.testing.assert_array_equal(gradient, rows)
    eqns = equations(jax.make_jaxpr(jax.grad(loss))(jnp.ones(N)))
    sums = [e.invars[0].aval.dtype for e in eqns if e.primitive.name == "reduce_sum"]
    assert set(sums) == {jnp.dtype(f32)}


def test_a_bias_gradient_is_summed_in_float32_with_the_region_under_vmap():
    x, w = jnp.ones((4096, 3)), jnp.ones((N, 3))

    def loss(b):
        y = jax.vmap(half()(lambda row: w @ row + b))(x)
        assert y.dtype == f16
        return jnp.sum(y.astype(f32))

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(N)), 4096)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("vmap", [False, True])
def test_a_bias_gradient_is_rounded_as_torch_rounds_it(jit, vmap):
    x, w = jnp.ones((1024, 3)), jnp.ones((3, N))

    def gradient(b, scale):
        with half():
            layer = lambda x: x @ w + b
            y = jax.vmap(layer)(x) if vmap else layer(x)
        return jnp.sum(scale * y.astype(f32))

    gradient = jax.grad(gradient)
    gradient = jax.jit(gradient) if jit else gradient
    b = jnp.ones(N)
    np.testing.assert_array_equal(gradient(b, 2.0 + 2.0**-9), 2048 + 2)
    np.testing.assert_array_equal(gradient(b, 3.0), 3072)
    np.testing.assert_array_equal(gradient(b, 64.0), np.inf)  # 65536


def test_residual_sums_are_float32():
    x, w, b = arrays()
    with half():
        assert (x + (x @ w + b)).dtype == f32
        assert ((x @ w + b) + x).dtype == f32
        assert (x @ w + x).dtype == f32
        assert jax.jit(lambda x: x + x @ w)(x).dtype == f32
        assert jax.jit(lambda x: x @ w + b)(x).dtype == f16


def test_an_explicit_float32_is_kept():
    x, w, b = arrays()
    with half():
        assert ((x @ w).astype(f32) + b).dtype == f32
        assert (jnp.float32(x @ w) + b).dtype == f32
        assert (lax.convert_element_type(x @ w, f32) + b[None]).dtype == f32


def test_numpy_arrays_and_numbers_become_jax_arrays():
    with half():
        for value in (np.ones(3), np.float32(2), 2.0, np.ones((2, 2), np.float16)):
            for dtype in (f16, f32, jnp.int32):
                assert isinstance(jnp.asarray(value, dtype), jax.Array)
                assert isinstance(lax.convert_element_type(value, dtype), jax.Array)
            assert isinstance(jnp.real(value), jax.Array)
            assert isinstance(jnp.add(value, 1), jax.Array)
            assert (np.ones((2, 2), np.float32) @ jnp.ones((2, 2))).dtype == f16


def test_masks_on_attention_scores_are_not_biases():
    q = jax.random.normal(jax.random.key(0), (2, 4, N))
    mask = jnp.full((2, 1, 4), -1e10, f32)
    with half():
        scores = jnp.einsum("bqd,bkd->bqk", q, q)
        assert (scores + mask).dtype == f32  # in float16 it would be -inf


def test_a_mean_of_many_does_not_overflow():
    x, w = jnp.ones((400, 400)), 2 * jnp.eye(400)
    for function in (jnp.mean, lambda y: jnp.var(300 * y), lambda y: jnp.std(y * 100)):
        run = lambda x, w, f=function: f(x @ w)
        for way in (half()(run), jax.jit(half()(run)), half()(jax.jit(run))):
            np.testing.assert_allclose(way(x, w), run(x, w), rtol=1e-3)


def batch_norms():
    x = jnp.ones((4, N))
    linen_norm = nn.BatchNorm(use_running_average=False)
    variables = jax.jit(linen_norm.init)(jax.random.key(0), x)
    nnx_norm = nnx.BatchNorm(N, use_running_average=True, rngs=nnx.Rngs(0))
    haiku_norm = hk.transform_with_state(
        lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True)
    )
    initial = haiku_norm.init(None, x)
    return {
        "linen": lambda x: linen_norm.apply(variables, x, mutable=["batch_stats"])[0],
        "nnx": nnx_norm,
        "haiku": lambda x: haiku_norm.apply(*initial, None, x)[0],
    }


@pytest.mark.parametrize("kind", mostly_slow(["linen", "nnx", "haiku"], "linen", "nnx"))
def test_what_follows_a_batchnorm_gets_the_dtype_of_its_input(kind):
    norm, (x, w, _) = batch_norms()[kind], arrays()

    def block(x):
        y = norm(x @ w)
        return jax.nn.relu(y), norm(x @ w) + y, x + y, jnp.concatenate([y, x @ w])

    for run in (half()(block), jax.jit(half()(block)), half()(jax.checkpoint(block))):
        assert [y.dtype for y in run(x)] == [f16, f16, f32, f16]
        for y, expected in zip(run(x), block(x), strict=True):
            np.testing.assert_allclose(y.astype(f32), expected, atol=0.01, rtol=0.01)
    with half():
        assert jax.nn.relu(norm(x)).dtype == f32  # as its input


def test_a_custom_vjp_after_a_batchnorm_gets_the_dtype_of_its_input():
    @jax.custom_vjp
    def double(y):
        return 2 * y

    double.defvjp(lambda y: (2 * y, None), lambda _, g: (2 * g,))
    norm, (x, w, _) = batch_norms()["linen"], arrays()
    assert half()(lambda x: double(norm(x @ w)))(x).dtype == f16


def test_batchnorm_keeps_statistics_in_float32():
    model = nn.Sequential([nn.Dense(N), nn.BatchNorm(use_running_average=False)])
    x = jax.random.normal(jax.random.key(1), (64, N)) + 100
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with half():
        _, state = model.apply(variables, x, mutable=["batch_stats"])
    _, expected = model.apply(variables, x, mutable=["batch_stats"])
    for a, b in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        assert a.dtype == f32
        np.testing.assert_allclose(a, b, rtol=5e-3)


def test_linen_decorated_method_makes_float32_parameters():
    class Model(nn.Module):
        @nn.compact
        @half()
        def __call__(self, x):
            return nn.Dense(3, kernel_init=nn.initializers.orthogonal())(x)

    model, x = Model(), jnp.ones((2, N))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype(f32)}
    assert model.apply(variables, x).dtype == f16


def test_nnx_dropout_and_batchnorm_mutate_in_an_eager_region():
    model = nnx.Sequential(
        nnx.Linear(N, N, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(N, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    )
    for _ in range(2):
        with half():
            model(jnp.ones((4, N)))
    model(jnp.ones((4, N)))
    assert model.layers[2].rngs.count[...] == 3


# What was traced before the casts reach it


def test_numbers_that_do_not_fit_into_float16_widen():
    x, w, _ = arrays()

    @jax.jit
    def masked(x):
        y = x @ w
        return jnp.where(y > 0, y, -1e10), y * 0.5, y + 1e-9, jnp.zeros_like(y) + y

    with half():
        dtypes = [y.dtype for y in masked(x)]
    assert dtypes == [f32, f16, f32, f16]


@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.vmap])
def test_an_array_of_a_number_that_does_not_fit_is_no_bias(way):
    x, w, _ = arrays()
    huge = way(half()(lambda x: x @ w + jnp.float32(1e6)))(x)
    assert huge.dtype == f32
    np.testing.assert_allclose(huge, x @ w + 1e6, rtol=1e-6)


@pytest.mark.slow
def test_activations_stay_in_half_precision_when_traced_before():
    x, w, b = arrays()
    functions = [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.sigmoid]
    functions += [lambda x: jnp.where(x > 0, x, 0), partial(jnp.clip, max=6)]
    for function in functions:
        with half():
            assert jax.jit(lambda x, f=function: f(x @ w + b))(x).dtype == f16
            assert jax.checkpoint(lambda x, f=function: f(x @ w + b))(x).dtype == f16
            assert function(x @ w + b).dtype == f16
    for function in (jax.nn.softmax, jax.nn.logsumexp, jnp.sum, jnp.linalg.norm):
        with half():
            assert jax.jit(lambda x, f=function: f(x @ w + b))(x).dtype == f32
            assert function(x @ w + b).dtype == f32


def test_softmax_subtracts_its_maximum_in_float32():
    x = (jnp.arange(N, dtype=f32) * 0.37 + 100).astype(f16)
    with half():
        y = jax.nn.softmax(x)
    np.testing.assert_array_equal(y, jax.nn.softmax(x.astype(f32)))


def test_bit_casts_get_what_they_were_traced_with():
    x, w, _ = arrays()

    @jax.jit
    def bits(x):
        return lax.bitcast_convert_type(x @ w, jnp.uint32)

    with half():
        assert bits(x).dtype == jnp.uint32


def test_a_wider_result_that_was_asked_for():
    x, w, _ = arrays()
    x, w = x.astype(f16), w.astype(f16)

    def wide(x, w):
        return jnp.matmul(x, w, preferred_element_type=f32)

    def loss(x, w):
        with half():
            y = wide(x, w)
        assert y.dtype == f32
        return jnp.sum(y**2)

    all_half(jax.grad(loss), x, w)
    expected = jax.grad(lambda x, w: jnp.sum(wide(x, w) ** 2))(x, w)
    np.testing.assert_allclose(jax.grad(loss)(x, w), expected, rtol=0.01, atol=0.05)
    with half():
        assert jax.jvp(wide, (x, w), (x, w))[1].dtype == f32


def test_float64_complex_and_integers_are_left():
    with jax.enable_x64(True), half():
        double = jnp.ones((2, 2), jnp.float64)
        assert (double @ double).dtype == jnp.float64
        assert jnp.exp(double).dtype == jnp.float64
    with half():
        assert (jnp.ones((2, 2), jnp.complex64) @ jnp.ones((2, 2))).dtype == "complex64"
        assert (jnp.ones((2, 2), int) @ jnp.ones((2, 2), int)).dtype == "int32"


# What a review found


def test_a_jaxpr_that_needs_no_casts_dies_with_its_function():
    big = jnp.ones((1000, 16)) + 0
    kept, function = weakref.ref(big), jax.jit((lambda b: lambda x: x * b)(big))
    with half():
        function(jnp.ones(16))
    del function, big
    jax.clear_caches()
    gc.collect()
    assert kept() is None


def test_a_custom_vjp_that_keeps_a_vjp():
    x, w, _ = arrays()

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: jax.vjp(jnp.matmul, x, w), lambda vjp, g: vjp(g))

    def loss(w):
        return jnp.sum(product(x, w).astype(f32) ** 2)

    for run in (half()(loss), half()(jax.jit(loss)), jax.jit(half()(loss))):
        gradient = jax.grad(run)(w)
        assert gradient.dtype == f32
        np.testing.assert_allclose(gradient, jax.grad(loss)(w), rtol=0.02, atol=0.2)
        all_half(jax.grad(run), w)


def test_a_mask_added_like_a_bias_stays_finite():
    x, w, _ = arrays()
    allowed = jnp.arange(N) < 3

    def entropy(x, mask):
        logits = w @ x + mask
        log_p = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.exp(log_p) * log_p)

    mask = jnp.where(allowed, 0.0, f32(-1e9))
    expected = jax.vmap(entropy, (0, None))(x, mask)
    for run in (
        half()(jax.vmap(entropy, (0, None))),
        jax.vmap(half()(entropy), (0, None)),
    ):
        np.testing.assert_allclose(run(x, mask), expected, rtol=0.01)
    with half():
        scores = jax.nn.softmax(x @ w + jnp.full((N,), -1e9, f32))
        assert jnp.all(jnp.isfinite(scores))
        assert jnp.all(jnp.isfinite(jax.nn.softmax(x @ w + mask)))


def test_branches_that_return_keys():
    with half():
        key = lax.cond(
            True, lambda k: k, lambda k: jax.random.split(k)[0], jax.random.key(0)
        )
    assert key == jax.random.key(0)


@pytest.mark.slow
def test_grad_inside_over_a_scan_with_a_product_that_does_not_change():
    _, w, _ = arrays()

    def loss(c):
        body = lambda c, _: (lax.add(c * 2.0, lax.dot(w, w)), None)
        return jnp.sum(lax.scan(body, c, None, length=3)[0])

    with half():
        assert jax.grad(loss)(w).dtype == f32
    model, x = nn.RNN(nn.LSTMCell(N)), jnp.ones((2, 3, N))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with half():
        gradients = jax.grad(lambda v: jnp.sum(model.apply(v, x)))(variables)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(f32)}


def test_average_pooling_of_large_sums():
    x = jnp.full((1, 64, 64, 1), 40.0, f16)
    with half():
        y = nn.avg_pool(x, (64, 64))
        assert jax.nn.relu(y).dtype == f16
    np.testing.assert_allclose(y, 40.0)


@pytest.mark.parametrize("way", ["scan", "fori", "cond", "switch"])
def test_a_half_carry_says_what_to_do(way):
    x, w, _ = arrays()
    body = lambda c: jnp.tanh(c @ w) + x
    run = {
        "scan": lambda c: lax.scan(lambda c, _: (body(c), None), c, None, length=2),
        "fori": lambda c: lax.fori_loop(0, 2, lambda _, c: body(c), c),
        "cond": lambda c: lax.cond(True, lambda c: c, body, c),
        "switch": lambda c: lax.switch(1, [lambda c: c, body], c),
    }[way]
    with pytest.raises(TypeError) as error, half():
        run(x @ w)
    assert any("Start from float32" in note for note in error.value.__notes__)
    with half():
        run((x @ w).astype(f32))
        jax.jit(lambda x: run(x @ w))(x)


@pytest.mark.slow
def test_rows_of_a_library_that_is_imported_late_hold():
    program = """if True:
        import sys, jax.numpy as jnp, jamp
        def region():
            return jamp.autocast(dtype=jnp.float16)
        with region():
            x = jnp.ones((4, 4)) @ jnp.ones((4, 4))
        assert "equinox" not in sys.modules
        import equinox
        with region():
            assert equinox.nn.LayerNorm(4)(x[0]).dtype == jnp.float32
        """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_branches_are_rewritten_once_if_they_agree():
    x, w, _ = arrays()

    def nested(depth):
        if depth == 0:
            return lambda x: x + x @ w
        branch = nested(depth - 1)
        return lambda x: lax.cond(x.sum() > 0, branch, lambda x: -x, x)

    function, traced = nested(4), []
    make = _compat.trace_to_jaxpr
    with pytest.MonkeyPatch.context() as patch, half():
        patch.setattr(
            _compat, "trace_to_jaxpr", lambda *a: (traced.append(a), make(*a))[1]
        )
        function(x)
    assert len(traced) == 2 * 4


# Rules


def test_rules_by_primitive_function_and_path():
    x, w, _ = arrays()
    with half(rules={lax.exp_p: f16}):
        assert jnp.exp(x @ w).dtype == f16
    with half(rules={jax.nn.softmax: f16}):
        assert jax.nn.softmax(x @ w).dtype == f16
    with half(rules={jax.nn.silu: f32}):  # a jitted function
        assert jax.nn.silu(x @ w).dtype == f32
    with half(rules={jax.nn.relu: f32}):  # a custom_jvp function
        assert jax.nn.relu(x @ w).dtype == f32
    with half(rules={lax.dot_general_p: None}):
        assert (x @ w).dtype == f32

    def head(x, w):
        return x @ w

    with half(rules={head: f32}):
        assert head(x @ w, w).dtype == f32
        assert (x @ w).dtype == f16
    with half(rules={"lm_head$": f32}):
        with jax.named_scope("lm_head"):
            assert (x @ w).dtype == f32
        with jax.named_scope("lm_head_2"):
            assert (x @ w).dtype == f16
    with half(rules={"decoder": f32}), jax.named_scope("decoder"):
        assert jax.jit(lambda x: x @ w)(x).dtype == f32


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(nn.Dense)(N, name="block")
        return nn.Dense(N, name="lm_head")(nn.relu(block(x)))


def make_layer(w):
    def layer(x):
        return x @ w

    return layer


def make_power(n):
    def power(x, n=n):
        return x**n

    return power


class Heads:
    def __call__(self, x):
        return self.head(x)

    def head(self, x):
        return x @ x

    @classmethod
    def make(cls, x):
        return x @ x


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (make_layer(jnp.ones((2, 2))), "each function that `def layer` makes here"),
        (jax.jit(make_layer(jnp.ones((2, 2)))), "each function that `def layer` makes"),
        (jax.checkpoint(make_power(2.0)), "each function that `def power` makes here"),
        (lambda x: x, "a lambda may share that of another one on its line"),
        (jax.jit(lambda x: x @ x), "a lambda may share that of another one"),
        (partial(jax.nn.softmax, axis=0), "a partial shares that of softmax"),
        (Heads().head, r"the method of an object shares that of Heads\.head"),
    ],
)
def test_a_function_that_cannot_be_told_from_others_is_no_key(key, message):
    """A function is found by its code, which closures of one `def` have in common."""
    with pytest.raises(ValueError, match=f"known by its code, and {message}"):
        half(rules={key: f32})


def test_a_function_with_code_of_its_own_is_a_key():
    def square(x):
        return x @ x

    x = jnp.ones((2, 2))
    for key, run in [(square, square), (Heads, Heads()), (Heads.make, Heads.make)]:
        with half(rules={key: f32}):
            assert run(x).dtype == f32
            assert (x @ x).dtype == f16


def test_rules_by_linen_module():
    x, _, _ = arrays()
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), x)
    for rules, dtypes in [
        ({"lm_head": f32}, [["float16"], ["float32"]]),
        ({"block": f32}, [["float32"], ["float16"]]),
        ({"Model/block": f32, "Model": f16}, [["float32"], ["float16"]]),
        ({nn.Dense: f32}, [["float32"], ["float32"]]),
    ]:
        forward = half(rules=rules)(model.apply)
        found = products(forward, variables, x)
        assert list(map(sorted, found)) == dtypes, rules


INSIDE = [
    (jnp.tanh, {lax.tanh_p: f16}, {"tanh": "float16"}),
    (jax.nn.softmax, {lax.exp_p: f16}, {"exp": "float16", "div": "float32"}),
    (jax.nn.softmax, {lax.exp_p: f16, jax.nn.softmax: f32}, {"exp": "float16"}),
    (lambda x: jnp.tensordot(x, x, 1), {lax.dot_general_p: f32},
     {"dot_general": "float32"}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "rules", "expected"), INSIDE)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rules_hold_inside_functions_of_the_tables(function, rules, expected, jit):
    run = half(rules=rules)(jit(function))
    found = {
        eqn.primitive.name: eqn.invars[0].aval.dtype.name
        for eqn in equations(jax.make_jaxpr(run)(jnp.ones((4, 4))))
        if eqn.primitive.name in expected
    }
    assert found == expected


def test_a_rule_for_a_function_comes_before_a_later_one_inside():
    rules = {jax.nn.softmax: f16, lax.exp_p: f32}
    for function in (jax.nn.softmax, jax.jit(jax.nn.softmax)):
        run = half(rules=rules)(function)
        with pytest.raises(ValueError, match="'exp' only matches ops that"):
            run(jnp.ones((4, 4)))


def test_the_first_rule_that_matches_decides():
    x, w, _ = arrays()
    with half(rules={"head": f32, lax.dot_general_p: bf16}):
        with jax.named_scope("head"):
            assert (x @ w).dtype == f32
        assert (x @ w).dtype == bf16


def identity_with_a_jvp():
    @jax.custom_jvp
    def f(x):
        return x

    f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return f


def identity_with_a_vjp():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return f


@pytest.mark.parametrize("make", [identity_with_a_jvp, identity_with_a_vjp])
def test_an_outer_rule_is_not_used_where_an_inner_region_decides(make):
    function = make()

    def run(x):
        with jamp.autocast(jnp.float16):
            return function(x)

    outer = jamp.autocast(jnp.float16, rules={function: jnp.bfloat16})
    with pytest.raises(ValueError, match="no op matched"), outer:
        jax.jit(run)(jnp.ones(2))
    with pytest.raises(ValueError, match="no op matched"), outer:
        run(jnp.ones(2))


def test_a_rule_that_matches_nothing_is_named_at_the_end():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match=r"no op matched 'no such', 'softmax'"):
        with half(rules={"no such": f32, jax.nn.softmax: f16, lax.dot_general_p: f16}):
            x @ w

    @jax.jit
    def product(x):
        return x @ w

    for _ in range(2):  # also when the rewritten function is reused
        with half(rules={lax.dot_general_p: bf16}):
            product(x)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"(": f32}, "not a regular expression"),
        ({"head": "float33"}, "is not a dtype"),
        ({"head": jnp.int32}, "cannot run in int32"),
        ({3: f32}, "a key of type int is not one of the three kinds"),
        ({len: f32}, "not one of the three kinds"),
    ],
)
def test_bad_rules(rules, message):
    with pytest.raises(ValueError, match=message):
        half(rules=rules)


def test_rules_must_be_a_dict():
    with pytest.raises(TypeError, match="must be a dict"):
        half(rules=[("head", f32)])


# cast_inputs


def test_cast_inputs():
    x, w, _ = arrays()

    @jamp.autocast(cast_inputs=f32)
    def precise(x, w, scale):
        assert not jamp.is_autocast_enabled()
        return x @ w * scale["n"], x.dtype

    with half():
        y, seen = precise(x @ w, w, {"n": 2})
        assert (y.dtype, seen) == (f32, f32)
    assert precise(x.astype(f16), w.astype(f16), {"n": 2})[1] == f16  # as torch's

    def loss(x):
        with half():
            return jnp.sum(precise(x @ w, w, {"n": 2})[0])

    assert jax.grad(loss)(x).dtype == f32
    found = products(jax.grad(loss), x)
    assert {"float32"} in found and {"float16"} in found


def test_cast_inputs_are_floating_arrays_of_any_kind():
    @jamp.autocast(cast_inputs=f32)
    def seen(*inputs):
        return [getattr(x, "dtype", type(x)) for x in inputs]

    given = jnp.ones(2, f16), np.ones(2, f16), np.float16(1), jnp.ones(2, jnp.bfloat16)
    left = np.float64(1), np.int32(1), 2.0, True
    with half():
        assert seen(*given) == [f32] * 4
        assert seen(*left) == [np.float64, np.int32, float, bool]


# Errors


@pytest.mark.parametrize("dtype", [f32, jnp.int32, jnp.float64, "cuda", 3.0])
def test_bad_dtype(dtype):
    with pytest.raises(ValueError, match=r"autocast\(dtype=.*must be float16 or bfl"):
        jamp.autocast(dtype)


def test_bad_enabled_and_cast_inputs():
    with pytest.raises(TypeError, match="enabled"):
        jamp.autocast(enabled=f16)
    with pytest.raises(ValueError, match="cast_inputs"):
        jamp.autocast(cast_inputs=jnp.int32)
    with pytest.raises(TypeError, match="decorates a function"):
        with jamp.autocast(cast_inputs=f32):
            pass


def test_a_nested_primitive_of_jax_without_a_rule_raises(monkeypatch):
    x, w, _ = arrays()
    new = Primitive("brand_new")
    new.def_impl(lambda x, jaxpr: x)
    monkeypatch.setattr(jax.lax, "brand_new_p", new, raising=False)
    jaxpr = jax.make_jaxpr(lambda x: x @ w)(x)
    with half(), pytest.raises(NotImplementedError, match=r"(?s)'brand_new'.*register"):
        new.bind(x, jaxpr=jaxpr)
    with half(), off():
        new.bind(x, jaxpr=jaxpr)


@pytest.mark.parametrize("dtype", mostly_slow([f16, jnp.bfloat16], f16))
@pytest.mark.parametrize("jit", [False, True])
def test_float32_functions_are_float32_under_differentiation(dtype, jit):
    x = jnp.asarray([-1.3, 0.7, 2.1], dtype)
    y = jnp.asarray([0.2, 0.9, 0.4])

    def loss(x, y):
        with jamp.autocast(dtype=dtype):
            a = jax.nn.softplus(x)
            b = optax.sigmoid_binary_cross_entropy(x, y)
        return a, b

    def expected(x, y):
        x = x.astype(f32)
        return jax.nn.softplus(x), optax.sigmoid_binary_cross_entropy(x, y)

    def run(function):
        outs, pullback = jax.vjp(function, x, y)
        return outs, pullback(tuple(map(jnp.ones_like, outs)))

    outs, gradients = (jax.jit(run, static_argnums=0) if jit else run)(loss)
    wanted, wanted_gradients = run(expected)
    for found, want in zip(
        (*outs, gradients[1]), (*wanted, wanted_gradients[1]), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=1e-6)
    assert gradients[0].dtype == dtype
    np.testing.assert_allclose(
        gradients[0].astype(f32), wanted_gradients[0].astype(f32), rtol=0.01
    )


@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16])
@pytest.mark.parametrize(
    "function", [jnp.log10, lambda x: jnp.linalg.norm(x, 3), jnp.log2]
)
def test_float32_functions_have_exact_constants(dtype, function):
    x = jnp.asarray([0.3, 0.7, 1.9], dtype)
    half_region = jamp.autocast(dtype=dtype)
    for run in (half_region(function), jax.jit(half_region(function))):
        np.testing.assert_allclose(run(x), function(x.astype(f32)), rtol=1e-6)
