"""Branching and selecting give the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp._scaling import skip

from ..marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

WAYS = {"branch": np.True_, "select": np.False_}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(skip, "branches", lambda: WAYS[request.param])
    return request.param


def start():
    # Numbers of few bits: no product is rounded, fused with a sum or not.
    return {"w": jnp.arange(-3.0, 3.0).reshape(2, 3) / 4, "b": jnp.ones(3)}


def gradients(overflow):
    grads = jax.tree.map(lambda p: 2.0**16 * (p + 0.25), start())
    return grads | {"b": jnp.where(overflow, jnp.array([1, jnp.nan, 2]), grads["b"])}


DONATE = {"donated": (0, 1), "not donated": ()}


@pytest.fixture(params=DONATE)
def donate(request):
    return {"donate_argnums": DONATE[request.param]}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def train(step, flags, **jit):
    """Five steps under jit, of which `flags` overflow."""
    tx = jamp.dynamic_loss_scale(
        optax.chain(optax.clip(1.0), optax.sgd(0.125, momentum=0.5)), growth_interval=2
    )

    traces = []

    @functools.partial(jax.jit, **jit)
    def train_step(params, state, overflow):
        traces.append(1)
        return step(tx, gradients(overflow), state, params)

    params = start()
    carry = params, tx.init(params)
    shapes = jax.tree.map(jax.typeof, carry)
    seen = []
    for overflow in flags:
        carry = train_step(*carry, jnp.bool_(overflow))
        assert jax.tree.map(jax.typeof, carry) == shapes
        seen.append(bits(carry))
    assert len(traces) == 1
    return seen


def fused(tx, grads, state, params):
    return jamp.step(tx, grads, state, params)


def updated(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


FLAGS = [False, True, False, False, True]


@cover()
@pytest.mark.parametrize("step", [fused, updated])
def test_all_ways_give_the_same_bits(step, monkeypatch):
    runs = []
    for branch in WAYS.values():
        monkeypatch.setattr(skip, "branches", lambda branch=branch: branch)
        runs += [train(step, FLAGS, donate_argnums=args) for args in DONATE.values()]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] != runs[0][2]


@cover(quick=2, ci=8)
@pytest.mark.parametrize("step", [fused, updated])
def test_a_skipped_step_holds_every_bit(step, way, donate):
    tx = jamp.dynamic_loss_scale(optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    state = tx.init(start())
    run = jax.jit(lambda p, s, g: step(tx, g, s, p), **donate)
    params, state = run(start(), state, gradients(False))
    params |= {"b": jnp.array([-0.0, 0.0, 1.0])}  # adding 0 would turn -0 into 0
    before, scale = bits((params, state.inner_state)), float(state.loss_scale)
    params, state = run(params, state, gradients(True))
    assert bits((params, state.inner_state)) == before
    assert state.skipped_steps == 1
    assert state.loss_scale == scale / 2


def looking(met):
    """An optimizer that notes whether its gradients are finite."""

    def look(updates, state, params=None):
        finite = jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)])
        jax.debug.callback(lambda flags: met.append(bool(np.all(flags))), finite)
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), look)


@cover(quick=2, ci=4)
def test_an_optimizer_never_meets_an_inf(way, donate):
    met = []
    tx = jamp.dynamic_loss_scale(looking(met))
    params = start()
    run = jax.jit(lambda s, p, g: tx.update(g, s, p), **donate)
    for overflow in FLAGS:
        run(tx.init(params), jax.tree.map(jnp.copy, params), gradients(overflow))
    jax.effects_barrier()
    assert all(met)
    assert len(met) == (FLAGS.count(False) if way == "branch" else len(FLAGS))


@cover(quick=2, ci=4)
@pytest.mark.parametrize("unscales", [False, True])
def test_an_optimizer_of_a_scaler_never_meets_an_inf(way, unscales):
    met, model, scaler = [], Net(), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, looking(met), wrt=nnx.Param)

    @nnx.jit
    def run(model, optimizer, scaler, x):
        grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)
        grads = scaler.unscale_(optimizer, grads) if unscales else grads
        scaler.step(optimizer, model, grads)
        scaler.update()

    for overflow in FLAGS:
        run(model, optimizer, scaler, jnp.full((4, 3), jnp.inf if overflow else 0.5))
    jax.effects_barrier()
    assert all(met)
    assert len(met) == (FLAGS.count(False) if way == "branch" else len(FLAGS))


def test_selecting_takes_leaves_that_are_no_plain_arrays(monkeypatch):
    monkeypatch.setattr(skip, "branches", lambda: np.False_)
    frozen = np.zeros(3, jax.dtypes.float0)
    old = {"key": jax.random.key(0), "none": None, "int": 3, "frozen": frozen}
    new = old | {"key": jax.random.key(1), "int": 4}

    @jax.jit
    def pick(finite):
        picked = skip.run_or_hold(finite, lambda: new, lambda like: old)
        assert picked.pop("frozen") is frozen
        return picked

    for finite, expected in ((True, new), (False, old)):
        picked = pick(finite)
        assert picked["int"] == expected["int"]
        assert picked["none"] is None
        assert jnp.all(
            jax.random.key_data(picked["key"]) == jax.random.key_data(expected["key"])
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.astype(jnp.float16), r"float16\[\]"),
        (lambda s: jnp.stack([s, s]), r"float32\[2\]"),
        (lambda s: (s, s), "no array"),
    ],
)
def test_a_state_that_changes_its_type_is_refused(change, message, monkeypatch):
    monkeypatch.setattr(skip, "branches", lambda: np.False_)
    changing = optax.GradientTransformation(
        lambda params: (jnp.zeros([]),),
        lambda updates, state, params=None: (updates, (change(state[0]),)),
    )
    tx = jamp.dynamic_loss_scale(changing)
    params = start()
    message = rf"at \[0\] it returned {message}, and was given float32\[\]\.\n"
    with pytest.raises(TypeError, match=message):
        jax.jit(tx.update)(gradients(False), tx.init(params), params)


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros([], jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)


def test_grad_scaler_by_both_ways(monkeypatch):
    def train():
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        scaler = jamp.GradScaler(growth_interval=2)

        @nnx.jit
        def train_step(model, optimizer, scaler, x):
            loss_fn = lambda model: scaler.scale(jnp.mean(model(x) ** 2))
            grads = nnx.grad(loss_fn)(model)
            skipped = scaler.step(optimizer, model, grads)
            scaler.update()
            return skipped

        seen = []
        for overflow in FLAGS:
            x = jnp.full((4, 3), jnp.inf if overflow else 0.5)
            assert train_step(model, optimizer, scaler, x) == overflow
            seen.append(bits(nnx.state((model, optimizer, scaler))))
        assert model.calls[...] == len(FLAGS)  # only what the optimizer owns is kept
        return seen

    runs = []
    for branch in WAYS.values():
        monkeypatch.setattr(skip, "branches", lambda branch=branch: branch)
        runs.append(train())
    assert runs[0] == runs[1]


def test_the_zeros_of_a_skipped_step_are_negative(monkeypatch):
    """XLA shares positive ones with those of a scatter, and writes them for both."""
    monkeypatch.setattr(skip, "branches", lambda: np.False_)
    grads = {"w": jnp.full(3, jnp.inf), "n": jnp.arange(3)}
    given = jax.jit(skip.harmless)(False, grads)
    assert bool((given["w"] == 0).all() & jnp.signbit(given["w"]).all())
    assert (given["n"] == grads["n"]).all()
