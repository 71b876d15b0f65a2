"""A step that overflows runs again on its batch, which is not lost; the rest is kept.

The reference is the same training with a loss scale that was right from the start.
Without float16 subnormals, its numbers have the same bits at every power of two.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from jamp._scaling import skip
from tests.bits import check_near, check_same_bits, nudged, numbers
from tests.marks import cover

from .wrong_steps import WRAPS

pytestmark = pytest.mark.usefixtures("standard_promotion")

BATCHES = 40
START = 2.0**30


@functools.cache
def batches():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCHES, 16, 8)).astype(np.float32)
    teacher = rng.standard_normal((8, 4)).astype(np.float32)
    return [(jnp.asarray(x), jnp.asarray(np.tanh(x @ teacher))) for x in x]


def make_params():
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 3, jnp.float32)
    return {"w1": normal(8, 16), "b1": normal(16), "w2": normal(16, 4)}


def loss_fn(params, x, y):
    with jamp.autocast(jnp.float16):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return 2 * jnp.mean((hidden @ params["w2"] - y) ** 2)


class Training:
    """A step with all that a skipped step changes: statistics, an average, a key."""

    def __init__(self, init_scale=START, **options):
        options = {"init_scale": init_scale} | options
        self.tx = jamp.dynamic_loss_scale(optax.adam(1e-2), **options)
        self.traces = 0

    def start(self):
        params = make_params()
        return {
            "params": params,
            "opt_state": self.tx.init(params),
            "average": make_params(),
            "mean": jnp.asarray(np.zeros(8, np.float32)),
            "key": jax.random.key(3),
            "steps": 0,
        }

    def step(self, state, x, y):
        self.traces += 1
        opt_state = state["opt_state"]
        key, dropout = jax.random.split(state["key"])
        x = x * jax.random.bernoulli(dropout, 0.9, x.shape)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(state["params"], x, y)
        params, opt_state = jamp.step(self.tx, grads, opt_state, state["params"])
        follow = lambda average, p: 0.75 * average + 0.25 * p
        new = {
            "params": params,
            "opt_state": opt_state,
            "average": jax.tree.map(follow, state["average"], params),
            "mean": 0.5 * state["mean"] + 0.5 * jnp.mean(x, 0),
            "key": key,
            "steps": state["steps"] + 1,
        }
        return new, {"loss": loss, "overflow": jamp.metrics(opt_state)["found_inf"]}


def train(step, state, data=None):
    for x, y in batches() if data is None else data:
        state, aux = step(state, x, y)
    return state, aux


def check_programs(found, train, data):
    """Compares what one program found with what another one gives for these data.

    A region rounds to float16, so the data move by a unit in its last place.
    """
    check_near(
        found, train(data), [train(these) for these in nudged(data, jnp.float16)]
    )


@pytest.fixture(params=["branch", "select"])
def way(request, monkeypatch):
    monkeypatch.setattr(skip, "branches", lambda: np.bool(request.param == "branch"))
    return request.param


@pytest.mark.gpu
@pytest.mark.slow
def test_no_batch_is_lost_and_all_is_as_with_the_right_scale(way):
    lossy = Training()
    state, _ = train(jax.jit(lossy.step, donate_argnums=0), lossy.start())
    assert state["opt_state"].inner_state[0].count == 25

    retried = Training()
    step = jax.jit(jamp.retry(retried.step, attempts=20), donate_argnums=0)
    state, aux = train(step, retried.start())
    metrics = jamp.metrics(state)
    assert state["opt_state"].inner_state[0].count == BATCHES
    assert metrics["skipped_steps"] == 0 and metrics["growth_tracker"] == BATCHES
    assert not metrics["found_inf"] and not aux["overflow"]
    found = float(metrics["loss_scale"])
    assert metrics["retried_steps"] == np.log2(START / found) > 10
    assert state["opt_state"].recent_skips == 0 == state["opt_state"].floor_steps

    plain = Training(found)
    overflowed = "retried_steps", "hysteresis_tracker"
    differing = {name: getattr(state["opt_state"], name) for name in overflowed}

    def train_with(step, data):
        state, _ = train(step, plain.start(), data)
        return state | {"opt_state": state["opt_state"]._replace(**differing)}

    check_same_bits(state, train_with(step, batches()))
    once = functools.partial(train_with, jax.jit(plain.step))
    check_programs(state, once, batches())


@pytest.mark.slow
def test_a_step_that_does_not_overflow_is_as_it_was(way):
    plain, retried = Training(2.0**10), Training(2.0**10)
    found = train(jax.jit(jamp.retry(retried.step)), retried.start())
    step = jax.jit(plain.step)
    check_programs(found, lambda data: train(step, plain.start(), data), batches())


@pytest.mark.gpu
def test_the_step_is_traced_once_and_the_host_is_not_asked(checking_leaks):
    training = Training()
    step = jax.jit(jamp.retry(training.step, 20), donate_argnums=0)
    state = training.start() | {"steps": jnp.int32(0)}
    data = batches()[:4]
    with jax.transfer_guard("disallow"):
        state, _ = train(step, state, data)
    assert training.traces == 1 and step._cache_size() == 1
    assert state["opt_state"].inner_state[0].count == 4


def test_a_batch_that_can_never_be_finite_is_skipped_after_the_attempts():
    training = Training(2.0**10)
    step = jax.jit(jamp.retry(training.step, attempts=5))
    state, _ = step(training.start(), *batches()[0])
    x, y = batches()[1]
    bad, aux = step(state, x.at[0, 0].set(jnp.nan), y)
    metrics = jamp.metrics(bad)
    assert metrics["found_inf"] and aux["overflow"] and jnp.isnan(aux["loss"])
    assert metrics["skipped_steps"] == 1 and metrics["retried_steps"] == 4
    assert metrics["loss_scale"] == 2.0**5
    assert bad["opt_state"].recent_skips == 1
    check_same_bits(bad["params"], state["params"])
    check_same_bits(bad["opt_state"].inner_state, state["opt_state"].inner_state)
    assert bad["steps"] == 2  # as a skipped step does without retries

    good, _ = step(bad, x, y)
    metrics = jamp.metrics(good)
    assert metrics["skipped_steps"] == 1 and metrics["retried_steps"] == 4
    assert not metrics["found_inf"] and good["opt_state"].recent_skips == 2


@cover()
@pytest.mark.parametrize("how", ["floor", "static"])
def test_a_scale_that_stays_is_not_tried_again(how):
    training = Training(2.0**10, min_scale=2.0**9 if how == "floor" else 0.0)
    if how == "static":
        training.tx = jamp.static_loss_scale(optax.adam(1e-2), 2.0**10)
    x, y = batches()[0]
    step = jax.jit(jamp.retry(training.step))
    state, _ = step(training.start(), x * jnp.inf, y)
    assert jamp.metrics(state)["retried_steps"] == (how == "floor")
    assert jamp.metrics(state)["skipped_steps"] == 1


@pytest.mark.slow
def test_outside_of_a_trace_it_is_the_same():
    jitted, eager = Training(), Training()
    data = batches()[:5]
    found = train(jamp.retry(jax.jit(eager.step), 20), eager.start(), data)
    step = jax.jit(jamp.retry(jitted.step, 20))
    check_programs(found, lambda data: train(step, jitted.start(), data), data)
    assert eager.traces == 1


@pytest.mark.slow
def test_each_of_a_batch_of_trainings_retries_alone():
    training = Training()
    starts = [training.start() | {"steps": jnp.int32(0)} for _ in range(2)]
    scale = lambda state, by: (
        state
        | {"opt_state": optax.tree.set(state["opt_state"], loss_scale=jnp.float32(by))}
    )
    starts = [scale(starts[0], 2.0**4), scale(starts[1], 2.0**30)]
    step = jamp.retry(training.step, 20)
    x, y = batches()[0]
    stack = lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves])
    both, _ = jax.jit(jax.vmap(step, (0, None, None)))(
        jax.tree.map(stack, *starts), x, y
    )
    retries = both["opt_state"].retried_steps
    assert retries[0] == 0 and retries[1] > 10
    np.testing.assert_array_equal(both["steps"], 1)
    alone = jax.jit(step)
    for i, start in enumerate(starts):
        one = [leaf[i] for leaf in numbers(both)]
        step_alone = lambda data, start=start: numbers(alone(start, *data)[0])
        check_programs(one, step_alone, (x, y))


def test_microbatches_are_retried_one_by_one():
    training = Training()
    many = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=4)
    training.tx = jamp.dynamic_loss_scale(many, init_scale=START)
    step = jax.jit(jamp.retry(training.step, 20))
    state, _ = train(step, training.start(), batches()[:8])
    inner = state["opt_state"].inner_state
    assert inner.gradient_step == 2 and inner.mini_step == 0
    assert jamp.metrics(state)["retried_steps"] > 10


def of_two(fits, overflows):
    """A step of two optimizers, its state, and what a retried one returns."""
    tx = {
        name: jamp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.5), init_scale=scale)
        for name, scale in ((fits, 2.0**4), (overflows, START))
    }

    def step(state, x, y):
        params, states = state["params"], {}
        for name in (fits, overflows):
            loss, grads = jamp.value_and_grad(loss_fn, state[name])(params, x, y)
            params, states[name] = jamp.step(tx[name], grads, state[name], params)
        return {"params": params, **states}, loss

    params = make_params()
    start = {"params": params, **{name: tx[name].init(params) for name in tx}}
    run = jax.jit(jamp.retry(step, 20))
    state, _ = run(start, *batches()[0])
    return step, run, start, state


@cover()
@pytest.mark.parametrize("fits, overflows", [("a", "b"), ("b", "a")])
def test_two_optimizers_are_retried_together(fits, overflows):
    *_, state = of_two(fits, overflows)
    assert state[overflows].retried_steps > 10 and state[fits].retried_steps == 0
    assert state[fits].growth_tracker == 1 == state[overflows].growth_tracker


@pytest.mark.slow
@pytest.mark.parametrize("fits, overflows", [("a", "b"), ("b", "a")])
def test_of_two_optimizers_neither_steps_until_both_can(fits, overflows):
    step, run, start, state = of_two(fits, overflows)
    start[overflows] = start[overflows]._replace(loss_scale=state[overflows].loss_scale)
    kept = lambda state: (state["params"], state[fits].inner_state)
    check_same_bits(kept(state), kept(run(start, *batches()[0])[0]))
    once = jax.jit(step)
    check_programs(kept(state), lambda data: kept(once(start, *data)[0]), batches()[0])


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, use_bias=False)(x)  # of which Adam would follow the noise
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(4)(nn.relu(x))


@pytest.mark.slow
def test_a_train_state_keeps_its_statistics():
    class State(jamp.linen.TrainState):
        batch_stats: object = None

    model = Norm()
    variables = jax.jit(functools.partial(model.init, train=True))(
        jax.random.key(0), batches()[0][0]
    )

    def start(init_scale):
        return State.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=jamp.dynamic_loss_scale(optax.adam(1e-2), init_scale=init_scale),
        )

    def step(state, x, y):
        def loss_fn(params):
            held = {"params": params, "batch_stats": state.batch_stats}
            with jamp.autocast(jnp.float16):
                out, updates = state.apply_fn(
                    held, x, train=True, mutable=["batch_stats"]
                )
                return jnp.mean((out - y) ** 2), updates["batch_stats"]

        vg = jamp.value_and_grad(loss_fn, state.opt_state, has_aux=True)
        (loss, batch_stats), grads = vg(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    data = batches()[:3]
    run, once = jax.jit(jamp.retry(step, 20)), jax.jit(step)
    state, _ = train(run, start(START), data)
    right = float(jamp.loss_scale(state))
    assert state.step == 3 and jamp.metrics(state)["retried_steps"] > 10

    def trained(step, data):
        state, _ = train(step, start(right), data)
        return state.batch_stats, state.params

    found = state.batch_stats, state.params
    check_same_bits(found, trained(run, data))
    check_programs(found, functools.partial(trained, once), data)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.hidden = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def nnx_step(model, optimizer, scaler, x, *, y):
    def scaled_loss(model):
        with jamp.autocast(jnp.float16):
            loss = jnp.mean((model(x) - y) ** 2)
        return scaler.scale(loss), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    skipped = scaler.step(optimizer, model, grads)
    scaler.update()
    return loss, skipped


def nnx_train(step, init_scale, data):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)
    objects = model, optimizer, jamp.GradScaler(init_scale)
    for x, y in data:
        _, skipped = step(*objects, x, y=y)
        assert not skipped
    return objects


@cover(ci=2)
@pytest.mark.parametrize("wrap", [nnx.jit, lambda step: step], ids=["jit", "eager"])
def test_nnx_objects_that_are_no_pytrees_are_held_too(wrap):
    class Counted(nnx.Module, pytree=False):
        def __init__(self):
            self.w, self.seen = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.int32(0))

        def __call__(self, x):
            self.seen[...] += 1
            return (self.w * x).astype(jnp.float16)

    def step(model, optimizer, scaler, x):
        def scaled_loss(model):
            return scaler.scale(jnp.mean(model(x)))

        scaler.step(optimizer, model, nnx.grad(scaled_loss)(model))
        scaler.update()

    model = Counted()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    scaler = jamp.GradScaler(2.0**18)
    wrap(jamp.retry(step))(model, optimizer, scaler, jnp.ones(2))
    assert jamp.metrics(scaler)["retried_steps"] > 1
    assert model.seen[...] == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["jit", "eager"])
def test_nnx_objects_are_held_between_attempts(how):
    step = jamp.retry(nnx_step, 20)
    count = 3 if how == "jit" else 1
    data = batches()[:count]
    objects = nnx_train(nnx.jit(step) if how == "jit" else step, START, data)
    model, optimizer, scaler = objects
    metrics = jamp.metrics(scaler)
    assert metrics["retried_steps"] > 10 and metrics["skipped_steps"] == 0
    assert optimizer.step[...] == count == metrics["growth_tracker"]
    once = nnx.jit(nnx_step)
    expected = nnx_train(once, scaler.get_scale(), data)
    if how == "jit":
        trained = lambda data: nnx.state(nnx_train(once, scaler.get_scale(), data)[:2])
        check_programs(nnx.state(objects[:2]), trained, data)
    same = model.dropout.rngs.count[...] == expected[0].dropout.rngs.count[...]
    assert same and model.dropout.rngs.count[...] == count


@cover(ci=2)
@pytest.mark.parametrize("change", ["eval", "growth"])
def test_an_attribute_that_a_step_changes_is_refused(change):
    def step(model, optimizer, scaler, x, y):
        model.eval() if change == "eval" else scaler.set_growth_interval(7)
        return nnx_step(model, optimizer, scaler, x, y=y)

    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    objects = model, optimizer, jamp.GradScaler()
    with pytest.raises(TypeError, match=r"jamp\.retry: step must change nothing"):
        nnx.jit(jamp.retry(step))(*objects, *batches()[0])


def test_a_state_may_hold_an_nnx_model():
    """It is returned, as any state of optax: the loss scale stands beside the model."""
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0**20)

    def step(state, x):
        model, opt_state, count = state
        graph, params = nnx.split(model)

        def loss_fn(params):
            return jnp.sum(nnx.merge(graph, params)(x).astype(jnp.float16))

        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (nnx.merge(graph, params), opt_state, count + 1), loss

    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    before = jnp.copy(model.kernel[...])
    state = model, tx.init(nnx.state(model)), 0
    found = jamp.find_loss_scale(step, state, jnp.ones((1, 2)))
    assert jamp.loss_scale(found[1]) == 2.0**15
    (new, opt_state, count), _ = jax.jit(jamp.retry(step))(state, jnp.ones((1, 2)))
    assert opt_state.retried_steps == 5 and count == 1
    check_same_bits(model.kernel[...], before)
    check_same_bits(new.kernel[...], before - 1)


def test_an_nnx_optimizer_with_its_own_scale_is_retried():
    def step(model, optimizer, x, y):
        def scaled_loss(model):
            with jamp.autocast(jnp.float16):
                loss = jnp.mean((model(x) - y) ** 2)
            return jamp.scale_loss(loss, optimizer.opt_state)

        optimizer.update(model, nnx.grad(scaled_loss)(model))

    model = Net()
    tx = jamp.dynamic_loss_scale(optax.adam(1e-2), init_scale=START)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.jit(jamp.retry(step, 20))(model, optimizer, *batches()[0])
    metrics = jamp.metrics(optimizer.opt_state)
    assert metrics["retried_steps"] > 10 and metrics["skipped_steps"] == 0
    assert optimizer.opt_state.inner_state[0].count[...] == 1


needs_devices = pytest.mark.devices(8)


@needs_devices
@cover(ci=4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", ["retry outside", "retry inside"])
def test_all_devices_agree_and_retry_together(order, check_vma):
    # The gradient of one device alone overflows, and its parameters are its own.
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), 2.0**20, axis_name="data")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)

    def step(state, x):
        params, opt_state, seen = state
        grads = (jamp.loss_scale(opt_state) * x).astype(jnp.float16)
        loss = jnp.sum(params * x)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (params, opt_state, seen + x), jax.lax.pmean(loss, "data")

    params = jnp.ones((8, 4))
    state = params, tx.init(params[0]), jnp.zeros((8, 4))
    specs = P("data"), jax.tree.map(lambda _: P(), state[1]), P("data")
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    x = np.full((8, 4), 2.0**-6, np.float32)
    x[5] = 1.0
    inside = order == "retry inside"
    run = mapped(jamp.retry(step)) if inside else jamp.retry(mapped(step))
    (params, opt_state, seen), loss = jax.jit(run)(state, x)
    assert opt_state.loss_scale == 2.0**15 and opt_state.retried_steps == 5
    np.testing.assert_array_equal(params, 1 - x)
    np.testing.assert_array_equal(seen, x)
    assert loss == np.mean(np.sum(x, 1))  # sums of powers of two


@needs_devices
def test_a_scalar_that_differs_by_device_is_returned():
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), 2.0**20, axis_name="data")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    params = jnp.ones(4)

    def step(state, x):
        params, opt_state = state
        grads = (jamp.loss_scale(opt_state) * jnp.sum(x, 0)).astype(jnp.float16)
        state = jamp.step(tx, jax.lax.pmean(grads, "data"), opt_state, params)
        return state, jnp.sum(x)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data"))
    )
    def local(state, x):
        state, total = jamp.retry(step)(state, x)
        return state, total[None]

    x = jnp.arange(32.0).reshape(8, 4)
    (_, opt_state), totals = jax.jit(local)((params, tx.init(params)), x)
    assert opt_state.retried_steps > 1
    np.testing.assert_array_equal(totals, np.sum(x, 1))


def test_a_step_may_return_a_key():
    training = Training()

    def step(state, x, y):
        new, aux = training.step(state, x, y)
        return new, aux | {"key": new["key"]}

    state, aux = jax.jit(jamp.retry(step, 20))(training.start(), *batches()[0])
    check_same_bits(aux["key"], state["key"])


@needs_devices
def test_a_flag_that_differs_is_raised_on_all():
    # Without axis_name each device has its own scale, and JAX's types say so.
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), 2.0**20)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)

    def step(state, x):
        params, opt_state = state
        grads = (jamp.loss_scale(opt_state) * x).astype(jnp.float16)
        loss = jnp.sum(params * x)
        total = jax.lax.psum(loss, "data")  # devices that diverge here wait forever
        return jamp.step(tx, grads, opt_state, params), total

    def local(x):
        vary = lambda leaf: jax.lax.pcast(jnp.asarray(leaf), "data", to="varying")
        params = jnp.ones((1, 4))
        state = jax.tree.map(vary, (params, tx.init(params)))
        (params, opt_state), _ = jamp.retry(step)(state, x)
        return params, opt_state.loss_scale[None]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data"))
    )
    x = np.full((8, 4), 2.0**-6, np.float32)
    x[5] = 1.0
    params, scales = jax.jit(mapped)(x)
    np.testing.assert_array_equal(params, 1 - x)
    assert scales[5] == 2.0**15 and np.all(np.delete(scales, 5) == 2.0**20)


def test_the_starting_scale_is_found_and_nothing_else_is_changed():
    training = Training()
    start = training.start()
    state = jamp.find_loss_scale(training.step, start, *batches()[0])
    found = float(jamp.loss_scale(state))
    assert training.traces == 2 and np.log2(found) % 1 == 0  # once in float32
    reset = optax.tree.set(state["opt_state"], loss_scale=start["opt_state"].loss_scale)
    check_same_bits(state | {"opt_state": reset}, start)


@pytest.mark.slow
def test_the_starting_scale_is_the_largest():
    training = Training()
    start = training.start()
    x, y = batches()[0]
    found = float(jamp.loss_scale(jamp.find_loss_scale(training.step, start, x, y)))
    step = jax.jit(training.step)
    for scale, overflows in ((found, False), (2 * found, True)):
        at = optax.tree.set(start["opt_state"], loss_scale=jnp.float32(scale))
        new, _ = step(start | {"opt_state": at}, x, y)
        assert jamp.metrics(new)["found_inf"] == overflows


@pytest.mark.slow
def test_what_is_no_array_reaches_the_step_as_it_is():
    training = Training()

    def step(state, x, y, train, names=("a",)):
        assert train is True and names == ("b",)
        return training.step(state, x, y)

    x, y = batches()[0]
    x, y = np.asarray(x), np.asarray(y)
    state = jamp.find_loss_scale(step, training.start(), x, y, True, names=("b",))
    expected = jamp.find_loss_scale(training.step, training.start(), x, y)
    assert jamp.loss_scale(state) == jamp.loss_scale(expected)
    once, _ = jamp.retry(step, 20)(training.start(), x, y, True, names=("b",))
    assert jamp.loss_scale(once) == jamp.loss_scale(state)


def test_the_scale_is_found_for_each_optimizer_from_end_to_end():
    txs = [jamp.dynamic_loss_scale(optax.sgd(1.0)) for _ in range(4)]
    factors = [2.0**-100, 1.0, 2.0**100, 0.0]

    def step(states, x):
        new = []
        for tx, state, by in zip(txs, states, factors, strict=True):
            grads = jnp.float32(by) * jamp.loss_scale(state) * x
            new.append(tx.update(grads, state, x)[1])
        return new, None

    states = [tx.init(jnp.ones(2)) for tx in txs]
    found = jamp.find_loss_scale(step, states, jnp.ones(2))
    assert [np.log2(float(jamp.loss_scale(s))) for s in found] == [32, 32, 27, 32]


def test_a_scale_that_is_not_asked_stays():
    idle = Training(3.0)  # no power of two
    off = jamp.dynamic_loss_scale(optax.sgd(1.0), enabled=False)
    used = Training()

    def step(states, x, y):
        grads = jax.tree.map(jnp.ones_like, states["params"])
        _, disabled = jamp.step(off, grads, states["off"], states["params"])
        new, aux = used.step(states["used"], x, y)
        return states | {"used": new, "off": disabled}, aux

    stale = idle.start()
    skipped = {"found_inf": jnp.bool_(True), "recent_skips": jnp.uint32(5)}
    stale["opt_state"] = stale["opt_state"]._replace(**skipped)
    params = make_params()
    states = {"idle": stale, "used": used.start(), "off": off.init(params)}
    states["params"] = params
    found = jamp.find_loss_scale(step, states, *batches()[0])
    assert jamp.loss_scale(found["idle"]) == 3.0
    assert found["off"].loss_scale == 1.0
    assert 2.0**10 < jamp.loss_scale(found["used"]) < START


def test_a_loop_of_more_steps_than_the_state_records_is_asked():
    def steps(state, x):
        return lax.scan(lambda s, _: once(s, x), state, length=40)

    def once(state, x):
        params, opt_state = state
        loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(TX, grads, opt_state, params), loss

    state = jnp.ones(2), TX.init(jnp.ones(2))
    found = jamp.find_loss_scale(steps, state, jnp.full(2, 1e-3))
    assert jamp.loss_scale(found) == 2.0**15


def test_a_step_that_is_never_finite_has_no_scale():
    training = Training()
    x, y = batches()[0]
    nothing = r"jamp\.find_loss_scale: the step overflows at every loss scale"
    with pytest.raises(ValueError, match=nothing):
        jamp.find_loss_scale(training.step, training.start(), x * jnp.nan, y)


def unscaled_step(training):
    def step(state, x, y):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        params, opt_state = jamp.step(training.tx, grads, opt_state, params)
        return state | {"params": params, "opt_state": opt_state}, loss

    return step


@cover()
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_scaled_loss_is_found_wherever_the_step_is(wrap):
    training, idle = Training(), Training(2.0**3)
    expected = jamp.find_loss_scale(training.step, training.start(), *batches()[0])

    def with_idle(states, x, y):
        new, aux = training.step(states["used"], x, y)
        return states | {"used": new}, aux["loss"]

    states = {"used": training.start(), "idle": idle.start()}
    states["params"] = states["used"]["params"]
    found = jamp.find_loss_scale(WRAPS[wrap](with_idle), states, *batches()[0])
    assert jamp.loss_scale(found["idle"]) == 2.0**3
    if wrap != "scan of 3":
        assert jamp.loss_scale(found["used"]) == jamp.loss_scale(expected)


def test_which_of_several_losses_is_not_scaled():
    training = Training()
    right, wrong = training.step, unscaled_step(training)

    def step(states, x, y):
        return {
            "actor": right(states["actor"], x, y)[0],
            "critic": wrong(states["critic"], x, y)[0],
        }, None

    states = {"actor": training.start(), "critic": training.start()}
    with pytest.raises(ValueError, match=r"loss scale at \['critic'\]"):
        jamp.find_loss_scale(step, states, *batches()[0])


def test_a_scaler_that_never_scaled_is_told():
    def step(model, optimizer, scaler, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        scaler.step(optimizer, model, grads)
        scaler.update()

    model, scaler = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for wrap in (lambda step: step, nnx.jit):
        with pytest.raises(ValueError, match=r"return scaler\.scale"):
            jamp.find_loss_scale(wrap(step), model, optimizer, scaler, batches()[0][0])
    assert scaler.get_scale() == 2.0**16


def test_the_scale_of_nnx_objects_is_found_and_nothing_else_is_changed():
    """What was tried in a trace, numbers of the search, does not stay in them."""
    model, scaler = Net(), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    metrics, (x, y) = jamp.metrics(scaler), batches()[0]
    jamp.find_loss_scale(nnx_step, model, optimizer, scaler, x, y=y)
    check_same_bits(nnx.state((model, optimizer)), before)
    found = float(scaler.get_scale())
    check_same_bits(
        jamp.metrics(scaler) | {"loss_scale": metrics["loss_scale"]}, metrics
    )
    step = nnx.jit(nnx_step)
    for scale, overflows in ((2 * found, True), (found, False)):
        scaler.update(scale)
        assert step(model, optimizer, scaler, x, y=y)[1] == overflows


HIGH = 2.0**20
TX = jamp.dynamic_loss_scale(optax.sgd(0.5), growth_interval=1000)

# What a step may do to a counter: by the overflow, by another flag, or always.
COUNTS = {
    "always": lambda n, inf, a: n + 1,
    "never": lambda n, inf, a: n,
    "finite": lambda n, inf, a: jnp.where(inf, n, n + 1),
    "overflow": lambda n, inf, a: lax.cond(inf, lambda: n + 1, lambda: n),
    "flag": lambda n, inf, a: jnp.where(a, n + 1, n),
    "flag or overflow": lambda n, inf, a: lax.select_n(a | inf, n, n + 1),
    "other numbers": lambda n, inf, a: lax.select_n(inf, n + 1, 2 * n + 5),
}


@cover(ci=4)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["program", "host"])
@pytest.mark.parametrize("a", [True, False])
def test_a_counter_is_that_of_the_last_attempt_whatever_moves_it(wrap, a):
    def step(state, x, a):
        params, opt_state, counts = state
        loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        params, opt_state = jamp.step(TX, grads, opt_state, params)
        inf = opt_state.found_inf
        counts = {name: COUNTS[name](n, inf, a) for name, n in counts.items()}
        return (params, opt_state, counts), loss

    def start(scale):
        params = jnp.ones(2)
        opt_state = TX.init(params)._replace(loss_scale=jnp.float32(scale))
        return params, opt_state, dict.fromkeys(COUNTS, jnp.int32(3))

    batch = jnp.ones(2), jnp.bool_(a)
    for scale, last in ((HIGH, 2.0**2), (2.0**126, 2.0**126)):
        expected, _ = jax.jit(step)(start(last), *batch)  # which never fits at 2**126
        found, _ = wrap(jamp.retry(step, 6))(start(scale), *batch)
        assert found[1].found_inf == expected[1].found_inf == (last == 2.0**126)
        check_same_bits((found[0], found[2]), (expected[0], expected[2]))


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
FACTORS = [1.0, 1.0, 2.0, 8.0, 1.0, 2.0**14, 1.0, np.inf, 1.0]


@cover(quick=2)
@pytest.mark.parametrize("name", SCALES)
def test_all_of_the_scale_is_the_same_in_one_program_and_by_the_host(name):
    # Of signs, whose numbers are exact in each program.
    inner = optax.chain(optax.scale_by_sign(), optax.sgd(0.125, momentum=0.5))
    tx = jamp.dynamic_loss_scale(inner, **({"init_scale": 2.0**19} | SCALES[name]))

    def one(state, scaled):
        params, opt_state, count = state

        def loss_fn(params):
            half = params.astype(jnp.float16) * scaled.astype(jnp.float16)
            return jnp.sum(half).astype(jnp.float32)

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
    for scaled in FACTORS:
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
    assert states["host"][2] == len(FACTORS)


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


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["program", "host"])
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


# Keys that are used again on purpose, where JAX checks that none is.


def drawing_step(tx):
    def step(state, x):
        params, opt_state, key = state
        key, draw = jax.random.split(key)
        x = x + jax.random.normal(draw, x.shape) / 8
        loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return (*jamp.step(tx, grads, opt_state, params), key), loss

    return step


NOISY = optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1))


@cover(quick=2)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("call", ["step", "overflow", "retry", "find", "check"])
def test_keys_that_are_used_again_are_cloned(call, wrap):
    tx = jamp.dynamic_loss_scale(NOISY, 2.0**18 if call == "retry" else 2.0**4)
    step, params = drawing_step(tx), jnp.ones(2)
    x = jnp.full(2, jnp.inf if call == "overflow" else 1.0)
    with jax.debug_key_reuse(True):
        state = params, tx.init(params), jax.random.key(1)
        if call == "find":
            jamp.find_loss_scale(wrap(step), state, x)
        elif call == "check":
            assert not jamp.debug.check_step(wrap(step), state, x).problems
        else:
            taken = wrap(jamp.retry(step) if call == "retry" else step)
            for _ in range(2):
                state, _ = taken(state, x)
            assert jamp.metrics(state)["found_inf"] == (call == "overflow")
