"""`find_loss_scale` and `check_step` name wrong steps, and right ones pass."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import jamp

from ..marks import cover
from .optimizers import NEEDS_VALUE, OPTIMIZERS
from .wrong_steps import (
    ALONE,
    CASES,
    DEPENDS,
    DIVIDED,
    HIDDEN,
    RIGHT,
    WRONG,
    Model,
    call,
    clipped,
    gradients,
    loss_of,
    make_batch,
    make_params,
    mesh,
)

pytestmark = [
    pytest.mark.devices(4),
    pytest.mark.usefixtures("standard_promotion"),
]


@cover(quick=6, ci=40)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("style, way", CASES)
def test_a_wrong_step_is_named(style, way, name):
    with pytest.raises(ValueError) as error:
        jamp.find_loss_scale(*call(style, WRONG[name], way))
    assert re.search(WRONG[name].message, str(error.value), re.DOTALL)


@cover(quick=3, ci=30)
@pytest.mark.parametrize(
    "name, style, way",
    [
        (name, *case)
        for name in RIGHT
        for case in (CASES if name not in ALONE else [("pair", "jit"), ("NNX", "jit")])
    ],
)
def test_a_right_step_passes(name, style, way):
    jamp.find_loss_scale(*call(style, RIGHT[name], way))


# Steps whose state is in several arguments, or is all that they return.

X, Y = make_batch()
TX = jamp.dynamic_loss_scale(optax.adamw(1e-3))


@functools.cache
def start():
    return make_params(), TX.init(make_params())


def light_loss(params, x):
    """Its gradient is `x` times the scale, in float16."""
    product = params.astype(jnp.float16) * x.astype(jnp.float16)
    return jnp.sum(product).astype(jnp.float32)


def light_start(tx):
    params = jnp.asarray(np.ones(4, np.float32))
    return params, tx.init(params)


def moved(params, opt_state, x, y, is_wrong):
    loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
    grads = clipped(grads, params, 1.0) if is_wrong else grads
    return *jamp.step(TX, grads, opt_state, params), loss


def of_params(params, opt_state, x, y, is_wrong):
    return moved(params, opt_state, x, y, is_wrong)


def of_params_alone(params, opt_state, x, y, is_wrong):
    return moved(params, opt_state, x, y, is_wrong)[:2]


def behind_a_key(key, state, x, y, is_wrong):
    noise = jax.random.normal(key, x.shape) / 100
    *state, loss = moved(*state, x + noise, y, is_wrong)
    return tuple(state), loss


def of_two(actor, critic, x, y, is_wrong):
    new = [moved(*state, x, y, is_wrong) for state in (actor, critic)]
    return *(state[:2] for state in new), new[0][2]


def of_a_pair(actor, critic, x, y, is_wrong):
    actor, critic, loss = of_two(actor, critic, x, y, is_wrong)
    return (actor, critic), loss


def alone(state, x, y, is_wrong):
    return moved(*state, x, y, is_wrong)[:2]


def with_two_results(state, x, y, is_wrong):
    *state, loss = moved(*state, x, y, is_wrong)
    return tuple(state), loss, {"loss": loss}


def with_a_buffer(state, x, y, is_wrong):
    """A replay buffer, a count and a key, as reinforcement learning has them."""
    key, draw = jax.random.split(state["key"])
    rows = jax.random.randint(draw, (32,), 0, len(X))
    batch = state["buffer"][rows].astype(jnp.float32) / 16, y[rows]
    *pair, loss = moved(*state["agent"], *batch, is_wrong)
    buffer = state["buffer"].at[state["count"]].set(x[0].astype(jnp.int8))
    new = {"key": key, "agent": tuple(pair), "count": state["count"] + 1}
    return new | {"buffer": buffer}, loss


def delayed(state, x, y, is_wrong):
    """TD3's actor, which steps every second time; this one is such a step."""
    critic, actor, count = state
    *critic, loss = moved(*critic, x, y, is_wrong=False)
    step = lambda actor: tuple(moved(*actor, x, y, is_wrong)[:2])
    actor = jax.lax.cond(count % 2 == 0, step, lambda actor: actor, actor)
    return (tuple(critic), actor, count + 1), loss


def with_buffer():
    state = {"key": jax.random.key(2), "agent": start(), "count": jnp.int32(0)}
    return state | {"buffer": jnp.asarray((16 * X).astype(np.int8))}


FORMS = {
    of_params: start,
    of_params_alone: start,
    behind_a_key: lambda: (jax.random.key(0), start()),
    of_two: lambda: (start(), start()),
    of_a_pair: lambda: (start(), start()),
    alone: lambda: (start(),),
    with_two_results: lambda: (start(),),
    with_a_buffer: lambda: (with_buffer(),),
    delayed: lambda: ((start(), start(), jnp.int32(0)),),
}


@cover(quick=2)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("step", FORMS)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_state_is_what_a_step_returns(is_wrong, step, jit):
    given = FORMS[step]()
    taken = functools.partial(step, is_wrong=is_wrong)
    taken = jax.jit(taken, donate_argnums=range(len(given))) if jit else taken
    if is_wrong:
        with pytest.raises(ValueError, match=DIVIDED):
            jamp.find_loss_scale(taken, *given, X, Y)
        return
    found = jamp.find_loss_scale(taken, *given, X, Y)
    expected = [
        node for node in given if not isinstance(node, jax.Array) or node is None
    ]
    kept = expected[0] if len(expected) == 1 else tuple(expected)
    assert jax.tree.structure(found) == jax.tree.structure(kept)


@cover()
@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "plain"])
def test_a_step_that_wraps_another_has_its_own_arguments(jit):
    right = functools.partial(of_params, is_wrong=False)

    @functools.wraps(of_params)
    def step(state, x, y):
        params, opt_state, _ = right(*state, x, y)
        return params, opt_state

    assert jamp.debug.check_step(jit(step), start(), X, Y).problems == ()
    with pytest.raises(TypeError, match=r"missing .* 'y'"):
        jamp.debug.check_step(jit(step), start(), X)


@cover(ci=2)
@pytest.mark.parametrize("form", [of_params, of_two])
def test_a_step_retries_in_each_form(form):
    high = jax.tree.map(lambda a: a, start())
    high = high[0], optax.tree.set(high[1], loss_scale=jnp.float32(2.0**24))
    step = jax.jit(jamp.retry(functools.partial(form, is_wrong=False), 20))
    if form is of_params:
        _, opt_state, loss = step(*high, X, Y)
        assert not jamp.metrics(opt_state)["found_inf"] and loss > 0
        assert jamp.metrics(opt_state)["retried_steps"] > 0
        return
    actor, critic, _ = step(high, start(), X, Y)
    for state in (actor, critic):
        assert not jamp.metrics(state)["found_inf"]


def loss_first(params, opt_state, x, y):
    *state, loss = moved(params, opt_state, x, y, False)
    return loss, *state


def a_pair_last(params, opt_state, x, y):
    *state, loss = moved(params, opt_state, x, y, False)
    return loss, tuple(state)


def in_a_dict(state, x, y):
    *state, loss = moved(*state, x, y, False)
    return {"loss": loss, "state": tuple(state)}


def behind_metrics(state, x, y):
    *state, loss = moved(*state, x, y, False)
    return [{"loss": loss, "count": jnp.int32(0)}, tuple(state)]


WHERE = {
    loss_first: start,
    a_pair_last: start,
    in_a_dict: lambda: (start(),),
    behind_metrics: lambda: (start(),),
}


@cover(quick=1)
@pytest.mark.parametrize("call", ["check_step", "retry"])
@pytest.mark.parametrize("step", WHERE)
def test_the_state_stands_anywhere_among_the_results(step, call):
    given = WHERE[step]()
    if call == "check_step":
        assert not jamp.debug.check_step(step, *given, X, Y).problems
        return
    once, again = step(*given, X, Y), jax.jit(jamp.retry(step))(*given, X, Y)
    assert jax.tree.structure(once) == jax.tree.structure(again)
    for one, two in zip(*map(jax.tree.leaves, (once, again)), strict=True):
        assert jnp.shape(one) == jnp.shape(two)


def test_two_results_like_the_state_are_refused():
    step = lambda state, x, y: (jnp.float32(0), moved(*state, x, y, False)[:2], state)
    with pytest.raises(TypeError, match="several things that look like the state"):
        jamp.find_loss_scale(step, start(), X, Y)


class Trainer:
    @functools.partial(jax.jit, static_argnums=0)
    def by_number(self, state, x, y):
        return alone(state, x, y, False)

    @functools.partial(jax.jit, static_argnames="self")
    def by_name(self, state, x, y):
        return alone(state, x, y, False)

    @functools.partial(jax.pmap, static_broadcasted_argnums=0, axis_name="d")
    def mapped(self, state, x, y):
        _, grads = jamp.value_and_grad(loss_of, state[1])(state[0], x, y)
        return jamp.step(TX, jax.lax.pmean(grads, "d"), state[1], state[0])

    def plain(self, state, x, y):
        return alone(state, x, y, False)


TRAINER = Trainer()
METHODS = {
    "static_argnums": TRAINER.by_number,
    "static_argnames": TRAINER.by_name,
    "jit of a bound method": jax.jit(TRAINER.plain),
    "a partial": functools.partial(jax.jit(Trainer.plain, static_argnums=0), TRAINER),
    "vmap": jax.vmap(TRAINER.plain),
    "pmap": TRAINER.mapped,
}


@cover(quick=1)
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_called_as_a_user_calls_them(name):
    given = start(), X, Y
    if name in ("vmap", "pmap"):
        spread = lambda a: jnp.broadcast_to(a, (4, *jnp.shape(a)))
        given = jax.tree.map(spread, given)
    jamp.find_loss_scale(METHODS[name], *given)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_ref_has_its_value_in_each_run_and_afterwards(is_given, jit):
    cursor = jax.new_ref(jnp.int32(0))
    xs = np.stack([X, 64 * X, 1e9 * X])  # from another batch, another scale fits

    def step(state, ref, xs):
        x = xs[ref[...]]
        ref[...] += 1
        return moved(*state, x, Y, False)[:2]

    closed = lambda state, xs: step(state, cursor, xs)
    taken, given = (
        (step, (start(), cursor, xs)) if is_given else (closed, (start(), xs))
    )
    taken = jax.jit(taken) if jit else taken
    found = jamp.loss_scale(jamp.find_loss_scale(taken, *given))
    assert found == jamp.loss_scale(jamp.find_loss_scale(alone_of, start(), X, Y))
    assert jamp.debug.check_step(taken, *given).problems == () and cursor[...] == 0


def alone_of(state, x, y):
    return alone(state, x, y, False)


def test_a_function_among_several_arguments_is_named():
    params, opt_state = start()
    step = lambda model, opt_state, x, y: (model, opt_state)
    with pytest.raises(TypeError, match=r"result at \[0\]\['act'\] .*eqx\.partition"):
        jamp.find_loss_scale(step, {**params, "act": jax.nn.gelu}, opt_state, X, Y)


def test_states_that_a_step_does_not_return_are_told():
    step = lambda params, opt_state, x, y: moved(params, opt_state, x, y, False)[2]
    with pytest.raises(TypeError, match=r"got dict, .*State.*, and returned"):
        jamp.find_loss_scale(step, *start(), X, Y)


# Gradients and states that go elsewhere.


def to_a_plain_optimizer(params, opt_state):
    _, grads = jamp.value_and_grad(loss_of, opt_state)(params, X, Y)
    plain = optax.adamw(1e-3)
    return jamp.step(plain, grads, plain.init(params), params)[0], opt_state


def swapped(params, opt_state):
    _, grads = jamp.value_and_grad(loss_of, opt_state)(params, X, Y)
    return jamp.step(TX, params, opt_state, grads)


def swapped_in_update(params, opt_state):
    _, grads = jamp.value_and_grad(loss_of, opt_state)(params, X, Y)
    updates, opt_state = TX.update(params, opt_state, grads)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.parametrize("step", [to_a_plain_optimizer, swapped, swapped_in_update])
def test_gradients_that_reach_no_loss_scale_are_named(step):
    message = "reach no optimizer" if step is to_a_plain_optimizer else DEPENDS
    with pytest.raises(ValueError, match=message):
        jamp.find_loss_scale(step, *start())


# Steps that no bound on scaled gradients tells from right ones: seen in float32 alone.


def norm(tree):
    return optax.tree.norm(tree)


def scaled_grads(state, x, y):
    return jamp.value_and_grad(loss_of, state[1])(state[0], x, y)[1]


@jax.custom_vjp
def injecting(hidden):
    """Its gradient has that of a loss of its own, as experts balance their load."""
    return hidden


injecting.defvjp(lambda h: (h, h), lambda h, ct: (ct + 1e-2 * h,))


def injected(params, x, y):
    with jamp.autocast(jnp.float16):
        hidden = injecting(jax.nn.gelu(x @ params["w1"]))
        return jnp.mean((hidden @ params["w2"] - y) ** 2).astype(jnp.float32)


def with_an_injected_loss(state, x, y):
    _, grads = jamp.value_and_grad(injected, state[1])(state[0], x, y)
    return jamp.step(TX, grads, state[1], state[0]), None


def nothing_is_used(state, x, y):
    jamp.step(TX, scaled_grads(state, x, y), state[1], state[0])
    return state, None


def averaged(state, x, y):
    """A mean of the gradients of this call and the last, each with its own scale."""
    *pair, last = state
    grads = scaled_grads(pair, x, y)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, grads, last)
    return (*jamp.step(TX, mean, pair[1], pair[0]), grads), None


def of_a_large_epsilon(state, x, y):
    """Sharpness-aware: the gradient at a point along the scaled gradient."""
    grads = scaled_grads(state, x, y)
    there = jax.tree.map(
        lambda p, g: p + 0.1 * g / (norm(grads) + 1.0), state[0], grads
    )
    return jamp.step(
        TX, scaled_grads((there, state[1]), x, y), state[1], state[0]
    ), None


def with_another_scale(state, x, y):
    """Of two networks with a scale each, one takes the other's."""
    one, two = state
    of = lambda params: jamp.loss_scale(one[1]) * loss_of(params, x, y)
    two = jamp.step(TX, jax.grad(of)(two[0]), two[1], two[0])
    return (jamp.step(TX, scaled_grads(one, x, y), one[1], one[0]), two), None


def with_more(state, x, y):
    """A second loss, which is not scaled, and a batch in half precision."""
    x = x.astype(jnp.float16).astype(jnp.float32)
    grads = gradients(WRONG["a second loss"], state[0], jamp.loss_scale(state[1]), x, y)
    return jamp.step(TX, grads, state[1], state[0]), None


def lost(state, x, y):
    """The parameters, but not the statistics and what the optimizer keeps."""
    params, opt_state, mean = state
    _, opt_state = jamp.step(TX, scaled_grads(state, x, y), opt_state, params)
    return (params, opt_state, 0.9 * mean + 0.1 * x.mean(0)), None


def best(state, x, y):
    """The least loss so far, which begins at inf and is scaled."""
    params, opt_state, least = state
    loss = lambda params: jamp.scale_loss(loss_of(params, x, y), opt_state)
    value, grads = jax.value_and_grad(loss)(params)
    return (*jamp.step(TX, grads, opt_state, params), jnp.minimum(least, value)), None


def summed(state, x, y, clip=False):
    """torch's accumulation: scaled gradients of two calls, which meet one scale."""
    params, opt_state, total, count = state
    grads = scaled_grads(state, x, y)
    grads = clipped(grads, None, None) if clip else grads
    total = jax.tree.map(jnp.add, total, grads)
    stepped = jamp.step(TX, total, opt_state, params)
    new = *stepped, jax.tree.map(jnp.zeros_like, total)
    kept = jax.lax.cond(count % 2 == 1, lambda: new, lambda: (*state[:2], total))
    return (*kept, count + 1), None


STATES = {
    "one": start,
    "two": lambda: (start(), start()),
    "grads": lambda: (*start(), jax.tree.map(jnp.zeros_like, make_params())),
    "mean": lambda: (*start(), jnp.zeros(8)),
    "least": lambda: (*start(), jnp.float32(jnp.inf)),
    "sums": lambda: (*STATES["grads"](), jnp.int32(0)),
}
OF_THEIR_OWN = {  # with another message, or another state
    "nothing is used": (nothing_is_used, "one", "no parameter moves"),
    "parameters are lost": (lost, "mean", "no parameter moves that a skip would hold"),
    "the best scaled loss": (best, "least", r"a scaled loss: .*\[2\] moves"),
    "a mean of two calls": (averaged, "grads", "between two calls"),
    "sums of clipped ones": (functools.partial(summed, clip=True), "sums", DIVIDED),
    "the scale of another": (with_another_scale, "two", DEPENDS),
    "an injected loss": (with_an_injected_loss, "one", DEPENDS),
    "sharpness": (of_a_large_epsilon, "one", DEPENDS),
    "beside a batch in half": (with_more, "one", DEPENDS),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_what_moves_nothing_or_between_calls_is_named(name):
    step, kind, message = OF_THEIR_OWN[name]
    with pytest.raises(ValueError, match=message):
        jamp.find_loss_scale(step, STATES[kind](), X, Y)


def with_statistics_and_a_warmup(state, x, y):
    """At first only the statistics move, on a skipped step too."""
    params, opt_state, mean = state
    grads = scaled_grads(state, x, y)
    return (*jamp.step(WARM, grads, opt_state, params), 0.9 * mean + x.mean(0)), None


WARM = jamp.dynamic_loss_scale(optax.sgd(optax.linear_schedule(0.0, 0.1, 2)))
LATER = {  # a call that is not the first steps
    "sums": (summed, STATES["sums"]),
    "a warmup": (
        with_statistics_and_a_warmup,
        lambda: (make_params(), WARM.init(make_params()), jnp.zeros(8)),
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_step_is_as_many_calls_as_it_takes(name):
    step, state = LATER[name]
    report = jamp.debug.check_step(jax.jit(step), state(), X, Y)
    assert report.problems == ()
    assert {"[0]['b']", "[0]['w1']", "[0]['w2']"}.isdisjoint(report.still)


def test_sums_of_half_gradients_over_calls_pass():
    tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(1e-3)))
    params = jax.tree.map(lambda a: a.astype(jnp.float16), make_params())

    def step(state, x, y):
        params, opt_state, total, count = state
        grads = scaled_grads(state, x, y)
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
        new = (
            *jamp.step(tx, total, opt_state, params),
            jax.tree.map(jnp.zeros_like, total),
        )
        kept = jax.lax.cond(count % 2 == 1, lambda: new, lambda: (*state[:2], total))
        return (*kept, count + 1), None

    zeros = jax.tree.map(jnp.zeros_like, make_params())
    state = params, tx.init(params), zeros, jnp.int32(0)
    found = jamp.find_loss_scale(step, state, X, Y)
    assert jamp.loss_scale(found[1]) == 2.0**16  # the first call does not ask it


def test_a_plain_optimizer_called_by_hand_is_named():
    plain = optax.adamw(1e-3)

    def step(state, x, y):
        params, opt_state, plain_state = state
        _, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        updates, plain_state = plain.update(grads, plain_state, params)
        return (optax.apply_updates(params, updates), opt_state, plain_state), None

    with pytest.raises(ValueError, match="reach no optimizer or GradScaler"):
        jamp.find_loss_scale(step, (*start(), plain.init(make_params())), X, Y)


@functools.cache
def half():
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), make_params())


BEHIND = {  # what stands behind master weights, and whether it may
    "scale": (optax.scale(0.5), False),
    "decay": (optax.add_decayed_weights(0.1), False),
    "schedule": (optax.scale_by_schedule(lambda count: 0.5), False),
    "clip": (optax.clip(1e-3), False),
    "masked": (optax.masked(optax.scale(0.5), {"w1": True, "b": 0, "w2": 0}), False),
    "identity": (optax.identity(), False),  # no state tells it from a scale
}


@cover(quick=4)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("remainder", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_nothing_that_changes_updates_stands_behind_master_weights(
    name, remainder, scaled
):
    behind, may = BEHIND[name]
    tx = optax.chain(jamp.master_weights(optax.sgd(0.1), remainder=remainder), behind)
    tx = jamp.dynamic_loss_scale(tx) if scaled else tx
    state, grads = tx.init(half()), jax.tree.map(jnp.ones_like, half())
    step = jax.jit(functools.partial(jamp.step, tx))
    if may:
        step(grads, state, half())
        return
    with pytest.raises(ValueError, match=r"stands behind jamp\.master_weights"):
        step(grads, state, half())


@cover(ci=6)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("around", ["MultiSteps", "multi_transform", "every step"])
def test_master_weights_stand_in_multi_steps_and_transforms(around, wrap):
    masters = jamp.master_weights(optax.adam(0.1), remainder=True)
    labels = {"w1": "a", "b": "b", "w2": "a"}
    parts = {"a": masters, "b": jamp.master_weights(optax.set_to_zero())}
    inner = {
        "MultiSteps": optax.MultiSteps(masters, 2),
        "multi_transform": optax.multi_transform(parts, labels),
        "every step": optax.MultiSteps(masters, 1),
    }[around]
    tx = jamp.dynamic_loss_scale(inner)
    grads = jax.tree.map(jnp.ones_like, half())
    wrap(functools.partial(jamp.step, tx))(grads, tx.init(half()), half())


# GradScaler: what torch does in place.


def scaler_step(model, optimizer, scaler, x, y, *, dropped=False, twice=False):
    def loss_fn(model):
        loss = loss_of(nnx.as_pure(nnx.state(model, nnx.Param)), x, y)
        return scaler.scale(scaler.scale(loss) if twice else loss)

    grads = nnx.grad(loss_fn)(model)
    if not twice:  # of a clip, all results have the same size
        unscaled = scaler.unscale_(optimizer, grads)
        grads = clipped(grads if dropped else unscaled, None, None)
    scaler.step(optimizer, model, grads)
    scaler.update()


def make_objects():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return model, optimizer, jamp.GradScaler()


USES = {  # of a scaler, and how they are named if they are wrong
    "right": None,
    "dropped": r"use what scaler\.unscale_ returned",
    "twice": r"scaled twice",
}


def test_a_scaler_that_is_switched_off_passes():
    model, optimizer, _ = make_objects()
    off = jamp.GradScaler(enabled=False)
    report = jamp.debug.check_step(nnx.jit(scaler_step), model, optimizer, off, X, Y)
    assert report.problems == ()


@cover(quick=3, ci=6)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["jit", "plain"])
def test_a_scaler_used_as_in_torch_is_named(wrap, use):
    right = USES[use] is None
    step = scaler_step if right else functools.partial(scaler_step, **{use: True})
    refused = pytest.raises(ValueError, match=USES[use])
    with contextlib.nullcontext() if right else refused:
        jamp.find_loss_scale(wrap(step), *make_objects(), X, Y)


def test_what_jamp_unscale_returned_is_named():
    def step(state, x, y):
        params, opt_state = state
        _, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        grads = jamp.unscale(grads, opt_state)
        return jamp.step(TX, grads, opt_state, params), None

    with pytest.raises(ValueError, match=r"what jamp\.unscale or .* has divided"):
        jamp.find_loss_scale(step, start(), X, Y)


# Steps that cannot be proved, or have nothing to prove.


def test_a_step_that_draws_from_outside_is_refused():
    rng = np.random.default_rng(0)
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    draw = lambda: rng.standard_normal(X.shape).astype(X.dtype)

    def step(state, y):
        x = io_callback(draw, shape, ordered=True)
        *state, loss = moved(*state, x, y, False)
        return tuple(state), loss

    with pytest.raises(ValueError, match="run twice with the same arguments"):
        jamp.find_loss_scale(step, start(), Y)


def test_a_skip_that_breaks_the_state_is_named():
    def step(state, x, y):
        params, opt_state, average = state
        loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        mean = jax.tree.map(lambda a, g: 0.9 * a + 0.0 * g, average, grads)
        return (*jamp.step(TX, grads, opt_state, params), mean), loss

    with pytest.raises(
        ValueError, match=r"a skipped step writes inf or nan into \[2\]"
    ):
        jamp.find_loss_scale(step, (*start(), make_params()), X, Y)


@cover()
@pytest.mark.parametrize("of_all", [True, False])
def test_a_guard_by_the_size_of_scaled_gradients_is_named(of_all):
    """Their norm is 1, and 1e5 when it is scaled: no step would ever be taken."""

    def step(state, x, y):
        loss, grads = jamp.value_and_grad(loss_of, state[1])(state[0], x, y)
        new = jamp.step(TX, grads, state[1], state[0])
        small = optax.tree.norm(grads) < 100
        choose = lambda new, old: jnp.where(small, new, old)
        params = jax.tree.map(choose, new[0], state[0])
        kept = jax.tree.map(choose, new[1], state[1]) if of_all else new[1]
        return (params, kept), loss

    with pytest.raises(ValueError, match="depends on the size of scaled"):
        jamp.find_loss_scale(step, start(), X, Y)


def test_a_hidden_nan_is_named_where_the_scale_cannot_rise_to_it():
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3), 8.0, max_scale=2.0**10)

    def step(state, x, y):
        loss, grads = jamp.value_and_grad(loss_of, state[1])(state[0], x, y)
        grads = jax.tree.map(jnp.nan_to_num, grads)
        return jamp.step(tx, grads, state[1], state[0]), loss

    with pytest.raises(ValueError, match=HIDDEN):
        jamp.find_loss_scale(step, (make_params(), tx.init(make_params())), X, Y)


def test_a_step_that_skips_below_the_largest_scale_is_named():
    def step(state, x, bad):
        loss, grads = jamp.value_and_grad(light_loss, state[1])(state[0], x)
        is_bad = jamp.loss_scale(state[1]) == bad
        grads = jax.tree.map(lambda g: jnp.where(is_bad, jnp.nan, g), grads)
        return jamp.step(TX, grads, state[1], state[0]), loss

    given = light_start(TX), np.full(4, 4, np.float32)
    largest = jamp.loss_scale(jamp.find_loss_scale(step, *given, 0.0)[1])
    assert largest == 2.0**13
    bad = largest / 2  # which the search does not try
    with pytest.raises(ValueError, match=r"largest loss scale, and skips at others"):
        jamp.find_loss_scale(step, *given, bad)


def test_a_skip_in_a_loop_that_the_next_step_makes_good_counts():
    """With `growth_interval=1` the scale after the loop is the one before it."""
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3), growth_interval=1)

    @jax.jit
    def steps(state, xs):
        def body(state, x):
            loss, grads = jamp.value_and_grad(light_loss, state[1])(state[0], x)
            return jamp.step(tx, grads, state[1], state[0]), loss

        return jax.lax.scan(body, state, xs)

    xs = np.float32([[4] * 4, [1] * 4])
    found = jamp.find_loss_scale(steps, light_start(tx), xs)
    (_, opt_state), _ = steps(found, xs)
    assert opt_state.skipped_steps == 0


def test_a_state_that_starts_at_inf_passes():
    plateau = optax.contrib.reduce_on_plateau(patience=5)
    tx = jamp.dynamic_loss_scale(optax.chain(optax.adam(1e-3), plateau))

    def step(state, x, y):
        params, opt_state, best = state
        loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        new = jamp.step(tx, grads, opt_state, params, value=loss)
        return (*new, jnp.minimum(best, loss)), loss

    jamp.find_loss_scale(
        step, (make_params(), tx.init(make_params()), jnp.float32(jnp.inf)), X, Y
    )


def test_a_step_that_divides_by_what_is_flushed_at_tiny_scales_passes():
    def step(state, x, y):
        params, opt_state = state
        _, first = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
        cosine = optax.tree.vdot(first, grads) / optax.tree.norm(first) ** 2
        grads = jax.tree.map(lambda g: g * cosine, grads)
        return jamp.step(TX, grads, opt_state, params), loss

    jamp.find_loss_scale(step, start(), X, Y)


# `check_step`.


def with_an_average(state, x, y):
    params, opt_state, average, count = state
    loss, grads = jamp.value_and_grad(loss_of, opt_state)(params, x, y)
    grads = {**grads, "b": jnp.zeros_like(grads["b"])}
    params, opt_state = jamp.step(TX, grads, opt_state, params)
    average = optax.incremental_update(params, average, 0.1)
    norm = optax.tree.norm(grads)
    count = count + jnp.float32(1)
    return (params, opt_state, average, count), {"loss": loss, "norm": norm}


def test_the_report_of_a_right_step():
    state = (*start(), make_params(), 0.0)
    report = jamp.debug.check_step(jax.jit(with_an_average), state, X, Y)
    assert report.problems == ()
    assert report.no_gradient == ("b",) and report.gradients["b"]["zeros"] == 1
    assert report.still == (
        "[0]['b']",
        "[1].inner_state[0].mu['b']",
        "[1].inner_state[0].nu['b']",
        "[2]['b']",
    )
    assert {*report.moved_by_skip} <= {"[2]['w1']", "[2]['w2']", "[3]"}
    assert report.scaled_results == ("['norm']",)
    assert report.compiles_again == ("[3]",)  # a Python number
    assert len(report.kept) > 10
    assert report.to_dict()["scale"] == report.scale
    assert "nothing wrong" in str(report) and "2**1" in report.to_markdown()


@pytest.mark.slow
def test_the_report_has_the_scale_that_is_found():
    step, state = jax.jit(with_an_average), (*start(), make_params(), 0.0)
    found = jamp.find_loss_scale(with_an_average, state, X, Y)
    assert jamp.debug.check_step(step, state, X, Y).scale == jamp.loss_scale(found)


@cover(ci=2)
@pytest.mark.parametrize("donates", [True, False])
def test_what_a_step_that_donates_or_is_not_jitted_keeps(donates):
    state = (*start(), make_params(), 0.0)
    step = jax.jit(with_an_average, donate_argnums=0) if donates else with_an_average
    kept = jamp.debug.check_step(step, state, X, Y).kept
    assert kept == () if donates else kept is None


def test_the_report_counts_what_float16_loses():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))

    def step(state, x):
        params, opt_state = state
        loss_fn = lambda p: jnp.sum(p * x) + jnp.sum((p[:1] * 2.0**-20).astype("f2"))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params), loss

    small = np.float32([2.0**-30, 2.0**-18, 1.0, 1.0]) * np.float32(2.0**-22)
    report = jamp.debug.check_step(step, light_start(tx), small)
    assert not report.problems
    of = report.gradients["the root"]
    scale = np.float32(report.scale)
    lost = [0, *(small[1:] * scale)]
    flushed = [0 < abs(g) <= 2.0**-25 for g in lost]
    assert of["flushed"] == sum(flushed) / 4
    assert of["subnormal"] == sum(2.0**-25 < g < 2.0**-14 for g in lost) / 4


def test_a_leaf_without_elements_has_no_shares():
    params = make_params() | {"none": jnp.zeros((0, 3))}
    step, state = step_of(loss_of, optax.sgd(0.1), params)
    report = jamp.debug.check_step(step, state, X, Y)
    assert not report.problems and {*report.gradients} == {*make_params()}


def without_a_region(params, x, y):
    return jnp.mean((jax.nn.gelu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def switched_off(params, x, y):
    with jamp.autocast(jnp.float16), jamp.autocast(enabled=False):
        return without_a_region(params, x, y)


@pytest.mark.parametrize("loss_fn", [without_a_region, switched_off])
def test_a_step_without_a_product_in_half_is_named(loss_fn):
    def step(state, x, y):
        with jamp.autocast(jnp.float16):  # of no use: it is left before the call
            grad_fn = jamp.value_and_grad(loss_fn, state[1])
        return jamp.step(TX, grad_fn(state[0], x, y)[1], state[1], state[0])

    report = jamp.debug.check_step(step, start(), X, Y)
    assert report.matmul_share == 0 and "half precision" in report.problems[0]
    whole = jamp.debug.check_step(alone_of, start(), X, Y)
    assert whole.matmul_share == 1 and not whole.problems


def test_devices_that_part_are_named():
    """Each gets gradients of its own size, and no axis that they overflow over."""

    def step(state, x, y):
        _, grads = jamp.value_and_grad(loss_of, state[1])(state[0], x, y)
        size = 8.0 ** jax.lax.axis_index("data")
        grads = jax.tree.map(lambda g: (g * size).astype(jnp.float16), grads)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return jamp.step(TX, grads, state[1], state[0])

    none = jax.sharding.PartitionSpec()
    devices = {"mesh": mesh(), "in_specs": none, "out_specs": none}
    mapped = jax.shard_map(step, check_vma=False, **devices)
    with pytest.raises(ValueError, match=r"some devices skip the step .* axis_name"):
        jamp.find_loss_scale(mapped, start(), X, Y)


@cover(quick=1)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_step_of_varying_axes_is_proved(is_wrong):
    def step(state, x, y):
        mean = lambda *args: jax.lax.pmean(loss_of(*args), "data")
        loss, grads = jamp.value_and_grad(mean, state[1])(state[0], x, y)
        grads = clipped(grads, None, None) if is_wrong else grads
        return jamp.step(TX, grads, state[1], state[0]), loss

    spec = jax.sharding.PartitionSpec
    specs = (spec(), spec("data"), spec("data"))
    step = jax.shard_map(step, mesh=mesh(), in_specs=specs, out_specs=spec())
    report = jamp.debug.check_step(step, start(), X, Y)
    assert bool(report.problems) == is_wrong


def test_a_scale_that_never_overflows_is_overflown_too():
    """A temperature's gradient is tiny; what a skip moves is seen all the same."""
    log = jnp.float32(0)

    def step(states, x, y):
        pair, (log, opt_state), target = states
        *pair, loss = moved(*pair, x, y, False)
        tiny = lambda log: 1e-6 * jnp.exp(log)
        _, grad = jamp.value_and_grad(tiny, opt_state)(log)
        new = jamp.step(TX, grad, opt_state, log)
        return (tuple(pair), new, optax.incremental_update(pair[0], target, 0.1)), loss

    target = jax.tree.map(jnp.ones_like, make_params())
    report = jamp.debug.check_step(step, (start(), (log, TX.init(log)), target), X, Y)
    assert report.moved_by_skip == ("[2]['b']", "[2]['w1']", "[2]['w2']")


GUARDED = {
    "a guard of its own": lambda grads, new, old: jax.tree.map(
        lambda a, b: jnp.where(jnp.isfinite(norm(grads)), a, b), new, old
    ),
    "no guard": lambda grads, new, old: new,
}


@cover(quick=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("averages", [True, False])
def test_norms_that_are_divided_or_only_compared_pass(averages, name, dtype):
    def loss_fn(params, x, y):
        with jamp.autocast(dtype=dtype):
            return without_a_region(params, x, y).astype(jnp.float32)

    def step(state, x, y):
        params, opt_state, average = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x, y)
        size = norm(grads) / jamp.loss_scale(opt_state)
        new, opt_state = jamp.step(TX, grads, opt_state, params)
        kept = GUARDED[name](grads, new, params)
        moved = jnp.where(opt_state.found_inf, average, 0.9 * average + 0.1 * size)
        return (kept, opt_state, moved if averages else average), loss

    report = jamp.debug.check_step(step, (*start(), jnp.float32(0)), X, Y)
    assert report.problems == () and report.moved_by_skip == ()


def test_the_report_of_a_wrong_step_does_not_raise():
    wrong = jax.jit(functools.partial(alone, is_wrong=True))
    report = jamp.debug.check_step(wrong, start(), X, Y)
    assert re.search(DIVIDED, report.problems[0], re.DOTALL) and report.scale
    assert "1 problem" in str(report) and report.problems[0] in str(report)


def test_the_report_of_a_step_that_always_overflows_does_not_raise():
    wrong = jax.jit(functools.partial(alone, is_wrong=True))
    never = jamp.debug.check_step(wrong, start(), X * jnp.nan, Y)
    assert "overflows at every loss scale" in never.problems[0] and never.scale is None


@pytest.mark.parametrize("call", [jamp.find_loss_scale, jamp.debug.check_step])
def test_a_proof_needs_values(call):
    step = functools.partial(alone, is_wrong=False)
    inside = jax.jit(lambda state: call(step, state, X, Y))
    with pytest.raises(TypeError, match="outside of jit"):
        inside(start())


def test_a_report_needs_a_function():
    with pytest.raises(TypeError, match="step must be a function"):
        jamp.debug.check_step(start(), X, Y)


@cover(ci=4)
@pytest.mark.parametrize("way", ["scan", "shard_map", "jit", "pmap"])
def test_the_report_of_a_step_on_devices_and_in_loops(way):
    report = jamp.debug.check_step(*call("TrainState", RIGHT["as it is"], way))
    # After the first step of a loop, the scale is finite.
    assert report.moved_by_skip == (None if way == "scan" else (".step",))
    assert report.problems == () and set(report.gradients) == {"b", "w1", "w2"}


def test_a_step_is_traced_once_as_it_is_and_once_in_float32():
    traces = []

    @jax.jit
    def step(state, x, y):
        traces.append(1)
        return moved(*state, x, y, False)[:2]

    jamp.find_loss_scale(step, start(), X, Y)
    assert len(traces) == 2


# Right steps whose rounding depends on the scale, and states that hold logs.


def step_of(loss_fn, inner, params, *, log=None, **scale):
    """A step `(params, opt_state, log)`, and its state."""
    tx = jamp.dynamic_loss_scale(inner, **scale)
    log = log or (lambda grads, opt_state: jnp.float32(0))

    def step(state, *batch):
        params, opt_state, _ = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *batch)
        logged = log(grads, opt_state)
        return (*jamp.step(tx, grads, opt_state, params), logged), loss

    opt_state = tx.init(params)
    return step, (
        params,
        opt_state,
        jax.tree.map(jnp.zeros_like, log(params, opt_state)),
    )


def attention_loss(params, x, y):
    """The gradient of the bias of the keys is 0: here it is nothing but rounding."""
    with jamp.autocast(jnp.float16):
        keys = x @ params["k"] + params["bias"]
        weights = jax.nn.softmax((x @ params["q"]) @ keys.swapaxes(1, 2) / 4)
        hidden = x + params["gamma"] * (weights @ (x @ params["v"]))
        logits = (hidden.mean(1) @ params["out"]).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return loss.mean()


def make_attention(seed, gamma):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape) / 4
    params = {"q": draw(16, 16), "k": draw(16, 16), "v": draw(16, 16)}
    params |= {"bias": np.zeros(16), "gamma": np.full(16, gamma), "out": draw(16, 3)}
    params = {name: jnp.asarray(p, jnp.float32) for name, p in params.items()}
    return params, np.float32(4 * draw(8, 12, 16)), np.arange(8, dtype=np.int32) % 3


INNER = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
}


@cover(quick=0)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("gamma", [1e-6, 1e-4, 1e-8])
@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_is_nothing_but_rounding_passes(seed, gamma, name):
    params, x, y = make_attention(seed, gamma)
    step, state = step_of(attention_loss, INNER[name], params)
    jamp.find_loss_scale(step, state, x, y)


@cover()
@pytest.mark.parametrize("name", ["lion", "sgd", "adam", "rmsprop"])
def test_a_scale_that_cannot_rise_passes(name):
    small = lambda params, x, y: 1e-5 * loss_of(params, x, y)
    step, state = step_of(
        small, INNER[name], make_params(), init_scale=1.0, max_scale=1.0
    )
    assert jamp.loss_scale(jamp.find_loss_scale(step, state, X, Y)[1]) == 1


def test_few_elements_whose_signs_are_rounding_pass():
    """A sum in another order, as on a GPU, may turn one of so many, and Lion's step."""
    params = jnp.zeros(2**18)

    def step(state, x):
        params, opt_state = state
        loss, grads = jamp.value_and_grad(lambda p: jnp.sum(p * x), opt_state)(params)
        turned = jnp.where(jamp.loss_scale(opt_state) > 1, -1e-9, 1e-9)
        grads = grads.at[0].multiply(turned)
        return jamp.step(tx, grads, opt_state, params), loss

    tx = jamp.dynamic_loss_scale(optax.lion(0.1))
    jamp.find_loss_scale(step, (params, tx.init(params)), np.ones(2**18, np.float32))


LOGS = {
    "scale": lambda grads, opt_state: jamp.loss_scale(opt_state),
    "scaled norm": lambda grads, opt_state: optax.tree.norm(grads),
    "norm": lambda grads, opt_state: optax.tree.norm(jamp.unscale(grads, opt_state)),
}


@cover(ci=6)
@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("function", ["check_step", "find_loss_scale"])
def test_a_log_in_the_state_is_reported_and_not_refused(function, name):
    step, state = step_of(loss_of, INNER["adam"], make_params(), log=LOGS[name])
    if function == "find_loss_scale":
        jamp.find_loss_scale(step, state, X, Y)
        return
    report = jamp.debug.check_step(step, state, X, Y)
    assert not report.problems and "[2]" in report.moved_by_skip
    assert report.scaled_results == (() if name == "norm" else ("[2]",))


WRAPPED = {
    "alone": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "masters": jamp.master_weights,
    "remainder": functools.partial(jamp.master_weights, remainder=True),
}
TAKEN = [  # masters are of half-precision parameters, remainders of bfloat16
    ("alone", "float32"),
    ("masters", "float16"),
    ("remainder", "bfloat16"),
    ("MultiSteps", "float32"),
    ("MultiSteps", "float16"),
    ("MultiSteps", "bfloat16"),
    ("alone", "float16"),
    ("alone", "bfloat16"),
    ("masters", "bfloat16"),
]
NAMES = ["lion", "sgd", "adam"]
NAMES += [name for name in OPTIMIZERS if name not in {*NAMES, *NEEDS_VALUE}]


@cover(quick=2, ci=60)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap, dtype", TAKEN)
def test_optimizers_pass(wrap, dtype, name):
    """With parameters in each dtype, and in each wrapper that takes it."""
    params = jax.tree.map(lambda a: a.astype(dtype), make_params())
    step, state = step_of(loss_of, WRAPPED[wrap](OPTIMIZERS[name]()), params)
    jamp.find_loss_scale(step, state, X, Y)


@cover(ci=2)
@pytest.mark.parametrize("function", ["find_loss_scale", "check_step"])
def test_hyperparameters_that_are_injected_pass(function):
    inner = optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.0, 1e-3, 10)
    )
    step, state = step_of(loss_of, inner, make_params())
    if function == "find_loss_scale":
        jamp.find_loss_scale(step, state, X, Y)
        return
    report = jamp.debug.check_step(step, state, X, Y)
    assert not report.problems  # the rate is 0 at first, and the next call is proved
    assert not {"[0]['b']", "[0]['w1']", "[0]['w2']"} & {*report.still}
