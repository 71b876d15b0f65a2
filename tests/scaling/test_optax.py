"""The optax wrapper: nesting, accumulation, bad input, one trace."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jamp
from tests.bits import check_same_bits
from tests.marks import cover


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def make_params():
    params = {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}
    return jax.device_put(params)


# Few bits, with which the numbers of a few steps are exact in any program.
X = np.float32([[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]])
BAD = np.where(np.arange(16).reshape(4, 4) == 5, np.float32(np.inf), X)


def run(tx, batches, params=None):
    """Trains; returns the parameters and the state, by way of update."""
    params = make_params() if params is None else params
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, x):
        _, grads = jamp.value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x in batches:
        params, state = train_step(params, state, x)
    return params, state


def scaled_sgd(**kwargs):
    return jamp.dynamic_loss_scale(optax.sgd(0.5, momentum=0.5), **kwargs)


def test_inject_hyperparams_makes_the_scalers_numbers_arrays(standard_promotion):
    factory = optax.inject_hyperparams(jamp.dynamic_loss_scale, static_args=("inner",))
    tx = factory(optax.sgd(0.5), growth_interval=2, backoff_factor=0.25)
    params, state = run(tx, [X, X, BAD])
    assert jamp.loss_scale(state) == 2.0**17 / 4
    state.hyperparams["backoff_factor"] = jnp.float32(0.5)
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    _, state = jax.jit(tx.update)(grads, state, params)
    assert jamp.loss_scale(state) == 2.0**17 / 8


def test_around_multi_steps_a_bad_microbatch_is_dropped_alone(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.MultiSteps(optax.sgd(1.0), 2))
    params, state = run(tx, [X, BAD, 2 * X])
    good, _ = run(
        jamp.dynamic_loss_scale(optax.MultiSteps(optax.sgd(1.0), 2)), [X, 2 * X]
    )
    chex.assert_trees_all_equal(params, good)
    assert jamp.metrics(state)["skipped_steps"] == 1
    assert state.inner_state.gradient_step == 1


def test_accumulation_as_in_torch_sums_scaled_gradients_and_checks_once():
    def accumulated_step(tx, params, state, batches):
        def add(total, x):
            loss, grads = jamp.value_and_grad(loss_fn, state)(params, x)
            grads = jax.tree.map(lambda g: g / len(batches), grads)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = jax.lax.scan(add, zeros, batches)
        return *jamp.step(tx, grads, state, params), losses

    tx = jamp.dynamic_loss_scale(optax.sgd(0.5))
    step = jax.jit(accumulated_step, static_argnums=0)
    params = make_params()
    state = tx.init(params)
    new_params, new_state, losses = step(tx, params, state, np.stack([X, 2 * X]))
    mean_loss = lambda p: (loss_fn(p, X) + loss_fn(p, 2 * X)) / 2
    grads = jax.jit(jax.grad(mean_loss))(params)
    minus = lambda p, g: np.asarray(p) - np.float32(0.5) * np.asarray(g)
    expected = jax.tree.map(minus, params, grads)
    check_same_bits(new_params, expected)
    assert losses.shape == (2,) and not new_state.found_inf

    # One bad microbatch drops the whole accumulated step, as in torch.
    new_params, new_state, _ = step(tx, params, state, np.stack([X, BAD]))
    chex.assert_trees_all_equal(new_params, params)
    assert new_state.found_inf and new_state.skipped_steps == 1


def called(function, *args):
    return function(*args)


@cover()
@pytest.mark.parametrize("run", [jax.eval_shape, called])
def test_half_precision_parameters_are_updated_in_float32(run, standard_promotion):
    params = {"w": np.ones(3, np.float16), "b": np.ones(2, jnp.bfloat16)}
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-2, weight_decay=0.1))
    grads = params = jax.device_put(params)
    state = run(tx.init, params)
    for update in (tx.update, jax.jit(tx.update)):
        updates, new_state = run(update, grads, state, params)
        chex.assert_trees_all_equal_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    moments = optax.tree.get(state, "mu")
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}
    step = jax.jit(lambda g, s, p: jamp.step(tx, g, s, p))
    new_params, _ = run(step, grads, state, params)
    chex.assert_trees_all_equal_dtypes(new_params, params)


@cover()
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_integer_float0_none_and_empty_leaves(wrap):
    params = {
        "w": np.ones(2, np.float32),
        "i": np.arange(2, dtype=np.int32),
        "none": None,
        "e": np.zeros((0, 2), np.float32),
    }
    labels = {"w": "sgd", "i": "frozen", "none": None, "e": "sgd"}
    inner = optax.multi_transform(
        {"sgd": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels
    )
    tx = jamp.dynamic_loss_scale(inner, init_scale=8.0)
    state = tx.init(params)
    objective = lambda p: jnp.sum(p["w"] ** 2)
    _, grads = jamp.value_and_grad(objective, state, allow_int=True)(params)
    assert grads["i"].dtype == jax.dtypes.float0
    step = wrap(lambda g: jamp.step(tx, g, state, params))
    new_params, _ = step(grads)
    np.testing.assert_array_equal(new_params["w"], [-1.0, -1.0])
    np.testing.assert_array_equal(new_params["i"], [0, 1])
    new_params, new_state = step({**grads, "w": np.full(2, np.inf, np.float32)})
    chex.assert_trees_all_equal(new_params, params)
    assert new_state.found_inf


def test_gradients_per_example():
    aggregate = optax.contrib.differentially_private_aggregate(
        1.0, 0.0, jax.random.key(0)
    )
    tx = jamp.dynamic_loss_scale(optax.chain(aggregate, optax.sgd(1.0)), init_scale=4.0)
    params = jnp.ones(2)
    grads = jnp.full((8, 2), 0.5) * 4
    new_params, _ = jax.jit(lambda g, s: jamp.step(tx, g, s, params))(
        grads, tx.init(params)
    )
    np.testing.assert_array_equal(new_params, 0.5)


def test_a_missing_gradient_leaves_its_parameter():
    tx, params = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0), make_params()
    grads = {"w": jnp.full((4, 2), 2.0), "b": None}
    for wrap in (lambda function: function, jax.jit):
        new_params, _ = wrap(lambda g: jamp.step(tx, g, tx.init(params), params))(grads)
        np.testing.assert_array_equal(new_params["w"], 0.0)
        np.testing.assert_array_equal(new_params["b"], params["b"])


def test_update_without_params():
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0)
    updates, _ = tx.update(jnp.array([4.0, 8.0]), tx.init(jnp.ones(2)))
    np.testing.assert_array_equal(updates, [-1.0, -2.0])
    updates, _ = jax.jit(tx.update)(jnp.array([jnp.nan, 8.0]), tx.init(jnp.ones(2)))
    np.testing.assert_array_equal(updates, [0.0, 0.0])


def test_lookahead(standard_promotion):
    tx = jamp.dynamic_loss_scale(
        optax.lookahead(optax.sgd(1.0), 2, 0.5), init_scale=2.0
    )
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2)})
    state = tx.init(params)
    for bad in (False, True):
        grads = {"w": jnp.full(2, jnp.inf if bad else 2.0)}
        updates, new_state = jax.jit(tx.update)(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(new_params.fast["w"], 1.0 if bad else 0.0)
        assert new_state.found_inf == bad


@pytest.mark.parametrize("axis_name", [None, "data"])  # which is not mapped here
def test_disabled_is_the_bare_optimizer(axis_name):
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), enabled=False, axis_name=axis_name)
    params = jnp.ones(2)
    state = tx.init(params)
    assert jamp.loss_scale(state) == 1.0 and jamp.scale_loss(3.0, state) == 3.0
    updates, new_state = jax.jit(tx.update)(jnp.array([jnp.inf, 1.0]), state, params)
    np.testing.assert_array_equal(updates, [-jnp.inf, -1.0])  # applied, as in torch
    chex.assert_trees_all_equal(jamp.metrics(new_state), jamp.metrics(state))


def take_step(tx, state, params, x):
    _, grads = jamp.value_and_grad(loss_fn, state)(params, x)
    return jamp.step(tx, grads, state, params)


@cover()
@pytest.mark.parametrize("wrap", [jax.jit, lambda step: step])
def test_a_disabled_run_is_resumed_with_a_new_scale(wrap):
    options = {"init_scale": 8.0, "hysteresis": 2, "growth_interval": 3}
    on, off = (
        jamp.dynamic_loss_scale(
            optax.sgd(0.5, momentum=0.5), enabled=enabled, **options
        )
        for enabled in (True, False)
    )
    on_step, off_step = (wrap(functools.partial(take_step, tx)) for tx in (on, off))
    params = make_params()
    state = off.init(params)
    for _ in range(2):
        params, state = off_step(state, params, X)
    check_same_bits(params, run(on, [X, X])[0])

    for x in (X, BAD):  # the first step, at a scale of 1, does not move the new scale
        _, resumed = on_step(state, params, x)
        assert resumed._replace(inner_state=()) == on.init(params)._replace(
            inner_state=(),
            found_inf=x is BAD,
            skipped_steps=int(x is BAD),
            recent_skips=int(x is BAD),
        )
    mine = optax.tree.set(state, loss_scale=jnp.float32(4.0))
    _, resumed = on_step(mine, params, X)
    assert jamp.loss_scale(resumed) == 4.0 and resumed.hysteresis_tracker == 0
    static = jamp.static_loss_scale(optax.sgd(0.5, momentum=0.5), 32.0)
    assert jamp.loss_scale(take_step(static, state, params, X)[1]) == 32.0


def test_value_and_grad_returns_the_plain_loss_and_scaled_gradients():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=64.0)
    params = make_params()
    state = tx.init(params)
    loss, grads = jax.value_and_grad(loss_fn)(params, X)
    got, scaled = jamp.value_and_grad(loss_fn, state)(params, X)
    assert got == loss
    chex.assert_trees_all_equal(scaled, jax.tree.map(lambda g: g * 64, grads))
    chex.assert_trees_all_equal(jamp.unscale(scaled, state), grads)

    with_aux = lambda params, x: (loss_fn(params, x), {"n": len(x)})
    (got, aux), again = jamp.value_and_grad(with_aux, state, has_aux=True)(params, X)
    assert got == loss and aux == {"n": len(X)}
    chex.assert_trees_all_equal(again, scaled)
    _, by_x = jamp.value_and_grad(loss_fn, state, argnums=(0, 1))(params, X)
    assert by_x[1].shape == X.shape
    by_hand = jax.grad(lambda p: jamp.scale_loss(loss_fn(p, X), state))(params)
    chex.assert_trees_all_equal(by_hand, scaled)


def test_the_loss_comes_back_as_it_was():
    params = jnp.ones(2, jnp.float16)
    state = jamp.dynamic_loss_scale(optax.sgd(0.5)).init(params)
    loss, grads = jamp.value_and_grad(lambda p: jnp.sum(p) * 1e-3, state)(params)
    assert loss.dtype == jnp.float16 and grads.dtype == jnp.float16


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("argnums, named", [(1, "1"), (-1, "-1"), ((0, 1), "1")])
def test_a_leaf_that_is_not_an_array_is_named_with_the_cure(jit, argnums, named):
    tx, rest = scaled_sgd(), {"inner": [jax.nn.gelu]}
    opt_state, loss = tx.init(make_params()), lambda x, params: loss_fn(params, x)
    grad_fn = jamp.value_and_grad(loss, opt_state, argnums)
    call = lambda x: grad_fn(x, make_params() | rest)
    where = rf"jamp.value_and_grad: argument {named} at \['inner'\]\[0\] must be an arr"
    with pytest.raises(TypeError, match=rf"(?s){where}.*gelu.*eqx.partition\("):
        (jax.jit(call) if jit else call)(X)


def test_other_type_errors_of_a_gradient_are_not_changed():
    def fails(params):
        raise error

    opt_state, error = scaled_sgd().init(make_params()), TypeError("my own")
    with pytest.raises(TypeError, match="my own") as raised:
        jamp.value_and_grad(fails, opt_state)(make_params())
    assert raised.value is error
    with pytest.raises(TypeError, match=r"argnums=\(0, 5\)"):
        jamp.value_and_grad(loss_fn, opt_state, (0, 5))(make_params(), X)
    with pytest.raises(TypeError, match="int32"):
        jamp.value_and_grad(loss_fn, opt_state)({"w": jnp.ones(3, int)}, X)


def test_what_is_not_differentiated_may_hold_functions():
    rest = {"activation": jnp.tanh}
    loss = lambda params, rest: rest["activation"](params["w"]).sum()
    opt_state = scaled_sgd().init(make_params())
    _, grads = jamp.value_and_grad(loss, opt_state)(make_params(), rest)
    assert jnp.all(grads["w"] > 0)


def test_the_scale_can_be_set():
    state = optax.chain(optax.identity(), scaled_sgd()).init(make_params())
    state = optax.tree.set(state, loss_scale=jnp.float32(3.0))
    assert jamp.loss_scale(state) == 3.0


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_float16_hyperparameters_do_not_make_the_scale_infinite(standard_promotion):
    tx = optax.inject_hyperparams(jamp.dynamic_loss_scale, static_args=("inner",))(
        optax.sgd(0.1)
    )
    state = jax.jit(tx.init)(jnp.ones(2, jnp.float16))
    assert np.isfinite(jamp.loss_scale(state))


@pytest.mark.cpu  # as XLA counts them there
def test_a_step_accesses_no_more_bytes_than_the_plain_one(standard_promotion):
    inner = optax.adamw(1e-3)
    tx = jamp.dynamic_loss_scale(inner)
    params = {name: np.ones((256, 256), np.float32) for name in "abc"}
    x = np.ones((8, 256), np.float32)

    def objective(params):
        h = x
        for kernel in params.values():
            h = jnp.tanh(h @ kernel)
        return jnp.mean(h**2)

    def plain(params, state):
        grads = jax.grad(objective)(params)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def fused(params, state):
        _, grads = jamp.value_and_grad(objective, state)(params)
        return jamp.step(tx, grads, state, params)

    def megabytes(step, state):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        return jitted.lower(params, state).compile().cost_analysis()["bytes accessed"]

    floor = megabytes(plain, inner.init(params))
    assert megabytes(fused, tx.init(params)) <= 1.05 * floor


def test_train_states_compute_the_same():
    def train(cls):
        state = cls.create(apply_fn=None, params=make_params(), tx=scaled_sgd())

        @jax.jit
        def train_step(state, x):
            _, grads = jamp.value_and_grad(loss_fn, state)(state.params, x)
            return state.apply_gradients(grads=grads)

        for x in (X, BAD, X):
            state = train_step(state, x)
        return state

    flax_state, state = train(train_state.TrainState), train(jamp.linen.TrainState)
    check_same_bits(state.params, flax_state.params)
    assert state.step == flax_state.step == 3
    assert jamp.metrics(state)["skipped_steps"] == 1


def test_train_state_replaces_other_fields():
    class State(jamp.linen.TrainState):
        batch_stats: dict

    state = State.create(
        apply_fn=None, params=make_params(), tx=scaled_sgd(), batch_stats={"mean": 0}
    )
    grads = jax.tree.map(jnp.zeros_like, state.params)
    state = state.apply_gradients(grads=grads, batch_stats={"mean": 1})
    assert state.batch_stats == {"mean": 1} and state.step == 1


def test_train_state_leaves_fp8_scales_to_flax():
    key = "_overwrite_with_gradient"
    params = {"params": make_params(), key: {"scale": jnp.float32(1)}}
    state = jamp.linen.TrainState.create(
        apply_fn=None, params=params, tx=scaled_sgd(init_scale=1.0)
    )
    grads = {"params": make_params(), key: {"scale": jnp.float32(3)}}
    new_state = state.apply_gradients(grads=grads)
    assert new_state.params[key]["scale"] == 3 and new_state.step == 1
    np.testing.assert_array_equal(new_state.params["params"]["w"], 0.5)


@pytest.mark.gpu
@cover(ci=4)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("how", ["update", "step"])
def test_a_jitted_step_traces_once_and_transfers_nothing(
    donate, how, standard_promotion, checking_leaks
):
    chex.clear_trace_counter()
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3), growth_interval=7)
    params = jax.device_put(make_params())
    state = jax.jit(tx.init)(params)
    bad = jax.device_put(BAD)
    x = jax.device_put(X)

    @chex.assert_max_traces(n=1)
    def train_step(params, state, x):
        loss, grads = jamp.value_and_grad(loss_fn, state)(params, x)
        if how == "step":
            return *jamp.step(tx, grads, state, params), loss
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(train_step, donate_argnums=(0, 1) if donate else ())
    structure, dtypes = (
        jax.tree.structure(state),
        jax.tree.map(lambda a: a.dtype, state),
    )
    with jax.transfer_guard("disallow"):
        for i in range(100):
            params, state, _ = jitted(params, state, bad if i % 10 == 3 else x)
    assert jax.tree.structure(state) == structure
    assert jax.tree.map(lambda a: a.dtype, state) == dtypes
    assert state.skipped_steps == 10


def frozen(inner):
    parts = {"train": inner, "freeze": optax.set_to_zero()}
    return optax.multi_transform(parts, {"w": "train", "b": "freeze"})


CLIP = optax.clip_by_global_norm(1.0)
NESTED = {
    "alone": jamp.dynamic_loss_scale,
    "behind": lambda tx: optax.chain(jamp.dynamic_loss_scale(tx), optax.scale(0.5)),
    "masters": lambda tx: jamp.dynamic_loss_scale(
        optax.chain(CLIP, jamp.master_weights(frozen(tx)))
    ),
    "inside": lambda tx: jamp.master_weights(jamp.dynamic_loss_scale(tx)),
}


@cover(quick=3)
@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", NESTED)
def test_a_nest_runs_its_optimizer_once_in_a_step(name, wrap, standard_promotion):
    """And asks for the types of its state once, however many steps there are."""
    calls = {"init": 0, "update": 0}
    adam = optax.adam(1e-3)

    def counted(name, function):
        def counting(*args):
            calls[name] += 1
            return function(*args)

        return counting

    inner = [counted(*of) for of in zip(calls, adam, strict=True)]
    tx = NESTED[name](optax.GradientTransformation(*inner))
    params = jax.tree.map(lambda p: p.astype(jnp.float16), make_params())
    state = tx.init(params)
    for factor in (1.0, np.inf):
        step = wrap(functools.partial(jamp.step, tx))
        for steps in range(2):
            before = dict(calls)
            grads = jax.tree.map(lambda p, f=factor: jnp.full_like(p, f), params)
            step(grads, state, params)
            is_traced = wrap is jax.jit and steps
            assert calls["update"] == before["update"] + (not is_traced)
    assert calls["init"] == before["init"]


def test_the_step_runs_inside_scan_vmap_and_remat():
    tx = scaled_sgd(growth_interval=2)
    params = make_params()
    batches = np.stack([X, BAD, X, 2 * X])

    def body(carry, x):
        params, state = carry
        loss = jax.checkpoint(loss_fn)
        _, grads = jamp.value_and_grad(loss, state)(params, x)
        return jamp.step(tx, grads, state, params), jamp.metrics(state)["loss_scale"]

    train = lambda batches: jax.lax.scan(body, (params, tx.init(params)), batches)
    (scanned, state), scales = jax.jit(train)(batches)
    expected, expected_state = run(tx, batches)
    check_same_bits(scanned, expected)
    chex.assert_trees_all_equal(jamp.metrics(state), jamp.metrics(expected_state))
    assert scales.tolist() == [2.0**16, 2.0**16, 2.0**15, 2.0**15]

    (both, _), _ = jax.jit(jax.vmap(train))(np.stack([batches, batches]))
    check_same_bits(jax.tree.map(lambda a: a[1], both), expected)


AROUND = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 5).gradient_transformation(),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step % 2 == 0
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_hides_overflows_is_refused(name, standard_promotion):
    tx = optax.chain(AROUND[name](scaled_sgd()), optax.identity())
    state = tx.init(make_params())
    for use in (
        lambda: jamp.value_and_grad(loss_fn, state),
        lambda: jamp.scale_loss(1.0, state),
        lambda: jamp.metrics(state),
        lambda: jamp.step(tx, make_params(), state, make_params()),
    ):
        with pytest.raises(ValueError, match=f"optax.{name} around a loss scale"):
            use()
    inside = jamp.dynamic_loss_scale(AROUND[name](optax.sgd(0.1)))
    assert jamp.loss_scale(inside.init(make_params())) == 2.0**16


@cover()
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_numbers_of_a_state_may_come_from_elsewhere(jit):
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0))
    state, grads = tx.init(jnp.ones(2)), jnp.full(2, 512.0)
    step = lambda state: jamp.step(tx, grads, state, jnp.ones(2))
    step = jax.jit(step) if jit else step
    for scale in (1024, 1024.0, np.float64(1024), np.int64(1024), jnp.asarray(1024)):
        given = optax.tree.set(state, loss_scale=scale, growth_tracker=np.int64(3))
        params, moved = step(given)
        np.testing.assert_array_equal(params, 0.5)
        assert moved.loss_scale == 1024.0 and moved.growth_tracker == 4
        chex.assert_trees_all_equal_dtypes(moved, state)
        assert jamp.loss_scale(given).dtype == jnp.float32
    items = jax.tree.map(lambda leaf: np.asarray(leaf).item(), state)
    assert items.recent_skips == 0 and type(items.recent_skips) is int
    chex.assert_trees_all_equal(step(items), step(state))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(step(items)))


def test_an_optimizer_may_fail_in_its_own_words():
    def fails(updates, state, params=None):
        raise RuntimeError("out of budget")

    inner = optax.GradientTransformation(lambda params: jnp.zeros(3), fails)
    tx = jamp.dynamic_loss_scale(inner)
    state = tx.init(jnp.ones(2))._replace(inner_state=jnp.zeros(4))
    with pytest.raises(RuntimeError, match="out of budget"):
        tx.update(jnp.ones(2), state, jnp.ones(2))
