"""`explain`: ops with their dtypes, rules and lines, kept arrays, and odd casts."""

from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jamp
from jamp import debug
from shared import residuals
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(16)(x))
        return nn.LayerNorm()(x)


HALF = jnp.float16
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))
PARAMS = jax.eval_shape(MLP().init, KEY, X)


def loss_fn(params, x):
    return jnp.mean(jax.nn.softmax(MLP().apply(params, x)) ** 2)


def rows(explanation, op):
    return [row for row in explanation.rows if row.op == op]


def test_ops_have_dtypes_rules_and_lines():
    explanation = debug.explain(loss_fn, dtype=jnp.float16)(PARAMS, X)
    (first, *_) = rows(explanation, "dot_general")
    assert first.rule == "lower" and "linear" in first.torch
    assert first.dtypes.endswith("-> float16") and first.runs_in == "float16"
    assert first.path == "MLP/Dense_*" and "test_explain.py:" in first.line
    assert sum(row.times for row in rows(explanation, "dot_general")) == 3
    (relu,) = rows(explanation, "jax.nn.relu")
    assert relu.times == 3 and relu.dtypes == "float16 -> float16"
    assert relu.rule == "keep" and relu.torch == ()
    (softmax,) = rows(explanation, "jax.nn.softmax")
    assert softmax.rule == "float32" and softmax.torch == ("softmax",)
    assert softmax.times == 1
    (norm,) = rows(explanation, "flax.linen.LayerNorm.__call__")
    assert (
        norm.path == "MLP/LayerNorm_*" and norm.dtypes == "float16, float32 -> float32"
    )


def test_a_function_is_given_what_comes_from_outside_of_it():
    explanation = debug.explain(jax.nn.softmax, jnp.float16)(jnp.ones(3, jnp.float16))
    assert [row.dtypes for row in explanation.rows] == ["float16 -> float32"]


def test_flops_are_those_of_the_products():
    table = debug.explain(loss_fn, dtype=jnp.bfloat16)(PARAMS, X).to_dict()
    assert table["matmul_flops"] == {"bfloat16": 2 * 8 * (4 * 16 + 16 * 16 + 16 * 16)}
    assert table["matmul_share"] == 1.0 and table["found"] == []


def test_flops_of_convolutions_and_of_scans():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(8, (3, 5), feature_group_count=2)(x)

    x = jax.ShapeDtypeStruct((2, 10, 10, 4), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    table = debug.explain(Net().apply, dtype=jnp.float16)(params, x).to_dict()
    assert table["matmul_flops"] == {"float16": 2 * 2 * 10 * 10 * 8 * 3 * 5 * 2}

    def scanned(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    table = debug.explain(scanned)(w, X).to_dict()
    assert table["matmul_flops"] == {"float32": 7 * 2 * 8 * 4 * 4}
    assert [row["rule"] for row in table["rows"][:1]] == ["no region"]


@cover()
@pytest.mark.parametrize("name", ["MLP", "CNN"])
def test_kept_bytes_are_those_of_jax_vjp(name):
    """`shared.residuals` counts them in another way."""
    case = residuals.CASES[name]
    loss, args = residuals.loss_of(case.model, "autocast"), residuals.arguments(case)
    kept = residuals.residuals(loss, *args)
    expected = sum(
        r.bytes
        for r in kept
        if r.op != "argument" and not r.constant and "float" in r.dtype
    )
    table = debug.explain(loss)(*args).to_dict()
    assert sum(table["saved_bytes"].values()) == pytest.approx(expected, rel=0.02)
    assert sum(row["bytes"] for row in table["saved"]) == sum(
        table["saved_bytes"].values()
    )
    assert table["saved"][0]["line"].startswith("residuals.py:")


def test_what_a_scan_carries_is_kept_in_each_iteration():
    """The body passes its carry on, as it was given: still the scan makes the stack."""

    def loss(layers, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (h * w, None), x, layers)[0])

    layers, x = jnp.ones((5, 4, 4)), jnp.ones((4, 4))
    (saved,) = debug.explain(loss)(layers, x).to_dict()["saved"]
    assert (saved["op"], saved["shape"]) == ("scan", (5, 4, 4))


def test_the_whole_step_shows_the_backward_pass():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, x):
        def loss(params):
            with jamp.autocast(dtype=jnp.float16):
                return loss_fn(params, x)

        _, grads = jamp.value_and_grad(loss, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params)

    opt_state = jax.eval_shape(tx.init, PARAMS)
    explanation = debug.explain(step)(PARAMS, opt_state, X)
    backward = [row for row in explanation.rows if row.backward]
    products = [row for row in backward if row.op == "dot_general"]
    assert products and all(row.runs_in == "float16" for row in products)
    assert explanation.saved is None and explanation.to_dict()["saved_bytes"] is None
    assert "(backward)" in str(explanation)


def test_a_users_rules_are_named():
    rules = {"Dense_1": jnp.float32, jax.nn.softmax: None}
    explanation = debug.explain(loss_fn, dtype=jnp.float16, rules=rules)(PARAMS, X)
    (wide,) = explanation.wide_products
    assert wide.rule == "rules['Dense_1']" and wide.path == "MLP/Dense_*"
    assert "float32 dot_general" in explanation.found[0]
    kept = [row for row in explanation.rows if row.rule == "rules['softmax']"]
    assert kept and all(row.dtypes.startswith("float") for row in kept)


def test_inner_regions_decide():
    def f(x, w):
        with jamp.autocast(dtype=jnp.float16):
            a = x @ w
            with jamp.autocast(enabled=False):
                b = x @ w
            with jamp.autocast(dtype=jnp.bfloat16, rules={"head": jnp.float32}):
                with jax.named_scope("head"):
                    return a, b, x @ w

    products = rows(
        debug.explain(f)(X, jax.ShapeDtypeStruct((4, 4), jnp.float32)), "dot_general"
    )
    found = {row.rule: row.runs_in for row in products}
    assert found == {"lower": "float16", "off": "float32", "rules['head']": "float32"}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_region_around_it_counts(jit):
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with jamp.autocast(jnp.float16):
        found = debug.explain(jit(lambda x, w: (x @ w) @ w))(X, w)
        inner = debug.explain(jit(lambda x, w: x @ w), jnp.bfloat16)(X, w)
    assert {row.runs_in for row in rows(found, "dot_general")} == {"float16"}
    assert {kept.dtype for kept in found.saved} == {"float16"}
    assert {row.runs_in for row in rows(inner, "dot_general")} == {"bfloat16"}


class OwnNorm(nnx.Module):
    """A norm as in many models: it casts, and returns float32."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        x = x.astype(jnp.float32)
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * self.scale[...]


class OwnAttention(nnx.Module):
    def __init__(self, dtype, rngs):
        self.qkv = nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.norm = OwnNorm()

    def __call__(self, x):
        h = self.qkv(x)
        q = self.norm(h)
        logits = jnp.einsum("td,sd->ts", q, h)
        return self.out(jnp.einsum("ts,sd->td", jax.nn.softmax(logits), h))


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_products_in_float32_under_a_policy_name_the_line_that_made_it_float32(dtype):
    model = OwnAttention(dtype, nnx.Rngs(0))
    model = jamp.nnx.with_policy(model, "mixed_float16")
    explanation = debug.explain(model)(jnp.ones((4, 8)))
    start = OwnAttention.__call__.__code__.co_firstlineno
    norm = OwnNorm.__call__.__code__.co_firstlineno + 1
    expected = [
        f"float32 dot_general at test_explain.py:{start + 3} in __call__: policy, "
        f"float32 since test_explain.py:{norm} in __call__",
        f"float32 dot_general at test_explain.py:{start + 4} in __call__: policy, "
        f"float32 since test_explain.py:{start + 3} in __call__",
    ]
    if dtype is not None:
        expected.append(
            f"float32 dot_general at test_explain.py:{start + 4} in __call__ in "
            "(OwnAttention/out): policy, cast in that line"
        )
    products = [line for line in explanation.found if "dot_general" in line]
    assert sorted(products) == sorted(expected)
    assert all(line.removeprefix("float32 ") in str(explanation) for line in products)


def test_numbers_and_explicit_casts_are_no_silent_promotions():
    def f(w, x):
        h = x @ w
        h = h * 0.5 + 1.0
        wide = h.astype(jnp.float32) * jnp.ones(4)
        return wide, jnp.asarray(h, jnp.float32) + jnp.ones(4), jax.nn.softmax(h)

    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    explanation = debug.explain(f, dtype=jnp.float16)(w, X)
    assert explanation.promotions == []


@pytest.mark.parametrize("jit", [False, True])
def test_promotions_are_counted_with_what_they_cost(jit):
    scale = jnp.linspace(0.0, 1.0, 16)

    def f(w, x):
        h = x @ w
        return jnp.tanh(h * scale) + 1.0

    w = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    f = jax.jit(f) if jit else f
    (promotion,) = debug.explain(f, dtype=jnp.float16)(w, X).promotions
    assert promotion.op == "mul" and promotion.times == 1
    assert promotion.bytes == 8 * 16 * 2


def test_sums_that_may_overflow():
    x = jax.ShapeDtypeStruct((4, 70_000), jnp.float16)

    def f(x):
        a = jnp.sum(x, axis=1)
        b = jax.lax.cumsum(x, axis=1)
        return a, b, jnp.sum(x, axis=0), jnp.mean(x), jnp.sum(x, dtype=jnp.float32)

    explanation = debug.explain(f)(x)
    found = [(r.op, r.elements) for r in explanation.reductions]
    assert found == [("reduce_sum", 70_000), ("cumsum", 70_000)]
    assert "overflows if their mean passes 0.936" in str(explanation)
    assert debug.explain(f, dtype=jnp.float16)(x).reductions == []
    assert debug.explain(f)(jax.ShapeDtypeStruct((4, 70_000), jnp.bfloat16)).found == []


def test_an_nnx_model_is_explained_as_it_is():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return jnp.mean(self.norm(self.dense(x)))

    model = Model(nnx.Rngs(0))
    table = debug.explain(model, dtype=jnp.float16)(jnp.ones((2, 4))).to_dict()
    assert table["function"] == "Model" and table["matmul_share"] == 1.0
    paths = {row["op"]: row["path"] for row in table["rows"]}
    assert paths["dot_general"] == "(Model/dense)"  # of its parameters: no path
    assert paths["flax.nnx.BatchNorm.__call__"] == "(Model/norm)"
    assert table["saved_bytes"]


def test_nothing_of_it_is_left_behind():
    @jax.jit
    def block(x):
        return jnp.sum(jnp.exp(x @ x.T))

    def f(x):
        with jamp.autocast(dtype=jnp.float16):
            return block(x)

    x = jnp.ones((4, 4))
    before = jax.jit(f).lower(x).as_text()
    debug.explain(f)(x)
    after = jax.jit(f).lower(x)
    assert after.as_text() == before
    assert "jamp.rule" not in after.as_text(debug_info=True)


def test_a_program_that_jax_keeps_is_read_with_its_own_reasons():
    block = jax.jit(lambda x: jax.nn.softmax(x @ x.T))
    explained = lambda rules=None: debug.explain(block, HALF, rules=rules)(X).to_dict()
    first = explained()
    assert explained({jax.nn.softmax: HALF})["rows"] != first["rows"]
    with ThreadPoolExecutor(4) as pool:
        assert all(again == first for again in pool.map(explained, [None] * 4))


@cover(quick=0)
@pytest.mark.parametrize("name", ["ResNet-50", "transformer"])
def test_the_report_of_a_whole_model_is_short(name):
    case = residuals.CASES[name]
    loss, args = residuals.loss_of(case.model, "autocast"), residuals.arguments(case)
    explanation = debug.explain(loss)(*args)
    assert len(str(explanation).splitlines()) <= 60
    assert str(explanation) == repr(explanation)
    assert "| dot_general |" in explanation._repr_markdown_()
    assert explanation.to_dict()["matmul_share"] == 1.0


def test_what_cannot_be_differentiated_is_explained_all_the_same():
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x, shape, x @ x.T)

    explanation = debug.explain(f)(jnp.ones((2, 2)))
    assert explanation.saved is None and "JVP" in explanation.refusal
    assert "not differentiated, ValueError: Pure callbacks" in str(explanation)


def test_scatters_and_reductions_are_one_op():
    def f(x, i):
        wide = jnp.zeros((8, 4)).at[i].add(x)
        return wide, jax.lax.reduce(x, 0.0, lambda a, b: jax.lax.max(a, b) + 0, (0,))

    explanation = debug.explain(f)(jnp.ones((2, 4)), jnp.arange(2))
    ops = {row.op: row for row in explanation.rows}
    assert ops["scatter-add"].bytes == 8 * 4 * 4 and "reduce" in ops
    assert "max" not in ops and "add" not in ops


def test_nothing_to_explain():
    assert str(debug.explain(lambda x: x)(X)) == "<lambda>: no matrix products; 0 casts"


def test_rows_of_a_train_step_have_the_users_lines():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, scaler, x):
        grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x) ** 2)))(model)
        scaler.step(optimizer, model, grads)
        scaler.update()

    args = model, optimizer, jamp.GradScaler(), jnp.ones((2, 4))
    rows = debug.explain(step)(*args).rows
    lines = {row.line.partition(":")[0] for row in rows}
    assert lines == {"test_explain.py"}


def test_what_a_policy_keeps_in_float32_has_no_rule_of_a_table():
    wrapped = jamp.get_policy("mixed_float16").wrap(lambda x, w: jax.nn.softmax(x @ w))
    rows = jamp.debug.explain(wrapped)(jnp.ones((2, 3)), jnp.ones((3, 4))).rows
    found = {row.op: (row.rule, row.dtypes) for row in rows}
    assert found["exp"] == ("no rule", "float32 -> float32")
    assert found["dot_general"][0] == "policy"


def test_a_pattern_with_a_dot_is_no_function():
    def loss_fn(x):
        with jax.named_scope("block_1"):
            return jnp.sum(jnp.exp(x) * jnp.tanh(x))

    explained = jamp.debug.explain(
        jax.value_and_grad(loss_fn), jnp.float16, rules={"block_.*": jnp.float32}
    )(jnp.ones(8))
    assert {"exp", "tanh"} <= {row.op for row in explained.rows}
    assert all("block" not in row.op for row in explained.rows)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_dtypes_are_those_of_the_users_arrays_whichever_op_is_cast_first(order):
    functions = [jax.nn.softmax, jnp.exp, lambda h: jnp.mean(h, axis=0)]
    given = []

    def fn(x, w):
        h = x @ w
        results = [functions[i](h) for i in order]
        given.append({i: r.dtype.name for i, r in zip(order, results, strict=True)})
        return results, jax.nn.relu(h.astype(jnp.float32))

    explained = debug.explain(fn, jnp.float16)(jnp.ones((4, 8)), jnp.ones((8, 8)))
    dtypes = {row["op"]: row["dtypes"] for row in explained.to_dict()["rows"]}
    assert dtypes["jax.nn.softmax"] == dtypes["exp"] == "float16 -> float32"
    assert dtypes["jax.numpy.mean"] == "float16 -> float16"
    assert given[-1][2] == "float16"
    assert dtypes["jax.nn.relu"] == "float32 -> float32"


def test_a_step_may_return_an_equinox_model():
    model = eqx.nn.MLP(4, 3, 16, 1, key=jax.random.key(0))  # holds functions
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def train_step(model, opt_state, x):
        def scaled_loss(model):
            with jamp.autocast(dtype=jnp.float16):
                loss = jnp.mean(jax.vmap(model)(x) ** 2)
            return jamp.scale_loss(loss, opt_state), loss

        grads, loss = eqx.filter_grad(scaled_loss, has_aux=True)(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss, "a name"

    for step in (train_step, eqx.filter_jit(train_step)):
        explanation = debug.explain(step)(model, opt_state, X)
        assert explanation.to_dict()["matmul_share"] == 1.0
        assert any(row.backward for row in explanation.rows)


def test_a_bias_that_is_added_in_float32_for_each_of_a_batch_does_not_widen():
    layer = lambda w, b, x: x @ w + b
    w, b, x = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 8), (2, 8), (2, 4, 8))
    )
    inside = jax.vmap(jamp.autocast(dtype=jnp.float16)(layer))
    explanation = debug.explain(inside)(w, b, x)
    assert explanation.half_results and explanation.promotions == []
    outside = debug.explain(jax.vmap(layer), jnp.float16)(w, b, x)  # gives float32
    assert [p.op for p in outside.promotions] == ["add"]
    cast = lambda w, b, x: jax.vmap(layer)(w, b, x).astype(jnp.float16)
    assert debug.explain(cast, jnp.float16)(w, b, x).promotions  # the user's own cast


CAUSAL = np.tril(np.ones((8, 8), bool))
TARGET = np.ones((8, 8), np.float32)


def binary_cross_entropy(h):
    losses = jnp.maximum(h, 0) - h * TARGET + jnp.log1p(jnp.exp(-jnp.abs(h)))
    return jnp.mean(losses)


def softmax_by_hand(h):
    h = h + jnp.where(CAUSAL, 0.0, -1e9)
    e = jnp.exp(h - jnp.max(h, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def attention(h):
    h = h[None, :, None]
    return nn.dot_product_attention(h, h, h, mask=CAUSAL[None, None])


NO_COST = {
    "a mask that is chosen": lambda h: jax.nn.softmax(jnp.where(CAUSAL, h, -2.4e38)),
    "a mask that is added": lambda h: jax.nn.softmax(h + jnp.where(CAUSAL, 0, -1e9)),
    "a softmax by hand": softmax_by_hand,
    "attention with a mask": attention,
    "a squared error": lambda h: jnp.mean((h - TARGET) ** 2),
    "an absolute error": lambda h: jnp.sum(jnp.abs(h - TARGET)),
    "one in a function": lambda h: jnp.mean(jax.jit(lambda h: (h - TARGET) ** 2)(h)),
    "one that is mapped": jax.vmap(lambda h: jnp.mean((h - TARGET[0]) ** 2)),
    "cross entropy": lambda h: -jnp.sum(jax.nn.log_softmax(h) * TARGET),
    "binary cross entropy": binary_cross_entropy,
    "a draw": lambda h: jax.random.categorical(
        jax.random.key(0), h.astype(jnp.float32)
    ),
    "an index": lambda h: jnp.argmax(h + TARGET, -1),
}
COST = {
    "a result": lambda h: h + TARGET,
    "a result that a sum reads": lambda h: (lambda x: (x, jnp.sum(x)))(h + TARGET),
    "an input of a layer": lambda h: nn.LayerNorm().apply(
        {"params": {"scale": TARGET[0], "bias": TARGET[0]}}, h + TARGET
    ),
    "a cast": lambda h: jnp.sum((h * TARGET).astype(jnp.float16)),
    "an input of a product": lambda h: jnp.sum((h + TARGET) @ h),
    "a value with two readers": lambda h: (lambda x: jnp.sum(x) + x @ h)(h + TARGET),
    "a nonlinear function": lambda h: jnp.sum(jnp.tanh(h + TARGET)),
    "stacked": lambda h: jnp.sum(
        jax.lax.scan(lambda _, row: (None, row + TARGET[0]), None, h)[1]
    ),
    "carried": lambda h: jnp.sum(
        jax.lax.scan(lambda c, row: (c + row, None), TARGET[0], h)[0]
    ),
}


def after_a_product(fn):
    return lambda w: fn(jnp.ones((8, 4)) @ w)


@pytest.mark.parametrize("case", NO_COST)
def test_widening_for_what_runs_in_float32_is_not_listed(case):
    w, fn = jnp.ones((4, 8)), after_a_product(NO_COST[case])
    assert "float32" in {r.dtypes[-7:] for r in debug.explain(fn, HALF)(w).rows}
    assert debug.explain(fn, HALF)(w).found == []
    if case not in ("a draw", "an index"):
        grad = jax.grad(lambda w: jnp.sum(fn(w).astype(jnp.float32)))
        assert debug.explain(grad, HALF)(w).found == []


@pytest.mark.parametrize("case", COST)
def test_widening_that_costs_something_is_listed(case):
    fn = after_a_product(COST[case])
    promotions = debug.explain(fn, HALF)(jnp.ones((4, 8))).promotions
    assert [p.op for p in promotions] == ["mul" if case == "a cast" else "add"]


def test_products_that_should_be_in_float32_are_not_listed():
    import optax

    def fn(w):
        h = jnp.ones((8, 4)) @ w
        angles = jnp.einsum("i,j->ij", jnp.arange(8.0), 1 / jnp.arange(1, 9))
        labels, padding = jnp.array([[1, 2]]), jnp.zeros((1, 8))
        loss = optax.ctc_loss(h[None], padding, labels, jnp.zeros((1, 2)))
        return jnp.sin(angles), loss

    explanation = debug.explain(fn, HALF)(jnp.ones((4, 8)))
    assert explanation.matmul_flops["float32"] and explanation.found == []
    outer = lambda h: jnp.einsum("i,j->ij", h[0], TARGET[0])
    widened = after_a_product(outer)
    (line,) = debug.explain(widened, HALF)(jnp.ones((4, 8))).found
    assert line.startswith("float32 dot_general") and "outer" in line


def masked_loss(x):
    mask = (x > 0).astype(x.dtype)
    return jnp.sum(mask * (x - 1) ** 2) / jnp.sum(mask)


@jax.jit
def jitted_square(x):
    return jnp.square(x)


def scanned_squares(x):
    return jnp.sum(jax.lax.scan(lambda _, row: (None, row * row), None, x)[1])


def vector_norms(x):
    return jnp.einsum("ij,ij->i", x, x), jnp.dot(x[0], x[0])


def cubes(x):
    return jnp.cumsum(x**3, axis=0), jnp.mean(jnp.where(x > 0, x**4.0, 0))


SQUARES = {
    "mean": (lambda x: jnp.mean(x**2), ["integer_pow"]),
    "norm": (lambda x: x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)), ["mul"]),
    "cast": (
        lambda x: jnp.mean((x * x.astype(jnp.float32).astype(x.dtype))[..., None]),
        ["mul"],
    ),
    "masked": (masked_loss, ["integer_pow"]),
    "jitted": (lambda x: jnp.mean(jitted_square(x), axis=0), ["square"]),
    "scanned": (scanned_squares, ["mul"]),
    "vectors": (vector_norms, ["dot_general"]),
    "cubes": (cubes, ["integer_pow", "pow"]),
}


@pytest.mark.parametrize("case", SQUARES)
def test_float16_squares_that_are_summed(case):
    fn, ops = SQUARES[case]
    x = jax.ShapeDtypeStruct((8, 16), jnp.float16)
    explanation = debug.explain(fn)(x)
    assert [square.op for square in explanation.squares] == ops
    lines = [line for line in explanation.found if line.startswith(f"float16 {ops[0]}")]
    assert lines and "test_explain.py:" in lines[0] and "overflows from" in lines[0]
    assert "square in float32, as in jnp.mean(x.astype(jnp.float32) ** 2)" in str(
        explanation
    )
    for dtype in (jnp.float32, jnp.bfloat16):  # they have the range
        x = jax.ShapeDtypeStruct((8, 16), dtype)
        assert debug.explain(fn)(x).squares == []


def test_the_number_from_which_a_square_overflows():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float16)
    limits = [square.limit for square in debug.explain(cubes)(x).squares]
    assert limits == pytest.approx([65504 ** (1 / 3), 16.0], rel=1e-3)
    assert "overflows from 256 on" in debug.explain(SQUARES["mean"][0])(x).found[0]


def gated(x):
    return jnp.sum(jnp.tanh(x * x)) + jnp.sum(x[:, :8] * x[:, 8:])


@pytest.mark.parametrize(
    "fn",
    [
        gated,
        jnp.var,
        lambda x: jnp.mean(x.astype(jnp.float32) ** 2),
        lambda x: x @ x.T,  # not the norm of a vector
        lambda x: jax.nn.relu(x) ** 2,  # not summed
    ],
)
def test_other_squares_are_not_listed(fn):
    x = jax.ShapeDtypeStruct((8, 16), jnp.float16)
    assert debug.explain(fn)(x).squares == []
    assert debug.explain(fn, jnp.float16)(x).squares == []


def test_a_region_squares_in_float32():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float16)
    for fn in (jax.nn.standardize, jnp.linalg.norm):  # JAX squares in float16
        assert debug.explain(fn)(x).squares
        assert debug.explain(fn, jnp.float16)(x).squares == []
    norm = nn.LayerNorm(use_bias=False, use_scale=False)

    def fn(x, w):
        h = x @ w
        return jnp.mean(h**2), jnp.mean(norm.apply({}, h)), jnp.mean(h * h)

    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    (square,) = debug.explain(fn, jnp.float16)(X, w).squares
    assert square.op == "mul"  # torch multiplies in float16 too


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        value = nn.Dense(1, name="value")(nn.relu(nn.Dense(8)(x)))
        return {"value": value.squeeze(-1), "loss": jnp.mean(value**2)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_results_in_half_precision_are_listed(dtype):
    params = jax.eval_shape(Critic().init, jax.random.key(0), X)
    explanation = debug.explain(Critic().apply, dtype)(params, X)
    (result,) = explanation.half_results
    assert (result.name, result.dtype) == ("value", jnp.dtype(dtype).name)
    assert (result.op, result.path) == ("add", "Critic/value")
    assert result.line.startswith("test_explain.py:")
    assert f"value: {result.dtype}, made by add at " in str(explanation)
    assert "cast with .astype(jnp.float32)" in str(explanation)
    assert explanation.to_dict()["half_results"][0]["name"] == "value"
    assert debug.explain(Critic().apply)(params, X).half_results == []


def test_half_results_of_scans_and_arguments():
    def fn(x, half):
        def body(carry, row):
            return carry, jax.nn.relu(row @ row)

        _, ys = jax.lax.scan(body, None, x)
        return half, ys.reshape(2, -1), jax.nn.softmax(ys), half.astype(jnp.bfloat16)

    half = jax.ShapeDtypeStruct((3,), jnp.float16)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float16)
    results = debug.explain(fn)(x, half).half_results
    assert [(r.name, r.op) for r in results] == [
        ("1", "max"),
        ("2", "div"),
        ("3", "convert_element_type"),
    ]


def test_parameters_that_are_kept_in_half_precision_are_no_half_results():
    def step(params, cache, x):
        loss = lambda params: jnp.mean(x @ params)
        loss, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, cache.at[0].set(x[0, 0]), loss

    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float16)
    (result,) = debug.explain(step)(half(4, 2), half(3), half(8, 4)).half_results
    assert result.name == "2"
    mapped = jax.pmap(step)
    arguments = half(1, 4, 2), half(1, 3), half(1, 8, 4)
    (result,) = debug.explain(mapped)(*arguments).half_results
    assert result.name == "2"


def test_a_function_may_return_numbers():
    fn = lambda x: (x @ x.T, 1.0, jnp.zeros(()))
    (result,) = debug.explain(fn, HALF)(jnp.ones((4, 8))).half_results
    assert result.name == "0"


@pytest.mark.parametrize("look", [debug.explain, debug.find_nonfinite])
def test_a_rule_that_decides_in_a_report_is_used(look):
    def head(x):
        with jax.named_scope("head"):
            return x @ x.T

    with jamp.autocast(jnp.float16, rules={"head": jnp.float32}):
        look(head)(jnp.ones((2, 2)))
    with (
        pytest.raises(ValueError, match="no op matched 'tail'"),
        jamp.autocast(jnp.float16, rules={"tail": jnp.float32}),
    ):
        look(head)(jnp.ones((2, 2)))
