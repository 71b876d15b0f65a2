"""`autocast(ScaledFloat16())`: each cotangent of a product has a scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import jamp
from shared import layers_apart
from shared.jaxprs import equations
from shared.residuals import residuals
from tests.autocast.test_constructs import (
    CONSTRUCTS,
    SMALL,
    apart,
    batch,
    dtypes,
    in_float32,
    jitted,
    loss_of,
    params,
)
from tests.autocast.test_float8 import MODELS
from tests.bits import check_rounded
from tests.jaxprs import PRODUCTS, products
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")
region = functools.partial(jamp.autocast, jamp.ScaledFloat16())


def normal(seed, *shape):
    numbers = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(numbers.astype(np.float32))


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mean_square(function, within=None, factor=SMALL):
    """A loss whose gradients are small, in a region or without one."""

    def loss(*args):
        out = (within(function) if within else function)(*args)
        return jnp.mean(jnp.square(out)) * factor

    return loss


# The claim.


@functools.cache
def truth():
    return layers_apart.exact()


@functools.cache
def error_of(name):
    within = jamp.autocast(**layers_apart.REGIONS[name])
    return layers_apart.errors(layers_apart.gradients(within)(), truth())


def test_the_gradients_lie_43_powers_of_two_apart():
    largest = [np.log2(np.abs(g).max()) for g in truth()]
    assert round(largest[-1]) == -13 and round(largest[0]) == -56
    assert np.all(np.diff(largest) > 0)


def test_every_layer_is_right():
    """Measured: at most 0.03 %."""
    assert np.all(error_of("scaled float16") < 0.005)


def test_the_best_scale_for_all_layers_leaves_four_of_them_wrong():
    scale, errors = layers_apart.best_scale(truth())
    assert scale not in (layers_apart.SCALES[0], layers_apart.SCALES[-1])
    assert layers_apart.wrong(errors) == 4


@pytest.mark.slow
def test_bfloat16_loses_more():
    """Measured: 0.4 to 0.5 %, at least 15 times as much."""
    ratio = error_of("bfloat16") / error_of("scaled float16")
    assert np.all(ratio > 10)


# The region.


def test_a_product_gives_float32_and_is_in_float16():
    x, w = normal(0, 8, 16), normal(1, 16, 4)
    with region():
        assert jamp.get_autocast_dtype() == jnp.float16
        assert (x @ w).dtype == jnp.float32
        assert (x @ w + jnp.zeros(4)).dtype == jnp.float32
    assert products(region()(jnp.matmul), x, w) == [{"float16"}]
    exact = np.float64(np.float16(x)) @ np.float64(np.float16(w))
    # A sum of 16 products, the largest as if no terms cancelled.
    check_rounded(region()(jnp.matmul)(x, w), exact, 16, np.max(np.abs(x) @ np.abs(w)))


def test_sums_do_not_overflow_forward_or_backward():
    full = lambda *shape: jnp.asarray(np.full(shape, 200, np.float32))
    x, w = full(4, 4096), full(4096, 4)
    loss = mean_square(jnp.matmul, region(), 1.0)
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
    assert value == np.float32(200.0 * 200 * 4096) ** 2
    assert all(np.all(np.isfinite(g)) for g in grads)
    image, kernel = full(1, 64, 8, 8), full(4, 64, 3, 3)
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1))
    conv = functools.partial(conv, padding="VALID")
    assert region()(conv)(image, kernel)[0, 0, 0, 0] == 200.0 * 200 * 64 * 9


# Which products.


QUICK = "matmul", "conv", "ragged"


def conv(x, w, **how):
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", **how)


GROUPS = np.array([3, 5], np.int32)
FUNCTIONS = {
    "matmul": (jnp.matmul, (5, 4), (4, 6)),
    "batched": (jnp.matmul, (3, 5, 4), (3, 4, 6)),
    "transposed": (lambda x, w: jnp.einsum("bij,bkj->ikb", x, w), (3, 4, 5), (3, 6, 5)),
    "two contracted": (
        lambda x, w: jnp.einsum("iab,abk->ik", x, w),
        (3, 4, 5),
        (4, 5, 6),
    ),
    "matrix and vector": (jnp.matmul, (5, 4), (4,)),
    "vecdot": (jnp.vecdot, (5, 4), (5, 4)),
    "tensordot": (lambda x, w: jnp.tensordot(x, w, 1), (5, 4), (4, 6)),
    "vmap inside": (
        lambda x, w: jax.vmap(lambda row: jnp.tanh(w.T @ row))(x),
        (5, 4),
        (4, 6),
    ),
    "conv": (conv, (2, 4, 8, 8), (6, 4, 3, 3)),
    "conv, groups": (
        functools.partial(conv, feature_group_count=2, rhs_dilation=(2, 1)),
        (2, 4, 8, 8),
        (6, 2, 3, 3),
    ),
    "conv, batch groups": (
        functools.partial(conv, batch_group_count=2),
        (4, 4, 8, 8),
        (6, 4, 3, 3),
    ),
    "conv transpose": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (2, 4, 4, 8),
        (3, 3, 8, 4),
    ),
    "ragged": (lambda x, w: lax.ragged_dot(x, w, GROUPS), (8, 4), (2, 4, 6)),
    "preset": (
        lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.F16_F16_F32),
        (5, 4),
        (4, 6),
    ),
}


@cover(quick=3, ci=len(FUNCTIONS))
@pytest.mark.parametrize("name", sorted(FUNCTIONS, key=[*QUICK, *FUNCTIONS].index))
def test_cotangents_of_every_product_are_scaled(name):
    function, *shapes = FUNCTIONS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    if name == "preset":  # which a CPU does not have
        plain = mean_square(lambda x, w: jnp.matmul(x, w))
    else:
        plain = mean_square(function)
    step = jax.grad(mean_square(function, region()), argnums=(0, 1))
    truth = jax.jit(jax.grad(plain, argnums=(0, 1)))
    assert apart(jax.jit(step)(*args), truth(*args)) < 2e-3
    found = products(step, *args)
    assert len(found) == 3 and all("float16" in dtypes for dtypes in found)
    assert "float32" not in set().union(*found)


@cover()
@pytest.mark.parametrize("name", ["matmul", "ragged", "conv", "two contracted"])
def test_no_power_of_two_is_lost_or_doubled(name):
    """Small integers, of which each result is a number of float16."""
    function, *shapes = FUNCTIONS[name]
    random = np.random.default_rng(0)
    args = [jnp.float32(random.integers(-4, 5, shape)) for shape in shapes]
    shape = jax.eval_shape(function, *args).shape
    cotangent = random.integers(-4, 5, shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, cotangent, *args):
        out, pullback = jax.vjp(function, *args)
        return out, *pullback(cotangent)

    for exponent in (-100, -60, 0, 60, 100):
        scaled = cotangent * np.float32(2.0**exponent)
        found = both(region()(function), scaled, *args)
        for a, b in zip(found, both(function, scaled, *args), strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_cotangent_of_a_model_is_float16_where_nothing_scales_it():
    """All that is float16 was cast from float32, and goes into products alone."""
    model, image = Net(), shaped(4, 8, 8, 3)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), image))

    def loss(p, rest, image):
        with region():
            out, _ = model.apply({**rest, "params": p}, image, mutable=["batch_stats"])
        return jnp.mean(out**2)

    moving = {"transpose", "reshape", "rev", "broadcast_in_dim", "squeeze", "slice"}
    allowed = {*PRODUCTS, *moving, "convert_element_type", "custom_vjp_call", "jit",
               "custom_jvp_call", "pjit"}  # fmt: skip
    p = variables.pop("params")
    jaxpr = jax.make_jaxpr(jax.grad(loss))(p, variables, image)
    n_products = 0
    for eqn in equations(jaxpr):
        given, made = (
            [v.aval.dtype for v in vs if hasattr(v.aval, "dtype")]
            for vs in (eqn.invars, eqn.outvars)
        )
        if jnp.float16 in given:
            assert eqn.primitive.name in allowed, eqn
        if eqn.primitive.name in PRODUCTS:
            n_products += 1
            assert set(given) == {jnp.dtype("float16")} and made == [jnp.float32]
        if eqn.primitive.name == "convert_element_type" and jnp.float16 in made:
            assert given == [jnp.float32]
    assert n_products == 3 * 8


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), padding="VALID")(x)
        x = nn.gelu(nn.BatchNorm(use_running_average=False)(x))
        x = x.reshape(x.shape[0], -1, 8)
        x = x + nn.MultiHeadAttention(num_heads=2)(x)
        return nn.softmax(nn.Dense(4)(nn.LayerNorm()(x)))


def test_a_norm_of_half_precision_gives_float32():
    """In plain float16 the next layer gets it in float16, and so does the cotangent."""
    model, x = nn.Sequential([nn.BatchNorm(False), nn.Dense(4)]), normal(0, 8, 6)
    x = x.astype(jnp.float16)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    p, stats = variables["params"], variables["batch_stats"]

    def apply(p, x):
        both = {"params": p, "batch_stats": stats}
        return model.apply(both, x, mutable=["batch_stats"])[0]

    found = jax.jit(jax.grad(mean_square(apply, region())))(p, x)
    truth = jax.jit(jax.grad(mean_square(apply)))(p, np.float32(x))
    norm = {name for name in p if "scale" in p[name]}
    for name in norm:
        assert apart(found[name], truth[name]) < 3e-3
    assert norm


def test_a_rule_with_a_dtype_keeps_a_layer_out():
    x, w = normal(0, 4, 4), normal(1, 4, 4)

    def run(x, w):
        with jax.named_scope("body"):
            x = x @ w
        with jax.named_scope("head"):
            return x, x @ w

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x1, x2 = region(rules={"head": dtype})(run)(x, w)
        assert (x1.dtype, x2.dtype) == (jnp.float32, dtype)


def test_a_rule_may_scale_products_of_any_region():
    x, w = normal(0, 16, 16), normal(1, 16, 16)

    def run(x, w):
        with jax.named_scope("head"):
            return x @ w

    truth = jax.jit(jax.grad(mean_square(run), (0, 1)))(x, w)
    for dtype in (jnp.float16, jnp.bfloat16, "float8"):
        within = jamp.autocast(dtype, rules={"head": jamp.ScaledFloat16()})
        assert jax.eval_shape(within(run), x, w).dtype == jnp.float32
        step = jax.grad(mean_square(run, within), (0, 1))
        assert products(step, x, w) == [{"float16"}] * 3
        assert apart(jax.jit(step)(x, w), truth) < 3e-3
    never = jamp.autocast(jnp.float16, rules={lax.sin_p: jamp.ScaledFloat16()})
    with pytest.raises(ValueError, match="no op matched 'sin'"):
        never(jnp.sin)(x)


@cover()
@pytest.mark.parametrize("construct", ["custom_jvp", "custom_jvp in jit"])
def test_tangents_are_not_scaled_by_a_rule(construct):
    """They stay linear: JAX transposes the products of a rule that it has traced."""
    p, x = params(), batch()
    rules = {lax.dot_general_p: jamp.ScaledFloat16()}
    run = jamp.autocast(jnp.float16, rules=rules)(CONSTRUCTS[construct])
    step = jitted(lambda p, x: loss_of(run)(p, x) * SMALL)
    truth = jax.tree.map(lambda g: g * SMALL, in_float32(construct)[1])
    assert apart(step(p, x)[1], truth) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_ops_of_a_cell_with_a_rule_stay_float32(dtype):
    x = normal(0, 2, 3, 64)
    apply, p = cell(x)
    within = jamp.autocast(dtype, rules={nn.OptimizedLSTMCell: jamp.ScaledFloat16()})
    step = jax.jit(jax.grad(mean_square(apply, within)))
    assert apart(step(p, x), jax.jit(jax.grad(mean_square(apply)))(p, x)) < 3e-3
    assert all(d == {"float16"} for d in products(step, p, x))


def test_a_rule_of_float8_and_what_does_not_qualify():
    x, w = normal(0, 32, 16), normal(1, 16, 16)

    def run(x, w):
        return x @ w, x[:5] @ w, conv(x.reshape(1, 1, 32, 16), w.reshape(1, 1, 16, 16))

    within = region(rules={run: jamp.Float8()})
    assert products(within(run), x, w) == [{"float8_e4m3fn"}, {"float16"}, {"float16"}]
    for y in jax.eval_shape(within(run), x, w):
        assert y.dtype == jnp.float32
    within = region(rules={run: jamp.Float8("rowwise_with_gw_hp")})
    small = mean_square(lambda x, w: within(run)(x, w)[0], factor=2.0**-30)
    exact = mean_square(lambda x, w: run(x, w)[0], factor=2.0**-30)
    found, truth = (jax.jit(jax.grad(f, 1))(x, w) for f in (small, exact))
    assert apart(found, truth) < 0.1


def test_what_is_saved_for_a_product_is_float16():
    def loss(p, x):
        with region():
            return jnp.sum(x @ p["a"]) + jnp.sum(x @ p["b"])

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    kept = residuals(loss, {"a": square, "b": square}, square)
    assert sorted(r.dtype for r in kept if r.bytes > 4) == ["float16"] * 3  # x once


def test_explain_says_which_products_are_scaled():
    explanation = jamp.debug.explain(region()(FUNCTIONS["conv"][0]))(
        shaped(2, 4, 8, 8), shaped(6, 4, 3, 3)
    )
    (row,) = (r for r in explanation.rows if r.flops)
    assert (row.rule, row.note, row.runs_in) == ("lower", "scaled float16", "float16")
    assert row.dtypes == "float16 -> float32"
    assert explanation.matmul_flops.keys() == {"float16"} and not explanation.found
    assert "lower; scaled float16" in str(explanation)
    step = jax.grad(mean_square(jnp.matmul, region()), (0, 1))
    rows = jamp.debug.explain(step)(shaped(4, 5), shaped(5, 6)).rows
    rows = [row for row in rows if row.flops]
    assert sum(row.times for row in rows) == 3
    for row in rows:
        assert (row.note, row.dtypes) == ("scaled float16", "float16 -> float32")


# Inf, nan, zeros.


@cover(ci=6)
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_a_cotangent_that_is_not_finite_makes_gradients_that_are_not(name, bad):
    function, *shapes = FUNCTIONS[name]
    args = [np.zeros(shape, np.float32) for shape in shapes]  # 0 * inf
    cotangent = np.zeros(jax.eval_shape(function, *args).shape, np.float32)
    cotangent[(0,) * cotangent.ndim] = bad
    run = lambda cotangent, *args: jax.vjp(region()(function), *args)[1](cotangent)
    for gradient in jax.jit(run)(cotangent, *args):
        assert not np.any(np.isfinite(gradient))


def test_zeros_give_zeros():
    x, w, zero = normal(0, 5, 4), normal(1, 4, 6), np.zeros((5, 6), np.float32)
    back = lambda x, w, y: jax.vjp(region()(jnp.matmul), x, w)[1](y)
    for gradient in jax.jit(back)(x, w, zero):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("exponent", [-126, -120, -112, -60, 0, 60, 126])
def test_scales_reach_all_of_float32(exponent):
    eye, w = (jnp.asarray(np.eye(4, dtype=np.float32) / n) for n in (1, 4))
    _, pullback = jax.vjp(region()(lambda x: x @ w), eye)
    cotangent = jnp.asarray(np.full((4, 4), 2.0**exponent, np.float32))
    expected = 0.0 if exponent < -124 else 2.0 ** (exponent - 2)  # XLA has none smaller
    np.testing.assert_array_equal(pullback(cotangent)[0], expected)


def test_one_large_number_leaves_the_small_ones_40_bits():
    eye, x = np.eye(2, dtype=np.float32), np.zeros((1, 2), np.float32)
    back = lambda y: jax.vjp(region()(lambda x: jnp.matmul(x, eye)), x)[1](y)[0]
    found = jax.jit(back)(np.float32([[2.0**10, 2.0**-28]]))
    np.testing.assert_array_equal(found, [[2.0**10, 2.0**-28]])


def test_two_scales_that_no_float32_is_the_product_of():
    """In a derivative inside the region both inputs are scaled."""
    eye = lambda exponent: np.eye(4, dtype=np.float32) * np.float32(2.0**exponent)

    @jax.jit
    def run(x, w, y):
        with region():
            out, pullback = jax.vjp(jnp.matmul, x, w)
            return out, *pullback(y)

    expected = eye(-120), eye(80), eye(40)
    for found, wanted in zip(run(eye(-80), eye(-40), eye(120)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_activations_overflow_as_in_plain_float16():
    x, w = jnp.full((2, 2), 1e5), jnp.eye(2)
    assert not np.any(np.isfinite(region()(jnp.matmul)(x, w)))


# Transformations.


def test_a_jitted_step_gives_the_bits_of_an_eager_one():
    loss, p, x = mean_square(lambda p, x: x @ p["w"], region()), params(), batch()
    found = jax.grad(loss)(p, x)["w"], jax.jit(jax.grad(loss))(p, x)["w"]
    np.testing.assert_array_equal(*found)


# Libraries, and training.


def cell(x):
    model = nn.RNN(nn.OptimizedLSTMCell(8))
    return model.apply, jax.jit(model.init)(jax.random.key(0), x)


@cover()
@pytest.mark.parametrize("name", [*reversed(MODELS), "cell"])
def test_models_that_know_nothing_of_jamp(name):
    x = normal(3, 2, 3, 64)
    apply, p = (MODELS | {"cell": cell})[name](x)
    step = jax.jit(jax.grad(mean_square(apply, region())))
    found = step(p, x)
    assert dtypes(found) == dtypes(p)
    assert apart(found, jax.jit(jax.grad(mean_square(apply)))(p, x)) < 3e-3
    assert all(d == {"float16"} for d in products(step, p, x))


FACTOR = 2.0**-40  # Adam squares gradients


def init(key):
    keys = jax.random.split(key, 2)
    return [jax.random.normal(k, (16, 16)) / 4 for k in keys]


def regression(within, factor):
    def loss(p, x):
        with within():
            out = jnp.tanh(x @ p[0]) @ p[1]
        return jnp.mean((out - jnp.sin(3 * x)) ** 2) * factor

    return loss


def trained(within, factor, tx):
    """The losses of a run whose gradients are all below float16's numbers."""
    loss_fn = regression(within, factor)

    def step(state, key):
        p, opt_state = state
        x = jax.random.normal(key, (32, 16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(p, x)
        p, opt_state = jamp.step(tx, grads, opt_state, p)
        return (p, opt_state), (loss / factor, jamp.metrics(opt_state)["found_inf"])

    @jax.jit
    def run():
        p = init(jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), 60)
        return lax.scan(step, (p, tx.init(p)), keys)[1]

    losses, found = run()
    return np.asarray(losses), int(np.sum(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling", [{"enabled": False}, {"init_scale": 1.0}, {}], ids=str
)
def test_training_without_a_loss_scale_and_with_one(scaling):
    tx = jamp.dynamic_loss_scale(optax.adam(1e-2, eps=1e-30), **scaling)
    off = functools.partial(jamp.autocast, enabled=False)
    truth, _ = trained(off, FACTOR, tx)
    losses, skipped = trained(region, FACTOR, tx)
    assert losses[-1] < 0.6 * losses[0] and skipped == 0
    np.testing.assert_allclose(losses, truth, rtol=5e-3)


def test_plain_float16_does_not_train_there():
    tx = jamp.dynamic_loss_scale(optax.adam(1e-2, eps=1e-30), enabled=False)
    losses, _ = trained(functools.partial(jamp.autocast, jnp.float16), FACTOR, tx)
    assert losses[-1] > 0.9 * losses[0]


# Many devices.
