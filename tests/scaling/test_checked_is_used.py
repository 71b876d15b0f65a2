"""What is checked is what the optimizer uses: no more, no less, and nothing around it.

A gradient that the optimizer throws away skips nothing. A derivative that it takes
itself counts. And `jamp.step` sees what stands in front of a loss scale and behind it.
"""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp._scaling import skip
from jamp._scaling.traced import reads_and_run

from ..bits import check_near, check_same_bits, nudged, numbers
from ..marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

JIT_AND_EAGER = pytest.mark.parametrize(
    "wrap", [jax.jit, lambda f: f], ids=["jit", "eager"]
)


def by_name(of_w, of_b):
    """A function from parameters, of a dict or of NNX, to a tree of labels."""
    choose = lambda path, _: of_w if "w" in jax.tree_util.keystr(path) else of_b
    return functools.partial(jax.tree_util.tree_map_with_path, choose)


TRAIN, FROZEN = by_name(True, False), by_name(False, True)
LABELS = by_name("train", "freeze")


def params_of(dtype=jnp.float32):
    ones = {"w": np.ones((4, 2), dtype), "b": np.ones(2, dtype)}
    return jax.tree.map(jnp.asarray, ones)


def split(train):
    parts = {"train": train, "freeze": optax.set_to_zero()}
    return optax.multi_transform(parts, LABELS)


def jitted(tx):
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


def zeroed_by_hand(updates, params):
    del params
    zeros = lambda update, is_one: jnp.zeros_like(update) if is_one else update
    return jax.tree.map(zeros, updates, FROZEN(updates))


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def every_second(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


ADAM = optax.adam(1e-2)
BEHIND = split(optax.scale_by_adam())

# Optimizers that do not read the gradient of "b".
FREEZING = {
    "multi_transform": split(ADAM),
    "clipping in the part": split(clipped(ADAM)),
    "accumulation in the part": split(every_second(ADAM)),
    "masked twice": optax.chain(
        optax.masked(ADAM, TRAIN), optax.masked(optax.set_to_zero(), FROZEN)
    ),
    "zeros first": optax.chain(optax.masked(optax.set_to_zero(), FROZEN), ADAM),
    "a rate behind": optax.chain(BEHIND, optax.scale(-1e-2)),
    "a schedule behind": optax.chain(
        BEHIND, optax.scale_by_learning_rate(optax.linear_schedule(1e-2, 0.0, 9))
    ),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: split(optax.adam(rate))
    )(rate=1e-2),
    "jitted": jitted(split(ADAM)),
    "by hand": optax.chain(optax.stateless(zeroed_by_hand), ADAM),
    "master_weights": jamp.master_weights(split(ADAM)),
}
# Optimizers that do.
READING = {
    "all": ADAM,
    "clipping of all": clipped(split(ADAM)),
    "accumulation of all": every_second(split(ADAM)),
}


class Model(nnx.Module):
    def __init__(self):
        for name, value in params_of().items():
            setattr(self, name, nnx.Param(value))


def by_update(tx):
    def step(grads):
        state = tx.init(params_of())
        updates, state = tx.update(grads, state, params_of())
        return optax.apply_updates(params_of(), updates), state.found_inf

    return step


def by_step(tx):
    def step(grads):
        params, state = jamp.step(tx, grads, tx.init(params_of()), params_of())
        return params, state.found_inf

    return step


def by_train_state(tx):
    def step(grads):
        state = jamp.linen.TrainState.create(apply_fn=None, params=params_of(), tx=tx)
        state = state.apply_gradients(grads=grads)
        return state.params, state.opt_state.found_inf

    return step


def by_scaler(inner):
    def step(grads):
        model, scaler = Model(), jamp.GradScaler()
        optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
        tree = nnx.state(model, nnx.Param)
        grads = jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(grads))
        skipped = scaler.step(optimizer, model, grads)
        scaler.update()
        return {"w": model.w[...], "b": model.b[...]}, skipped

    return step


WAYS = {
    "update": lambda inner: by_update(jamp.dynamic_loss_scale(inner)),
    "step": lambda inner: by_step(jamp.dynamic_loss_scale(inner)),
    "static": lambda inner: by_step(jamp.static_loss_scale(inner, 2.0**16)),
    "TrainState": lambda inner: by_train_state(jamp.dynamic_loss_scale(inner)),
    "GradScaler": by_scaler,
}


def gradients(**bad):
    grads = {"w": np.full((4, 2), 2.0**15, "f4"), "b": np.full(2, 2.0**15, "f4")}
    for name, value in bad.items():
        grads[name][0] = value
    return jax.tree.map(jnp.asarray, grads)


@cover(quick=6)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", FREEZING)
@pytest.mark.parametrize("wrap", ["jit", "select", "eager"])
def test_an_unread_gradient_skips_nothing(wrap, name, how, monkeypatch):
    if wrap == "select":
        monkeypatch.setattr(skip, "branches", lambda: np.False_)
    step = WAYS[how](FREEZING[name])
    step = step if wrap == "eager" else jax.jit(step)
    expected, skipped = step(gradients())
    assert not skipped
    for bad in (jnp.inf, jnp.nan):
        found, skipped = step(gradients(b=bad))
        assert not skipped
        chex.assert_trees_all_equal(found, expected)
    np.testing.assert_array_equal(expected["b"], params_of()["b"])
    found, skipped = step(gradients(w=jnp.inf))
    assert skipped
    chex.assert_trees_all_equal(found, params_of())


@cover(quick=2, ci=10)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_gradient_that_the_trace_does_not_see_is_checked(bad, how):
    """Beside traced gradients, one that is known when the program is traced."""
    known, step = gradients(b=bad)["b"], WAYS[how](optax.adam(0.1))
    found, skipped = jax.jit(lambda w: step({"w": w, "b": known}))(gradients()["w"])
    assert skipped
    chex.assert_trees_all_equal(found, params_of())


@cover(quick=2, ci=12)
@pytest.mark.parametrize("how", ["step", "GradScaler"])
@pytest.mark.parametrize("name", READING)
@JIT_AND_EAGER
def test_a_gradient_that_is_read_skips(wrap, name, how):
    found, skipped = wrap(WAYS[how](READING[name]))(gradients(b=jnp.inf))
    assert skipped
    chex.assert_trees_all_equal(found, params_of())


def needs_values(tx):
    """An optimizer that JAX cannot trace: Python reads values in both functions."""

    def init(params):
        return tx.init(jax.tree.map(np.asarray, params))

    def update(updates, state, params=None):
        most = max(np.max(np.abs(update)) for update in jax.tree.leaves(updates))
        rate = 0.5 if most > 1e9 else 1.0
        return tx.update(jax.tree.map(lambda u: u * rate, updates), state, params)

    return optax.GradientTransformation(init, update)


UNTRACED = {
    "sgd": split(optax.sgd(1e-2)),
    "split": split(ADAM),
    "moments in bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}


@cover(ci=9)
@pytest.mark.parametrize("how", ["static", "step", "GradScaler"])
@pytest.mark.parametrize("name", UNTRACED)
def test_an_optimizer_that_cannot_be_traced_trains_and_skips_eagerly(name, how):
    inner = UNTRACED[name]
    step, expected = WAYS[how](needs_values(inner)), WAYS[how](inner)
    for grads, skips in ((gradients(), False), (gradients(w=jnp.inf), True)):
        found, skipped = step(grads)
        assert skipped == skips
        chex.assert_trees_all_equal(found, expected(grads)[0])
    assert step(gradients(b=jnp.inf))[1]  # nothing is known of what it reads


@cover(ci=4)
@pytest.mark.parametrize("name", ["sgd", "split"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_master_weights_of_an_optimizer_that_cannot_be_traced(dtype, name):
    params = params_of(dtype)
    tx, plain = needs_values(UNTRACED[name]), UNTRACED[name]
    state = jamp.master_weights(tx).init(params)
    grads = params_of(dtype)
    found, _ = jamp.step(jamp.master_weights(tx), grads, state, params)
    plain = jamp.master_weights(plain)
    expected, _ = jamp.step(plain, grads, plain.init(params), params)
    chex.assert_trees_all_equal(found, expected)


def test_after_unscale_every_gradient_counts():
    # The user reads them all, for example to clip by their norm.
    model, scaler = Model(), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, split(ADAM), wrt=nnx.Param)
    tree = nnx.state(model, nnx.Param)
    grads = jax.tree.map(lambda old: jnp.full_like(old, jnp.inf), tree)
    assert scaler.step(optimizer, model, scaler.unscale_(optimizer, grads))


def adapters(layers=2):
    params = {}
    for i in range(layers):
        params[f"w{i}"] = np.full((32, 32), 1 / 32, "f4")
        params[f"a{i}"] = np.full((32, 4), 1 / 32, "f4")
        params[f"b{i}"] = np.zeros((4, 32), "f4")
    return params


def adapted_loss(params, x):
    with jamp.autocast(dtype=jnp.float16):
        for i in range(len(params) // 3):
            low = (x @ params[f"a{i}"]) @ params[f"b{i}"]
            x = jnp.tanh(x @ params[f"w{i}"] + low)
        return jnp.mean(x**2)


def products(function, *args, donate=()):
    lowered = jax.jit(function, donate_argnums=donate).lower(*args)
    text = lowered.compile().as_text()
    return len(re.findall(r"= \S+ dot\(", text))


@pytest.mark.cpu  # it counts the products of a program for one
@cover(quick=2, ci=8)
@pytest.mark.parametrize("how", ["step", "update"])
@pytest.mark.parametrize("program", ["labels", "all", "partition", "labels, donated"])
def test_gradients_of_frozen_parameters_are_not_computed(program, how):
    """A program with labels has as many products as one that differentiates less.

    Where it is donated what it steps, it branches on a CPU. The control trains all.
    """
    params, x = adapters(), np.ones((8, 32), "f4")
    labels = {name: "freeze" if name[0] == "w" else "train" for name in params}
    parts = {"train": ADAM, "freeze": optax.set_to_zero()}
    tx = jamp.dynamic_loss_scale(optax.multi_transform(parts, labels))
    plain = jamp.dynamic_loss_scale(ADAM)

    def stepped(tx, loss_fn, params, state):
        loss, grads = jamp.value_and_grad(loss_fn, state)(params)
        if how == "step":
            return *jamp.step(tx, grads, state, params), loss
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def by_labels(params, state):
        return stepped(tx, lambda params: adapted_loss(params, x), params, state)

    def by_partition(trained, frozen, state):
        loss_fn = lambda trained: adapted_loss(trained | frozen, x)
        return stepped(plain, loss_fn, trained, state)

    trained = {name: p for name, p in params.items() if labels[name] == "train"}
    frozen = {name: p for name, p in params.items() if labels[name] == "freeze"}
    if program == "partition":
        assert products(by_partition, trained, frozen, plain.init(trained)) == 14
        return
    tx = plain if program == "all" else tx
    donate = (0, 1) if program == "labels, donated" else ()
    count = products(by_labels, params, tx.init(params), donate=donate)
    assert count > 14 if program == "all" else count == 14


def test_a_freeze_around_master_weights_saves_their_copies():
    parts = {"train": jamp.master_weights(ADAM), "freeze": optax.set_to_zero()}
    tx, params = optax.multi_transform(parts, LABELS), params_of(jnp.bfloat16)
    tx = jamp.dynamic_loss_scale(tx)
    state = tx.init(params)
    masters = jax.tree.leaves(optax.tree.get(state, "master"))
    assert [m.shape for m in masters] == [params["w"].shape]
    new, _ = jamp.step(tx, params, state, params)
    np.testing.assert_array_equal(new["b"], params["b"])


def test_a_half_parameter_without_its_master_is_refused():
    """As in a state of an earlier version, which had none of frozen parameters."""
    params, tx = params_of(jnp.bfloat16), jamp.master_weights(split(ADAM))
    state = tx.init(params)
    older = state._replace(master=state.master | {"b": optax.MaskedNode()})
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        tx.update(params, older, params)


def test_what_is_read():
    function = lambda t: {"a": t["a"] * 2, "b": jnp.zeros_like(t["b"]), "c": t["n"]}
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "n": jnp.arange(2), "none": None}
    found = {"a": True, "b": False, "n": True, "none": None}
    assert reads_and_run(function, tree)[0] == found
    assert reads_and_run(jax.jit(function), tree)[0] == found


# Derivatives that an optimizer takes itself.

SAM = optax.contrib.sam(ADAM, optax.sgd(0.1), opaque_mode=True)


def given_to_all(params):
    """What trainers pass to every optimizer, whether it takes it or not."""
    constant = lambda params: jnp.float32(0)
    return {"value_fn": constant, "value": jnp.float32(0), "grad": params}


TAKE_DERIVATIVES = {
    "grad_fn": SAM,
    "obj_fn": optax.contrib.sophia(0.1),
    "value_fn": optax.chain(ADAM, optax.scale_by_zoom_linesearch(5)),
    "grad": optax.scale_by_backtracking_linesearch(5),
}
IGNORE = {
    "adam": ADAM,
    "chain": optax.chain(optax.clip(1.0), ADAM),
    "plateau": optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=5)),
    "masters": jamp.master_weights(ADAM),
    "split": split(ADAM),
    "MultiSteps": every_second(ADAM),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
}


@cover(quick=4)
@JIT_AND_EAGER
@pytest.mark.parametrize("name", [*TAKE_DERIVATIVES, *IGNORE])
def test_what_an_optimizer_must_not_use_is_refused_when_it_is_used(name, wrap):
    inner, params = (TAKE_DERIVATIVES | IGNORE)[name], params_of()
    is_ignored = name in IGNORE
    refused = pytest.raises(ValueError, match=r"is not supported.*opaque_mode=False")
    tx = jamp.dynamic_loss_scale(inner)
    given = given_to_all
    if name in ("grad_fn", "obj_fn"):
        given = lambda params: {name: lambda *args: params}
    for use in (tx.update, functools.partial(jamp.step, tx)):
        call = lambda grads, state, params, use=use: use(
            grads, state, params, **given(params)
        )
        with contextlib.nullcontext() if is_ignored else refused:
            wrap(call)(gradients(), tx.init(params), params)
    model, scaler = Model(), jamp.GradScaler()
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    with contextlib.nullcontext() if is_ignored else refused:
        scaler.step(optimizer, model, grads, **given(grads))
    with pytest.raises(RuntimeError, match="Closure use is not currently supp"):
        jamp.GradScaler().step(optimizer, model, grads, closure=lambda: 0.0)


def test_the_transparent_form_of_sam_trains():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    loss_fn = lambda params: jnp.sum((params["w"] - 2.0) ** 2)
    plain, tx = {"w": jnp.zeros(2)}, jamp.dynamic_loss_scale(sam)
    scaled, state, plain_state = plain, tx.init(plain), sam.init(plain)
    for _ in range(4):
        grads = jamp.value_and_grad(loss_fn, state)(scaled)[1]
        scaled, state = jamp.step(tx, grads, state, scaled)
        updates, plain_state = sam.update(jax.grad(loss_fn)(plain), plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    check_same_bits(scaled, plain)  # op by op


# `jamp.step` around an optimizer that holds a loss scale.

SCALED = jamp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9))
KEY = 0

BEHIND_IT = {
    "weight decay": optax.add_decayed_weights(0.1),
    "a part of them": optax.masked(optax.add_decayed_weights(0.1), TRAIN),
    "momentum": optax.trace(0.9),
    "noise": optax.add_noise(0.1, 0.5, KEY),
    "adam": optax.scale_by_adam(),
    "an average": optax.ema(0.9),
    "a schedule": optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 3)),
    "a bound": optax.keep_params_nonnegative(),
    "jitted": jitted(optax.trace(0.9)),
}


def ODD(step):
    return step % 2 == 1


def looped(tx):
    """A loop around the loss scale, of which nothing is known."""

    def update(grads, state, params):
        step = lambda state, grads: tx.update(grads, state, params)[::-1]
        rows = jax.tree.map(lambda grad: grad[None], grads)
        state, updates = jax.lax.scan(step, state, rows)
        return jax.tree.map(lambda update: update[0], updates), state

    return optax.GradientTransformation(tx.init, update)


# Nothing is refused here, and a step that is not skipped is update + apply_updates.
LEGITIMATE = {
    "alone": SCALED,
    "chain": optax.chain(SCALED),
    "clipping inside": optax.chain(jamp.dynamic_loss_scale(clipped(ADAM))),
    "named_chain": optax.named_chain(("amp", SCALED), ("rate", optax.scale(0.5))),
    "multi_transform": optax.multi_transform({"t": SCALED}, by_name("t", "t")),
    "multi_transform inside": optax.chain(jamp.dynamic_loss_scale(split(ADAM))),
    "MultiSteps inside": optax.chain(jamp.dynamic_loss_scale(every_second(ADAM))),
    "apply_if_finite inside": optax.chain(
        jamp.dynamic_loss_scale(optax.apply_if_finite(ADAM, 3))
    ),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: jamp.dynamic_loss_scale(optax.adam(rate))
    )(rate=optax.linear_schedule(1e-2, 0.0, 9)),
    "conditionally_mask": optax.conditionally_mask(SCALED, lambda step: step >= 0),
    "conditionally_transform inside": optax.chain(
        jamp.dynamic_loss_scale(optax.conditionally_transform(ADAM, ODD))
    ),
    "condition on nothing": optax.chain(
        SCALED, optax.conditionally_transform(optax.trace(0.9), ODD)
    ),
    "in a loop": looped(SCALED),
    "jitted": jitted(SCALED),
    "jitted in a chain": optax.chain(jitted(SCALED), optax.scale(0.5)),
    "master_weights": jamp.master_weights(SCALED),
    "static": optax.chain(jamp.static_loss_scale(ADAM, 8.0), optax.scale(0.5)),
    "disabled": optax.chain(jamp.dynamic_loss_scale(ADAM, enabled=False)),
    "lookahead": optax.lookahead(SCALED, sync_period=2, slow_step_size=0.5),
    "no loss scale": optax.chain(optax.clip(1.0), ADAM),
} | {f"{k} behind": optax.chain(SCALED, tx) for k, tx in BEHIND_IT.items()}


def by_hand(tx):
    """`optax.conditionally_transform`, whose state jamp does not know."""

    def update(grads, state, params=None):
        step, inner = state
        run = lambda: tx.update(grads, inner, params)
        updates, inner = jax.lax.cond(ODD(step), run, lambda: (grads, inner))
        return updates, (step + 1, inner)

    return optax.GradientTransformation(lambda p: (jnp.int32(0), tx.init(p)), update)


# A state shows where a loss scale stands, and not what is around it: a mask of all and
# `optax.identity()` are refused as others are.
CLIP, MOMENTUM = optax.clip(1.0), optax.trace(0.9)
MASKED = optax.masked(SCALED, TRAIN)
OF_PARTS = {"train": SCALED, "freeze": optax.sgd(0.1)}
FROZEN_PART = {"train": SCALED, "freeze": optax.set_to_zero()}
MISPLACED = {
    "behind what has no state": optax.chain(CLIP, SCALED),
    "behind what has a state": optax.chain(MOMENTUM, SCALED),
    "behind nothing": optax.chain(optax.identity(), optax.chain(SCALED)),
    "in a named chain": optax.named_chain(("clip", CLIP), ("amp", SCALED)),
    "behind a chain": optax.chain(optax.chain(optax.identity(), CLIP), SCALED),
    "behind a part": optax.chain(optax.masked(CLIP, TRAIN), SCALED),
    "behind, in master weights": optax.chain(CLIP, jamp.master_weights(SCALED)),
    "behind, jitted": jitted(optax.chain(CLIP, SCALED)),
    "jitted behind": optax.chain(CLIP, jitted(SCALED)),
    "behind, in some steps": optax.conditionally_mask(optax.chain(CLIP, SCALED), ODD),
    "in some steps behind": optax.chain(CLIP, optax.conditionally_mask(SCALED, ODD)),
    "behind some steps": optax.chain(optax.conditionally_transform(CLIP, ODD), SCALED),
    "disabled": optax.chain(CLIP, jamp.dynamic_loss_scale(ADAM, enabled=False)),
    "static": optax.chain(CLIP, jamp.static_loss_scale(ADAM, 8.0)),
    "masked": MASKED,
    "a mask of all": optax.masked(SCALED, by_name(True, True)),
    "masked and frozen": optax.chain(MASKED, optax.masked(optax.set_to_zero(), FROZEN)),
    "masked and momentum": optax.chain(MASKED, MOMENTUM),
    "masked in masked": optax.masked(MASKED, by_name(True, True)),
    "masked and conditional": optax.conditionally_mask(MASKED, ODD),
    "masked, in master weights": jamp.master_weights(MASKED),
    "masked, jitted": jitted(MASKED),
    "a part": optax.multi_transform(OF_PARTS, LABELS),
    "a part beside a frozen one": optax.multi_transform(FROZEN_PART, LABELS),
    "a part in a chain": optax.chain(
        optax.partition(OF_PARTS, LABELS), optax.add_decayed_weights(0.1)
    ),
    "behind a count": by_hand(SCALED),
    "behind a count, in a chain": optax.chain(by_hand(SCALED), MOMENTUM),
    "behind a count, in master weights": jamp.master_weights(by_hand(SCALED)),
    "behind a count, static": by_hand(jamp.static_loss_scale(ADAM, 8.0)),
}


def added(grads, updates, state):
    return jax.tree.map(lambda g, u: u - 1e-3 * g, grads, updates), state


def start_of(tx, name, dtype=jnp.float32):
    params = params_of(dtype)
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    return params, tx.init(params)


def kept(tree):
    """The leaves of a state that are not of a loss scale itself."""
    kind = jamp.DynamicLossScaleState
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return numbers([n.inner_state if isinstance(n, kind) else n for n in nodes])


@cover(quick=10)
@JIT_AND_EAGER
@pytest.mark.parametrize("name", MISPLACED)
def test_a_loss_scale_in_the_wrong_place_is_refused(name, wrap):
    tx = MISPLACED[name]
    params = params_of(jnp.float16 if "master" in name else jnp.float32)
    step = wrap(lambda grads: jamp.step(tx, grads, tx.init(params), params))
    with pytest.raises(ValueError, match=r"a mask or a partition|stands in front"):
        step(jax.tree.map(jnp.ones_like, params))


def test_what_no_state_shows_is_found_by_running_the_step():
    tx = optax.GradientTransformationExtraArgs(
        SCALED.init, lambda g, s, p=None, **_: added(g, *SCALED.update(g, s, p))
    )

    def step(state, x):
        loss_fn = lambda params: jnp.sum(params["w"] * x) + jnp.sum(params["b"] ** 2)
        loss, grads = jamp.value_and_grad(loss_fn, state[1])(state[0])
        return jamp.step(tx, grads, state[1], state[0]), loss

    params = params_of()
    with pytest.raises(ValueError, match="multiplied by the scale once too often"):
        jamp.find_loss_scale(step, (params, tx.init(params)), 1.0)


# The first of these are quick: eager and compiled in turns.
FIRST = ("alone", "chain", "multi_transform inside", "jitted")
FIRST += ("momentum behind", "in a loop", "master_weights", "no loss scale", "static")
FIRST += ("inject_hyperparams", "condition on nothing", "MultiSteps inside")
NESTS = [
    (how, name)
    for i, name in enumerate([*FIRST, *(n for n in LEGITIMATE if n not in FIRST)])
    for how in (("eager", "branch"), ("branch", "eager"))[i % 2]
]
SELECTED = ("lookahead", "master_weights", "inject_hyperparams", "momentum behind")
NESTS += [("select", name) for name in SELECTED]


@cover(quick=14, ci=len(NESTS))
@pytest.mark.parametrize("how, name", NESTS)
def test_legitimate_nests_step_and_hold(how, name, monkeypatch):
    if how == "select":
        monkeypatch.setattr(skip, "branches", lambda: np.False_)
    wrap = (lambda f: f) if how == "eager" else jax.jit
    tx = LEGITIMATE[name]
    params, state = start_of(tx, name)

    def by_hand(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, by_hand = wrap(functools.partial(jamp.step, tx)), wrap(by_hand)
    good = gradients()
    expected = by_hand(good, state, params)
    found = step(good, state, params)
    if how == "eager":  # op by op
        check_same_bits(numbers(found), numbers(expected))
    else:
        nearby = [by_hand(g, state, params) for g in nudged(good)]
        check_near(numbers(found), numbers(expected), nearby)
    if name in ("disabled", "no loss scale"):
        return
    new_params, new_state = step(gradients(w=jnp.inf), *found[::-1])
    assert jamp.metrics(new_state)["found_inf"]
    chex.assert_trees_all_equal(new_params, found[0])
    chex.assert_trees_all_equal(kept(new_state), kept(found[1]))


def test_half_precision_gradients_arrive_through_master_weights():
    tx = jamp.master_weights(SCALED)
    params = params_of(jnp.float16)
    grads = jax.tree.map(jnp.ones_like, params)
    for wrap in (lambda f: f, jax.jit):
        _, after = wrap(functools.partial(jamp.step, tx))(
            grads, tx.init(params), params
        )
        assert not jamp.metrics(after)["found_inf"]
    clipping = optax.chain(optax.clip(0.1), tx)
    with pytest.raises(ValueError, match="stands in front"):
        jamp.step(clipping, grads, clipping.init(params), params)


# `find_loss_scale`.


def tiny_step(tx):
    def step(state, x):
        params, opt_state = state
        loss_fn = lambda params: jnp.sum(params * 1e-30 * x)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params), loss

    params = jnp.zeros(2)
    return step, (params, tx.init(params))


MOST = [(float("inf"), 2.0**32), (2.0**18, 2.0**18), (1e5, 2.0**16)]


@cover(ci=len(MOST))
@pytest.mark.parametrize("most, expected", MOST)
def test_tiny_gradients_have_a_sane_scale_and_zeros_prove_nothing(most, expected):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), max_scale=most)
    step, state = tiny_step(tx)
    assert jamp.loss_scale(jamp.find_loss_scale(step, state, 1.0)) == expected
    with pytest.raises(ValueError, match="no parameter moves"):
        jamp.find_loss_scale(step, state, 0.0)


@cover(ci=len(MOST))
@pytest.mark.parametrize("most, expected", MOST)
def test_tiny_gradients_of_nnx_objects_have_a_sane_scale(most, expected):
    scaler, model = jamp.GradScaler(max_scale=most), Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def nnx_step(model, optimizer, scaler):
        params = nnx.state(model, nnx.Param)
        grads = jax.tree.map(lambda p: 1e-3 * scaler.get_scale() * p, params)
        scaler.step(optimizer, model, grads)
        scaler.update()

    jamp.find_loss_scale(nnx_step, model, optimizer, scaler)
    assert scaler.get_scale() == expected


@pytest.mark.devices(4)
@cover()
@pytest.mark.parametrize("checks", [False, True])
def test_a_step_runs_again_where_the_state_varies(checks):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**20)

    def step(state, x):
        params, opt_state = state
        loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params), loss

    def varying(a):
        return jax.lax.pcast(a, "data", to="varying") if checks else a

    def local(params, x):
        state = jax.tree.map(lambda a: a + jnp.zeros_like(a), tx.init(params))
        state = jax.tree.map(lambda a: varying(a[None])[0], (params, state))
        again, _ = jamp.retry(step, 12)(state, x)
        return jamp.loss_scale(again)[None]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=checks,
        )
    )
    scales = run(np.ones(2, "f4"), 1 / np.arange(1, 9, dtype="f4"))
    assert scales.shape == (4,) and scales[0] == 2.0**15
    assert not checks or np.all(scales == scales[0])
