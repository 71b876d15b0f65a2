"""Master weights: parameters are rounded copies, bit for bit, and training follows."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from hypothesis import given
from hypothesis import strategies as st

import jamp
from jamp._scaling.state import DynamicLossScaleState
from shared.master_weights import STEPS, TRAINED, curves, nearest, worst_difference
from tests.bits import check_rounded, check_same_bits
from tests.marks import cover

from .masters import (
    NESTINGS,
    SCALE,
    bits,
    check_nearest,
    masters_in,
    stepped,
    updated,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = {"half": jnp.float16, "brain": jnp.bfloat16}
SHAPE = (128, 128)  # adafactor factors it


def make_params(seed=0, zeros=(0.0, -0.0)):
    """Numbers from 2**-24 to 2**15 of both signs, and zeros."""
    rng = np.random.default_rng(seed)

    def leaf(dtype):
        size = np.prod(SHAPE)
        x = rng.choice([-1, 1], size) * 2.0 ** rng.uniform(-24, 15, size)
        edges = [2.0**-24, -(2.0**-24), 2.0**-14, 2.0**15, -(2.0**15), 1.0, *zeros]
        x[: len(edges)] = edges
        return x.reshape(SHAPE).astype(dtype)

    full = rng.normal(size=SHAPE).astype(np.float32)
    leaves = {name: leaf(dtype) for name, dtype in HALVES.items()}
    return jax.device_put(leaves | {"full": full})


def make_grads(seed, params):
    """Numbers from 2**-20 to 2**6; every fourth step has ones that take 1 to near 0."""
    rng = np.random.default_rng(1000 + seed)

    def leaf(p):
        g = rng.normal(size=p.shape) * 2.0 ** rng.uniform(-20, 6, p.shape)
        if seed % 4 == 3:
            g = np.where(rng.random(p.shape) < 0.2, 50 * np.asarray(p, np.float32), g)
        return np.clip(g, -6e4, 6e4).astype(p.dtype)

    return jax.device_put(jax.tree.map(leaf, params))


def with_one(leaf, at, value):
    """An array with another number at a place."""
    leaf = np.array(leaf)
    leaf[at] = value
    return jax.device_put(leaf)


def updated_in_two_jits(tx):
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)

    def run(params, state, grads):
        updates, state = update(grads, state, params)
        return apply(params, updates), state

    return run


def updated_twice_in_one_jit(tx):
    """Two steps in one program: half the gradients, and the rest."""

    def run(params, state, grads):
        half = jax.tree.map(lambda g: g / 2, grads)
        for _ in range(2):
            params, state = updated(tx)(params, state, half)
        return params, state

    return jax.jit(run)


def scanned(tx):
    def run(params, state, grads):
        def body(carry, grads):
            return updated(tx)(*carry, grads), None

        one = jax.tree.map(lambda g: g[None], grads)
        return jax.lax.scan(body, (params, state), one)[0]

    return jax.jit(run)


WAYS = {
    "jit": lambda tx: jax.jit(updated(tx)),
    "step": lambda tx: jax.jit(stepped(tx)),
    "two jits": updated_in_two_jits,
    "two steps in a jit": updated_twice_in_one_jit,
    "scan": scanned,
    "eager": updated,
    "eager step": stepped,
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2),
    "decay": lambda: optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.02)),
}


# Parameters are rounded copies.


@cover(quick=3, ci=24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_the_rounded_copies(name, way):
    tx = jamp.master_weights(OPTIMIZERS[name]())
    start = params = make_params()
    state = tx.init(params)
    check_nearest(params, state)
    step = WAYS[way](tx)
    for i in range(20):
        params, state = step(params, state, make_grads(i, params))
        check_nearest(params, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, start)
    for path, leaf in params.items():
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
        assert np.any(bits(leaf) != bits(start[path])), "the control"


wrap, scale = jamp.master_weights, partial(jamp.dynamic_loss_scale, init_scale=SCALE)
NOT_ROUNDED = "half frozen", "MultiSteps around", "MultiSteps around, scaled"
ROUNDED = [name for name in NESTINGS if name not in (*NOT_ROUNDED, "alone")]
SCALED = ["scaled", "scaled, clipped", "scaled statically", "scaled inside"]


@cover(quick=2, ci=24)
@pytest.mark.parametrize("way", ["jit", "step", "two jits"])
@pytest.mark.parametrize("name", ROUNDED)
def test_nesting_keeps_parameters_rounded(name, way):
    tx = NESTINGS[name](wrap, scale, OPTIMIZERS["adamw"]())
    start = params = make_params()
    state = tx.init(params)
    structure = jax.eval_shape(lambda: state)
    step = WAYS[way](tx)
    for i in range(8):
        params, state = step(params, state, make_grads(i, params))
        check_nearest(params, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, start)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, structure)
    for path, leaf in params.items():
        assert np.any(bits(leaf) != bits(start[path])), "the control"


def test_multi_steps_around_it():
    """Equal as numbers: updates that are held back are 0, and -0 + 0 is 0."""
    tx = optax.MultiSteps(wrap(optax.adam(1e-2)), 2)
    start = params = make_params()
    state, step = tx.init(params), jax.jit(updated(tx))
    for i in range(4):
        params, state = step(params, state, make_grads(i, params))
        [masters] = masters_in(state)
        for name, dtype in HALVES.items():
            rounded = nearest(masters[name], dtype)
            np.testing.assert_array_equal(params[name], rounded)
            moved = np.asarray(params[name]) != np.asarray(start[name])
            assert np.any(moved) == (i > 0)


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_parameters_that_collapse(dtype, way):
    """Shrinks parameters to between 2**-1 and 2**-40 of their value, in one step."""
    rng = np.random.default_rng(0)
    params = {"w": jax.device_put(rng.uniform(1, 2**15, (40, 64)).astype(dtype))}
    part = 2.0 ** -np.arange(1, 41, dtype=np.float32)[:, None]
    grads = {"w": params["w"].astype(jnp.float32) * (1 - part)}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    step = WAYS[way](tx)
    for _ in range(3):
        params, state = step(params, state, grads)
        check_nearest(params, state)
        grads = {"w": state.master["w"] * (1 - part)}


@cover(quick=2)
@pytest.mark.parametrize("way", ["jit", "step", "two jits", "eager", "eager step"])
@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_where_no_update_reaches_the_rounded_copy(dtype, way):
    """From 1, with a copy of 1 - 2**-24, to -2**-24: float32 cannot hold the move."""
    power = np.float32(2.0) ** np.arange(15, dtype=np.float32)
    params = {"w": jax.device_put(power.astype(dtype))}
    tx = jamp.master_weights(optax.sgd(1.0))
    state, step = tx.init(params), WAYS[way](tx)
    params, state = step(params, state, {"w": power * 2.0**-24})
    np.testing.assert_array_equal(state.master["w"], power * (1 - 2.0**-24))
    params, state = step(params, state, {"w": power})
    check_nearest(params, state)
    assert np.all(np.abs(state.master["w"]) <= power * 2.0**-24)


BITS = st.lists(st.integers(0, 2**16 - 1), min_size=8, max_size=8)
NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=8, max_size=8)
SGD = jamp.master_weights(optax.sgd(1.0))
SGD_STEPS = {"eager": updated(SGD), "jit": jax.jit(updated(SGD))}


@given(
    halves=BITS,
    brains=BITS,
    grads=st.lists(NUMBERS, min_size=1, max_size=4),
    exponent=st.integers(-34, 0),
    way=st.sampled_from(sorted(SGD_STEPS)),
)
def test_any_parameters_and_gradients(halves, brains, grads, exponent, way):
    def numbers(patterns, dtype):
        x = np.array(patterns, np.uint16).view(dtype)
        small = np.abs(x.astype(np.float32)) < 5e4  # not nan
        return jax.device_put(np.where(small, x, np.ones_like(x)))

    params = {
        "half": numbers(halves, np.float16),
        "brain": numbers(brains, jnp.bfloat16),
    }
    state = SGD.init(params)
    for row in grads:
        row = jax.device_put(np.array(row, np.float32) * np.float32(2.0**exponent))
        params, state = SGD_STEPS[way](params, state, {"half": row, "brain": row})
        check_nearest(params, state)


# The copies move as float32 parameters do.


@cover()
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["eager", "eager step"])
def test_the_copies_move_as_float32_parameters_do(name, way):
    inner = OPTIMIZERS[name]()
    tx = jamp.master_weights(inner)
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=(128, 129)).astype(HALVES[n]) for n in HALVES}
    for leaf in params.values():
        leaf[0] = 0
    full = jax.device_put(jax.tree.map(lambda p: p.astype(np.float32), params))
    params = jax.device_put(params)
    state, full_state = tx.init(params), inner.init(full)
    for i in range(8):
        size = 2.0 ** rng.uniform(-30, 0, (128, 129))
        draw = lambda p, size=size: (rng.normal(size=p.shape) * size).astype(p.dtype)
        grads = jax.tree.map(draw, params)
        wide = jax.device_put(jax.tree.map(lambda g: g.astype(np.float32), grads))
        grads = jax.device_put(grads)
        params, state = WAYS[way](tx)(params, state, grads)
        full, full_state = updated(inner)(full, full_state, wide)
        check_same_bits(state.master, full)
        check_same_bits(state.inner_state, full_state)
        assert i or np.any(bits(full["half"][0]) != 0), "the control"


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_steps_smaller_than_any_float16_add_up(way):
    """0 + -0 is 0: a copy that rounds to -0 must not be lost."""
    tx = jamp.master_weights(optax.sgd(1.0))
    cases = {
        f"{start} - {sign}": (start, sign)
        for start in (0.0, -0.0, 2.0**-24, -(2.0**-24))
        for sign in (1, -1)
    }
    assert len(cases) == 8
    params = {n: np.full(3, start, np.float16) for n, (start, _) in cases.items()}
    grads = {n: np.full(3, sign * 1e-8, np.float32) for n, (_, sign) in cases.items()}
    params, grads = jax.device_put((params, grads))
    state, step = tx.init(params), WAYS[way](tx)
    for _ in range(40):
        params, state = step(params, state, grads)
        check_nearest(params, state)
    for name, (start, sign) in cases.items():
        end = start - sign * 4e-7
        np.testing.assert_allclose(state.master[name], end, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(params[name], end, atol=2.0**-25, err_msg=name)


def test_updates_smaller_than_a_float16_add_up():
    step = {"w": jnp.full(2, -1e-4)}
    naive = tx = optax.sgd(1.0)
    params = {"w": jnp.ones(2, jnp.float16)}
    stalled, _ = updated(naive)(params, naive.init(params), step)
    assert stalled["w"].tolist() == [1, 1]
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    for _ in range(100):
        params, state = updated(tx)(params, state, step)
    np.testing.assert_allclose(params["w"], 1.01, rtol=2.0**-11)
    np.testing.assert_allclose(state.master["w"], 1.01, rtol=1e-5)


# Skipped steps.


ORDERS = {
    "scale outside": lambda x, **kw: jamp.dynamic_loss_scale(wrap(x), **kw),
    "scale inside": lambda x, **kw: wrap(jamp.dynamic_loss_scale(x, **kw)),
}


def parts(state):
    """The copies, the optimizer's own state and the loss scale, in either order."""
    pair = state, state.inner_state
    scaling, copies = pair if isinstance(state, DynamicLossScaleState) else pair[::-1]
    return copies.master, pair[1].inner_state, scaling


@cover(quick=2, ci=8)
@pytest.mark.parametrize("way", ["jit", "step", "two jits", "eager"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_skipped_step_holds_every_bit(order, way):
    tx = ORDERS[order](OPTIMIZERS["adamw"](), init_scale=SCALE)
    params = make_params(zeros=(0.0,))
    state, step = tx.init(params), WAYS[way](tx)
    grads = make_grads(0, params)
    leaves = (None, "half", "brain", "full", None)
    for leaf, bad in zip(leaves, (0, np.inf, np.nan, -np.inf, 0), strict=True):
        these = dict(grads)
        if leaf:
            these[leaf] = with_one(these[leaf], (3, 5), bad)
        new_params, new_state = step(params, state, these)
        copies, inner, scaling = parts(state)
        new_copies, new_inner, new_scaling = parts(new_state)
        assert bool(new_scaling.found_inf) == (leaf is not None)
        assert new_scaling.skipped_steps == scaling.skipped_steps + (leaf is not None)
        assert new_scaling.loss_scale == scaling.loss_scale / (2 if leaf else 1)
        if leaf:
            check_same_bits(new_params, params)
            check_same_bits((new_copies, new_inner), (copies, inner))
        else:
            assert np.any(bits(new_copies["half"]) != bits(copies["half"]))
        params, state = new_params, new_state
        check_nearest(params, state)


@cover(quick=2, ci=4)
@pytest.mark.parametrize("way", ["jit", "step"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_skipped_step_holds_negative_zeros(order, way):
    tx = ORDERS[order](optax.sgd(1.0))
    params = {"w": jnp.array([-0.0, 0.0, 1.0], jnp.float16)}
    state = tx.init(params)
    grads = {"w": jnp.full(3, jnp.inf, jnp.float16)}
    new_params, new_state = WAYS[way](tx)(params, state, grads)
    check_same_bits(new_params, params)
    check_same_bits(parts(new_state)[0], parts(state)[0])


def run_with_overflows(order, name, way):
    """The history of a run of 24 steps of which 4 are skipped."""
    tx = ORDERS[order](OPTIMIZERS[name](), init_scale=2.0**10, growth_interval=4)
    rng = np.random.default_rng(0)
    noise = lambda: {
        n: jax.device_put(rng.normal(size=SHAPE).astype(HALVES.get(n, np.float32)))
        for n in (*HALVES, "full")
    }
    params, grads = noise(), [noise() for _ in range(24)]
    for i in (2, 3, 9, 20):
        leaf = ("half", "brain", "full")[i % 3]
        bad = np.inf if i % 2 else np.nan
        grads[i][leaf] = with_one(grads[i][leaf], (i, i), bad)
    state, step = tx.init(params), WAYS[way](tx)
    history = []
    for these in grads:
        params, state = step(params, state, these)
        check_nearest(params, state)
        history.append((params, *parts(state)[:2], jamp.metrics(state)))
    assert jamp.metrics(state)["skipped_steps"] == 4
    scales = [float(metrics["loss_scale"]) for *_, metrics in history]
    assert scales[:5] == [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8]
    assert max(scales[5:]) > 2.0**8
    return history


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_both_orders_give_the_same_bits(name):
    runs = [run_with_overflows(order, name, "eager") for order in ORDERS]
    for outside, inside in zip(*runs, strict=True):
        check_same_bits(outside, inside)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jit", "step"])
def test_both_orders_agree_when_compiled(way):
    """Two programs may multiply and add in one rounding or in two, in each step."""
    runs = [run_with_overflows(order, "adamw", way) for order in ORDERS]
    for outside, inside in zip(*runs, strict=True):
        check_rounded(outside[1:3], inside[1:3], 2 * len(runs[0]))
        check_same_bits(outside[3], inside[3])


# The state.


def test_a_static_scale_skips_and_holds():
    tx = jamp.static_loss_scale(wrap(optax.adam(1e-2)), SCALE)
    params = make_params(zeros=(0.0,))
    state = tx.init(params)
    grads = make_grads(0, params)
    grads["brain"] = with_one(grads["brain"], (0, 0), np.nan)
    new_params, new_state = jax.jit(stepped(tx))(params, state, grads)
    check_same_bits(new_params, params)
    check_same_bits(new_state.inner_state, state.inner_state)
    assert new_state.skipped_steps == 1 and new_state.loss_scale == SCALE


def test_the_optimizer_inside_sees_float32():
    seen = []

    def spy(updates, state, params=None, **extra):
        seen.append([x.dtype for x in jax.tree.leaves((updates, params, extra))])
        return updates, state

    tx = wrap(optax.GradientTransformationExtraArgs(lambda p: (), spy))
    params = make_params()
    grads = make_grads(0, params)
    updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    assert seen == [[jnp.float32] * 9]
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


@cover()
@pytest.mark.parametrize("way", ["jit", "step", "eager"])
def test_leaves_that_need_no_copy_pass(way):
    params = {
        "half": jnp.ones(2, jnp.float16),
        "full": jnp.ones(2),
        "int": jnp.arange(2),
        "none": None,
        "empty": jnp.zeros((0, 2), jnp.float16),
    }
    labels = {name: "sgd" for name in params} | {"int": "frozen", "none": None}
    tx = wrap(
        optax.multi_transform(
            {"sgd": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels
        )
    )
    state = tx.init(params)
    assert state.master["full"] == state.master["int"] == optax.MaskedNode()
    assert state.master["none"] is None
    assert state.master["empty"].dtype == jnp.float32
    grads = params | {"int": jnp.zeros(2, jnp.int32)}
    new_params, new_state = WAYS[way](tx)(params, state, grads)
    assert new_params["half"].tolist() == new_params["full"].tolist() == [0, 0]
    assert new_params["int"].tolist() == [0, 1] and new_params["none"] is None
    chex.assert_trees_all_equal_shapes_and_dtypes(new_params, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


def test_float0_gradients_of_integers_pass():
    params = {"w": jnp.ones(2, jnp.float16), "i": jnp.arange(2)}
    labels = {"w": "sgd", "i": "frozen"}
    inner = optax.multi_transform(
        {"sgd": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels
    )
    tx = jamp.dynamic_loss_scale(wrap(inner), init_scale=2.0)
    state = tx.init(params)
    _, grads = jamp.value_and_grad(lambda p: jnp.sum(p["w"]), state, allow_int=True)(
        params
    )
    assert grads["i"].dtype == jax.dtypes.float0
    params, state = jamp.step(tx, grads, state, params)
    assert params["w"].tolist() == [0, 0] and params["i"].tolist() == [0, 1]


def test_a_missing_gradient_leaves_its_parameter_and_copy():
    params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.float16)}
    tx = wrap(optax.sgd(1.0))
    state = tx.init(params)
    grads = {"w": jnp.ones(2, jnp.float16), "b": None}
    new_params, new_state = jamp.step(tx, grads, state, params)
    assert new_params["w"].tolist() == [0, 0] and new_params["b"].tolist() == [1, 1]
    assert new_state.master["b"].tolist() == [1, 1]
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


@cover(ci=4)
@pytest.mark.parametrize("way", ["step", "eager"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_float32_parameters_behave_as_with_the_bare_optimizer(name, way):
    inner = OPTIMIZERS[name]()
    tx = wrap(inner)
    rng = np.random.default_rng(0)
    draw = lambda: {"w": jax.device_put(rng.normal(size=SHAPE).astype(np.float32))}
    params = bare = draw()
    state, bare_state = tx.init(params), inner.init(bare)
    assert jax.tree.leaves(state.master) == []
    for _ in range(5):
        grads = draw()
        params, state = WAYS[way](tx)(params, state, grads)
        bare, bare_state = WAYS[way](inner)(bare, bare_state, grads)
        check_same_bits((params, state.inner_state), (bare, bare_state))


def test_eval_shape_and_jit_of_init():
    tx = jamp.dynamic_loss_scale(wrap(optax.adamw(1e-3)))
    params = make_params()
    state = tx.init(params)
    shapes = jax.eval_shape(tx.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    check_same_bits(jax.jit(tx.init)(params), state)
    structs = jax.eval_shape(lambda: params)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(tx.init, structs), state
    )


# Compilation and donation.


@cover()
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("how", [stepped, updated])
@pytest.mark.parametrize("order", ["scale outside", "scale inside", "alone"])
def test_a_jitted_step_traces_once_and_transfers_nothing(
    order, how, donate, checking_leaks
):
    chex.clear_trace_counter()
    tx = (ORDERS | {"alone": wrap})[order](optax.adamw(1e-3))
    params = make_params()
    state = tx.init(params)
    grads = [make_grads(i, params) for i in range(2)]
    if order != "alone":
        grads[1]["half"] = with_one(grads[1]["half"], (0, 0), np.inf)
    step = chex.assert_max_traces(how(tx), n=1)
    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    shapes = jax.eval_shape(lambda: (params, state))
    first = params, state
    params, state = jitted(params, state, grads[0])
    with jax.transfer_guard("disallow"):
        for i in range(20):
            params, state = jitted(params, state, grads[i % 2])
    chex.assert_trees_all_equal_shapes_and_dtypes((params, state), shapes)
    moments = jax.tree.leaves([optax.tree.get(state, name) for name in ("mu", "nu")])
    assert {m.dtype for m in moments} == {jnp.dtype("float32")}
    deleted = [x.is_deleted() for x in jax.tree.leaves(first)]
    assert any(deleted) == donate
    check_nearest(params, state)


def test_vmap_over_models():
    tx = wrap(optax.adam(1e-2))
    models = [make_params(seed) for seed in range(3)]
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    grads = stack([make_grads(seed, models[0]) for seed in range(3)])
    params = stack(models)
    state, step = jax.jit(jax.vmap(tx.init))(params), jax.jit(jax.vmap(updated(tx)))
    for _ in range(3):
        params, state = step(params, state, grads)
        check_nearest(params, state)


def test_a_step_mixes_no_dtypes():
    tx = jamp.dynamic_loss_scale(wrap(optax.sgd(1e-3, momentum=0.9)))
    params = make_params()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        state = tx.init(params)
        for wrapper in (lambda f: f, jax.jit):
            params, state = wrapper(stepped(tx))(params, state, make_grads(0, params))
    check_nearest(params, state)


# Train states.


def regression(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 8)).astype(np.float16)
    return x, x[:, :1] * x[:, 1:2]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_an_nnx_model_learns_in_float16(order):
    class Model(nnx.Module):
        def __init__(self, rngs):
            kinds = dict(param_dtype=jnp.float16, dtype=jnp.float16, rngs=rngs)
            self.hidden = nnx.Linear(8, 64, **kinds)
            self.norm = nnx.LayerNorm(64, rngs=rngs)  # float32
            self.out = nnx.Linear(64, 1, **kinds)

        def __call__(self, x):
            return self.out(nnx.relu(self.norm(self.hidden(x))))

    @nnx.jit
    def create():
        model = Model(nnx.Rngs(0))
        tx = ORDERS[order](optax.adam(1e-2), init_scale=2.0**10)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = create()
    x, y = regression()

    @nnx.jit
    def train_step(model, optimizer, x):
        scaled = lambda model: jamp.scale_loss(
            jnp.mean((model(x) - y).astype(jnp.float32) ** 2), optimizer.opt_state
        )
        loss, grads = nnx.value_and_grad(scaled)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for i in range(60):
        bad = i == 30
        before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))
        scaled = jamp.loss_scale(optimizer.opt_state)
        losses.append(train_step(model, optimizer, x * jnp.inf if bad else x) / scaled)
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        check_nearest(params, nnx.as_pure(optimizer.opt_state))
        if bad:
            check_same_bits(jax.tree.map(np.asarray, params), before)
    assert params["hidden"]["kernel"].dtype == jnp.float16
    assert params["norm"]["scale"].dtype == jnp.float32
    assert losses[-1] < losses[0] / 10
    assert jamp.metrics(optimizer.opt_state)["skipped_steps"] == 1


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        kinds = dict(param_dtype=jnp.float16, dtype=jnp.float16)
        return nn.Dense(1, **kinds)(nn.relu(nn.Dense(64, **kinds)(x)))


@cover(ci=4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cls", [jamp.linen.TrainState, train_state.TrainState])
def test_train_states(cls, order):
    model, (x, y) = Model(), regression()
    params = jax.jit(model.init)(jax.random.key(0), x)
    tx = ORDERS[order](optax.adam(1e-2), init_scale=2.0**10)
    state = cls.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state, x):
        def loss_fn(params):
            error = state.apply_fn(params, x) - y
            return jnp.mean(error.astype(jnp.float32) ** 2)

        loss, grads = jamp.value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for i in range(60):
        before = state.params
        state, loss = train_step(state, x * jnp.inf if i == 30 else x)
        losses.append(loss)
        check_nearest(state.params, state.opt_state)
        if i == 30:
            chex.assert_trees_all_equal(state.params, before)
    assert losses[-1] < losses[0] / 10
    assert jamp.metrics(state)["skipped_steps"] == 1 and state.step == 60


# Training follows float32.


def fall(losses):
    return losses[0] - losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_training_follows_float32_where_naive_float16_does_not(name):
    reference, master, scaled, bare = curves(TRAINED[name]).values()
    assert len(master) == STEPS + 1
    assert fall(reference) > 0.15 * reference[0], "float32 learns"
    assert worst_difference(master, reference) < 0.02
    assert abs(fall(master) / fall(reference) - 1) < 0.02

    assert worst_difference(scaled, reference) > 0.1
    assert fall(scaled) < 0.5 * fall(reference), "it stalls"
    if name == "SGD":
        assert fall(bare) < 0.5 * fall(reference), "it stalls"
    else:
        assert not np.isfinite(bare[-1]), "Adam's eps is 0 in float16"


def test_parameters_changed_from_outside_are_taken_over():
    tx = jamp.master_weights(optax.sgd(0.5))
    params = {"w": jnp.array([1.0, 2.0, -3.0], jnp.float16)}
    state = tx.init(params)
    grads = {"w": jnp.full(3, 2**-13, jnp.float16)}
    for _ in range(3):
        params, state = jamp.step(tx, grads, state, params)
    kept = np.asarray(state.master["w"])
    assert kept[0] == 1 - 3 * 2**-14  # not a float16
    params = {"w": params["w"].at[1].set(5.0)}  # as a checkpoint would
    params, state = jamp.step(tx, grads, state, params)
    after = np.asarray(state.master["w"])
    assert after[1] == 5 - 2**-14
    assert after[0] == kept[0] - 2**-14
    assert after[2] == kept[2] - 2**-14
