"""All of a state under `retry`: in one program, and by attempts of the host.

A leaf that a step chooses by a flag is held between attempts, whatever the flag has to
do with the overflow. The reference is one step at a scale that fits.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp

pytestmark = pytest.mark.usefixtures("standard_promotion")

HIGH, FITS, NEVER = 2.0**20, 2.0**2, 2.0**126
ATTEMPTS = 6  # from HIGH, too few only for what never fits

# Flags that a step may choose a leaf by: of the overflow, and of two others.
FLAGS = {
    "inf": lambda inf, a, b: inf,
    "not inf": lambda inf, a, b: ~inf,
    "not not inf": lambda inf, a, b: ~~inf,
    "a": lambda inf, a, b: a,
    "b": lambda inf, a, b: b,
    "not a": lambda inf, a, b: ~a,
    "inf or a": lambda inf, a, b: inf | a,
    "a or inf": lambda inf, a, b: a | inf,
    "not inf or a": lambda inf, a, b: ~inf | a,
    "a or not inf": lambda inf, a, b: a | ~inf,
    "inf and a": lambda inf, a, b: inf & a,
    "not inf and a": lambda inf, a, b: ~inf & a,
    "not (inf or a)": lambda inf, a, b: ~(inf | a),
    "not (not inf or a)": lambda inf, a, b: ~(~inf | a),
    "not inf or not a": lambda inf, a, b: ~inf | ~a,
    "a or b": lambda inf, a, b: a | b,
    "not (a or b)": lambda inf, a, b: ~(a | b),
    "inf differs from a": lambda inf, a, b: inf ^ a,
    "inf as a number": lambda inf, a, b: inf.astype(jnp.int32) == 1,
    "inf as another": lambda inf, a, b: inf.astype(jnp.float32) < 0.5,
    "true": lambda inf, a, b: jnp.bool_(True),
    "false": lambda inf, a, b: jnp.bool_(False),
}

# Ways to choose one of two values by a flag.
CHOOSE = {
    "select_n": lambda flag, x, y: lax.select_n(flag, y, x),
    "select": lambda flag, x, y: lax.select(flag, x, y),
    "where": lambda flag, x, y: jnp.where(flag, x, y),
    "jitted": jax.jit(lambda flag, x, y: lax.select_n(flag, y, x)),
    "cond": lambda flag, x, y: lax.cond(flag, lambda: x, lambda: y),
    "jitted cond": jax.jit(
        lambda flag, x, y: lax.cond(flag, lambda x, y: x, lambda x, y: y, x, y)
    ),
    "switch": lambda flag, x, y: lax.switch(
        flag.astype(jnp.int32), [lambda: y, lambda: x, lambda: x + 8]
    ),
    "copied": lambda flag, x, y: jnp.copy(lax.select_n(flag, jnp.copy(y), x)),
    "by a number": lambda flag, x, y: jnp.stack([y, x])[flag.astype(jnp.int32)],
    "half of it": lambda flag, x, y: jnp.where(
        jnp.stack([flag, ~flag]), jnp.stack([x, y]), jnp.stack([y, y])
    )[0],
    "looped": lambda flag, x, y: lax.fori_loop(
        0, 2, lambda i, z: lax.select_n(flag, y, z), x
    ),
}

# What a leaf becomes: its values, and another one's.
NEW = {
    "next": lambda old, other: (old + 1, old),
    "held or next": lambda old, other: (old, old + 1),
    "next or another": lambda old, other: (old + 1, other),
    "always next": lambda old, other: (old + 1, old + 1),
    "always held": lambda old, other: (old, old),
    "the other one": lambda old, other: (other, old),
}
CASES = [
    *itertools.product(FLAGS, ["select_n"], NEW),
    *itertools.product(FLAGS, ["cond"], list(NEW)[:2]),
    *itertools.product(("inf", "not inf", "a", "inf or a"), CHOOSE, list(NEW)[:2]),
]
# A choice of choices: what one flag leaves open, another one decides.
NESTED = [*itertools.product(("inf", "not inf", "a"), ("a", "inf", "b"))]


def step(state, scaled, a, b):
    """A step whose gradient is `scaled` in float16, and a choice for each case."""
    params, opt_state, leaves, pairs = state

    def loss_fn(params):
        return jnp.sum((params * scaled).astype(jnp.float16)).astype(jnp.float32)

    _, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
    params, opt_state = jamp.step(TX, grads, opt_state, params)
    inf = opt_state.found_inf
    flags = {name: flag(inf, a, b) for name, flag in FLAGS.items()}
    new = []
    for (flag, choose, values), old, other in zip(
        CASES, leaves, [*leaves[1:], leaves[0]], strict=True
    ):
        new.append(CHOOSE[choose](flags[flag], *NEW[values](old, other)))
    twice = []
    for (outer, inner), old in zip(NESTED, pairs, strict=True):
        chosen = lax.select_n(flags[inner], old, old + 1)
        twice.append(lax.select_n(flags[outer], chosen, old))
    return (params, opt_state, new, twice), inf


TX = jamp.dynamic_loss_scale(optax.sgd(0.5), growth_interval=1000)


@pytest.fixture(scope="module")
def programs():
    """A step, in one program with its attempts, and with attempts of the host."""
    with jax.numpy_dtype_promotion("standard"):
        once, one = jax.jit(step), jax.jit(jamp.retry(step, ATTEMPTS))
        for run in (once, one):  # compiles it
            run(start(FITS), jnp.float32(1.0), jnp.bool_(True), jnp.bool_(True))
    return once, one, jamp.retry(once, ATTEMPTS)


def start(scale):
    params = jnp.ones(2)
    leaves = [jnp.int32(10 * i) for i in range(len(CASES))]
    pairs = [jnp.int32(10 * i) for i in range(len(NESTED))]
    opt_state = TX.init(params)._replace(loss_scale=jnp.float32(scale))
    return params, opt_state, leaves, pairs


def wrong(found, expected):
    """The cases whose leaves differ."""
    names = [*CASES, *NESTED]
    pairs = zip([*found[2], *found[3]], [*expected[2], *expected[3]], strict=True)
    pairs = jax.device_get(list(pairs))
    return [name for name, (x, y) in zip(names, pairs, strict=True) if x != y]


@pytest.mark.parametrize("given", [HIGH, FITS, NEVER])
def test_a_leaf_that_a_flag_chooses_changes_once(given, programs):
    plain, retried, host = programs
    for a, b in itertools.product([jnp.bool_(False), jnp.bool_(True)], repeat=2):
        batch = jnp.float32(1.0), a, b
        # The last attempt decides, and it is finite unless none is.
        expected, inf = plain(start(NEVER if given == NEVER else FITS), *batch)
        assert bool(inf) == (given == NEVER)
        for run in (retried, host):
            found, inf = run(start(given), *batch)
            assert bool(inf) == (given == NEVER)
            assert wrong(found, expected) == [], (bool(a), bool(b))
            np.testing.assert_array_equal(found[0], expected[0])


SCALES = {
    "as in torch": {},
    "with hysteresis": {"hysteresis": 2},
    "at a floor": {"min_scale": 2.0**18, "init_scale": 2.0**20},
    "growing": {"growth_interval": 1, "init_scale": 2.0**14},
    "growing to a limit": {
        "growth_interval": 1,
        "max_scale": 2.0**15,
        "init_scale": 2.0**14,
    },
    "by other factors": {"growth_factor": 1.7, "backoff_factor": 0.3},
    "off": {"enabled": False},
}
BATCHES = [1.0, 1.0, 8.0, 1.0, 2.0**14, 1.0, np.inf, 1.0]


@pytest.mark.parametrize("name", SCALES)
def test_all_of_the_scale_is_the_same_in_one_program_and_by_the_host(name):
    tx = jamp.dynamic_loss_scale(
        optax.adam(0.1), **({"init_scale": 2.0**19} | SCALES[name])
    )

    def one(state, scaled):
        params, opt_state, count = state

        def loss_fn(params):
            return jnp.sum((params * scaled).astype(jnp.float16)).astype(jnp.float32)

        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (params, opt_state, count + 1), loss

    once = jax.jit(one)
    many = {
        "by hand": lambda state, x: by_hand(once, state, x),
        "program": jax.jit(jamp.retry(one, 3)),
        "host": jamp.retry(jax.jit(one), 3),
        "scan": jax.jit(lambda state, x: scan_of_one(jamp.retry(one, 3), state, x)),
    }
    states = {way: (jnp.ones(2), tx.init(jnp.ones(2)), 0) for way in many}
    for scaled in BATCHES:
        for way, run in many.items():
            states[way], _ = run(states[way], jnp.float32(scaled))
        expected = jax.tree_util.tree_leaves_with_path(states["by hand"])
        for way in ("host", "program", "scan"):
            found = jax.tree.leaves(states[way])
            differ = [
                jax.tree_util.keystr(path)
                for (path, x), y in zip(expected, found, strict=True)
                if np.asarray(x).tobytes()
                != np.asarray(y, np.asarray(x).dtype).tobytes()
            ]
            assert differ == [], (way, scaled)
    assert states["host"][2] == len(BATCHES)


def by_hand(once, state, x):
    """Three attempts, each from the state before but for the scale and its trackers."""
    for attempts_left in (2, 1, 0):
        new, aux = once(state, x)
        params, old, count = state
        decides = ("loss_scale", "growth_tracker", "hysteresis_tracker")
        found = {name: getattr(new[1], name) for name in decides}
        moved = found["loss_scale"] != old.loss_scale
        moved |= found["hysteresis_tracker"] != old.hysteresis_tracker
        if not (new[1].found_inf and moved and attempts_left):
            return new, aux
        old = old._replace(**found, retried_steps=old.retried_steps + 1)
        state = params, old, count


def scan_of_one(run, state, x):
    return lax.scan(run, state, x[None])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["host", "program"])
def test_each_attempt_gets_a_state_and_a_batch_that_no_other_has_changed(wrap):
    def writing(state, batch):
        batch["x"] = batch["x"] * 0.5
        state["count"] += 1

        def loss_fn(params):
            return jnp.sum((params * batch["x"]).astype(jnp.float16))

        _, grads = jamp.value_and_grad(loss_fn, state["opt_state"])(state["params"])
        step = jamp.step(TX, grads, state["opt_state"], state["params"])
        state["params"], state["opt_state"] = step
        return state, batch["x"]

    opt_state = TX.init(jnp.ones(2))._replace(loss_scale=jnp.float32(HIGH))
    state = {"params": jnp.ones(2), "opt_state": opt_state, "count": jnp.int32(0)}
    state, x = wrap(jamp.retry(writing, 20))(state, {"x": jnp.float32(1.0)})
    assert x == 0.5 and state["count"] == 1
    np.testing.assert_array_equal(state["params"], 1 - 0.5 * 0.5)
    assert state["opt_state"].retried_steps == 5
