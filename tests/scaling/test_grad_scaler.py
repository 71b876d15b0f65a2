"""GradScaler: torch's methods and errors, eagerly and under nnx.jit."""

import copy
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from tests.bits import check_rounded, check_same_bits
from tests.marks import cover

X = np.ones((4, 2), np.float32)
BAD = X.copy()
BAD[0, 0] = np.inf


def odd_eighths(key, shape, dtype):
    """Numbers of few bits, with which a step is exact in any program."""
    return (2 * jax.random.randint(key, shape, 0, 4) + 1).astype(dtype) / 8


def make_model(seed=0):
    model = nnx.Linear(2, 2, kernel_init=odd_eighths, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)


def mean_square(model, x):
    return jnp.mean((x @ model.kernel[...]) ** 2)


def scaled_grads(model, scaler, x):
    return nnx.grad(lambda model: scaler.scale(mean_square(model, x)))(model)


def train_step(model, optimizer, scaler, x):
    grads = scaled_grads(model, scaler, x)
    skipped = scaler.step(optimizer, model, grads)
    scaler.update()
    return skipped


def arrays(*nodes):
    return [jax.tree.map(np.asarray, nnx.as_pure(nnx.state(node))) for node in nodes]


@pytest.fixture(params=["jit", "eager"])
def wrap(request):
    return {"eager": lambda function: function, "jit": nnx.jit}[request.param]


def test_step_and_skip(wrap):
    (model, optimizer), scaler = make_model(), jamp.GradScaler(growth_interval=2)
    bare, bare_optimizer = make_model()
    step = wrap(train_step)
    skipped = [bool(step(model, optimizer, scaler, x)) for x in (X, BAD, 2 * X, X)]
    assert skipped == [False, True, False, False]
    for x in (X, 2 * X, X):
        grads = nnx.grad(lambda model, x=x: mean_square(model, x))(bare)
        bare_optimizer.update(bare, grads)
    check_same_bits(arrays(model, optimizer), arrays(bare, bare_optimizer))
    assert optimizer.step[...] == 3
    assert scaler.state_dict() == {
        "scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 0,
    }


def test_a_skip_holds_model_and_optimizer_bit_for_bit(wrap):
    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    step = wrap(train_step)
    step(model, optimizer, scaler, X)
    before = arrays(model, optimizer)
    assert step(model, optimizer, scaler, BAD)
    chex.assert_trees_all_equal(arrays(model, optimizer), before)
    assert not step(model, optimizer, scaler, X)  # the control
    assert np.any(arrays(model)[0]["kernel"] != before[0]["kernel"])


def test_unscale_gives_plain_gradients_for_clipping(wrap):
    def clipped_step(model, optimizer, scaler, x):
        grads = scaler.unscale_(optimizer, scaled_grads(model, scaler, x))
        norm = optax.tree.norm(nnx.as_pure(grads))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        skipped = scaler.step(optimizer, model, grads)
        scaler.update()
        return norm, skipped

    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    plain = nnx.as_pure(nnx.grad(lambda m: mean_square(m, X))(model))
    before = arrays(model)[0]["kernel"]
    norm, skipped = wrap(clipped_step)(model, optimizer, scaler, X)
    check_rounded(norm, optax.tree.norm(plain), 1)
    moved = np.linalg.norm(arrays(model)[0]["kernel"] - before)
    # Each of four elements is clipped, and subtracted from a number below 1.
    check_rounded(moved, 0.5 * 0.1, 4, largest=1.0)
    assert not skipped
    norm, skipped = wrap(clipped_step)(model, optimizer, scaler, BAD)
    assert skipped and not np.isfinite(norm)


@cover(ci=2)
def test_accumulated_gradients_are_checked_once(wrap):
    def accumulated(model, optimizer, scaler, xs):
        grads = [scaled_grads(model, scaler, x) for x in xs]
        total = jax.tree.map(lambda *g: sum(g[1:], g[0]) / len(g), *grads)
        skipped = scaler.step(optimizer, model, total)
        scaler.update()
        return skipped

    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    assert not wrap(accumulated)(model, optimizer, scaler, [X, 2 * X])
    assert wrap(accumulated)(model, optimizer, scaler, [X, BAD])
    assert scaler.get_scale() == 2.0**15


def test_works_with_the_optax_wrapper_in_an_nnx_optimizer():
    model, _ = make_model()
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = lambda m: jamp.scale_loss(mean_square(m, x), optimizer.opt_state)
        optimizer.update(model, nnx.grad(loss_fn)(model))

    step(model, optimizer, X)
    before = arrays(model)
    step(model, optimizer, BAD)
    chex.assert_trees_all_equal(arrays(model), before)
    assert jamp.metrics(optimizer.opt_state)["skipped_steps"] == 1
    assert jamp.loss_scale(optimizer.opt_state) == 2.0**15


def test_scale_takes_nests_and_keeps_array_dtypes():
    scaler = jamp.GradScaler(8.0)
    nest = {"a": jnp.float16(2), "b": [jnp.ones(2, jnp.float16), (3.0, jnp.int32(1))]}
    scaled = scaler.scale(nest)
    assert scaled["a"] == 16 and scaled["a"].dtype == jnp.float32
    assert scaled["b"][0].dtype == jnp.float16
    assert [float(value) for value in scaled["b"][1]] == [24.0, 8.0]


def test_update_with_a_new_scale(wrap):
    def body(scaler, value):
        scaler.update(value)
        return scaler.get_scale()

    scaler = jamp.GradScaler()
    scaler.growth_tracker[...] = jnp.int32(5)
    assert wrap(body)(scaler, jnp.float32(3.7)) == np.float32(3.7)
    scaler.update(2)
    scaler.update(new_scale=np.float64(1024))
    assert scaler.state_dict()["scale"] == 1024.0
    assert scaler.state_dict()["_growth_tracker"] == 5


@cover(ci=2)
def test_a_new_scale_ends_an_iteration(wrap):
    def body(model, optimizer, scaler, x):
        skipped = []
        for new_scale in (8.0, None, 4.0):
            grads = scaled_grads(model, scaler, x)
            skipped.append(scaler.step(optimizer, model, grads))
            scaler.update(new_scale)
        scaler.unscale_(optimizer, scaled_grads(model, scaler, x))
        scaler.update(2.0)
        return skipped, scaler.unscale_(optimizer, scaled_grads(model, scaler, x))

    (model, optimizer), scaler = make_model(), jamp.GradScaler()

    def ended(*args):
        skipped, grads = body(*args)
        args[2].update(1.0)
        return skipped, nnx.as_pure(grads)

    skipped, grads = wrap(ended)(model, optimizer, scaler, X)
    assert not any(skipped) and scaler.get_scale() == 1.0
    plain = nnx.as_pure(nnx.grad(lambda m: mean_square(m, X))(model))
    check_same_bits(grads, plain)


def test_get_scale_is_a_float_outside_and_an_array_inside_a_trace():
    scaler = jamp.GradScaler()
    assert type(scaler.get_scale()) is float

    @nnx.jit
    def inside(scaler):
        assert isinstance(scaler.get_scale(), jax.core.Tracer)
        return scaler.get_scale()

    assert inside(scaler) == 2.0**16


def test_setters_take_effect(wrap):
    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    assert scaler.get_growth_interval() == 1
    assert scaler.get_growth_factor() == 4.0 and scaler.get_backoff_factor() == 0.25
    step = wrap(train_step)
    step(model, optimizer, scaler, X)
    assert scaler.get_scale() == 2.0**18
    step(model, optimizer, scaler, BAD)
    assert scaler.get_scale() == 2.0**16


def test_disabled(wrap):
    (model, optimizer), scaler = make_model(), jamp.GradScaler(enabled=False)
    assert not scaler.is_enabled() and jamp.GradScaler().is_enabled()
    loss = jnp.float16(3)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert not wrap(train_step)(model, optimizer, scaler, BAD)
    assert not np.all(np.isfinite(arrays(model)[0]["kernel"]))  # applied, as in torch
    scaler.load_state_dict({})
    scaler.update()


def clipped(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)


@cover(ci=2)
def test_gradients_of_another_backward_pass_are_told_from_unscaled_ones(wrap):
    def body(model, optimizer, scaler, x):
        try:
            scaler.unscale_(optimizer, scaled_grads(model, scaler, x))
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        grads = scaled_grads(model, scaler, 2 * x)  # the next iteration, not unscaled
        with pytest.warns(
            RuntimeWarning, match=r"step\(\) got gradients that unscale_"
        ):
            scaler.step(optimizer, model, grads)
        scaler.update()

    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    wrap(body)(model, optimizer, scaler, X)


@pytest.mark.filterwarnings("error")
def test_after_update_an_iteration_that_ended_early_is_forgotten():
    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    scaler.unscale_(optimizer, scaled_grads(model, scaler, X))
    scaler.update()  # what the message says
    before = arrays(model)[0]["kernel"]
    grads = nnx.as_pure(nnx.grad(lambda m: mean_square(m, X))(model))["kernel"]
    assert not train_step(model, optimizer, scaler, X)
    moved = before - arrays(model)[0]["kernel"]
    np.testing.assert_array_equal(moved, 0.5 * grads)


@cover(ci=6)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("order", ["one by one", "all at once", "unscaled between"])
def test_several_losses_in_one_iteration_make_no_warning(wrap, order):
    """As in a GAN: two models, two losses, one scaler, and clipped gradients."""

    def one_by_one(pairs, scaler, x):
        for model, optimizer in pairs:
            grads = scaler.unscale_(optimizer, scaled_grads(model, scaler, x))
            scaler.step(optimizer, model, clipped(grads))

    def all_at_once(pairs, scaler, x):
        grads = [scaled_grads(model, scaler, x) for model, _ in pairs]
        grads = [
            scaler.unscale_(optimizer, own)
            for (_, optimizer), own in zip(pairs, grads, strict=True)
        ]
        for (model, optimizer), own in zip(pairs, grads, strict=True):
            scaler.step(optimizer, model, clipped(own))

    def unscaled_between(pairs, scaler, x):
        grads = [
            scaler.unscale_(optimizer, scaled_grads(model, scaler, x))
            for model, optimizer in pairs
        ]
        for (model, optimizer), own in zip(pairs, grads, strict=True):
            scaler.step(optimizer, model, own)

    def body(first, second, scaler, x):
        ways[order]((first, second), scaler, x)
        scaler.update()

    ways = {
        "one by one": one_by_one,
        "all at once": all_at_once,
        "unscaled between": unscaled_between,
    }
    first, second, scaler = make_model(0), make_model(1), jamp.GradScaler()
    before = arrays(first[0], second[0])
    wrap(body)(first, second, scaler, X)
    for old, new in zip(before, arrays(first[0], second[0]), strict=True):
        assert 0 < np.max(np.abs(new["kernel"] - old["kernel"])) < 1


def test_a_step_that_raises_does_not_forget_what_was_unscaled():
    class Fails(Exception):
        pass

    def failing(updates, params):
        if fails:
            raise Fails
        return updates

    model, _ = make_model()
    tx = optax.chain(optax.stateless(failing), optax.sgd(0.5))
    optimizer, scaler = nnx.Optimizer(model, tx, wrt=nnx.Param), jamp.GradScaler()
    start, plain = model.kernel[...], nnx.grad(lambda m: mean_square(m, X))(model)
    grads = scaler.unscale_(optimizer, scaled_grads(model, scaler, X))
    fails = True
    with pytest.raises(Fails):
        scaler.step(optimizer, model, grads)
    with pytest.raises(ValueError, match=r"parameters have a leaf at \['kernel'\]"):
        scaler.step(optimizer, model, nnx.State({"bias": grads["bias"]}))
    fails = False
    assert not scaler.step(optimizer, model, grads)
    expected = start - 0.5 * plain["kernel"][...]
    np.testing.assert_array_equal(model.kernel[...], expected)
    scaler.update()


def test_half_an_iteration_cannot_leave_a_trace():
    @nnx.jit
    def half(model, optimizer, scaler):
        scaler.unscale_(optimizer, scaled_grads(model, scaler, X))

    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    with pytest.raises(RuntimeError, match="in the middle of an iteration"):
        half(model, optimizer, scaler)
    assert not nnx.jit(train_step)(model, optimizer, scaler, X)  # still usable


def test_half_an_iteration_cannot_enter_a_trace_or_be_copied():
    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    scaler.unscale_(optimizer, scaled_grads(model, scaler, X))
    for action in (
        lambda: nnx.jit(train_step)(model, optimizer, scaler, X),
        lambda: copy.deepcopy(scaler),
        lambda: pickle.dumps(scaler),
        lambda: nnx.split(scaler),
        lambda: scaler.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="in the middle of an iteration"):
            action()
    scaler.update()
    copy.deepcopy(scaler)


def test_a_scaler_closed_over_by_a_trace_recovers():
    (model, optimizer), scaler = make_model(), jamp.GradScaler()

    @nnx.jit
    def step(model, optimizer):  # wrong: the scaler is not an argument
        scaler.unscale_(optimizer, scaled_grads(model, scaler, X))
        scaler.update()

    with pytest.raises(Exception, match="different trace level"):
        step(model, optimizer)
    with pytest.raises(RuntimeError, match="in the middle of an iteration"):
        train_step(model, optimizer, scaler, X)
    assert not train_step(model, optimizer, scaler, X)


class First(nnx.Param):
    pass


class Second(nnx.Param):
    pass


class TwoParts(nnx.Module):
    def __init__(self):
        self.first, self.second = First(jnp.ones(2)), Second(jnp.ones(2))


@cover(ci=4)
@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_models_one_is_skipped_and_any_overflow_halves_the_scale(wrap, bad):
    def body(models, optimizers, scaler, inputs):
        pairs = zip(models, optimizers, inputs, strict=True)
        skipped = [
            scaler.step(optimizer, model, scaled_grads(model, scaler, x))
            for model, optimizer, x in pairs
        ]
        scaler.update()
        return skipped

    pairs = make_model(0), make_model(1)
    models, optimizers = zip(*pairs, strict=True)
    scaler, inputs = jamp.GradScaler(init_scale=8.0), [X, X]
    inputs[bad] = BAD
    before = [arrays(*pair) for pair in pairs]
    skipped = wrap(body)(models, optimizers, scaler, inputs)
    assert list(map(bool, skipped)) == [i == bad for i in (0, 1)]
    chex.assert_trees_all_equal(arrays(*pairs[bad]), before[bad])
    moved = arrays(*pairs[1 - bad])[0]["kernel"] != before[1 - bad][0]["kernel"]
    assert np.any(moved) and scaler.get_scale() == 4.0


@cover(ci=4)
@pytest.mark.parametrize("unscale", [False, True])
def test_two_optimizers_on_one_model_share_its_gradients(wrap, unscale):
    def body(model, optimizers, scaler, grads):
        if unscale:
            for optimizer in optimizers:
                grads = scaler.unscale_(optimizer, grads)
        skipped = [scaler.step(optimizer, model, grads) for optimizer in optimizers]
        scaler.update()
        return skipped

    model, scaler = TwoParts(), jamp.GradScaler(8.0)
    optimizers = [nnx.Optimizer(model, optax.sgd(1.0), wrt=w) for w in (First, Second)]
    grads = nnx.State({"first": First(jnp.full(2, 8.0)), "second": Second(BAD[0])})
    skipped = wrap(body)(model, optimizers, scaler, grads)
    assert [bool(flag) for flag in skipped] == [False, True]
    np.testing.assert_array_equal(model.first[...], 0.0)  # unscaled once
    np.testing.assert_array_equal(model.second[...], 1.0)
    assert scaler.get_scale() == 4.0


@cover(ci=2)
def test_a_model_may_hold_its_scaler(wrap):
    class Trainee(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.scaler = jamp.GradScaler()

    def body(model, optimizer, x):
        grads = nnx.grad(lambda m: m.scaler.scale(jnp.mean(m.dense(x) ** 2)))(model)
        grads = model.scaler.unscale_(optimizer, grads)
        skipped = model.scaler.step(optimizer, model, grads)
        model.scaler.update()
        return skipped

    model = Trainee()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert not wrap(body)(model, optimizer, X)
    assert wrap(body)(model, optimizer, BAD)
    assert model.scaler.get_scale() == 2.0**15


def test_bounds_and_hysteresis_are_those_of_the_wrapper():
    (model, optimizer) = make_model()
    scaler = jamp.GradScaler(
        8.0, growth_interval=1, min_scale=4.0, max_scale=16.0, hysteresis=2
    )
    scales = []
    for x in (X, X, BAD, BAD, BAD, BAD):
        train_step(model, optimizer, scaler, x)
        scales.append(scaler.get_scale())
    assert scales == [16.0, 16.0, 16.0, 8.0, 4.0, 4.0]


@cover(ci=2)
def test_extra_arguments_reach_the_optimizer(wrap):
    def body(model, optimizer, scaler, grads):
        return scaler.step(optimizer, model, grads, value=jnp.float32(0.25))

    model, scaler = make_model()[0], jamp.GradScaler(2.0)
    optimizer = nnx.Optimizer(model, optax.polyak_sgd(), wrt=nnx.Param)
    grads = jax.tree.map(lambda p: 2 * jnp.ones_like(p), nnx.state(model, nnx.Param))
    before = arrays(model)[0]["kernel"]

    def whole(*args):
        body(*args)
        args[2].update()

    wrap(whole)(model, optimizer, scaler, grads)
    moved = before - arrays(model)[0]["kernel"]  # value / |grad|^2, |grad|^2 = 6
    np.testing.assert_allclose(moved, 0.25 / 6, rtol=1e-4)


def test_repr_in_the_middle_of_an_iteration():
    (model, optimizer), scaler = make_model(), jamp.GradScaler()
    scaler.unscale_(optimizer, scaled_grads(model, scaler, X))
    assert "scale=65536.0" in repr(scaler) and "growth_interval=2000" in repr(scaler)
    assert str(scaler) == repr(scaler)


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_copies_are_equal_and_apart(copier):
    (model, optimizer), scaler = make_model(), jamp.GradScaler(growth_interval=3)
    train_step(model, optimizer, scaler, X)
    twin = copier(scaler)
    assert twin.state_dict() == scaler.state_dict()
    train_step(model, optimizer, scaler, BAD)
    assert twin.get_scale() == 2 * scaler.get_scale()
    assert nnx.jit(train_step)(model, optimizer, twin, BAD)


@cover(ci=2)
def test_a_disabled_scaler_keeps_the_scale_for_an_enabled_one(wrap):
    (model, optimizer), off = make_model(), jamp.GradScaler(8.0, enabled=False)
    wrap(train_step)(model, optimizer, off, BAD)
    assert off.get_scale() == jamp.loss_scale(off) == jamp.scale_loss(1.0, off) == 1.0
    assert "scale=1.0" in str(off)
    on = jamp.GradScaler()
    nnx.update(on, nnx.state(off))
    assert on.get_scale() == 8.0
    train_step(*make_model(), on, BAD)
    nnx.update(off, nnx.state(on))
    assert off.get_scale() == jamp.metrics(off)["loss_scale"] == 1.0
    resumed = jamp.GradScaler()
    nnx.update(resumed, nnx.state(off))
    assert resumed.state_dict() == on.state_dict()


def test_state_dict_round_trip():
    (model, optimizer), scaler = make_model(), jamp.GradScaler(3.7, hysteresis=3)
    train_step(model, optimizer, scaler, BAD)
    saved = scaler.state_dict()
    assert saved["scale"] == float(np.float32(3.7))
    assert saved["_hysteresis_tracker"] == 2  # overflows are left
    fresh = jamp.GradScaler(hysteresis=3)
    fresh.load_state_dict(saved)
    assert fresh.state_dict() == saved
    plain = jamp.GradScaler(max_scale=2.0, init_scale=1.0)
    plain.load_state_dict({**saved, "_hysteresis_tracker": 3})
    assert plain.hysteresis_tracker[...] == 0 and plain.get_scale() == 2.0


def test_bfloat16_gradients_keep_their_dtype():
    model, scaler = make_model()[0], jamp.GradScaler(3.0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    grads = jax.tree.map(
        lambda p: jnp.full(p.shape, 2, jnp.bfloat16), nnx.state(model, nnx.Param)
    )
    unscaled = nnx.as_pure(scaler.unscale_(optimizer, grads))
    assert unscaled["kernel"].dtype == jnp.bfloat16
    expected = (jnp.float32(2) * np.float32(1 / 3)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(unscaled["kernel"], jnp.full((2, 2), expected))


@pytest.mark.gpu
def test_a_jitted_step_traces_once_and_transfers_nothing(checking_leaks):
    (model, optimizer), scaler = make_model(), jamp.GradScaler(growth_interval=7)
    traces = []

    @nnx.jit
    def step(model, optimizer, scaler, x):
        traces.append(1)
        return train_step(model, optimizer, scaler, x)

    x, bad = jax.device_put(X), jax.device_put(BAD)
    with jax.transfer_guard("disallow"):
        skipped = [
            step(model, optimizer, scaler, bad if i % 10 == 3 else x) for i in range(20)
        ]
    assert len(traces) == 1
    assert sum(map(int, skipped)) == 2


@pytest.mark.parametrize("enabled", [1, np.True_, True])
def test_enabled_takes_what_torch_scripts_pass(enabled):
    assert jamp.GradScaler(enabled=enabled).is_enabled() is True
    assert jamp.GradScaler(enabled=type(enabled)(0)).is_enabled() is False


def test_a_module_that_is_no_pytree_is_trained():
    class Model(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))
            self.sizes = [1, 2]

    model, scaler = Model(), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, optax.sgd(0.25), wrt=nnx.Param)
    loss_fn = lambda model: scaler.scale(jnp.sum(model.w[...] ** 2))
    assert not scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
    np.testing.assert_array_equal(model.w[...], 0.5)


def stacked(shape):
    """A scaler for each of some models, as `nnx.vmap` makes them."""
    make = lambda scale: jamp.GradScaler(1024.0, hysteresis=3)
    for _ in shape:
        make = nnx.vmap(make)
    return nnx.jit(make)(np.ones(shape, np.float32))


@cover(ci=3)
@pytest.mark.parametrize("shape", [(3,), (1,), (2, 3)])
def test_a_stacked_scaler_is_logged_and_copied(shape):
    """A third of the scalers overflow, and each has its own numbers afterwards."""
    scaler = stacked(shape)
    found_inf = np.arange(np.prod(shape)).reshape(shape) % 3 == 1

    def overflow(scaler, found_inf):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        grad = jnp.where(found_inf, jnp.inf, 1.0)
        grads = jax.tree.map(lambda x: jnp.full_like(x, grad), nnx.state(model))
        scaler.step(optimizer, model, grads)
        scaler.update()

    for _ in shape:
        overflow = nnx.vmap(overflow)
    overflow = nnx.jit(overflow)
    for _ in range(3):
        overflow(scaler, jnp.asarray(found_inf))
    expected = np.where(found_inf, 512.0, 1024.0)
    assert np.array_equal(scaler.get_scale(), expected)
    assert "512" in repr(scaler) if found_inf.any() else "1024" in str(scaler)
    logged = jamp.metrics(scaler)
    assert np.array_equal(logged["growth_tracker"], np.where(found_inf, 0, 3))
    assert np.array_equal(logged["skipped_steps"], 3 * found_inf)
    assert np.array_equal(scaler.hysteresis_tracker[...], np.where(found_inf, 2, 0))
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert np.array_equal(copied.get_scale(), expected)


def test_a_stacked_scaler_takes_one_number():
    scaler = stacked((3,))
    scaler.update(4.0)
    assert scaler.get_scale().tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="new_scale must be one number; got shape"):
        scaler.update(jnp.arange(1.0, 4))
    one = jamp.GradScaler(8.0).state_dict()
    for call in (scaler.state_dict, lambda: scaler.load_state_dict(one)):
        with pytest.raises(ValueError, match=r"nnx\.state"):
            call()
    with pytest.raises(ValueError, match="scale must be one number; got shape"):
        jamp.GradScaler().load_state_dict(one | {"scale": np.ones(3)})
    with pytest.raises(ValueError, match=r"check: .*jax\.tree\.map"):
        jamp.debug.check(scaler)
    one = jax.tree.map(lambda x: x[0], jamp.metrics(scaler))
    jamp.debug.check(one)
