"""Alarms: flags in `metrics`, and the exception that `jamp.debug.check` raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp import debug
from tests.marks import cover

FLAGS = ("scale_at_floor", "scale_below_one", "many_skips")
BAD, GOOD = np.full(3, np.inf, np.float32), np.ones(3, np.float32)


def train(tx, skips, opt_state=None):
    """The state after steps of which some overflow, and all metrics on the way."""
    params = np.zeros(3, np.float32)

    @jax.jit
    def run(opt_state, skips):
        def body(opt_state, skip):
            grads = jnp.where(skip, BAD, GOOD)
            _, opt_state = jamp.step(tx, grads, opt_state, params)
            return opt_state, jamp.metrics(opt_state)

        return jax.lax.scan(body, opt_state, skips)

    opt_state = tx.init(params) if opt_state is None else opt_state
    return run(opt_state, np.asarray(skips, bool))


def flags(metrics):
    return {name: bool(metrics[name]) for name in FLAGS}


def test_a_healthy_run_has_no_alarm():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=50)
    skips = np.zeros(500, bool)
    skips[[0, 1, 2, 60, 200]] = True  # calibration, then skips after growth
    state, seen = train(tx, skips)
    assert not any(np.any(seen[name]) for name in FLAGS)
    debug.check(state)


def test_fifteen_skips_at_the_start_are_calibration():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    state, _ = train(tx, np.ones(15, bool))
    assert jamp.loss_scale(state) == 2.0
    assert not any(flags(jamp.metrics(state)).values())


def test_a_scale_below_one_is_told():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0)
    _, seen = train(tx, [True, False, True, False])
    np.testing.assert_array_equal(seen["scale_below_one"], [0, 0, 1, 1])


@cover()
@pytest.mark.parametrize("window", [5, 1, 31, 32])
@pytest.mark.parametrize("share", [0.25, 0.0, 0.5, 0.99])
def test_many_skips_counts_the_last_steps(window, share):
    skips = np.random.default_rng(window).random(300) < share + 0.05
    tx = jamp.static_loss_scale(optax.sgd(0.1), 8.0)
    params, seen = np.zeros(3, np.float32), []
    state = tx.init(params)
    step = jax.jit(lambda grads, state: jamp.step(tx, grads, state, params)[1])
    for skip in skips:
        state = step(BAD if skip else GOOD, state)
        limits = {"window": window, "skipped_share": share}
        seen.append(bool(jamp.metrics(state, **limits)["many_skips"]))
    last = [skips[max(0, i + 1 - window) : i + 1].sum() for i in range(len(skips))]
    least = max(share * window, 1)
    np.testing.assert_array_equal(seen, np.array(last) >= least)


def test_a_run_that_has_only_skipped_is_told_before_the_window_is_full():
    tx = jamp.static_loss_scale(optax.sgd(0.1), 8.0)
    params = np.zeros(3, np.float32)
    state, step = tx.init(params), jax.jit(lambda s: jamp.step(tx, BAD, s, params)[1])
    for _ in range(15):
        state = step(state)
    jamp.debug.check(state)
    state = step(state)
    with pytest.raises(FloatingPointError, match="16 steps skipped so far"):
        jamp.debug.check(state)


def test_steps_at_the_floor_are_counted_from_the_first_overflow_there():
    options = {"init_scale": 4.0, "min_scale": 4.0, "growth_interval": 50}
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), **options)
    state, seen = train(tx, np.zeros(40, bool))
    assert state.floor_steps == 0 and not np.any(seen["scale_at_floor"])
    state, seen = train(tx, [True] + 31 * [False], state)
    np.testing.assert_array_equal(seen["scale_at_floor"], 31 * [False] + [True])
    state, _ = train(tx, np.zeros(50, bool), state)  # it grows
    assert state.floor_steps == 0 and jamp.loss_scale(state) == 8.0
    assert jamp.metrics(state, floor_steps=1)["scale_at_floor"] == np.False_


def test_the_lowest_scale_of_all_is_a_floor():
    options = {"init_scale": 2.0**-120, "backoff_factor": 0.5}
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), **options)
    state, seen = train(tx, np.ones(40, bool))
    assert np.flatnonzero(seen["scale_at_floor"])[0] == 5 + 31
    with pytest.raises(FloatingPointError, match=r"stuck at its floor, 1\.17549e-38"):
        debug.check(state)


def test_a_grad_scaler_has_the_same_metrics():
    model = nnx.jit(lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    options = {"init_scale": 4.0, "growth_interval": 7, "min_scale": 0.25}
    scaler = jamp.GradScaler(**options)
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), **options)
    params = np.zeros(3, np.float32)
    state = tx.init(params)
    update = jax.jit(lambda grads, state: jamp.step(tx, grads, state, params)[1])

    @nnx.jit
    def step(model, optimizer, scaler, factor):
        loss = lambda model: scaler.scale(factor * jnp.mean(model(jnp.ones((2, 3)))))
        scaler.step(optimizer, model, nnx.grad(loss)(model))
        scaler.update()
        return jamp.metrics(scaler)

    for skip in np.random.default_rng(0).random(60) < 0.4:
        metrics = step(model, optimizer, scaler, np.float32(np.inf if skip else 1.0))
        state = update(BAD if skip else GOOD, state)
        assert metrics == jamp.metrics(state) == jamp.metrics(scaler)
    assert jamp.loss_scale(scaler) == scaler.get_scale()


def test_a_disabled_scaler_has_metrics():
    metrics = jamp.metrics(jamp.GradScaler(enabled=False))
    assert metrics["loss_scale"] == 1.0 and not any(flags(metrics).values())


def test_metrics_keep_the_host_out():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    state, _ = train(tx, [False])
    jamp.metrics(state)
    with jax.transfer_guard("disallow"):
        assert all(isinstance(x, jax.Array) for x in jamp.metrics(state).values())


def test_check_names_numbers_and_causes():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=4.0)
    state, _ = train(tx, np.ones(20, bool))
    sources = (state, jamp.metrics(state), {"opt": (state, None)})
    for source in sources:
        with pytest.raises(FloatingPointError) as error:
            debug.check(source)
        message = str(error.value)
        assert "below 1, at 3.8147e-06" in message and "20 steps skipped" in message
        assert "too many of the last steps" in message
        for advice in ("find_nonfinite(", "overflow_report(", "rules={"):
            assert advice in message


def test_check_reads_a_history():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    history = debug.History(every=10)
    debug.check(history)  # nothing to report yet
    for skipped in (np.zeros(20, bool), np.ones(16, bool)):
        state, _ = train(tx, skipped)
        history.append(jamp.metrics(state))
        if not skipped[-1]:
            debug.check(history)
    with pytest.raises(FloatingPointError, match="too many of the last steps"):
        debug.check(history)
