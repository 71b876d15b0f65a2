"""`autocast("float8")`: which products, in which regions and models."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jamp
from jamp._autocast import derivatives
from shared.jaxprs import equations
from tests.jaxprs import products
from tests.marks import cover

FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
pytestmark = pytest.mark.usefixtures("standard_promotion", "default_precision")


def operands(rows=32, n=64, columns=48):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(rows, n)), rng.normal(size=(n, columns)) / n**0.5
    return jnp.asarray(x.astype(np.float32)), jnp.asarray(w.astype(np.float32))


def in_region(function, dtype="float8", **kwargs):
    return jamp.autocast(dtype, **kwargs)(function)


def matmul(x, w):
    return x @ w


def notes_of(function, *args, **kwargs):
    """What `explain` says of each product, with its path."""
    explanation = jamp.debug.explain(function, **kwargs)(*args)
    return [(row.path, row.note) for row in explanation.rows if row.flops]


def note_of(function, *args, dtype="float8"):
    ((_, note),) = notes_of(function, *args, dtype=dtype)
    return note


# The region.


def test_the_region_is_one_of_bfloat16():
    def run(x, w):
        with jamp.autocast("float8"):
            assert jamp.is_autocast_enabled()
            assert jamp.get_autocast_dtype() == jnp.bfloat16
            h = x @ w
            assert h.dtype == jnp.bfloat16
            assert jax.nn.softmax(h).dtype == jnp.float32
            assert (h + jnp.zeros(48)).dtype == jnp.bfloat16  # a bias

    jax.eval_shape(run, *operands())


def test_a_name_stands_for_the_default_recipe():
    assert jamp.Float8() == jamp.Float8("tensorwise") != jamp.Float8("rowwise")
    assert len({jamp.Float8(), jamp.Float8("tensorwise")}) == 1
    named, given = jamp.autocast("float8"), jamp.autocast(jamp.Float8())
    assert named.settings == given.settings


# Which products.


def odd(sizes):
    return f"no float8: {sizes}: each size must be a multiple of 16 or at least 256"


QUALIFIED = [
    (lambda x, w: x @ w, "float8 tensorwise"),
    (lambda x, w: jnp.tensordot(x, w, 1), "float8 tensorwise"),
    (lambda x, w: jnp.einsum("ij,jk->ki", x, w), "float8 tensorwise"),
    (lambda x, w: jax.vmap(lambda row: row @ w)(x), "float8 tensorwise"),
    (lambda x, w: x.astype(jnp.float16) @ w, "float8 tensorwise"),
    (lambda x, w: jnp.stack([x, x]) @ jnp.stack([w, w]), "float8 tensorwise"),
    (
        lambda x, w: jnp.einsum(
            "iab,abk->ik", x.reshape(32, 8, 8), w.reshape(8, 8, 48)
        ),
        "float8 tensorwise",
    ),
    (lambda x, w: x[:31] @ w, odd("31x64x48")),
    (lambda x, w: x[:, :40] @ w[:40], odd("32x40x48")),
    (lambda x, w: x @ w[:, :8], odd("32x64x8")),
    (lambda x, w: x[0] @ w, odd("1x64x48")),
    *(
        (functools.partial(way, precision=precision), "no float8: its own precision")
        for way in (lax.dot, jnp.matmul, functools.partial(jnp.einsum, "ik,kn->in"))
        for precision in ("high", lax.Precision.HIGH, ("default", "high"))
    ),
    (
        lambda x, w: jnp.dot(*map(jnp.bfloat16, (x, w)), precision="highest"),
        "no float8: its own precision",
    ),
    (lambda x, w: jnp.dot(x, w, precision="default"), "float8 tensorwise"),
    (
        lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
        "no float8: its own precision",
    ),
    (
        lambda x, w: jax.jvp(lambda x: x @ w, (x,), (x,))[0],
        "no float8: in a derivative or a jitted shard_map",
    ),
]


@pytest.mark.parametrize(("function", "note"), QUALIFIED)
def test_explain_says_why_a_product_is_in_float8_or_not(function, note):
    x, w = operands()
    notes = {note for _, note in notes_of(function, x, w, dtype="float8")}
    assert notes == {note}
    found = products(in_region(function), x, w)
    assert all(dtypes <= FLOAT8 for dtypes in found) == note.startswith("float8")


@pytest.mark.parametrize("default", ["high", "float32", "BF16_BF16_F32"])
def test_the_default_precision_is_not_one_of_a_call(default):
    with jax.default_matmul_precision(default):
        found = products(in_region(lambda x, w: x @ w), *operands())
    assert all(dtypes <= FLOAT8 for dtypes in found)


def test_products_of_one_line_have_reasons_of_their_own():
    several = lambda x, w: [x @ w[:, :n] for n in (8, 40)]
    notes = [note for _, note in notes_of(several, *operands(), dtype="float8")]
    assert {*notes} == {odd(f"32x64x{n}") for n in (8, 40)}


def test_the_reason_of_a_function_is_that_of_its_product():
    function = lambda x, w: jnp.vecdot(x, x, axis=0)  # it transposes first
    assert note_of(function, *operands()) == odd("1x32x1")


def test_explain_has_the_dtypes_of_a_product_and_the_users_rule():
    def function(x, w):
        with jax.named_scope("up"):
            return x @ w

    rules = {"up": "float8"}
    explained = jamp.debug.explain(function, jnp.bfloat16, rules=rules)(*operands())
    (row,) = (row for row in explained.rows if row.op == "dot_general")
    assert row.rule == "rules['up']" and row.note == "float8 tensorwise"
    assert row.dtypes == "float8_e4m3fn -> bfloat16"


def test_a_product_of_nothing_is_in_bfloat16():
    x, w = operands()
    assert products(in_region(lambda x, w: x[:0] @ w), x, w) == [{"bfloat16"}]


@pytest.mark.parametrize("dtype", ["float8", jamp.ScaledFloat16()], ids=str)
def test_what_asks_for_float32_runs_in_float32(dtype):
    x, w = operands()
    exact = lambda x, w: lax.dot(x, w, precision=lax.Precision.HIGHEST)
    assert products(in_region(exact, dtype), x, w) == [{"float32"}]
    dot = lambda x, w: x[0] @ w[:, 0]
    assert products(in_region(dot, dtype), x, w) == [{"float32"}]


def test_convolutions_and_ragged_products_are_in_bfloat16():
    image, kernel = jnp.ones((16, 16, 16, 16)), jnp.ones((16, 16, 3, 3))
    conv = in_region(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"))
    assert products(conv, image, kernel) == [{"bfloat16"}]
    x, w = operands()
    sizes = jnp.array([16, 16])
    ragged = in_region(lambda x, w: lax.ragged_dot(x, jnp.stack([w, w]), sizes))
    assert products(ragged, x, w) == [{"bfloat16", "int32"}]


# Rules.


def mlp(x, w):
    for name in ("first", "second", "head"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    return x


SQUARE = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (64, 64))]


def dtypes_of(function, *args):
    """Of the products, by the last name of their paths."""
    rows = jamp.debug.explain(function)(*args).rows
    return {row.path.rpartition("/")[2]: row.runs_in for row in rows if row.flops}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_rules_take_products_into_float8_and_out_of_it(jit):
    run = jit(mlp)
    only = {"first|second": "float8"}
    found = dtypes_of(in_region(run, jnp.bfloat16, rules=only), *SQUARE)
    assert found == {
        "first": "float8_e4m3fn",
        "second": "float8_e4m3fn",
        "head": "bfloat16",
    }
    but = {"head": jnp.bfloat16, "first": jnp.float32}
    found = dtypes_of(in_region(run, "float8", rules=but), *SQUARE)
    assert found == {"first": "float32", "second": "float8_e4m3fn", "head": "bfloat16"}
    found = dtypes_of(in_region(run, jnp.float16, rules=only), *SQUARE)
    assert found["head"] == "float16" and found["first"] == "float8_e4m3fn"


@pytest.mark.parametrize("key", [mlp, lax.dot_general_p, "first|second|head"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_key_is_of_any_kind(key, jit):
    run = in_region(jit(mlp), jnp.bfloat16, rules={key: jamp.Float8("rowwise")})
    assert [d <= FLOAT8 for d in products(run, *SQUARE)] == [True] * 3


def test_other_ops_that_match_follow_the_tables():
    def run(x, w):
        with jax.named_scope("layer"):
            h = x @ w
            return h, jax.nn.softmax(h), x[:8] @ w

    arguments = operands(columns=64)
    half = functools.partial(in_region, run, jnp.bfloat16)
    h, p, small = jax.jit(half(rules={"layer": "float8"}))(*arguments)
    dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16
    assert (h.dtype, p.dtype, small.dtype) == dtypes
    plain = jax.jit(half())(*arguments)
    np.testing.assert_array_equal(small, plain[2])


# Models that know nothing of jamp.


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x)
        h = nn.gelu(nn.Dense(128)(x))
        return nn.LayerNorm()(x + nn.Dense(64)(h))


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def linen_model(x):
    module = LinenMLP()
    return module.apply, jax.jit(module.init)(jax.random.key(0), x)


def nnx_model(x):
    graph, state = nnx.split(NNXMLP(nnx.Rngs(0)))
    return (lambda state, x: nnx.merge(graph, state)(x)), state


def equinox_model(x):
    mlp = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    return (lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, static)))(x)), params


def haiku_model(x):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 64])(x)))
    return model.apply, jax.jit(model.init)(jax.random.key(0), x)


def plain_model(x):
    rng, shapes = np.random.default_rng(0), ((64, 128), (128, 64))
    params = [jnp.asarray(np.float32(rng.normal(size=s) / 8)) for s in shapes]
    return (lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]), params


MODELS = {
    "linen": linen_model,
    "nnx": nnx_model,
    "equinox": equinox_model,
    "haiku": haiku_model,
    "plain": plain_model,
}


def loss_of(apply, dtype):
    def loss(params, x):
        with jamp.autocast(dtype):
            y = apply(params, x)
        return jnp.mean(jnp.float32(y) ** 2)

    return loss


@cover(quick=2, ci=len(RECIPES) * len(MODELS))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*reversed(MODELS)])
def test_all_products_of_a_model_are_in_float8(name, recipe):
    x = np.random.default_rng(1).normal(size=(2, 16, 64)).astype(np.float32)
    apply, params = MODELS[name](x)
    step = jax.value_and_grad(loss_of(apply, jamp.Float8(recipe)))
    found = products(step, params, x)
    in_float8 = [dtypes <= FLOAT8 for dtypes in found]
    # Two layers of three products, of which one is a weight's gradient.
    n_high = 2 if recipe == "rowwise_with_gw_hp" else 0
    assert (in_float8.count(True), in_float8.count(False)) == (6 - n_high, n_high)
    assert all(dtypes == {"bfloat16"} for dtypes in found if not dtypes <= FLOAT8)


@cover(ci=6)
@pytest.mark.parametrize("name", ["plain", "linen"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_near_those_of_float32(name, recipe):
    x = np.random.default_rng(1).normal(size=(2, 16, 64)).astype(np.float32)
    apply, params = MODELS[name](x)
    run = jax.jit(jax.value_and_grad(loss_of(apply, jamp.Float8(recipe))))
    loss, grads = run(params, x)
    with jax.default_matmul_precision("highest"):
        true_loss, true_grads = jax.jit(
            jax.value_and_grad(lambda p, x: jnp.mean(apply(p, x) ** 2))
        )(params, x)
    np.testing.assert_allclose(loss, true_loss, rtol=0.02)
    largest = max(float(jnp.linalg.norm(g)) for g in jax.tree.leaves(true_grads))
    for grad, truth in zip(*map(jax.tree.leaves, (grads, true_grads)), strict=True):
        assert grad.dtype == truth.dtype
        error = float(jnp.linalg.norm(grad - truth))
        assert error <= 0.15 * float(jnp.linalg.norm(truth)) + 1e-3 * largest


# What is kept, and how often it is made.


def casts_to_float8(function, *args):
    names = [
        str(eqn.params["new_dtype"])
        for eqn in equations(jax.make_jaxpr(function)(*args))
        if eqn.primitive.name == "convert_element_type"
    ]
    return names.count("float8_e4m3fn"), names.count("float8_e5m2")


def test_a_value_is_quantized_once_in_a_region():
    x, w = operands()

    def attention(weights, x):
        with jamp.autocast("float8"):
            return sum(jnp.sum(jnp.float32(x @ w)) for w in weights)

    weights = [w, 2 * w, 3 * w]
    assert casts_to_float8(attention, weights, x) == (1 + 3, 0)
    assert casts_to_float8(jax.grad(attention, (0, 1)), weights, x) == (1 + 3, 3)


def test_nothing_is_quantized_for_a_gradient_that_nobody_takes(monkeypatch):
    made = []
    original = derivatives.quantized

    def counted(x, *, dtype, axes):
        made.append(axes)
        return original(x, dtype=dtype, axes=axes)

    monkeypatch.setattr(derivatives, "quantized", counted)
    x, w = operands()
    run = in_region(matmul, jamp.Float8("rowwise"))
    eager = run(x, w)
    assert made == [(1,), (0,)]
    made.clear()
    jax.eval_shape(lambda x, w: jax.vjp(run, x, w)[1], x, w)
    assert sorted(made) == [(0,), (0,), (1,), (1,)]
    np.testing.assert_array_equal(np.float32(eager), np.float32(jax.jit(run)(x, w)))


def test_a_value_that_flax_promotes_is_quantized_once():
    class QKV(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64)(x)  # bfloat16, which each Dense makes float32 again
            return [nn.Dense(64)(x) for _ in range(3)]

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    params = jax.eval_shape(QKV().init, jax.random.key(0), x)
    run = in_region(lambda params, x: QKV().apply(params, x))
    assert casts_to_float8(run, params, x) == (1 + 1 + 1 + 3, 0)


# Derivatives and transforms.


def loss(w, x, dtype="float8"):
    with jamp.autocast(dtype):
        y = jnp.tanh(x @ w)
    return jnp.mean(jnp.float32(y) ** 2)


def assert_same(a, b):
    np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.slow
def test_vmap_has_a_scale_for_each_example():
    x, w = operands()
    run = in_region(matmul)
    batch = jnp.stack([x, 300 * x, x.at[0, 0].set(jnp.inf)])
    together = jax.vmap(run, (0, None))(batch, w)
    for row, example in zip(together, batch, strict=True):
        assert_same(row, run(example, w))
    inside = in_region(lambda batch, w: jax.vmap(matmul, (0, None))(batch, w))
    assert not np.isfinite(np.float32(inside(batch, w))).any()  # one scale for all
    grads = jax.vmap(jax.grad(loss), (None, 0))(w, batch[:2])
    for grad, example in zip(grads, batch[:2], strict=True):
        assert_same(grad, jax.grad(loss)(w, example))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_jit_changes_no_bit(recipe):
    """XLA may not quantize the float32 number that a bfloat16 one was rounded from."""
    x, w = operands(rows=64, columns=64)

    def layers(weights, x):
        with jamp.autocast(jamp.Float8(recipe)):
            for w in weights:
                x = jax.nn.gelu(x @ w)
        return jnp.sum(jnp.float32(x) ** 2)

    weights = [w, 2 * w.T, -w]
    grads = jax.grad(layers)(weights, x)
    for grad, other in zip(grads, jax.jit(jax.grad(layers))(weights, x), strict=True):
        np.testing.assert_array_equal(grad, other)


def test_an_inf_reaches_the_loss_scaler():
    x, w = operands()
    scaler = jamp.dynamic_loss_scale(optax.sgd(0.1))

    @jax.jit
    def step(w, x):
        state = scaler.init(w)
        _, grads = jamp.value_and_grad(loss, state)(w, x.at[0, 0].set(jnp.inf))
        return jamp.step(scaler, grads, state, w)

    new, state = step(w, x)
    assert bool(jamp.metrics(state)["found_inf"])
    np.testing.assert_array_equal(new, w)


@pytest.mark.slow
def test_find_nonfinite_goes_through_a_scale():
    x, w = operands()

    def run(w, x):
        with jamp.autocast("float8"):
            return jnp.sum(jnp.log(jnp.abs(x).at[0, 0].set(0.0)) @ w)

    report = jamp.debug.find_nonfinite(run)(w, x).to_dict()
    assert [op["primitive"] for op in report["ops"]] == ["log"]
    report = jamp.debug.find_nonfinite(jax.grad(loss))(w, x.at[0, 0].set(jnp.nan))
    assert report.to_dict()["ops"] == []
    assert report.found == ["x"]
