"""A run goes on from the state of another: equal to a fresh one, or an error.

Other arguments, another kind of loss scale, none at all, or master weights: the numbers
and dtypes of the state must not contradict the new run.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp._scaling import rule
from jamp._scaling.rule import LossScaleConfig, LossScaleState, ScaleKind
from shared.master_weights import nearest
from tests.bits import check_same_bits
from tests.marks import cover

from .masters import types
from .optimizers import NEEDS_VALUE, OPTIMIZERS

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = (jnp.float16, jnp.bfloat16)
WRAPS = {"jit": jax.jit, "eager": lambda step: step}
FLOAT32 = jnp.dtype("float32")
OLD, OWN, START = 2.0**9, 2.0**4, 2.0**12  # scales: dynamic at last, static, dynamic


# Sums and products of few bits: neither a dtype nor fusion rounds them.
def inner():
    return optax.sgd(0.5, momentum=0.5)


SCALES = {
    "dynamic": lambda tx: jamp.dynamic_loss_scale(tx, START, growth_interval=3),
    "static": lambda tx: jamp.static_loss_scale(tx, OWN),
    "disabled": lambda tx: jamp.dynamic_loss_scale(tx, START, enabled=False),
    "bare": lambda tx: tx,
}
KINDS = list(itertools.product(SCALES, ("", "masters")))
INF = float("inf")


def make(kind):
    scaled, masters = kind
    return SCALES[scaled](jamp.master_weights(inner()) if masters else inner())


def make_params(dtype):
    params = {"w": np.array([[1, 2, 3], [4, 5, 6]], dtype), "b": np.ones(3, dtype)}
    return jax.device_put(params)


@functools.cache
def stepper(kind, wrap):
    """A step whose gradients are a quarter of a number, scaled as the state says."""
    tx = make(kind)

    def step(params, state, number):
        scale = getattr(state, "loss_scale", 1.0)
        grads = jax.tree.map(
            lambda p: jnp.full(p.shape, 0.25 * number * scale).astype(p.dtype), params
        )
        return jamp.step(tx, grads, state, params)

    return WRAPS[wrap](step)


def train(kind, wrap, params, state, numbers):
    """The parameters, the state, and the scale after each step."""
    scales = []
    for number in numbers:
        params, state = stepper(kind, wrap)(params, state, jnp.float32(number))
        scales.append(float(getattr(state, "loss_scale", 1.0)))
    return params, state, scales


@functools.cache
def old_run(kind, wrap, dtype):
    """A few steps, the first of which make a dynamic scale back off to `OLD`."""
    params = make_params(dtype)
    skips = [INF] * 3 if kind[0] == "dynamic" else []
    state = make(kind).init(params)
    params, state, _ = train(kind, wrap, params, state, [*skips, 1, 2])
    if skips:
        assert jamp.loss_scale(state) == OLD
    return params, state


def by_hand(kind, params, trace, numbers):
    """Momentum in float32, without a loss scale. An inf skips the step."""
    dtypes = jax.tree.map(lambda p: p.dtype, params)
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)
    rounded = lambda tree: jax.tree.map(lambda p, d: p.astype(d), tree, dtypes)
    params, trace = wide(params), wide(trace)
    for grad in [np.float32(0.25 * number) for number in numbers if number < INF]:
        trace = jax.tree.map(lambda t, grad=grad: 0.5 * t + grad, trace)
        params = jax.tree.map(lambda p, t: p - 0.5 * t, params, trace)
        if not kind[1]:
            params = wide(rounded(params))
    if kind[1]:
        return jax.tree.map(nearest, params, dtypes), trace
    return rounded(params), trace


def expected_scales(kind, old, was_disabled, numbers):
    """The scale after each step of a run that goes on from another one's scale."""
    if kind[0] != "dynamic":
        return [OWN if kind[0] == "static" else 1.0] * len(numbers)
    scale, tracker, found = old, 2 if old == OLD else 0, []
    for number in numbers:
        if was_disabled:
            scale, tracker, was_disabled = START, 0, False
        elif not np.isfinite(number):
            scale, tracker = scale / 2, 0
        else:
            tracker += 1
            scale, tracker = (2 * scale, 0) if tracker == 3 else (scale, tracker)
        found.append(scale)
    return found


def numbers_for(kind):
    """Steps of the new run, of which one without a scale checks nothing."""
    return [1, 1, 2, 1] if kind[0] in ("disabled", "bare") else [INF, 1, 2, 1, INF, 1]


def momentum(state):
    ((_, trace),) = optax.tree.get_all_with_path(state, "trace")
    return trace


def check_goes_on(kind, wrap, params, state, old, was_disabled):
    numbers = numbers_for(kind)
    want = by_hand(kind, params, momentum(state), numbers)
    got, state, scales = train(kind, wrap, params, state, numbers)
    check_same_bits(got, want[0])
    wide = lambda t: np.asarray(t, np.float32)
    check_same_bits(jax.tree.map(wide, momentum(state)), want[1])
    assert scales == expected_scales(kind, old, was_disabled, numbers)
    if kind[1] or kind[0] in ("dynamic", "static"):
        assert {leaf.dtype for leaf in jax.tree.leaves(momentum(state))} == {FLOAT32}
    _, after, _ = train(kind, wrap, got, state, [1])
    assert types(after) == types(state)


def name_of(kind):
    return " ".join(kind).strip()


@cover(quick=4)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("dtype", (*HALVES, jnp.float32), ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("old_kind", KINDS, ids=name_of)
def test_each_kind_goes_on_from_each_other_or_says_what_to_do(
    old_kind, kind, dtype, wrap
):
    params, state = old_run(old_kind, wrap, dtype)
    old, off = float(getattr(state, "loss_scale", 1.0)), old_kind[0] == "disabled"
    is_scaled = old_kind[0] != "bare", kind[0] != "bare"
    if old_kind[1] == kind[1] and is_scaled[0] == is_scaled[1]:
        check_goes_on(kind, wrap, params, state, old, off)
        return
    with pytest.raises(ValueError, match=r"must be a .*State, as|belongs to"):
        train(kind, wrap, params, state, [1])
    if old_kind[1] != kind[1]:
        return
    if kind[0] == "bare":  # as the message says
        state, old = state.inner_state, 1.0
    else:
        state = make(kind).init(params)._replace(inner_state=state)
        old = float(state.loss_scale)
    check_goes_on(kind, wrap, params, state, old, False)


# Stateless optimizers take any state.
STATELESS = {
    "momentum": lambda: optax.sgd(0.5, momentum=0.5),
    "sgd": lambda: optax.sgd(0.5),
    "scale": lambda: optax.scale(-0.5),
    "chain": lambda: optax.chain(optax.scale(-0.5)),
    "adam": lambda: optax.adam(0.5),
}
WRAPPED = {
    "bare": lambda tx: tx,
    "dynamic": jamp.dynamic_loss_scale,
    "disabled": lambda tx: jamp.dynamic_loss_scale(tx, enabled=False),
    "masters": jamp.master_weights,
    "dynamic masters": lambda tx: jamp.dynamic_loss_scale(jamp.master_weights(tx)),
    "disabled masters": lambda tx: jamp.dynamic_loss_scale(
        jamp.master_weights(tx), enabled=False
    ),
}
ALIKE = [{"dynamic", "disabled"}, {"dynamic masters", "disabled masters"}]


@cover(quick=2, ci=30)
@pytest.mark.parametrize("old", WRAPPED)
@pytest.mark.parametrize("name", STATELESS)
def test_a_state_of_another_structure_is_refused(name, old):
    params = make_params(jnp.float16)
    for new in WRAPPED.keys() - {old}:
        if {old, new} in ALIKE:
            continue
        state = WRAPPED[old](STATELESS[name]()).init(params)
        tx = WRAPPED[new](STATELESS[name]())
        calls = {"step": lambda s, tx=tx: jamp.step(tx, params, s, params)}
        if new != "bare":  # that is optax alone
            calls["update"] = lambda s, tx=tx: tx.update(params, s, params)
        for how, wrap in itertools.product(calls, WRAPS):
            with pytest.raises(ValueError, match=r"must be a .*State, as|belongs to"):
                _, _ = WRAPS[wrap](calls[how])(state)
                pytest.fail(f"silent: {how} from {old} to {new}, {wrap}")


@cover()
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_disabled_run_steps_whatever_comes(wrap):
    """As in torch. The page on checkpoints says to set the scale of its state to 1."""
    on = jamp.dynamic_loss_scale(optax.sgd(0.5), 2.0**16)
    off = jamp.dynamic_loss_scale(optax.sgd(0.5), enabled=False)

    def step(params, state):
        def loss_fn(params):
            with jamp.autocast(dtype=jnp.float16):
                return jnp.mean((x @ params["w"]) ** 2)

        _, grads = jamp.value_and_grad(loss_fn, state)(params)
        return jamp.step(off, grads, state, params)

    x, params = jnp.full((4, 3), 2.0), {"w": jnp.ones((3, 2))}
    step, state = WRAPS[wrap](step), on.init(params)
    moved, after = step(params, state)  # its loss overflows at the old scale
    assert not jnp.any(jnp.isfinite(moved["w"])) and not after.found_inf
    assert after.loss_scale == 1.0 and after.skipped_steps == 0
    state = optax.tree.set(state, loss_scale=jnp.float32(1))
    moved, after = step(params, state)
    assert jnp.all(jnp.isfinite(moved["w"]) & (moved["w"] != params["w"]))
    check_same_bits(moved, step(params, off.init(params))[0])


def by_optax(old, new, numbers, flags):
    """The scales after steps with other arguments, and those of a fresh run."""
    params, made = jnp.ones(2), []
    for start in (None, new):
        tx = jamp.dynamic_loss_scale(optax.sgd(0.5), **(start or old))
        state = tx.init(params)
        if start is None:
            for flag in numbers:
                _, state = jamp.step(tx, jnp.full(2, flag), state, params)
            tx = jamp.dynamic_loss_scale(optax.sgd(0.5), **new)
        scales = []
        for flag in flags:
            _, state = jamp.step(tx, jnp.full(2, flag), state, params)
            scales.append(float(jamp.loss_scale(state)))
        made.append(scales)
    return made


def by_scaler(old, new, numbers, flags):
    """The same with a `GradScaler` that takes the other one's `nnx.state`."""

    def drive(scaler, flags):
        model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        scales = []
        for flag in flags:
            grad = nnx.State({"kernel": nnx.Param(jnp.full((2, 1), flag))})
            scaler.step(optimizer, model, grad)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    was, scaler = jamp.GradScaler(**old), jamp.GradScaler(**new)
    drive(was, numbers)
    nnx.update(scaler, nnx.state(was))
    return drive(scaler, flags), drive(jamp.GradScaler(**new), flags)


ARGUMENTS = {
    "hysteresis": ({"init_scale": 16.0}, [INF], {"init_scale": 8.0, "hysteresis": 3}),
    "less hysteresis": (
        {"init_scale": 8.0, "hysteresis": 3},
        [],
        {"init_scale": 8.0},
    ),
    "more hysteresis": (
        {"init_scale": 8.0, "hysteresis": 2},
        [],
        {"init_scale": 8.0, "hysteresis": 4},
    ),
    "max_scale": ({"init_scale": 64.0}, [], {"init_scale": 8.0, "max_scale": 8.0}),
    "min_scale": ({"init_scale": 2.0}, [], {"init_scale": 8.0, "min_scale": 8.0}),
}


@cover(quick=3)
@pytest.mark.parametrize("how", [by_optax, by_scaler])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_new_arguments_act_at_once(name, how):
    old, numbers, new = ARGUMENTS[name]
    new = new | {"growth_interval": 4}
    flags = [1.0, INF, INF, INF, INF, 1.0, 1.0, 1.0, 1.0, INF]
    resumed, fresh = how(old, new, numbers, flags)
    if name.endswith("_scale"):  # the first step ends at the bound, and counts nothing
        resumed, fresh = resumed[:8], fresh[:8]
    assert resumed == fresh


def test_a_static_scale_is_its_argument():
    params = jnp.ones(2)
    for other in (
        jamp.dynamic_loss_scale(optax.sgd(0.5), 2.0**15),
        jamp.static_loss_scale(optax.sgd(0.5), 1024.0),
        jamp.dynamic_loss_scale(optax.sgd(0.5), enabled=False),
    ):
        tx, state = jamp.static_loss_scale(optax.sgd(0.5), 16.0), other.init(params)
        for number in (INF, 1.0, INF):
            _, state = jamp.step(tx, jnp.full(2, number), state, params)
            assert jamp.loss_scale(state) == 16.0
        assert state.skipped_steps == 2
    rated = optax.inject_hyperparams(jamp.static_loss_scale, static_args=("inner",))
    tx = rated(optax.sgd(0.5), loss_scale=8.0)
    state = tx.init(params)
    state.hyperparams["loss_scale"] = jnp.float32(4.0)
    _, state = jax.jit(tx.update)(params, state, params)
    assert jamp.loss_scale(state) == 4.0


@cover(quick=2, ci=12)
@pytest.mark.parametrize("kind", ScaleKind)
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"hysteresis": 3, "growth_interval": 2},
        {"init_scale": 64.0, "min_scale": 8.0, "max_scale": 1024.0},
    ],
)
def test_what_is_adopted_stays(numbers, kind):
    """Adopting twice is adopting once, and a run's own state does not change."""
    rng = np.random.default_rng(0)
    count = 300
    old = LossScaleState(
        np.float32(2.0) ** rng.integers(-3, 20, count).astype(np.float32),
        rng.integers(0, 6, count, np.int32),
        rng.random(count) < 0.5,
        rng.integers(0, 9, count, np.int32),
        rng.integers(-5, 4, count, np.int32),
        rng.integers(0, 9, count, np.uint32),
        rng.integers(0, 3, count, np.int32),
        rng.integers(0, 3, count, np.int32),
    )
    flags = rng.random((20, count)) < 0.4
    config = LossScaleConfig(**numbers)
    adopt = functools.partial(rule.adopted, config=config, kind=kind)

    def body(state, found_inf):
        state = rule.advance(state, found_inf, config, kind)
        return state, (adopt(state), state)

    @jax.jit
    def run(old):
        """What is adopted, and what stands after each step: in pairs."""
        first, fresh = adopt(old), rule.init(config, kind)
        steps = jax.lax.scan(body, first, flags)[1]
        return (adopt(first), first), (adopt(fresh), fresh), steps

    for again, state in run(old):
        check_same_bits(again, state)


def test_what_was_counted_at_another_scale_is_forgotten():
    run = LossScaleConfig(init_scale=8.0, max_scale=8.0, hysteresis=3)
    old = rule.init(LossScaleConfig(init_scale=64.0))
    old = old._replace(growth_tracker=jnp.int32(7), floor_steps=jnp.int32(3))
    adopted = rule.adopted(old, run)
    assert adopted.loss_scale == 8.0
    assert adopted.growth_tracker == 0 == adopted.floor_steps
    same = rule.adopted(old, LossScaleConfig())
    assert same.growth_tracker == 7 and same.floor_steps == 3


@pytest.mark.parametrize("forgiven", range(4))
def test_states_of_older_versions_count_down_from_minus_two(forgiven):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5), 8.0, hysteresis=3)
    params = jnp.ones(2)
    state = tx.init(params)._replace(hysteresis_tracker=jnp.int32(-2 - forgiven))
    scales = []
    for _ in range(4):
        _, state = jamp.step(tx, params * INF, state, params)
        scales.append(float(state.loss_scale))
    left = max(2 - forgiven, 0)
    assert scales == [8.0] * left + [8.0 / 2**n for n in range(1, 5 - left)]


# What an optimizer's state is made of.

SGD = optax.sgd(0.5)
NESTS = {
    "alone": jamp.dynamic_loss_scale,
    "static": lambda tx: jamp.static_loss_scale(tx, 8.0),
    "masters": lambda tx: jamp.dynamic_loss_scale(jamp.master_weights(tx)),
    "before": lambda tx: jamp.dynamic_loss_scale(
        optax.chain(tx, jamp.master_weights(SGD))
    ),
    "mixed": lambda tx: jamp.dynamic_loss_scale(
        optax.multi_transform(
            {"own": jamp.master_weights(SGD), "plain": tx}, {"w": "own", "b": "plain"}
        )
    ),
    "disabled": lambda tx: jamp.dynamic_loss_scale(tx, enabled=False),
    "inside": lambda tx: jamp.master_weights(jamp.dynamic_loss_scale(tx)),
}
MORE = {
    "trace": lambda: optax.trace(0.9),
    "ema": lambda: optax.ema(0.9),
    "apply_every": lambda: optax.apply_every(2),
    "bfloat16 moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "MultiSteps": lambda: optax.MultiSteps(SGD, 2).gradient_transformation(),
}
FIRST = {name: OPTIMIZERS[name] for name in ("adam", "adafactor", "lbfgs")}
FACTORIES = FIRST | MORE | OPTIMIZERS


def traced_step(tx, state, params, name):
    extra = {"value": jnp.float32(3.0)} if name in NEEDS_VALUE else {}
    step = lambda state, params: jamp.step(tx, params, state, params, **extra)[1]
    return jax.eval_shape(step, state, params)


@cover(quick=4, ci=80)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", FACTORIES)
def test_init_makes_the_dtypes_that_update_returns(name, nest):
    for dtype in HALVES:
        tx, params = NESTS[nest](FACTORIES[name]()), make_params(dtype)
        state = jax.eval_shape(tx.init, params)
        after = traced_step(tx, state, params, name)
        assert types(after) == types(state), (name, dtype)


@cover(quick=3)
@pytest.mark.parametrize("name", FACTORIES)
def test_the_state_of_half_precision_moments_is_taken_over(name):
    """Off, then on; without a loss scale, then with one."""
    for dtype in HALVES:
        params, bare = make_params(dtype), FACTORIES[name]()
        tx = jamp.dynamic_loss_scale(bare)
        own = jax.eval_shape(tx.init, params)
        half = jax.eval_shape(bare.init, params)
        off = jamp.dynamic_loss_scale(bare, enabled=False)
        for state in (own._replace(inner_state=half), jax.eval_shape(off.init, params)):
            after = traced_step(tx, state, params, name)
            assert types(after) == types(own), (name, dtype)
        back = traced_step(off, after, params, name)  # never narrower
        assert types(back) == types(after), (name, dtype)


@cover()
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
def test_what_cannot_change_its_dtypes_says_how_to_cast_the_state(dtype):
    params = make_params(dtype)
    off = jamp.dynamic_loss_scale(inner(), enabled=False)
    tx, state = jamp.dynamic_loss_scale(inner(), 8.0), off.init(params)
    step = lambda carry, _: (jamp.step(tx, carry[0], carry[1], carry[0]), None)
    cure = r"trace\['b'\] it returned float32\[3\], and .*float16\[3\]\..*cast it first"
    for wrap in WRAPS.values():
        with pytest.raises(TypeError, match=cure):
            wrap(jamp.retry(step))((params, state), None)
    as_made = lambda old, new: jnp.asarray(old, new.dtype)
    state = jax.tree.map(as_made, state, tx.init(params))
    jamp.retry(step)((params, state), None)
    (_, scanned), _ = jax.lax.scan(step, (params, state), jnp.arange(3))
    assert types(scanned) == types(state)


# Enabled, disabled, enabled.


@cover()
@pytest.mark.parametrize("name", ["adamw", "polyak_sgd", "lbfgs"])
def test_optimizers_on_and_off_and_on(name):
    factory = FACTORIES[name]
    bare, target = factory(), jnp.array([1.0, -2.0, 3.0])
    loss_fn = lambda params: jnp.sum((params - target) ** 2)
    txs = {on: jamp.dynamic_loss_scale(factory(), enabled=on) for on in (True, False)}

    def run(tx, params, state, value_and_grad):
        loss, grads = value_and_grad(params)
        extra = {"value": loss} if name in NEEDS_VALUE else {}
        return jamp.step(tx, grads, state, params, **extra)

    params = plain = jnp.zeros(3)
    state, bare_state = txs[True].init(params), bare.init(plain)
    for on in (True, False, False, True, True):
        grad_fn = jamp.value_and_grad(loss_fn, state)
        params, state = run(txs[on], params, state, grad_fn)
        plain, bare_state = run(bare, plain, bare_state, jax.value_and_grad(loss_fn))
        check_same_bits((params, state.inner_state), (plain, bare_state))  # op by op
    assert np.any(params != 0.0)


# Integers.


@cover()
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["step", "update"])
def test_integer_parameters_with_float_gradients_move_as_in_optax(how, wrap):
    """The sum is rounded, not the update; a skipped step holds every digit."""
    params = {
        "int": np.array([3, -3, 0, 7], np.int32),
        "small": np.array([1, 2, 3, 100], np.int8),
        "unsigned": np.array([9, 2, 3, 0], np.uint32),
    }
    large = {"int": np.full(4, 2**24 + 1, np.int32)}
    params, large = jax.device_put((params, large))
    bare, scaled = optax.sgd(1.0), jamp.dynamic_loss_scale(optax.sgd(1.0), 8.0)

    def run(tx, grads, state, params):
        if how == "step":
            return jamp.step(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = WRAPS[wrap](functools.partial(run, scaled)), functools.partial(run, bare)
    for value in (0.7, -0.7, 1.2, -0.4):
        full = lambda p, v=value: np.full(p.shape, v, np.float32)
        grads = jax.device_put(jax.tree.map(full, params))
        want, _ = run[1](grads, bare.init(params), params)
        grads = jax.tree.map(lambda g: 8 * g, grads)
        got, _ = run[0](grads, scaled.init(params), params)
        check_same_bits(got, want)
    grads = {"int": np.full(4, INF, np.float32)}
    held, _ = run[0](grads, scaled.init(large), large)
    check_same_bits(held, large)


# A number that is not a scale: what a collapsed run saves, or a cast to float16 leaves.

NO_SCALES = (0.0, 1e-40, float("inf"), float("nan"), -2.0)


@cover(quick=4)
@pytest.mark.parametrize("value", NO_SCALES)
@pytest.mark.parametrize("scaled", ["dynamic", "static"])
def test_what_is_not_a_scale_skips_one_step_and_starts_anew(scaled, value):
    tx, params = SCALES[scaled](inner()), make_params(jnp.float32)
    state = optax.tree.set(tx.init(params), loss_scale=jnp.float32(value))
    first = {"dynamic": START, "static": OWN}[scaled]

    def step(params, state):
        loss_fn = lambda params: jnp.sum(params["w"]) + jnp.sum(params["b"])
        _, grads = jamp.value_and_grad(loss_fn, state)(params)
        return jamp.step(tx, grads, state, params)

    held, state = jax.jit(step)(params, state)
    check_same_bits(held, params)
    assert state.loss_scale == first and state.skipped_steps == 1
    moved, state = jax.jit(step)(held, state)
    np.testing.assert_array_equal(moved["w"], params["w"] - 0.5)


@cover(quick=3)
@pytest.mark.parametrize("value", NO_SCALES)
@pytest.mark.parametrize("scaled", ["dynamic", "static", "disabled"])
def test_what_is_not_a_scale_is_refused_where_it_is_seen(scaled, value):
    tx, params = SCALES[scaled](inner()), make_params(jnp.float32)
    state = optax.tree.set(tx.init(params), loss_scale=jnp.float32(value))
    with pytest.raises(ValueError, match="not a positive normal number"):
        jamp.step(tx, params, state, params)


@pytest.mark.parametrize("value", NO_SCALES)
def test_a_scaler_with_what_is_not_a_scale_skips_one_step(value):
    model, scaler = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jamp.GradScaler(START)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    scaler.loss_scale[...] = jnp.float32(value)
    before = nnx.as_pure(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, scaler):
        loss_fn = lambda model: scaler.scale(jnp.sum(model(jnp.ones((1, 2)))))
        scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
        scaler.update()

    step(model, optimizer, scaler)
    check_same_bits(nnx.as_pure(nnx.state(model, nnx.Param)), before)
    assert scaler.get_scale() == START
    step(model, optimizer, scaler)
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    check_same_bits(after["kernel"], before["kernel"] - np.float32(0.5))
