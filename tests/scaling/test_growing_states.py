"""Optimizers whose first step adds to their state, or widens it.

They run as they do without a loss scale. A skipped step returns the structure of a
step that runs, with zeros for what that adds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.bits import check_same_bits
from tests.marks import cover

from .masters import by_path, stepped, types, updated

pytestmark = pytest.mark.usefixtures("standard_promotion")

INF, START = float("inf"), 8.0


def norm(updates):
    """Of numbers of few bits, which no order of a sum rounds."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(updates))


def momentum(first, of, given):
    """A momentum that its first step makes: `of(m)` is the state, `given` reads it."""

    def update(grads, state, params=None):
        trace = given(state)
        if trace is not None:
            grads = jax.tree.map(lambda g, m: g + 0.5 * m, grads, trace)
        return jax.tree.map(lambda g: -0.5 * g, grads), of(grads)

    return optax.GradientTransformation(lambda params: first(params), update)


def halved(params):
    return {"m": jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)}


SGD = optax.sgd(0.5, momentum=0.5)
OPTIMIZERS = {
    "monitor": lambda: optax.chain(optax.monitor({"norm": norm}), SGD),
    "none": lambda: momentum(
        lambda p: {"m": None}, lambda m: {"m": m}, lambda state: state["m"]
    ),
    "wider": lambda: momentum(halved, lambda m: {"m": m}, lambda state: state["m"]),
    "monitor behind": lambda: optax.chain(SGD, optax.monitor({"norm": norm})),
    "two monitors": lambda: optax.chain(
        optax.monitor({"a": norm, "b": lambda g: {"max": jnp.max(g["w"])}}),
        SGD,
        optax.monitor({"ema": optax.measure_with_ema(norm, 0.5, debias=False)}),
    ),
    "empty": lambda: momentum(
        lambda p: (), lambda m: (m,), lambda state: state[0] if state else None
    ),
    "more keys": lambda: momentum(
        lambda p: {"z": jnp.zeros(())},
        lambda m: {"a": m, "z": jnp.ones(())},
        lambda state: state.get("a"),
    ),
}
SCALES = {
    "dynamic": lambda tx: jamp.dynamic_loss_scale(tx, START),
    "static": lambda tx: jamp.static_loss_scale(tx, START),
    "disabled": lambda tx: jamp.dynamic_loss_scale(tx, enabled=False),
}
WRAPS = {"jit": jax.jit, "eager": lambda function: function}
RUNS = {
    "runs": (1, 2, 3),
    "skips": (INF, 1, 2),
    "skips twice": (INF, INF, 1, 2),
    "skips later": (1, INF, 2),
}


HOWS = {
    name: lambda tx, way=way: lambda grads, state, params: way(tx)(params, state, grads)
    for name, way in {"step": stepped, "update": updated}.items()
}


def make_params(dtype=jnp.float32):
    params = {"w": [1, 2, 3], "b": [[1, 1], [1, 1]]}
    return {name: jnp.asarray(np.array(p, dtype)) for name, p in params.items()}


def make_grads(number, params):
    return jax.tree.map(lambda p: jnp.full_like(p, 0.25 * number), params)


@cover(quick=3)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_the_first_step_adds_to_the_state(wrap, name, scale, how):
    bare, tx = OPTIMIZERS[name](), SCALES[scale](OPTIMIZERS[name]())
    step = WRAPS[wrap](HOWS[how](tx))
    for numbers in RUNS.values():
        if scale == "disabled" and INF in numbers:
            continue
        params = plain = make_params()
        state, plain_state = tx.init(params), bare.init(params)
        first = jax.eval_shape(bare.update, params, plain_state, params)[1]
        for number in numbers:
            before = params, state.inner_state
            grads = make_grads(number * float(state.loss_scale), params)
            params, state = step(grads, state, params)
            if number < INF:
                grads = make_grads(number, plain)
                updates, plain_state = bare.update(grads, plain_state, plain)
                plain = optax.apply_updates(plain, updates)
                check_same_bits((params, state.inner_state), (plain, plain_state))
                continue
            assert state.found_inf
            check_same_bits(params, before[0])
            assert types(state.inner_state) == types(first)
            old, new = map(by_path, (before[1], state.inner_state))
            for path, leaf in new.items():
                np.testing.assert_array_equal(leaf, old.get(path, 0.0 * leaf))


@cover()
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scan_begins_with_the_state_of_a_step(name):
    """The state of a step is a fixed point; that of `init` is none, as in optax."""
    params = make_params()
    bare, scaled = OPTIMIZERS[name](), jamp.dynamic_loss_scale(OPTIMIZERS[name](), 1.0)
    for tx in (bare, scaled):
        step = lambda state, tx=tx: tx.update(params, state, params)[1]
        state = tx.init(params)
        first = jax.eval_shape(step, state)
        assert types(first) != types(state)
        assert types(jax.eval_shape(step, first)) == types(first)


@cover()
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_multi_steps_is_as_without_a_loss_scale(name):
    params = make_params()
    bare = optax.MultiSteps(OPTIMIZERS[name](), 2).gradient_transformation()
    found = []
    for tx in (bare, jamp.dynamic_loss_scale(bare, 1.0)):
        try:
            state = tx.init(params)
            for _ in range(4):
                _, state = tx.update(params, state, params)
            found.append(getattr(state, "inner_state", state))
        except (TypeError, ValueError) as error:
            found.append((type(error), str(error)))
    check = (
        check_same_bits if hasattr(found[0], "acc_grads") else np.testing.assert_equal
    )
    check(found[1], found[0])


@cover()
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_retry_says_to_take_the_first_step_before(name, wrap):
    tx = jamp.dynamic_loss_scale(OPTIMIZERS[name](), 4.0)

    def step(state, number):
        params, opt_state = state
        grads = make_grads(number * jamp.loss_scale(opt_state), params)
        return jamp.step(tx, grads, opt_state, params), number

    retried = WRAPS[wrap](jamp.retry(step))
    state = make_params(), tx.init(make_params())
    message = "cast it first" if name == "wider" else "take that step on its own"
    with pytest.raises(TypeError, match=rf"jamp\.retry: step .*{message}"):
        retried(state, 1.0)
    first, _ = WRAPS[wrap](step)(state, 1.0)
    (_, state), _ = retried(first, 2.0**126)  # at a scale of 4 this overflows
    assert jamp.metrics(state)["retried_steps"] > 0
    assert types(state) == types(first[1])


MONITOR = optax.monitor({"norm": norm})


@cover(ci=8)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_masters_beside_a_monitor(inside, remainder, how):
    masters = functools.partial(jamp.master_weights, remainder=remainder)
    inner = optax.chain(MONITOR, masters(SGD))
    inner = masters(optax.chain(MONITOR, SGD)) if inside else inner
    params = make_params(jnp.bfloat16)
    tx = jamp.dynamic_loss_scale(inner, START)
    state, moved = tx.init(params), params
    step = jax.jit(HOWS[how](tx))
    for number in (INF, 1, INF, 2):
        grads = make_grads(number * float(state.loss_scale), params)
        moved, state = step(grads, state, moved)
    assert state.skipped_steps == 2 and optax.tree.get(state, "norm") > 0
    check_same_bits(moved, trained_alone(params))


@cover()
@pytest.mark.parametrize("remainder", [False, True])
def test_the_other_form_of_the_masters_goes_on_although_the_state_has_grown(remainder):
    masters = functools.partial(jamp.master_weights, SGD)
    params = make_params(jnp.bfloat16)
    other = optax.chain(MONITOR, masters(remainder=not remainder))
    same = optax.chain(MONITOR, masters(remainder=remainder))
    tx, same = (jamp.dynamic_loss_scale(inner, START) for inner in (other, same))
    first = jax.jit(functools.partial(jamp.step, same))
    _, state = first(params, same.init(params), params)
    step = functools.partial(jax.eval_shape, functools.partial(jamp.step, tx))
    _, after = step(params, state, params)
    assert types(after) == types(step(params, tx.init(params), params)[1])


def trained_alone(params):
    tx = jamp.master_weights(SGD)
    state, step = tx.init(params), jax.jit(functools.partial(jamp.step, tx))
    for number in (1, 2):
        params, state = step(make_grads(number, params), state, params)
    return params


def test_what_stands_around_a_loss_scale_is_held():
    """A monitor and momentum behind it."""
    tx = optax.chain(
        jamp.dynamic_loss_scale(optax.sgd(1.0), START),
        optax.monitor({"norm": norm}),
        optax.trace(0.5),
    )
    for wrap in WRAPS.values():
        params, state = make_params(), tx.init(make_params())
        grads = make_grads(INF, params)
        held, after = wrap(HOWS["step"](tx))(grads, state, params)
        check_same_bits(held, params)
        check_same_bits(after[2], state[2])
        assert after[1].measurements["norm"] == 0


@pytest.mark.devices(2)
def test_in_shard_map():
    tx = jamp.dynamic_loss_scale(OPTIMIZERS["monitor"](), START, axis_name="d")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones(4)}
    state = tx.init(params)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d")
    )
    def step(grads, scale, params):
        state = jax.tree.map(lambda x: x, tx.init(params))
        state = state._replace(loss_scale=scale)
        params, state = jamp.step(tx, grads, state, params)
        return params, optax.tree.get(state, "norm")[None]

    for last, expected in ((8.0, [2.0, 2.0]), (INF, [0.0, 0.0])):
        grads = {"w": jnp.asarray([8.0, 8.0, 8.0, last])}
        moved, found = step(grads, state.loss_scale, params)
        assert found.tolist() == expected
        assert moved["w"].tolist() == ([0.5] * 4 if last < INF else [1.0] * 4)


# Flax NNX.


class Logs(nnx.Optimizer):
    """It makes a Variable, another object and a number in its first update."""

    def update(self, model, grads, /, **kwargs):
        found = norm(nnx.as_pure(grads))
        if hasattr(self, "norm"):
            self.norm[...] = found
            self.more.last[...] = found
        else:
            self.norm = nnx.Variable(found)
            self.more = More(found)
        self.calls = getattr(self, "calls", 0) + 1
        return super().update(model, grads, **kwargs)


class More(nnx.Pytree):
    def __init__(self, found):
        self.last = nnx.Variable(found)


class Weights(nnx.Module):
    def __init__(self):
        self.w, self.b = map(nnx.Param, make_params().values())


# NNX itself cannot write into None or an empty tuple.
NNX = {"monitor": (nnx.Optimizer, OPTIMIZERS["monitor"])}
NNX["subclass"] = Logs, lambda: SGD
NNX |= {
    name: (nnx.Optimizer, of)
    for name, of in OPTIMIZERS.items()
    if name not in ("none", "empty", *NNX)
}
NNX_WRAPS = {"jit": nnx.jit, "eager": lambda function: function}
NNX_RUNS = [(True, run) for run in RUNS] + [(False, "runs")]  # enabled or not


def grads_of(model, number):
    return jax.tree.map(lambda p: jnp.full_like(p, 0.25 * number), nnx.state(model))


@cover(quick=4)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("enabled, run", NNX_RUNS)
@pytest.mark.parametrize("name", NNX)
@pytest.mark.parametrize("wrap", NNX_WRAPS)
def test_the_first_step_of_an_nnx_optimizer_adds_to_it(
    wrap, name, enabled, run, unscales
):
    cls, of = NNX[name]

    def step(model, optimizer, scaler, number):
        grads = grads_of(model, number * scaler.loss_scale[...] ** enabled)
        if unscales:
            grads = scaler.unscale_(optimizer, grads)
        skipped = scaler.step(optimizer, model, grads)
        scaler.update()
        return skipped

    numbers, step = RUNS[run], NNX_WRAPS[wrap](step)
    (model, plain), scaler = (
        (Weights(), Weights()),
        jamp.GradScaler(START, enabled=enabled),
    )
    optimizer, bare = (cls(m, of(), wrt=nnx.Param) for m in (model, plain))
    known = model.w, optimizer.step
    for number in numbers:
        skipped = step(model, optimizer, scaler, jnp.float32(number))
        assert bool(skipped) == (number == INF)
        if number < INF:
            bare.update(plain, grads_of(plain, number))
            check_same_bits(*(nnx.as_pure(nnx.state(x)) for x in (model, plain)))
            check_same_bits(*(nnx.as_pure(nnx.state(x)) for x in (optimizer, bare)))
    assert model.w is known[0] and optimizer.step is known[1]
    if cls is Logs:
        assert isinstance(optimizer.norm, nnx.Variable)
        assert isinstance(optimizer.more, More)
    assert optimizer.step[...] == sum(number < INF for number in numbers)


@pytest.mark.parametrize("wrap", NNX_WRAPS)
@pytest.mark.parametrize("name", ["monitor", "subclass"])
def test_retry_of_an_nnx_step_says_to_take_the_first_step_before(name, wrap):
    def step(model, optimizer, scaler, number):
        scaler.step(optimizer, model, grads_of(model, number * scaler.loss_scale[...]))
        scaler.update()

    (cls, of), model, scaler = NNX[name], Weights(), jamp.GradScaler(4.0)
    optimizer = cls(model, of(), wrt=nnx.Param)
    retried = NNX_WRAPS[wrap](jamp.retry(step))
    with pytest.raises(TypeError, match=r"jamp\.retry: step .*first step"):
        retried(model, optimizer, scaler, 1.0)


@pytest.mark.parametrize("wrap", NNX_WRAPS)
def test_a_skipped_first_step_makes_zeros(wrap):
    def step(model, optimizer, scaler):
        scaler.step(optimizer, model, grads_of(model, INF))
        scaler.update()

    model, scaler = Weights(), jamp.GradScaler(START)
    optimizer = Logs(model, SGD, wrt=nnx.Param)
    NNX_WRAPS[wrap](step)(model, optimizer, scaler)
    assert optimizer.norm[...] == 0 == optimizer.more.last[...]
    check_same_bits(nnx.as_pure(nnx.state(model)), nnx.as_pure(nnx.state(Weights())))
