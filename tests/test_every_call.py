"""Every public function and method once: eagerly, in jit, in a scan and in NNX.

The rows are small right calls with a known result, the same on every release of JAX.
The numbers are powers of two and small integers, so the results are exact. What these
functions do to other functions is in `test_control_flow.py`.
"""

import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp

from .marks import cover
from .test_package import REFERENCE, methods_of

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.every_release,
]

f16, f32, bf16 = np.float16, np.float32, jnp.bfloat16
X = np.float32([[2, 0], [0, 1]])
INF = np.float32(np.inf)
ROWS, CALLED = {}, {}


class Holder(nnx.Module):
    def __init__(self, x):
        self.x = nnx.Param(x)


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: (
        lambda x: jax.tree.map(
            lambda y: y[0], lax.scan(lambda _, x: (_, f(x)), None, x[None])[1]
        )
    ),
    "nnx": lambda f: lambda x: nnx.jit(lambda m: f(m.x[...]))(Holder(x)),
}


def row(*calls, ways=WAYS):
    """Enters a function of an array that yields results, and what each must be.

    That is a value, also of its dtype if it is NumPy's, or a function that asserts.

    Args:
      calls: the public names that it calls, without "jamp.".
      ways: where it can run.
    """

    def enter(function):
        ROWS.update({f"{function.__name__}-{way}": (function, way) for way in ways})
        CALLED.update(dict.fromkeys(calls))
        return function

    return enter


def check(got, expected):
    if callable(expected):
        return expected(got)
    got, dtype = np.asarray(got), getattr(expected, "dtype", None)
    assert dtype is None or got.dtype == dtype, (got.dtype, dtype)
    np.testing.assert_array_equal(got.astype(np.float32), np.float32(expected))


# Regions


@row("autocast", "is_autocast_enabled", "get_autocast_dtype")
def regions(x):
    with jamp.autocast(jnp.float16):
        assert jamp.is_autocast_enabled() and jamp.get_autocast_dtype() == f16
        yield x @ x, f16(X @ X)
        yield jnp.exp(x @ x)[0, 1], f32(1)
        with jamp.autocast(enabled=False):
            yield x @ x, X @ X
    assert not jamp.is_autocast_enabled()
    with jamp.autocast(jnp.bfloat16, rules={"head": jnp.float32}):
        with jax.named_scope("head"):
            yield x @ x, X @ X
        yield x @ x, (X @ X).astype(bf16)
    with jamp.autocast(jnp.float16):
        cast = jamp.autocast(jnp.float16, cast_inputs=jnp.float16)(jnp.negative)
        yield cast(x), f16(-X)
    dense = jax.value_and_grad(
        lambda w: jnp.sum(jamp.autocast("float16")(jnp.dot)(x, w))
    )
    yield dense(x)[1], np.float32([[2, 2], [1, 1]])


@row(
    "dot_product_attention",
    "linen.dot_product_attention",
    "nnx.dot_product_attention",
)
def attention(x):
    value = jnp.broadcast_to(x[0, 0], (1, 4, 2, 8))
    for attend in (
        jamp.dot_product_attention,
        jamp.linen.dot_product_attention,
        jamp.nnx.dot_product_attention,
    ):
        known = np.full((1, 4, 2, 8), 2)
        yield attend(value, value, value), f32(known)
        yield jamp.autocast("float16")(attend)(value, value, value), f16(known)


@row("Float8", "ScaledFloat16")
def recipes(x):
    wide = jnp.tile(x, (8, 8))
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        region = jamp.autocast(jamp.Float8(recipe))
        loss = lambda w, region=region: jnp.sum(region(jnp.dot)(wide, w))
        yield jax.grad(loss)(wide)[:2, :2], np.float32([[16, 16], [8, 8]])
    loss = lambda w: jnp.sum(jamp.autocast(jamp.ScaledFloat16())(jnp.dot)(x, w))
    yield (
        2.0**-40 * jax.grad(lambda w: 2.0**40 * loss(w))(x),
        np.float32([[2, 2], [1, 1]]),
    )


# Loss scaling in optax


def sgd(**options):
    return jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=8.0, **options)


@row("dynamic_loss_scale", "DynamicLossScaleState", "loss_scale", "metrics")
def overflow_and_growth(x):
    tx = sgd(growth_interval=1)
    state = tx.init(x)
    assert isinstance(state, jamp.DynamicLossScaleState)
    updates, state = tx.update(x * jnp.inf, state, x)
    yield updates, X * 0
    yield jamp.loss_scale(state), f32(4)
    updates, state = tx.update(4 * x, state, x)
    yield updates, -X / 2
    expected = {"loss_scale": f32(8), "growth_tracker": np.int32(0), "found_inf": False}
    expected |= {"skipped_steps": np.int32(1), "retried_steps": np.int32(0)}
    for name, value in expected.items():
        yield jamp.metrics(state)[name], value


@row("static_loss_scale", "step")
def static_scale(x):
    tx = jamp.static_loss_scale(optax.sgd(0.5), 4.0)
    params, state = jamp.step(tx, 4 * x, tx.init(x), x)
    yield params, X / 2
    yield jamp.loss_scale(state), f32(4)
    params, state = jamp.step(tx, INF * x, state, x)
    yield params, X


@row("value_and_grad", "scale_loss", "unscale")
def scaled_gradients(x):
    state = sgd().init(x)
    loss, grads = jamp.value_and_grad(lambda x: jnp.sum(x * x), state)(x)
    yield loss, f32(5)
    yield grads, 16 * X
    yield jamp.unscale(grads.astype(jnp.float16), state), 2 * X
    yield jamp.scale_loss(loss, state), f32(40)


def half_step(tx):
    def step(state, x):
        params, opt_state = state
        loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params), loss

    return step


@row("retry")
def retried(x):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=2.0**18)
    (params, opt_state), loss = jamp.retry(half_step(tx))((x, tx.init(x)), x)
    yield params, X / 2
    yield loss, f16(5)
    yield jamp.loss_scale(opt_state), f32(2**15)


@row("find_loss_scale", ways=["eager"])
def first_scale(x):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5))
    state = jamp.find_loss_scale(half_step(tx), (x, tx.init(x)), x)
    yield jamp.loss_scale(state), f32(2**15)


@row("master_weights", "master_params")
def masters(x):
    for remainder, dtype in ((False, jnp.float16), (True, jnp.bfloat16)):
        tx = jamp.master_weights(optax.sgd(2.0**-16), remainder=remainder)
        params = x.astype(dtype)
        state = tx.init(params)
        for _ in range(2):
            params, state = jamp.step(tx, -jnp.ones((2, 2), dtype), state, params)
        yield params, (X + 2.0**-15).astype(dtype)
        yield jamp.master_params(params, state), X + f32(2.0**-15)


# Policies


@row(
    "Policy",
    "Policy.cast_to_compute",
    "Policy.cast_to_output",
    "Policy.cast_to_param",
    "Policy.with_output_dtype",
    "Policy.wrap",
    "get_policy",
    "half_dtype",
    "cast_to_half",
    "cast_to_full",
)
def policies(x):
    policy = jamp.Policy(jnp.float32, jnp.float16, jnp.float32)
    assert jamp.get_policy(str(policy)) == policy
    yield policy.cast_to_compute({"x": x})["x"], f16(X)
    yield policy.cast_to_param(policy.cast_to_compute(x)), X
    yield policy.cast_to_output(f16(1) * x), X
    narrow = policy.with_output_dtype(jnp.bfloat16)
    yield narrow.wrap(jnp.dot)(x, x), (X @ X).astype(bf16)
    half = jamp.half_dtype()
    yield jamp.cast_to_half(x), X.astype(half)
    yield jamp.cast_to_full(jamp.cast_to_half(x)), X


@row("linen.with_policy")
def linen_policy(x):
    model = nn.Sequential([nn.Dense(2, use_bias=False), nn.Dense(2, use_bias=False)])
    model = jamp.linen.with_policy(model, "c=float16,o=float32", {"layers_1": "full"})
    params = {"params": {f"layers_{i}": {"kernel": x} for i in range(2)}}
    y, kept = model.apply(params, x, capture_intermediates=True)
    yield y, X @ X @ X
    yield kept["intermediates"]["layers_0"]["__call__"][0], f16(X @ X)


@row("linen.TrainState", "linen.TrainState.create", "linen.TrainState.apply_gradients")
def train_state(x):
    state = jamp.linen.TrainState.create(apply_fn=None, params={"w": x}, tx=sgd())
    state = state.apply_gradients(grads={"w": INF * x})
    state = state.apply_gradients(grads={"w": 4 * x})
    yield state.params["w"], X / 2
    yield state.step, 2
    yield jamp.loss_scale(state), f32(4)


class Net(nnx.Module):
    def __init__(self, x):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        self.body.kernel[...] = self.head.kernel[...] = jnp.asarray(x)

    def __call__(self, x):
        return self.head(self.body(x))


@row("nnx.with_policy", "nnx.named_scopes")
def nnx_models(x):
    model = jamp.nnx.with_policy(Net(x), "c=float16,o=float32", {"head": "full"})
    yield model(x), X @ X @ X
    yield model.body(x), f16(X @ X)
    with jamp.autocast(jnp.float16, rules={"head": jnp.float32}):
        yield jamp.nnx.named_scopes(Net(x))(x), X @ X @ X


# GradScaler


@row(
    "GradScaler",
    "GradScaler.scale",
    "GradScaler.unscale_",
    "GradScaler.step",
    "GradScaler.update",
    "GradScaler.get_scale",
)
def scaler_steps(x):
    model, scaler = Net(x), jamp.GradScaler(init_scale=8.0, growth_interval=1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for factor, skips, scale in ((jnp.inf, True, 4), (1.0, False, 8)):
        loss_fn = lambda m, by=factor: scaler.scale(jnp.sum(m.head(x)) * by)
        grads = scaler.unscale_(optimizer, nnx.grad(loss_fn)(model))
        yield scaler.step(optimizer, model, grads), skips
        scaler.update()
        yield scaler.get_scale(), scale
    yield model.head.kernel[...], X - np.float32([[1, 1], [0.5, 0.5]])
    yield model.body.kernel[...], X
    scaler.update(2.0)
    yield scaler.get_scale(), 2


@row(
    "GradScaler.get_growth_factor",
    "GradScaler.set_growth_factor",
    "GradScaler.get_backoff_factor",
    "GradScaler.set_backoff_factor",
    "GradScaler.get_growth_interval",
    "GradScaler.set_growth_interval",
    "GradScaler.is_enabled",
    "GradScaler.state_dict",
    "GradScaler.load_state_dict",
    ways=["eager"],
)
def scaler_settings(x):
    scaler = jamp.GradScaler(enabled=True)
    for setting, value in (
        ("growth_factor", 4.0),
        ("backoff_factor", 0.25),
        ("growth_interval", 7),
    ):
        getattr(scaler, f"set_{setting}")(value)
        yield getattr(scaler, f"get_{setting}")(), value
    other = jamp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and len(scaler.state_dict()) == 5
    yield scaler.is_enabled(), True
    yield jamp.GradScaler(enabled=False).is_enabled(), False


# Many devices


@row("sharding.gather", "sharding.mean")
def means(x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x):
        whole = lambda w, d: jamp.sharding.gather(w, "data", reduce_dtype=d)
        for dtype in (jnp.float16, jnp.int8, jnp.float8_e4m3fn):
            yield jax.grad(lambda w, d=dtype: jnp.sum(x * whole(w, d)))(w)
            yield jamp.sharding.mean(x, "data", dtype=dtype)
        sharded = lambda w: jamp.sharding.gather(w, "data", P("data"))
        yield lax.all_gather(jax.grad(lambda w: jnp.sum(x @ sharded(w)))(w[:1]), "data")

    mapped = jax.shard_map(
        lambda w, x: [*local(w, x)],
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    *found, sharded = jax.jit(mapped)(x, x)
    for gradient, mean in zip(found[::2], found[1::2], strict=True):
        yield gradient, np.float32([[1, 0.5], [1, 0.5]])
        yield mean, np.float32([[1, 0.5]])
    yield sharded.reshape(2, 2), np.float32([[1, 1], [0.5, 0.5]])


@row("sharding.error_feedback", "sharding.ErrorFeedbackState")
def feedback(x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = jamp.sharding.error_feedback("data", 2)
    state = tx.init(x[0])
    assert isinstance(state, jamp.sharding.ErrorFeedbackState)
    places = dict(in_specs=(P("data"), P("data")), out_specs=(P(), P("data")))
    update = jax.shard_map(tx.update, mesh=mesh, check_vma=False, **places)
    updates, state = jax.jit(update)(x.reshape(4), state)
    yield updates, np.float32([1, 0.5])


# Reports


def reading(read, expected):
    """The check of a report: it prints, and a part of it is as expected."""

    def check_report(report):
        assert str(report) and report.to_markdown() and report.to_dict()
        assert read(report) == expected

    return check_report


def methods(kind, *names):
    return [f"debug.{kind}", *(f"debug.{kind}.{name}" for name in names)]


TEXTS = "to_dict", "to_markdown"


@row(
    *("debug.overflow_report", "debug.underflow_report", "debug.grad_histogram"),
    *methods("OverflowReport", *TEXTS),
    *methods("UnderflowReport", *TEXTS),
    *methods("GradHistogram", *TEXTS),
)
def gradient_reports(x):
    report = jamp.debug.overflow_report({"w": x.at[0, 0].set(jnp.inf)}, 8.0)
    yield report, reading(lambda report: report.to_dict()["w"]["inf"], 1)
    report = jamp.debug.underflow_report({"w": x * 2.0**-25}, 4.0, when=x[0, 0] > 0)
    yield report, reading(lambda report: report.to_dict()["w"]["flushed"], 0.25)
    report = jamp.debug.grad_histogram({"w": x * 1024}, 1024.0)
    yield report, reading(lambda report: report.to_dict()["exponents"], {0: 1, 1: 1})


@row("debug.find_nonfinite", *methods("NonfiniteReport", *TEXTS))
def origins(x):
    for when in (None, x[0, 0] > 0):
        report = jamp.debug.find_nonfinite(jnp.log, when=when)(x)
        yield report, reading(lambda r: r.to_dict()["ops"][0]["primitive"], "log")


@row("debug.explain", *methods("Explanation", *TEXTS))
def explanations(x):
    report = jamp.debug.explain(jnp.dot, jnp.float16)(x, x)
    reading(lambda report: report.to_dict()["matmul_share"], 1)(report)
    yield x, X


@row(
    *("calibrate", "debug.plot_scale", "debug.GradHistogram.plot"),
    *methods("Calibration", *TEXTS, "to_json", "from_json", "plot"),
    ways=["eager"],
)
def calibrations(x):
    def loss_fn(w, x):
        with jax.named_scope("head"):
            return jnp.sum(x @ w)

    wide = jnp.tile(x, (8, 8))
    report = jamp.calibrate(loss_fn, skip_small=False)(wide, wide)
    yield report, reading(lambda report: report.rules, {"(^|/)head$": "float8"})
    read = jamp.debug.Calibration.from_json(report.to_json())
    yield read, reading(lambda report: report.to_dict(), report.to_dict())
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for i, plot in enumerate(
        (
            report.plot,
            jamp.debug.grad_histogram({"w": x}).plot,
            lambda ax: jamp.debug.plot_scale(
                {"loss_scale": [8.0], "found_inf": [0]}, ax
            ),
        )
    ):
        ax = figure.add_subplot(3, 1, i + 1)
        assert plot(ax=ax) is ax


@row(
    "debug.check",
    *methods("History", "append", "extend", "fetch", "keys", "rows"),
    ways=["eager"],
)
def histories(x):
    tx, rows = sgd(), []
    state = tx.init(x)
    history = jamp.debug.History(on_row=lambda step, row: rows.append(step))
    history.append(jamp.metrics(state))
    _, states = lax.scan(
        lambda state, x: (tx.update(x, state, x)[1],) * 2, state, jnp.stack([x, x])
    )
    history.extend(jax.vmap(jamp.metrics)(states))
    history.fetch()
    assert rows == [0, 1, 2] and "loss_scale" in history.keys()
    yield history["growth_tracker"], np.int32([0, 1, 2])
    yield len(list(history.rows())), 3
    jamp.debug.check(history)
    for _ in range(8):
        state = tx.update(x * jnp.inf, state, x)[1]
    with pytest.raises(FloatingPointError, match="below 1"):
        jamp.debug.check(state)


# Of each function the row in a scan, or the first one.
QUICK = {name.rpartition("-")[0]: name for name in reversed(ROWS)}
QUICK |= {n.rpartition("-")[0]: n for n in ROWS if n.endswith("-scan")}
del QUICK["calibrations"]  # is measured in tests of the reports
ORDER = dict.fromkeys([*QUICK.values(), *ROWS])


@cover(quick=len(QUICK))
@pytest.mark.parametrize("name", ORDER)
def test_a_call_gives_the_known_result(name):
    function, way = ROWS[name]
    expected = []

    def run(x):
        results, expected[:] = zip(*function(x), strict=True)
        return results

    for got, known in zip(WAYS[way](run)(jnp.asarray(X)), expected, strict=True):
        check(got, known)


def test_every_public_name_is_called():
    names = {*REFERENCE}
    for name in REFERENCE:
        value = operator.attrgetter(name)(jamp)
        names |= {f"{name}.{method.__name__}" for method in methods_of(value)}
    assert names == {*CALLED}
