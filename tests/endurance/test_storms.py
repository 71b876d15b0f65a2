"""Storms: thousands of random cases, long runs, threads, states of another JAX."""

import os
import pathlib
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jamp
from tests.bits import check_rounded

from .storms.calls import Calls, Net
from .storms.garbage import check_garbage
from .storms.oracle import Scaling, check_bits, scaling_of, trajectory
from .storms.plans import plans
from .storms.programs import PROGRAMS, check_programs
from .storms.trees import check_plan

DATA = pathlib.Path(__file__).parent / "data"
RULE = {
    "growth_factor": 1.1,
    "backoff_factor": 0.9,
    "growth_interval": 7,
    "min_scale": 0.0,
    "max_scale": 2.0**40,
    "hysteresis": 2,
}


# `make endurance` runs as many times more, of other random inputs each time.
TIMES = int(os.environ.get("STORMS", "1"))


def storm(examples):
    return settings(
        max_examples=TIMES * examples,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.mark.nightly
@storm(8)
@given(plans(), st.integers(0, 2**32 - 1))
def test_trees(plan, seed):
    check_plan(plan, np.random.default_rng(seed), 110)


@pytest.mark.slow
@storm(400)
@given(st.data())
def test_garbage(data):
    check_garbage(data)


@pytest.mark.nightly
@storm(12)
@given(PROGRAMS, st.integers(0, 2**32 - 1))
def test_programs(programs, seed):
    check_programs(programs, seed)


test_calls = pytest.mark.nightly(Calls.TestCase)
Calls.TestCase.settings = settings(storm(125), stateful_step_count=30)


def test_what_the_storms_found():
    """Each of these was once a raw error of JAX or NumPy, or passed silently."""
    params = {"w": jnp.ones(2), "i": jnp.arange(2)}
    inner = optax.masked(optax.sgd(1.0), {"w": True, "i": False})
    tx = jamp.dynamic_loss_scale(inner, enabled=False)
    grads = {"w": jnp.ones(2), "i": np.zeros(2, jax.dtypes.float0)}
    moved, _ = jamp.step(tx, grads, tx.init(params), params)
    check_bits("moved", moved, {**params, "w": jnp.zeros(2)})

    tx = jamp.dynamic_loss_scale(optax.sgd(1.0))
    state = tx.init(jnp.ones(2))
    assert jamp.scale_loss(np.float64(2), state) == 2.0**17  # warned of float64


@pytest.mark.nightly
def test_ten_thousand_steps():
    """In a scan, and in a jitted loop with donated buffers: one trajectory."""
    steps = 10_000
    rng = np.random.default_rng(0)
    bad = rng.random(steps) < 0.06
    grads = rng.normal(size=(steps, 2)).astype(np.float32)
    grads[bad, 0] = np.inf
    tx = jamp.dynamic_loss_scale(optax.sgd(2.0**-10), 2.0**12, **RULE)
    start = Scaling(np.float32(2.0**12), 0)
    expected = trajectory(start, bad, RULE)
    assert len(np.unique(expected.scale)) > 300  # the control: it moves

    traces = []

    def step(carry, grad):
        traces.append(1)
        params, state = carry
        carry = jamp.step(tx, grad, state, params)
        return carry, scaling_of(carry[1])

    params = jnp.ones(2)
    final, got = jax.jit(lambda c, g: jax.lax.scan(step, c, g))(
        (params, tx.init(params)), grads
    )
    carry = jax.tree.map(jnp.array, (params, tx.init(params)))
    jitted, rows = jax.jit(step, donate_argnums=0), []
    for grad in grads:
        carry, row = jitted(carry, grad)
        rows.append(row)
    looped = jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(rows))
    for name, *values in zip(Scaling._fields, got, looped, expected, strict=True):
        in_scan, in_loop, want = map(np.asarray, values)
        check_bits(f"{name} in a scan", in_scan, want.astype(in_scan.dtype))
        check_bits(f"{name} in a loop", in_loop, want.astype(in_scan.dtype))
    np.testing.assert_allclose(carry[0], final[0], rtol=1e-4)
    assert len(traces) == 2  # one for the scan, one for the loop


def train(dtype, seed, steps=40):
    """Runs a model in its own autocast region; returns every bit of the results."""
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(steps, 8, 4)).astype(np.float32)
    xs[rng.random(steps) < 0.2, 0, 0] = np.inf
    params = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    tx = jamp.dynamic_loss_scale(optax.sgd(0.01), growth_interval=3)
    seen = []

    @jax.jit
    def step(params, state, x):
        def loss_fn(params):
            with jamp.autocast(dtype):
                h = x @ params["w"]
                seen.append(h.dtype)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        loss, grads = jamp.value_and_grad(loss_fn, state)(params)
        return *jamp.step(tx, grads, state, params), loss

    state, rows = tx.init(params), []
    for x in xs:
        params, state, loss = step(params, state, x)
        with jamp.autocast(dtype):
            eager = x @ params["w"]
        assert eager.dtype == dtype and seen == [dtype]
        rows.append(jax.device_get((params, jamp.metrics(state), loss, eager)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


@pytest.mark.nightly
def test_two_threads_train_two_models():
    jobs = [(jnp.dtype(jnp.float16), 0), (jnp.dtype(jnp.bfloat16), 1)]
    alone = [train(*job) for job in jobs]
    assert 0 < alone[0][1]["skipped_steps"][-1] < 40
    found: list = [None, None]
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait()
        found[i] = train(*jobs[i])

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for got, want in zip(found, alone, strict=True):
            check_bits("in two threads", got, want)
        found = [None, None]


def make_states():
    """A state and a scaler after steps.

    Each JAX in the names of `tests/endurance/data/state-jax-*.pickle` made its file:
    `pickle.dumps({"params": params, "state": state, "scaler": scaler})`.
    """
    params = {"w": jnp.ones(3), "h": jnp.ones(2, jnp.float16)}
    inner = jamp.master_weights(optax.adam(0.125))
    tx = jamp.dynamic_loss_scale(inner, 2.0**12, **RULE)
    state = tx.init(params)
    for value in (1.0, jnp.inf, 2.0, 3.0):
        grads = jax.tree.map(lambda p, v=value: jnp.full_like(p, v), params)
        params, state = jamp.step(tx, grads, state, params)
    model = Net(np.ones(3, np.float32))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    scaler = jamp.GradScaler(2.0**12, **RULE)
    grads = nnx.state(model, nnx.Param)
    for factor in (1.0, jnp.nan, jnp.inf):
        bad = jax.tree.map(lambda g, f=factor: g * f, grads)
        scaler.step(optimizer, model, bad)
        scaler.update()
    return tx, params, state, scaler


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_a_state_pickled_by_another_jax_goes_on(version, standard_promotion):
    tx, params, state, scaler = make_states()
    kept = pickle.loads((DATA / f"state-jax-{version}.pickle").read_bytes())
    assert jax.tree.structure(kept["state"]) == jax.tree.structure(state)
    # Its tracker counts down from -2, and that of today up from 0.
    tracker = -2 - kept["state"].hysteresis_tracker
    today = kept["state"]._replace(hysteresis_tracker=tracker)
    check_bits("scaling", scaling_of(today), scaling_of(state))
    assert kept["scaler"].state_dict() == scaler.state_dict()
    assert scaler.state_dict()["scale"] == float(np.float32(2.0**12 * 0.9))
    for pair in zip(*map(jax.tree.leaves, (today, state)), strict=True):
        check_rounded(*pair, 8)  # four steps, each of a product and a sum
        assert pair[0].dtype == pair[1].dtype
    grads = jax.tree.map(jnp.ones_like, params)
    _, moved = jamp.step(tx, grads, state, params)
    _, also = jamp.step(tx, grads, kept["state"], kept["params"])
    scaling = scaling_of(moved)
    check_bits("scaling", scaling_of(also), scaling)
    kept["scaler"].update(8.0)
    assert kept["scaler"].get_scale() == 8.0
