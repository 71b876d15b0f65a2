"""autocast: regions, layers, rules, errors."""

import gc
import threading
import weakref
from functools import partial

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
from jax.extend.core import Primitive

import jamp
from jamp import _compat
from shared.jaxprs import equations
from tests.bits import check_near, nudged
from tests.jaxprs import all_half, products
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

f16, bf16, f32 = jnp.float16, jnp.bfloat16, jnp.float32
half = partial(jamp.autocast, dtype=f16)
off = partial(jamp.autocast, enabled=False)
N = 8


def arrays():
    rng = np.random.default_rng(0)
    x, w, b = (
        rng.normal(size=(N, N)),
        rng.normal(size=(N, N)) / N**0.5,
        rng.normal(size=N),
    )
    return [jnp.asarray(a.astype(np.float32)) for a in (x, w, b)]


# Regions


def test_region_is_known_inside_and_gone_outside():
    x, w, _ = arrays()
    assert not jamp.is_autocast_enabled()
    with half():
        assert jamp.is_autocast_enabled() and jamp.get_autocast_dtype() == f16
    assert not jamp.is_autocast_enabled() and (x @ w).dtype == f32
    default = f16 if jax.default_backend() == "gpu" else bf16
    assert jamp.get_autocast_dtype() == default
    with jamp.autocast():
        assert (x @ w).dtype == default


def test_a_region_that_is_off_takes_float32_as_in_torch():
    x, w, _ = arrays()
    for dtype in ("float32", "bfloat16", "float16"):
        with jamp.autocast(dtype=dtype, enabled=dtype != "float32"):
            assert (x @ w).dtype == dtype
    with pytest.raises(ValueError, match="must be float16 or bfloat16"):
        jamp.autocast(dtype="float32")
    with pytest.raises(ValueError, match="must be float16 or bfloat16"):
        jamp.autocast(dtype="float64", enabled=False)


def test_one_object_is_entered_again_and_inside_itself_and_decorates():
    region, (x, w, _) = half(), arrays()

    @region
    def product(x, w):
        """Multiplies."""
        return x @ w

    for _ in range(2):
        with region:
            with region:
                assert (x @ w).dtype == f16
            assert (x @ w).dtype == f16
        assert product(x, w).dtype == f16
        assert (x @ w).dtype == f32
    assert product.__name__ == "product" and product.__doc__ == "Multiplies."


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


def test_no_value_outlives_its_use():
    x, w, b = arrays()
    gc.freeze()  # what was made before is not searched
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


REGIONS = {
    "float16": half,
    "bfloat16": partial(jamp.autocast, bf16),
    "float8_e4m3fn": partial(jamp.autocast, "float8"),
    "float32": off,
    "scaled": partial(jamp.autocast, jamp.ScaledFloat16()),
}


@pytest.mark.parametrize("outer", REGIONS)
def test_regions_nest(outer):
    """Each region in each other one, and again in that: the innermost decides."""
    x, w = jnp.ones((16, 16)), jnp.ones((16, 16))

    def function(x, w):
        outs = []
        with REGIONS[outer]():
            outs.append(x @ w)
            for name in REGIONS:
                with REGIONS[name]():
                    outs.append(x @ w)
                    with REGIONS[outer]():
                        outs.append(x @ w)
        return outs

    expected = [outer, *(n for name in REGIONS for n in (name, outer))]
    dtypes = [{name if name != "scaled" else "float16"} for name in expected]
    for run in (function, jax.jit(function), half()(jax.jit(function))):
        assert products(run, x, w) == dtypes
    wide = [y.dtype == f32 for y in jax.eval_shape(function, x, w)]
    assert wide == [name in ("float32", "scaled") for name in expected]


# Layers


def linen(module, x):
    variables = jax.jit(module.init)(jax.random.key(0), x)
    return partial(module.apply, variables)


def nnx_layer(layer, *args, **kwargs):
    return layer(*args, **kwargs, rngs=nnx.Rngs(0))


def eqx_layer(layer, *args):
    return jax.vmap(layer(*args, key=jax.random.key(0)))


def haiku_linear():
    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8)(x)))
    return partial(layer.apply, layer.init(jax.random.key(0), jnp.ones((4, 1))))


ROWS, IMAGES, SEQUENCES = (4, N), (2, N, N, 3), (2, 3, N)
# For each dtype the layers that give it: Linen's modules, or what makes a function.
LAYERS = {
    f16: {
        "linen Dense": (nn.Dense(5), ROWS),
        "linen Dense, batch of 1": (nn.Dense(5), (1, N)),
        "linen Dense, sequence": (nn.Dense(5), SEQUENCES),
        "linen DenseGeneral": (nn.DenseGeneral((2, 3)), ROWS),
        "linen DenseGeneral, axes": (nn.DenseGeneral(5, axis=(-2, -1)), (4, 2, N)),
        "linen Conv": (nn.Conv(4, (3, 3)), IMAGES),
        "linen Conv, one image": (nn.Conv(4, (3, 3)), (N, N, 3)),
        "linen ConvTranspose": (nn.ConvTranspose(4, (3, 3)), IMAGES),
        "linen attention": (nn.MultiHeadDotProductAttention(2), SEQUENCES),
        "linen Einsum": (nn.Einsum((N, 2, 3), "bi,ijk->bjk"), ROWS),
        "nnx Linear": (partial(nnx_layer, nnx.Linear, N, 5), ROWS),
        "nnx Conv": (partial(nnx_layer, nnx.Conv, 3, 4, (3, 3)), IMAGES),
        "nnx attention": (
            partial(nnx_layer, nnx.MultiHeadAttention, 2, N, decode=False),
            SEQUENCES,
        ),
        "equinox Linear": (partial(eqx_layer, eqx.nn.Linear, N, 5), ROWS),
        "equinox Conv": (partial(eqx_layer, eqx.nn.Conv2d, 3, 4, 3), (2, 3, N, N)),
        "plain": (lambda: lambda x: x @ jnp.ones((N, 5)) + jnp.ones(5), ROWS),
        # A product of one number with each weight, which elsewhere is an outer one.
        "linen Dense, one feature": (nn.Dense(8), (4, 1)),
        "linen Einsum, one feature": (nn.Einsum((1, 8), "bi,io->bo"), (4, 1)),
        "nnx Linear, one feature": (partial(nnx_layer, nnx.Linear, 1, 8), (4, 1)),
        "nnx Linear, no bias": (
            partial(nnx_layer, nnx.Linear, 1, 8, use_bias=False),
            (4, 1),
        ),
        "eqx Linear, one feature": (
            partial(eqx_layer, eqx.nn.Linear, 1, 8),
            (4, 1),
        ),
        "haiku Linear, one feature": (haiku_linear, (4, 1)),
        "a user's, after a layer": (
            lambda: lambda x: nnx_layer(nnx.Linear, 1, 1)(x) @ jnp.ones((1, 8)),
            (4, 1),
        ),
    },
    f32: {
        "linen LayerNorm": (nn.LayerNorm(), ROWS),
        "linen LayerNorm, bare": (nn.LayerNorm(use_bias=False, use_scale=False), ROWS),
        "linen RMSNorm": (nn.RMSNorm(), ROWS),
        "linen GroupNorm": (nn.GroupNorm(2), ROWS),
        "nnx LayerNorm": (partial(nnx_layer, nnx.LayerNorm, N), ROWS),
        "equinox LayerNorm": (lambda: jax.vmap(eqx.nn.LayerNorm(N)), ROWS),
    },
}
QUICK = ["linen Dense", "linen LayerNorm", "nnx Linear", "equinox Linear", "plain"]
# Not that of Einsum, which is float32 on the oldest JAX.
QUICK += ["linen Dense, one feature"]
DTYPES = {name: dtype for dtype, layers in LAYERS.items() for name in layers}


@cover(quick=len(QUICK))
@pytest.mark.parametrize("name", sorted(DTYPES, key=[*QUICK, *DTYPES].index))
def test_dtype_of_a_layer(name):
    dtype = DTYPES[name]
    layer, shape = LAYERS[dtype][name]
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape).astype(np.float32))
    layer = linen(layer, x) if isinstance(layer, nn.Module) else layer()
    exact = jax.jit(layer)(x)
    for given in (x, jnp.asarray(np.float16(x))):
        y = half()(layer)(given)
        inside = jax.eval_shape(half()(layer), given)
        assert y.dtype == inside.dtype == dtype
        np.testing.assert_allclose(np.float32(y), exact, rtol=0.02, atol=0.02)


@cover()
@pytest.mark.parametrize("name", ["equinox Linear", "equinox Conv"])
def test_a_layer_with_the_region_under_vmap(name):
    make, shape = LAYERS[f16][name]
    model, inputs = make().__wrapped__, jnp.ones(shape)

    def loss(model):
        y = jax.vmap(half()(lambda x: model(x)))(inputs)
        assert y.dtype == f16
        return jnp.sum(y.astype(f32))

    gradients = eqx.filter_jit(eqx.filter_grad(loss))(model)
    assert gradients.weight.dtype == gradients.bias.dtype == f32


@cover(quick=2, ci=6)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("vmap", ["no", "inside", "around"])
def test_a_bias_gradient_is_summed_in_float32_and_rounded_as_in_torch(jit, vmap):
    x, w = jnp.ones((1024, 3)), jnp.ones((3, N))
    layer = lambda x, b: x @ w + b
    over_rows = lambda layer: jax.vmap(layer, in_axes=(0, None))
    run = {
        "no": half()(layer),
        "inside": half()(over_rows(layer)),
        "around": over_rows(half()(layer)),
    }[vmap]

    def loss(b, scale):
        y = run(x, b)
        assert y.dtype == f16
        return jnp.sum(scale * y.astype(f32))

    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    b = jnp.ones(N)
    np.testing.assert_array_equal(gradient(b, 2.0 + 2.0**-9), 2048 + 2)
    np.testing.assert_array_equal(gradient(b, 3.0), 3072)
    np.testing.assert_array_equal(gradient(b, 64.0), np.inf)  # 65536


def test_residual_sums_and_what_was_cast_to_float32_are_float32():
    x, w, b = arrays()
    with half():
        assert (x + (x @ w + b)).dtype == f32
        assert ((x @ w + b) + x).dtype == f32
        assert jax.jit(lambda x: x + x @ w)(x).dtype == f32
        assert jax.jit(lambda x: x @ w + b)(x).dtype == f16
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


def test_linen_decorated_method_makes_float32_parameters():
    class Model(nn.Module):
        @nn.compact
        @half()
        def __call__(self, x):
            return nn.Dense(3, kernel_init=nn.initializers.orthogonal())(x)

    model, x = Model(), jnp.ones((2, N))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype(f32)}
    assert jax.eval_shape(model.apply, variables, x).dtype == f16


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
    np.testing.assert_allclose(huge, x @ w + 1e6, atol=1)


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


def test_branches_that_return_keys():
    with half():
        key = lax.cond(
            True, lambda k: k, lambda k: jax.random.split(k)[0], jax.random.key(0)
        )
    assert key == jax.random.key(0)


def test_average_pooling_of_large_sums():
    x = jnp.full((1, 64, 64, 1), 40.0, f16)
    with half():
        y = nn.avg_pool(x, (64, 64))
        assert jax.nn.relu(y).dtype == f16
    np.testing.assert_array_equal(y, 40.0)


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
    for value, dtype in ((f16, f16), (None, f16), (f32, f32)):
        with half(rules={lax.convert_element_type_p: value}):
            h, count = x @ w, jnp.arange(len(x))[:, None]
            assert (h * jnp.full(h.shape, 2.0)).dtype == dtype  # not a weak array
            assert jax.jit(lambda h, n: h * n)(h, count).dtype == dtype

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


@cover(ci=4)
@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16])
@pytest.mark.parametrize("jit", [True, False])
def test_float32_functions_are_float32_under_differentiation(dtype, jit):
    x = jnp.asarray([-1.3, 0.7, 2.1], dtype)
    y = jnp.asarray([0.2, 0.9, 0.4])

    def loss(x, y):
        with jamp.autocast(dtype=dtype):
            a = jax.nn.softplus(x)
            b = optax.sigmoid_binary_cross_entropy(x, y)
        return a, b

    def expected(x, y):
        return jax.nn.softplus(x), optax.sigmoid_binary_cross_entropy(x, y)

    def run(function, x, y):
        outs, pullback = jax.vjp(function, x, y)
        return outs, pullback(tuple(map(jnp.ones_like, outs)))

    outs, gradients = (jax.jit(run, static_argnums=0) if jit else run)(loss, x, y)
    wide = x.astype(f32), y
    compiled = jax.jit(run, static_argnums=0)
    wanted, *nearby = (compiled(expected, *args) for args in [wide, *nudged(wide)])
    of_float32 = lambda outs, gradients: (outs, gradients[1])
    check_near(
        of_float32(outs, gradients),
        of_float32(*wanted),
        [of_float32(*each) for each in nearby],
    )
    assert gradients[0].dtype == dtype
    np.testing.assert_allclose(gradients[0].astype(f32), wanted[1][0], rtol=0.01)


@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16])
@pytest.mark.parametrize(
    "function", [jnp.log10, lambda x: jnp.linalg.norm(x, 3), jnp.log2]
)
def test_float32_functions_have_exact_constants(dtype, function):
    x = jnp.asarray([0.3, 0.7, 1.9], dtype)
    half_region, wide = jamp.autocast(dtype=dtype), x.astype(f32)
    nearby = list(map(function, nudged(wide)))
    for run in (half_region(function), jax.jit(half_region(function))):
        check_near(run(x), function(wide), nearby)
