"""What is one op in torch reads half precision, computes in float32 and rounds once.

Values and gradients are compared with the same function in float64, over the range of
the dtype. What the backward pass keeps is no more than without a region.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jamp
from jamp._autocast.one_op import SLOPES
from jamp._autocast.ops import FUNCTIONS, ONE_OP
from jamp._autocast.traits import CURVED
from tests.marks import cover

from .ways import WAYS

pytestmark = pytest.mark.usefixtures("standard_promotion")

exact = functools.partial(jax.nn.gelu, approximate=False)
ONE = {
    "gelu": jax.nn.gelu,
    "exact gelu": exact,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "selu": jax.nn.selu,
    "soft_sign": jax.nn.soft_sign,
    "log_sigmoid": jax.nn.log_sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
    "squareplus": jax.nn.squareplus,
    "1 / x": lambda x: 1 / x,
    "sinc": jnp.sinc,
    "tanh": jnp.tanh,
    "erf": lax.erf,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "cbrt": jnp.cbrt,
    "Linen's gelu": nn.gelu,
    "NNX's silu": nnx.silu,
}
TWO = {
    "x / y": jnp.divide,
    "hypot": jnp.hypot,
    "atan2": jnp.arctan2,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
}
FUNCTION = ONE | TWO
HALVES = ["float16", "bfloat16"]


def arrays(count, dtype):
    """Numbers of both signs whose magnitudes go from 2^-12 to 2^13, and small ones."""
    random = np.random.default_rng(0)
    powers = random.uniform(-12, 13, (count, 256))
    powers[:, ::2] /= 4
    return [*np.copysign(2.0**powers, random.normal(size=(count, 256))).astype(dtype)]


def summed(function):
    return lambda *args: (jnp.sum(jnp.float32(out := function(*args))), out)


def gradients(function, count):
    """The gradients by each input, with the value."""
    return jax.grad(summed(function), tuple(range(count)), has_aux=True)


def wide(name, args):
    """Value and gradients in float64, without a region."""
    with jax.enable_x64(True):
        full = [jnp.asarray(x, jnp.float64) for x in args]
        value, pull = jax.vjp(FUNCTION[name], *full)
        return np.asarray(value), [*map(np.asarray, pull(jnp.ones_like(value)))]


def check(found, truth, dtype, share=2.0**-6, least=1e-5):
    """Within a share of the truth. Beyond the largest number is inf, or that number."""
    largest = float(jnp.finfo(dtype).max)
    found = np.asarray(found, np.float64)
    over = np.abs(truth) > 0.99 * largest
    assert np.all(np.abs(found[over]) >= 0.98 * largest)
    np.testing.assert_allclose(found[~over], truth[~over], rtol=share, atol=least)


# Where terms of both signs cancel in float32 too, or the slope comes from the rounded
# result as in torch, only the largest numbers keep all digits.
CANCELS = {"sigmoid", "tanh", "sinc", "squareplus", "logaddexp", "logaddexp2"}
CANCELS |= {"gelu", "exact gelu", "Linen's gelu"}


@cover(quick=6, ci=70)
@pytest.mark.parametrize("name", FUNCTION)
@pytest.mark.parametrize("way", ["live", "jit inside", "jit around", *[*WAYS][3:]])
@pytest.mark.parametrize("dtype", HALVES)
def test_values_and_gradients_over_the_range(name, way, dtype):
    count = 1 + (name in TWO)
    args = arrays(count, dtype)
    function = WAYS[way](jamp.autocast(dtype), FUNCTION[name])
    grads, value = gradients(function, count)(*map(jnp.asarray, args))
    expected, slopes = wide(name, args)
    assert value.dtype == dtype and {g.dtype for g in grads} == {jnp.dtype(dtype)}
    share = 2.0**-6 if dtype == "float16" else 2.0**-5
    for found, truth in zip([value, *grads], [expected, *slopes], strict=True):
        least = float(jnp.finfo(dtype).eps) if name in CANCELS else 1e-5
        check(found, truth, dtype, share, least)


@cover(quick=2)
@pytest.mark.parametrize("name", ONE)
def test_forward_mode_and_second_derivatives(name):
    (x,) = arrays(1, "float16")
    x = x[(np.abs(x) > 0.1) & (np.abs(x) < 64)]
    function = jamp.autocast("float16")(FUNCTION[name])
    slope = lambda x: jnp.float32(jax.jvp(function, (x,), (jnp.ones_like(x),))[1])
    curve = jax.jit(jax.grad(lambda x: jnp.sum(slope(x))))
    with jax.enable_x64(True):
        full = lambda x: jax.jvp(FUNCTION[name], (x,), (jnp.ones_like(x),))[1]
        wide = jnp.asarray(x, jnp.float64)
        truth = full(wide), jax.grad(lambda x: jnp.sum(full(x)))(wide)
        truth = [*map(np.asarray, truth)]
    check(jax.jit(slope)(x), truth[0], "float16", least=1e-3)
    check(curve(x), truth[1], "float16", least=4e-3 * np.max(np.abs(truth[1])))


def test_a_policy_runs_them_too():
    x = jnp.asarray([200.0, -300.0, 3.0], jnp.float16)
    run = jamp.get_policy("params=float32,compute=float16,output=float16").wrap
    act = run(lambda x: jax.nn.gelu(x) / jnp.max(jnp.abs(x)))
    found = jax.grad(lambda x: jnp.sum(jnp.float32(act(x))))(x)
    _, pull = jax.vjp(lambda x: jax.nn.gelu(x) / jnp.max(jnp.abs(x)), jnp.float32(x))
    np.testing.assert_allclose(found, *pull(jnp.ones(3)), rtol=2e-3)


def test_a_gradient_in_a_region_of_what_is_jitted():
    """The differentiated function arrives at the region, whole."""
    with jamp.autocast(jnp.float16):
        x = jnp.asarray([300, 400], jnp.float16)
        value, grad = jax.value_and_grad(jnp.linalg.norm)(x)
        inside = jax.jit(jax.value_and_grad(jnp.linalg.norm))(x)
    assert value == inside[0] == 500 and value.dtype == jnp.float16
    np.testing.assert_allclose([grad, inside[1]], [[0.6, 0.8]] * 2, rtol=1e-3)


@pytest.mark.every_release
def test_each_row_has_a_case():
    cases = {getattr(f, "__name__", "") for f in ONE.values()}
    cases |= {"glu", "gelu", "hypot", "logaddexp", "logaddexp2", "logit"}
    cases |= {"sinc", "xlogy", "xlog1py"}
    rows = {
        path.split(".")[-1] for path, row in FUNCTIONS.items() if row.kind is ONE_OP
    }
    assert rows <= cases
    assert SLOPES.keys() < CURVED


# What is kept.


def kept(function, *args):
    """What is kept for the backward pass, as bytes and as shapes and dtypes."""
    made = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    leaves = jax.tree.leaves(made)
    kinds = sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), kinds


H = jax.ShapeDtypeStruct((16, 64), jnp.float16)
ALSO = {
    "jitted": jax.jit(jax.nn.gelu),
    "of a mapped row": jax.vmap(jax.nn.gelu),
    "twice": lambda h: jax.nn.gelu(jax.nn.gelu(h)),
}


@pytest.mark.every_release
@pytest.mark.parametrize("name", [*ONE, *ALSO])
def test_the_input_or_the_result_alone_is_kept(name):
    function = (ONE | ALSO)[name]
    _, kinds = kept(jamp.autocast("float16")(function), H)
    arrays = [kind for kind in kinds if kind[1] == "float16" and kind[0]]
    more = name == "twice"
    assert arrays == [(H.shape, "float16")] * (1 + more)
    assert all(dtype in ("float16", "bool") for _, dtype in kinds)


def test_a_gate_is_kept_beside_what_torch_keeps():
    gated = jamp.autocast("float16")(lambda h, g: g * jax.nn.gelu(h))
    assert kept(gated, H, H)[1] == [(H.shape, "float16")] * 3


POLICIES = [
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
]
LAYERS = {
    "MLP": lambda act: lambda h, w: act(h @ w) @ w.T,
    "GeGLU": lambda act: lambda h, w: (act(h @ w) * (h @ w)) @ w.T,
}


@cover(quick=2)
@pytest.mark.parametrize("policy", [*POLICIES, "names"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("act", [jax.nn.gelu, jax.nn.mish, jnp.tanh, jax.nn.silu])
def test_a_policy_of_checkpoint_keeps_no_more_than_without(policy, layer, act):
    policies = jax.checkpoint_policies
    names = policies.save_only_these_names("before")
    chosen = names if policy == "names" else getattr(policies, policy)
    named = lambda x: act(checkpoint_name(x, "before"))

    def loss(h, w):
        step = jax.checkpoint(LAYERS[layer](named), policy=chosen)
        return jnp.sum(lax.scan(lambda h, w: (step(h, w), None), h, w)[0])

    h = jax.ShapeDtypeStruct((4, 8), jnp.float16)
    w = jax.ShapeDtypeStruct((6, 8, 16), jnp.float16)
    assert kept(jamp.autocast("float16")(loss), h, w)[0] <= kept(loss, h, w)[0]


def test_a_gpu_computes_gelu_anew_and_others_as_they_like():
    grad = jax.jit(
        jax.grad(lambda h: jnp.sum(jamp.autocast("float16")(jax.nn.gelu)(h)))
    )
    for platform, expected in {"cuda": 1, "rocm": 1, "tpu": 0, "cpu": 0}.items():
        text = grad.trace(H).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == expected, platform


def test_a_rule_of_the_users_decides_about_it():
    act = jamp.autocast("float16", rules={jax.nn.gelu: jnp.float32})(jax.nn.gelu)
    assert jax.eval_shape(act, H).dtype == jnp.float32


def test_float32_stays_float32():
    region = jamp.autocast("float16")
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    dtypes = {n: jax.eval_shape(region(f), x).dtype.name for n, f in ONE.items()}
    assert {*dtypes.values()} == {"float32"}


@pytest.mark.parametrize("number", [1e-5, 3e-6, 6e4])
@pytest.mark.parametrize("way", ["live", "jit inside", "jit around"])
def test_a_quotient_by_a_number_whose_inverse_is_out_of_range(number, way):
    x = np.asarray([1e-4, 1e-3, 0.0, -0.1], np.float16)
    function = WAYS[way](jamp.autocast("float16"), lambda x: x / number)
    expected = np.float32(x) / np.float32(np.float16(number))
    np.testing.assert_allclose(function(jnp.asarray(x)), expected, rtol=1e-3, atol=1e-7)
