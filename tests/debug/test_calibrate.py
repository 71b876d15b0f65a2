"""`calibrate`: errors by product and row, choices, and rules that autocast takes."""

import itertools
import json
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jamp
from jamp import debug
from jamp._debug.calibrate import (
    Wanted,
    agreed_dtypes,
    choose_dtype,
    loss_scale_for,
    pays,
    scope_pattern,
)
from jamp._debug.walk import starred
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(32, 32)


def calibrated(loss_fn, *args, **options):
    return jamp.calibrate(loss_fn, **{"skip_small": False, **options})(*args)


def row_at(report, path):
    (row,) = (row for row in report.rows if row.path == path)
    return row


def spread_over(powers, rows=64):
    """Ordinary rows, each scaled by a power of two."""
    x = normal(rows, 64, seed=1)
    return (
        x * np.float32(2.0) ** -np.linspace(0, powers, rows, dtype=np.float32)[:, None]
    )


def layer(w, x):
    with jax.named_scope("layer"):
        y = x @ w
    return jnp.mean(jnp.sin(y))


W = normal(64, 64, seed=2) / 8


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        return nn.LayerNorm()(nn.Dense(32)(x))


@pytest.fixture(scope="module")
def params():
    return jax.jit(MLP().init)(jax.random.key(0), X)


def linen_loss(params, x):
    return jnp.mean(MLP().apply(params, x) ** 3)


# The numbers.


@pytest.mark.gpu
@cover(ci=3)
@pytest.mark.parametrize(
    ("powers", "choice"),
    [(16, "rowwise"), (12, "float8"), (0, "float8"), (20, "rowwise")],
)
def test_a_layer_whose_rows_spread_is_not_tensorwise(powers, choice):
    report = calibrated(layer, W, spread_over(powers))
    row = row_at(report, "layer")
    assert row.choice == choice
    whole, worst = row.errors["tensorwise"]["forward"]
    assert 0.02 < whole < 0.05  # the whole does not show it
    if powers >= 16:
        assert worst > 0.2 and "forward loses" in row.why
    assert max(row.errors["rowwise"]["forward"]) < 0.11
    assert row.worst("bfloat16") < 0.01


@cover()
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_a_gradient_whose_rows_vanish_is_not_tensorwise(direction):
    powers = np.float32(2.0) ** -np.linspace(
        0, 20, 64, dtype=np.float32
    )  # of what the forward product contracts
    x, w = spread_over(0), W
    x, w = (x * powers, w) if direction == "wgrad" else (x, w * powers[:, None])
    row = row_at(calibrated(layer, w, x), "layer")
    assert row.choice == "rowwise" and row.why.startswith(f"float8: {direction} loses")
    beyond = {at for at, found in row.errors["tensorwise"].items() if found[1] > 0.15}
    assert beyond == {direction}


def test_a_row_that_float32_would_lose_beside_the_others_does_not_count():
    for powers, choice in ((20, "rowwise"), (30, "float8")):
        x = spread_over(0)
        x[0] *= np.float32(2.0**-powers)
        assert row_at(calibrated(layer, W, x), "layer").choice == choice


@pytest.mark.slow
def test_few_numbers_are_judged_as_a_whole():
    report = calibrated(layer, W[:, :8], spread_over(0, rows=8), dtype=jnp.bfloat16)
    whole, worst = row_at(report, "layer").errors["bfloat16"]["forward"]
    assert whole == worst > 0


def test_the_errors_are_those_of_the_region():
    x = spread_over(16)
    expected = x @ W

    def products(w):
        with jamp.autocast(jamp.Float8("tensorwise")):
            return x @ w

    @jax.jit
    def in_region(w, cotangent):
        got, pull = jax.vjp(products, w)
        return got.astype(jnp.float32), *pull(cotangent.astype(got.dtype))

    # `layer` takes the mean of the sines of y.
    cotangent = np.cos(expected) / np.float32(expected.size)
    got, dw = map(np.asarray, in_region(W, cotangent))
    exact = x.T @ cotangent
    errors = row_at(calibrated(layer, W, x), "layer").errors["tensorwise"]
    off = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert errors["forward"][0] == pytest.approx(off(got, expected), 1e-3)
    assert errors["wgrad"][0] == pytest.approx(off(dw, exact), 1e-2)
    lost = np.linalg.norm(got - expected, axis=1)
    rows = np.max(lost / np.linalg.norm(expected, axis=1))
    # A row is at least as large as with random signs, so the error is not larger.
    assert 0.5 * rows < errors["forward"][1] <= rows * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_another_recipe_is_the_first_one_tried(recipe):
    report = calibrated(layer, W, spread_over(4), dtype=jamp.Float8(recipe))
    row = row_at(report, "layer")
    assert row.choice == report.dtype == recipe and next(iter(row.errors)) == recipe
    assert "tensorwise" not in row.errors
    assert report.rules == {"(^|/)layer$": jamp.Float8(recipe)}
    wgrad, dgrad = row.errors[recipe]["wgrad"][0], row.errors[recipe]["dgrad"][0]
    assert (wgrad < 0.01) == (recipe == "rowwise_with_gw_hp") and dgrad > 0.02


@pytest.mark.slow
def test_a_tight_tolerance_leads_to_bfloat16_and_float32():
    choices = {
        tolerance: row_at(
            calibrated(layer, W, X @ W[:32], tolerance=tolerance), "layer"
        )
        for tolerance in (0.15, 0.02, 0.001)
    }
    assert [row.choice for row in choices.values()] == ["float8", "bfloat16", "float32"]
    assert choices[0.02].why.startswith("float8: forward loses")
    assert "bfloat16: " in choices[0.001].why


@pytest.mark.slow
def test_small_products_stay_out_and_large_ones_do_not():
    def loss(params, x):
        with jax.named_scope("up"):
            h = x @ params["up"]
        with jax.named_scope("down"):
            y = h @ params["down"]
        return jnp.mean(y)

    params = {"up": jnp.ones((16, 1040)), "down": jnp.ones((1040, 16))}
    report = jamp.calibrate(loss)(params, jnp.ones((16, 16)))
    assert row_at(report, "up").choice == "float8"
    down = row_at(report, "down")
    assert down.choice == "bfloat16" and "too small to pay" in down.why
    assert report.rules == {
        "(^|/)up$": "float8",
        "(^|/)down$": jnp.dtype(jnp.bfloat16),
    }
    assert report.found == [
        "bfloat16 down 16x1040x16: float8: too small to pay; rowwise: too small to pay"
    ]


@pytest.mark.parametrize(
    ("recipe", "k", "n", "expected"),
    [
        ("tensorwise", 4096, 1024, False),
        ("tensorwise", 4097, 1024, True),
        ("tensorwise", 4096, 1025, True),
        ("rowwise", 8192, 2048, False),
        ("rowwise", 8192, 2049, True),
        ("rowwise", 1024, 8192, False),
        ("rowwise", 1025, 4097, True),
        ("rowwise", 2048, 4096, False),
        ("rowwise", 2048, 4097, True),
        ("rowwise", 2049, 4096, True),
    ],
)
def test_what_pays_begins_where_torchaos_filters_say(recipe, k, n, expected):
    assert pays(recipe, k, n) == expected


def test_rows_do_not_make_a_product_pay():
    exact = {"tensorwise": {"forward": (0.0, 0.0)}}
    assert choose_dtype(exact, (8192, 64, 64), 0.15, True)[0] == "float32"
    assert choose_dtype(exact, (64, 64, 8192), 0.15, True)[0] == "float8"


@pytest.mark.slow
def test_the_worst_iteration_counts_wherever_it_is():
    def loss(w, xs):
        def body(total, x):
            return total + jnp.sum(x @ w), None

        return jax.lax.scan(body, jnp.float32(0), xs)[0]

    outlier = X.copy()
    outlier[0, 0] = 2.0**20
    orders = np.stack([X, outlier]), np.stack([outlier, X])
    one, two = (calibrated(loss, X, xs).rows[0].errors for xs in orders)
    assert one == two and one["tensorwise"]["forward"][1] > 0.15


@pytest.mark.slow
def test_iterations_become_the_worst_of_them():
    def loss(ws, x):
        def body(h, w):
            with jax.named_scope("body"):
                return h @ w, None

        return jnp.mean(jnp.sin(jax.lax.scan(jax.checkpoint(body), x, ws)[0]))

    eye = jnp.eye(64)
    w = eye * 2.0 ** -jnp.linspace(0, 16, 64)
    x = spread_over(0)
    x[:, 0] = 1.0
    for ws, is_spread in ((jnp.stack([eye, eye]), False), (jnp.stack([w, eye]), True)):
        row = row_at(calibrated(loss, ws, x), "body")
        assert set(row.errors["tensorwise"]) == {"forward", "dgrad", "wgrad"}
        assert (row.worst("tensorwise") > 0.2) == is_spread
        if not is_spread:  # the same product twice counts once
            once = row_at(calibrated(loss, ws[:1], x), "body")
            assert row.errors == once.errors


@pytest.mark.slow
def test_what_float8_does_not_take_says_why():
    def loss(w, x):
        with jax.named_scope("odd"):
            x = x @ w
        with jax.named_scope("scores"):
            x = x.reshape(2, -1, 24)
            y = x @ x.swapaxes(1, 2)
        return jnp.mean(y)

    w = jax.random.normal(jax.random.key(1), (32, 24))
    report = calibrated(loss, w, X)
    assert "32x32x24: each size must be" in row_at(report, "odd").problem
    assert row_at(report, "scores").problem == "neither input is a weight"
    assert row_at(report, "scores").sizes == "2 of 16x24x16"
    assert all(row.choice == "bfloat16" for row in report.rows)
    assert report.rules == {}  # the region leaves them in bfloat16 by itself


@cover(quick=0)
@pytest.mark.parametrize("factor", [2.0**-20, 1.0])
def test_experts_are_measured_one_by_one(factor):
    def loss(w, x):
        with jax.named_scope("experts"):
            return jnp.mean((x @ w) ** 2)

    keys = jax.random.split(jax.random.key(0), 2)
    w = jax.random.normal(keys[0], (8, 32, 48)) / 6
    x = jax.random.normal(keys[1], (8, 64, 32)) * 2.0 ** -jnp.arange(8.0)[:, None, None]
    x = x.at[3, :32].mul(factor)
    report = calibrated(loss, w, x)
    row = row_at(report, "experts")
    assert row.sizes == "8 of 64x32x48"
    assert row.choice == ("rowwise" if factor < 1 else "float8")
    assert (max(row.errors["tensorwise"]["forward"]) > 0.5) == (factor < 1)


def test_a_product_without_a_gradient_is_measured_forward():
    def loss(w, x):
        with jax.named_scope("frozen"):
            y = jax.lax.stop_gradient(x @ w)
        return jnp.sum(y) + jnp.sum(w)

    row = row_at(calibrated(loss, W[:32], X), "frozen")
    assert list(row.errors["tensorwise"]) == ["forward"] and row.choice == "float8"


@pytest.fixture(scope="module")
def expected():
    return row_at(calibrated(layer, W, spread_over(0)), "layer")


HOLDING = {
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "cond": lambda f: lambda w, x: jax.lax.cond(x[0, 0] < 99, f, f, w, x),
    "scan": lambda f: (
        lambda w, x: jax.lax.scan(
            lambda total, _: (total + f(w, x), None), 0.0, None, 1
        )[0]
    ),
}


@cover(quick=0)
@pytest.mark.parametrize("way", HOLDING)
def test_a_product_in_a_function_that_jax_holds_is_measured(way, expected):
    """In float32 nothing else there changes."""
    function = HOLDING[way](layer)
    for _ in range(2):  # what is kept of the first call is not used by the second
        row = row_at(calibrated(function, W, spread_over(0)), "layer")
        assert row.choice == expected.choice
        chex.assert_trees_all_close(dict(row.errors), dict(expected.errors), rtol=0.01)


def test_what_is_not_finite_runs_in_float32():
    x = spread_over(0)
    x[0, 0] = np.inf
    row = row_at(calibrated(layer, W, x), "layer")
    assert row.choice == "float32" and row.worst("bfloat16") == np.inf


# float16.


@pytest.mark.slow
def test_float16_names_what_overflows_and_what_vanishes():
    def loss(params, x):
        with jax.named_scope("fine"):
            h = x @ params["fine"]
        with jax.named_scope("large"):
            large = (h * 1e4) @ params["large"]
        with jax.named_scope("small"):
            small = (h * 1e-9) @ params["small"]
        return jnp.mean(jnp.tanh(large * 1e-5)) + jnp.mean(jnp.tanh(small * 1e7))

    params = {name: W[:32, :32] * 8 for name in ("fine", "large", "small")}
    report = calibrated(loss, params, X, dtype=jnp.float16)
    choices = {row.path: row.choice for row in report.rows}
    assert choices == {"fine": "float16", "large": "float32", "small": "float32"}
    assert "overflows" in row_at(report, "large").why
    assert set(report.rules) == {"(^|/)large$", "(^|/)small$"}
    assert report.loss_scale >= 1
    with jamp.autocast(jnp.float16, rules=report.rules):
        assert jnp.isfinite(jax.jit(loss)(params, X))


@pytest.mark.slow
def test_float16_gradients_are_measured_under_a_loss_scale():
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(x @ w) * 1e-6

    report = calibrated(loss, W[:32], X, dtype="float16")
    assert report.loss_scale == 2.0**24
    assert row_at(report, "layer").choice == "float16"


@pytest.mark.parametrize(
    ("found", "scale"),
    [
        ([{"largest backward": 1.0}], 2.0**15),
        ([{"largest backward": 3.0}, {"largest backward": 0.0}], 2.0**14),
        ([{"largest backward": 1e6}], 1.0),
        ([{"largest backward": 1.0}, {"largest backward": np.inf}], 2.0**15),
        (
            [
                {"largest backward": 1.0},
                {"largest backward": 1e3, "float16 forward": np.array([np.inf] * 2)},
            ],
            2.0**15,
        ),
        ([{"largest backward": 0.0}], 2.0**24),
        ([], 2.0**24),
    ],
)
def test_the_loss_scale_is_the_largest_that_fits(found, scale):
    assert loss_scale_for(found) == scale


# Paths and rules.


def check_rules(report, loss_fn, *args, dtype="float8"):
    """Each rule matches, and `explain` shows the paths and what was chosen there."""
    rows = debug.explain(loss_fn, dtype, rules=report.rules)(*args).rows
    rows = [row for row in rows if row.op == "dot_general" and not row.backward]
    notes = {"float8": "float8 tensorwise", "rowwise": "float8 rowwise"}
    chosen = {(starred(row.path), notes.get(row.choice, "")) for row in report.rows}
    assert {(row.path, row.note) for row in rows} == chosen


@pytest.mark.slow
def test_linen_paths_and_rules(params):
    report = calibrated(linen_loss, params, X)
    assert [row.path for row in report.rows] == ["MLP/Dense_0", "MLP/Dense_1"]
    assert list(report.rules) == ["(^|/)MLP/Dense_0$", "(^|/)MLP/Dense_1$"]
    check_rules(report, linen_loss, params, X)
    check_rules(report, linen_loss, params, X, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_rules_hold_inside_of_other_scopes(params):
    report = calibrated(linen_loss, params, X)

    def step(params, x):
        with jax.named_scope("train"):
            return linen_loss(params, x)

    rows = debug.explain(step, jnp.bfloat16, rules=report.rules)(params, X).rows
    notes = [row.note for row in rows if row.op == "dot_general"]
    assert set(notes) == {"float8 tensorwise"}


@pytest.mark.slow
def test_a_rule_is_for_its_own_product():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(11):
                x = nn.Dense(16)(x)
            return x

    x = X[:16, :16]
    params = Deep().init(jax.random.key(0), x)
    # The rows spread in Dense_1's input and in Dense_2's input.
    scales = 2.0 ** -jnp.linspace(0, 20, 16)
    params["params"]["Dense_0"]["kernel"] *= scales
    loss = lambda params, x: jnp.mean(Deep().apply(params, x) ** 2)
    report = calibrated(loss, params, x, tolerance=0.2)
    assert len(report.rules) == 11
    check_rules(report, loss, params, x)


@pytest.mark.parametrize(
    ("scope", "other"), [("a[0]", "a0"), ("f(x)", "fx"), ("a.b", "axb")]
)
def test_a_pattern_takes_a_path_as_it_is_written(scope, other):
    pattern = scope_pattern(scope, [scope])
    assert re.search(pattern, f"train/{scope}") and not re.search(pattern, other)


@pytest.mark.slow
def test_haiku_paths_and_rules():
    import haiku as hk

    model = hk.transform(lambda x: hk.nets.MLP([64, 32])(x))
    params = model.init(jax.random.key(0), X)
    loss = lambda params, x: jnp.mean(model.apply(params, None, x) ** 2)
    report = calibrated(loss, params, X)
    assert len({row.path for row in report.rows}) == 2
    assert all("linear_" in row.path for row in report.rows)
    check_rules(report, loss, params, X)


@pytest.mark.slow
def test_a_region_of_the_loss_itself_is_seen(params):
    def loss(params, x):
        with jamp.autocast(jnp.bfloat16, rules={"Dense_0": "float8"}):
            return linen_loss(params, x), "more"

    report = calibrated(loss, params, X)
    assert [row.path for row in report.rows] == ["MLP/Dense_0", "MLP/Dense_1"]
    outside = calibrated(linen_loss, params, X)
    for row, other in zip(report.rows, outside.rows, strict=True):
        assert row.errors == other.errors  # both ran in float32


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(x)


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.slow
def test_nnx_has_no_paths_until_it_is_given_them():
    plain = calibrated(nnx_loss, Net(), X)
    assert {row.path for row in plain.rows} == {""} and plain.rules == {}
    head, warning, *_ = str(plain).split("\n")
    assert (
        head == "nnx_loss: 2 of 2 products could run in float8, with errors up to 15 %"
    )
    assert warning.startswith("2 products have no module path")
    assert "jamp.nnx.named_scopes" in str(plain) and "test_calibrate.py" in str(plain)
    model = jamp.nnx.named_scopes(Net())
    report = calibrated(nnx_loss, model, X)
    assert [row.path for row in report.rows] == ["blocks/0", "blocks/1", "head"]
    assert "no module path" not in str(report) and "3 of 3 products in" in str(report)
    check_rules(report, nnx_loss, model, X)


@pytest.mark.slow
def test_equinox_layers_have_the_paths_of_their_classes():
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    report = calibrated(loss, model, X)
    assert {row.path for row in report.rows} == {"eqx.nn.MLP/eqx.nn.Linear"}
    assert [row.sizes for row in report.rows] == ["32x32x64", "32x64x32"]
    check_rules(report, loss, model, X)


def test_products_of_one_scope_have_one_rule():
    def loss(w, x):
        with jax.named_scope("both"):
            y = x @ w
            y = y @ (w * np.float32(2.0) ** -np.linspace(0, 20, 64, dtype=np.float32))
        return jnp.mean(y)

    report = calibrated(loss, W, spread_over(0))
    assert report.rules == {"(^|/)both$": jamp.Float8("rowwise")}
    assert [row.choice for row in report.rows] == ["rowwise", "rowwise"]
    assert report.rows[0].why == "as another product of this module"


@pytest.mark.parametrize("order", [1, -1])
def test_the_most_careful_dtype_of_a_scope_is_that_of_its_rule(order):
    names = ["float8", "rowwise", "bfloat16", "float32"]
    for pair in itertools.combinations(names, 2):
        wanted = [Wanted("a", name, True) for name in pair]
        assert agreed_dtypes(wanted[::order]) == {"a": pair[1]}


@pytest.mark.slow
def test_no_rule_brings_a_softmax_into_bfloat16():
    def loss(w, x):
        with jax.named_scope("head"):
            return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])

    report = calibrated(loss, W[:32], X, tolerance=0.02)
    assert [row.choice for row in report.rows] == ["bfloat16"] and report.rules == {}
    report = calibrated(loss, W[:32], X, tolerance=0.001)
    assert report.rules == {"(^|/)head$": jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_no_rule_brings_the_ops_of_a_library_into_bfloat16():
    def loss(w, x):
        with jax.named_scope("head"):
            log_density = jax.scipy.stats.norm.logpdf(x @ w)
        return -jnp.mean(log_density)

    report = calibrated(loss, W[:32], X, tolerance=0.02)
    assert [row.choice for row in report.rows] == ["bfloat16"] and report.rules == {}


# The report.


def test_it_goes_through_json():
    x = spread_over(16)
    x[0, 0] = np.inf
    for report in (calibrated(layer, W, spread_over(16)), calibrated(layer, W, x)):
        text = report.to_json()
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
        again = debug.Calibration.from_json(text)
        assert again.rows == report.rows and again.rules == report.rules
        assert again.to_dict() == report.to_dict() and str(again) == str(report)


def test_it_prints_as_a_table():
    text = str(calibrated(layer, W, spread_over(16)))
    head, names, row, *_ = text.split("\n")
    assert head == "layer: 0 of 1 products in float8, with errors up to 15 %"
    assert names.split()[:2] == ["module", "product"] and "float8 %" in names
    assert row.startswith("layer") and "64x64x64" in row and "rowwise" in row
    assert "| layer |" in calibrated(layer, W, spread_over(16)).to_markdown()


@pytest.mark.slow
def test_it_is_drawn(params):
    report = calibrated(linen_loss, params, X)
    ax = report.plot()
    drawn = {line.get_label(): line for line in ax.get_lines()}
    assert {"float8", "rowwise", "bfloat16", "tolerance, 15 %"} == set(drawn)
    worst = [row.worst("tensorwise") for row in report.rows]
    np.testing.assert_array_equal(drawn["float8"].get_xdata(), worst)
    assert "MLP/Dense_0" in ax.get_yticklabels()[0].get_text()
    assert report.plot(ax) is ax
    calibrated(lambda w: jnp.sum(w), W).plot()


def test_nothing_to_calibrate():
    report = calibrated(lambda w: jnp.sum(w), W)
    assert report.rows == [] and report.rules == {} and "no matrix prod" in str(report)


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    """What a probe traces does not enter a cache that others read."""

    @jax.jit
    def inner(w, x):
        with jax.named_scope("inner"):
            return x @ w

    loss = lambda w, x: jnp.mean(inner(w, x))
    before = jax.make_jaxpr(jax.grad(loss))(W[:32], X)
    report = calibrated(loss, W[:32], X)
    assert row_at(report, "inner").errors
    after = jax.make_jaxpr(jax.grad(loss))(W[:32], X)
    assert "callback" not in str(after) and str(before) == str(after)
    in_float8 = jamp.autocast("float8")(loss)
    jaxpr = str(jax.make_jaxpr(in_float8)(W[:32], X))
    assert "callback" not in jaxpr and "f8_e4m3fn" in jaxpr


@pytest.mark.slow
def test_the_weight_may_stand_on_the_left():
    layer = eqx.nn.Linear(32, 64, use_bias=False, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (48, 32))
    x = x * 2.0 ** -jnp.arange(48.0)[:, None]  # the input is spread, not the weight

    def by_equinox(weight, x):
        return jnp.sum(jax.vmap(eqx.tree_at(lambda m: m.weight, layer, weight))(x) ** 2)

    def by_hand(weight, x):
        return jnp.sum((x @ weight.T) ** 2)

    (row,), (other,) = (
        jamp.calibrate(loss)(layer.weight, x).rows for loss in (by_equinox, by_hand)
    )
    assert row.sizes == other.sizes == "48x32x64"
    for at, errors in row.errors["tensorwise"].items():
        assert errors == pytest.approx(other.errors["tensorwise"][at], rel=0.3)


def test_a_ragged_product_is_named():
    def loss(w, x):
        return jnp.sum(jax.lax.ragged_dot(x, w, jnp.array([16, 16])))

    one = np.float32(1)
    report = jamp.calibrate(loss)(np.full((2, 32, 16), one), np.full((32, 32), one))
    (row,) = report.rows
    assert (row.primitive, row.why) == ("ragged_dot_general", "not measured")
    assert row.problem.startswith("ragged, of which a GPU makes one dense product")
    assert (row.choice, report.rules) == ("bfloat16", {})
