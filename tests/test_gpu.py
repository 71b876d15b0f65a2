"""What only a GPU can show: which kernels there are, and that none drops a rounding.

`make gpu` runs these tests there, with those of the wings that are marked `gpu`. On a
CPU they run too, without what is asked where `ON_GPU`, so that none of them meets its
first device on a GPU. Numbers that are compared as bits are exact on both: neither
another order of a sum nor a fused product moves them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from jamp import _targets
from jamp._autocast.float8 import RECIPES
from shared import hlo, products
from tests.bits import check_same_bits
from tests.marks import cover

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]

ON_GPU = jax.default_backend() == "gpu"
HALF = jnp.dtype("float16" if ON_GPU else "bfloat16")  # what `autocast()` runs in
UNITS = _targets.units(jax.devices()[0])
# Where the units lack float8, XLA's GPU compiler may drop a cast to it and back.
ROUNDS_FLOAT8 = not ON_GPU or "float8" in UNITS


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def copies(program, size):
    """The copies of at least so many bytes in a compiled program."""
    instructions = itertools.chain(*hlo.parse(program.as_text()).values())
    found = (i for i in instructions if i.op in ("copy", "copy-start"))
    return [i.text for i in found if hlo.size_of(i.shape) >= size]


def places(tree, size):
    """Where the arrays of at least so many bytes are in the device's memory."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if leaf.nbytes >= size)
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]


# --- loss scaling


@pytest.mark.slow
def test_a_step_copies_no_parameter_and_never_asks_the_host():
    """A skipped one either: its parameters and state stay where they are, every bit."""
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3))
    params = [normal(512, 512, seed=seed) for seed in range(4)]
    size = params[0].nbytes

    def train_step(params, state, grads):
        return jamp.step(tx, grads, state, params)

    step = jax.jit(train_step, donate_argnums=(0, 1))
    grads = [2.0**16 * p for p in params]
    bad = [grads[0].at[3, 5].set(jnp.inf), *grads[1:]]
    program = step.lower(params, tx.init(params), grads).compile()
    params, state = program(params, tx.init(params), grads)
    where = places((params, state), size)
    before = jax.tree.map(np.array, (params, state.inner_state))
    params, state = program(params, state, bad)
    check_same_bits((params, state.inner_state), before)
    assert state.skipped_steps == 1 and state.loss_scale == 2.0**15
    assert places((params, state), size) == where, "donated arrays are kept in place"
    assert copies(program, size) == []
    figures = hlo.summarize(program)
    assert figures.host == 0
    if ON_GPU:
        assert figures.conditionals == 0
        assert figures.temporary_bytes < size


def test_an_exported_step_runs_on_the_device_at_hand():
    """Exported for CPUs and for CUDA at once, in numbers that no order can change."""
    tx = jamp.dynamic_loss_scale(optax.sgd(2.0**-4), 2.0**4)
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.integers(-2, 3, (32, 16)), jnp.float32)
    x = jnp.asarray(rng.integers(-2, 3, (8, 32)), jnp.float32)

    def step(w, opt_state, x):
        def loss_fn(w):
            with jamp.autocast(jnp.float16):
                return jnp.sum(jnp.float32(x @ w)) / 2

        _, grads = jamp.value_and_grad(loss_fn, opt_state)(w)
        return jamp.step(tx, grads, opt_state, w)

    state = tx.init(w)
    exported = export.export(jax.jit(step), platforms=["cpu", "cuda"])(w, state, x)
    jitted = jax.jit(exported.call, donate_argnums=(0, 1))
    program = jitted.lower(w, state, x).compile()
    gradient = np.repeat(np.asarray(x).sum(0)[:, None] / 2, 16, 1)
    moved, state = program(jnp.copy(w), state, x)
    np.testing.assert_array_equal(moved, w - 2.0**-4 * gradient)
    held, state = program(jnp.copy(moved), state, x.at[2, 3].set(jnp.inf))
    np.testing.assert_array_equal(held, moved)
    assert state.skipped_steps == 1 and state.loss_scale == 2.0**3
    if ON_GPU:
        assert hlo.summarize(program).conditionals == 0


# --- autocast and policies


@pytest.mark.slow
def test_autocast_runs_its_products_in_half_precision():
    model = nnx.MultiHeadAttention(8, 256, decode=False, rngs=nnx.Rngs(0))
    x = normal(4, 128, 256)
    graph, state = nnx.split(model)

    def loss_fn(state):
        with jamp.autocast():
            y = nnx.merge(graph, state)(x)
        assert y.dtype == HALF
        return jnp.mean(y.astype(jnp.float32) ** 2)

    step = jax.jit(jax.value_and_grad(loss_fn)).trace(state)
    half = products.short(HALF)
    assert set(products.traced(step.jaxpr)) == {half}
    program = step.lower().compile()
    value, gradients = program(state)
    np.testing.assert_allclose(value, jnp.mean(model(x) ** 2), rtol=0.01)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    if ON_GPU:
        assert set(products.compiled(program.as_text())) == {half}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_that_a_bias_masks_is_finite_in_attention(dtype):
    """cuDNN's kernel takes the bias in half precision, in which -1e9 is -inf."""
    q, k = normal(2, 64, 4, 64), normal(2, 64, 4, 64)
    bias = np.where(np.tri(64, k=-1), 0, -1e9).astype(np.float32)  # none for the first

    def loss(attend, q):
        out = in_region(attend, dtype)(q, k, k, bias).astype(jnp.float32)
        return jnp.sum(out[:, 1:] ** 2), out

    run = jax.jit(jax.value_and_grad(loss, 1, has_aux=True), static_argnums=0)
    if ON_GPU:
        text = run.lower(jamp.dot_product_attention, q).compile().as_text()
        assert "fmha" in text
    (_, out), grad = run(jamp.dot_product_attention, q)
    (_, expected), expected_grad = run(jax.nn.dot_product_attention, q)
    assert np.isfinite(out).all() and np.isfinite(grad).all()
    np.testing.assert_allclose(out[:, 1:], expected[:, 1:], 2e-2, 2e-2)
    np.testing.assert_allclose(grad, expected_grad, 5e-2, 5e-2)


def in_region(function, region):
    def run(*args):
        with jamp.autocast(region):
            return function(*args)

    return run


@cover()
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_and_its_gradients_are_of_float8_numbers(recipe):
    """17 becomes 16 in float8; only `rowwise_with_gw_hp` keeps an input as it is."""
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(17 * rng.choice([-1.0, 1.0], shape), jnp.bfloat16)
        for shape in ((32, 64), (64, 48), (32, 48))
    )

    @jax.jit
    def run(x, w, g):
        y, backward = jax.vjp(in_region(jnp.matmul, jamp.Float8(recipe)), x, w)
        return y, *backward(g)

    program = run.lower(x, w, g).compile()
    signs = [np.sign(np.float32(a)) for a in (x, w, g)]
    sums = signs[0] @ signs[1], signs[2] @ signs[1].T, signs[0].T @ signs[2]
    is_kept = [False, False, recipe == "rowwise_with_gw_hp"]
    for found, total, kept in zip(program(x, w, g), sums, is_kept, strict=True):
        assert found.dtype == jnp.bfloat16
        expected = total * (17.0**2 if kept else 16.0**2)
        bound = 2.0**-8 if kept else 0.0 if ROUNDS_FLOAT8 else 0.15
        np.testing.assert_allclose(np.float32(found), expected, bound)
    if ON_GPU and ROUNDS_FLOAT8:
        in_half = sum(is_kept)
        expected = {"f8": 3 - in_half} | ({"bf16": 1} if in_half else {})
        assert products.compiled(program.as_text()) == expected


# --- masters in 16 bits


@pytest.mark.slow
def test_remainders_keep_every_bit_of_full_masters_for_10000_steps():
    """In one scan, and in sums that are rounded once: the rate is a power of two."""
    wraps = [functools.partial(jamp.master_weights, remainder=r) for r in (False, True)]
    scaled = functools.partial(
        jamp.dynamic_loss_scale, init_scale=8.0, growth_interval=20, max_scale=2.0**24
    )
    txs = [scaled(wrap(optax.sgd(2.0**-9))) for wrap in wraps]
    params = {"w": normal(256, dtype=jnp.bfloat16)}

    def step(carry, number):
        noise = normal(256, seed=number)
        new = []
        for tx, (p, state) in zip(txs, carry["runs"], strict=True):
            # Random, but towards zero from far away; and an inf in some steps.
            sign = jnp.where(jnp.abs(p["w"]) > 2, jnp.sign(p["w"] * noise), 1)
            grads = noise * sign * jamp.loss_scale(state)
            grads = jnp.where(number % 97 == 5, jnp.inf, grads).astype(jnp.bfloat16)
            new.append(jamp.step(tx, {"w": grads}, state, p))
        full, rest = ((p["w"], jamp.master_params(p, s)["w"]) for p, s in new)
        bits = lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        differ = sum(
            jnp.sum(bits(a) != bits(b)) for a, b in zip(full, rest, strict=True)
        )
        is_tie = bits(full[1]) & 0xFFFF == 0x8000
        counts = jnp.stack([differ, jnp.sum(is_tie)])
        return {"runs": new, "counts": carry["counts"] + counts}, None

    runs = [(params, tx.init(params)) for tx in txs]
    start = {"runs": runs, "counts": jnp.zeros(2, jnp.int32)}
    end, _ = jax.jit(lambda c: lax.scan(step, c, jnp.arange(10_000)))(start)
    (_, full), (w, rest) = end["runs"]
    assert end["counts"][0] == 0
    assert end["counts"][1] > 0, "the control: some masters lie half way"
    assert rest.skipped_steps == full.skipped_steps == 104
    kept = rest.inner_state.master["w"]
    assert kept.dtype == jnp.int16 and len(np.unique(kept)) > 200, "the control"
    assert jnp.mean(w["w"] != params["w"]) > 0.9, "the control"


@cover(quick=0)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_parameter_and_its_remainder_are_of_one_sum(scaled):
    """Two sums that differ in the last bit would make halves that do not fit."""
    params = {
        name: normal(1024, 256, seed=seed, dtype=jnp.bfloat16)
        for seed, name in enumerate("abcd")
    }
    # About Adam's epsilon, so that the sums have all bits: some are near a half.
    size = 1e-8 * (2.0**16 if scaled else 1)
    grads = {name: size * normal(1024, 256, seed=ord(name)) for name in params}
    programs, masters = {}, {}
    for form in (False, True):
        tx = jamp.master_weights(optax.adamw(1e-2), remainder=form)
        tx = jamp.dynamic_loss_scale(tx) if scaled else tx
        step = lambda g, params, state, tx=tx: jamp.step(tx, g, state, params)
        args = grads, params, tx.init(params)
        programs[form] = jax.jit(step, donate_argnums=2).lower(*args).compile()
        masters[form] = jamp.master_params(*programs[form](*args))
    full, rest = (np.stack(list(masters[form].values())) for form in (False, True))
    # Two programs may differ in the last bits; with other halves, in the 16th.
    np.testing.assert_allclose(rest, full, 2.0**-18, 2.0**-24)
    near = full.view(np.uint32) & 0xFFFF
    assert np.sum(near == 0x7FFF) > 5 and np.sum(near == 0x8000) > 5, "the control"
    if ON_GPU:
        instructions = itertools.chain(*hlo.parse(programs[True].as_text()).values())
        shapes = {i.name: i.shape for i in instructions if i.op == "fusion"}
        kernels = [shape for shape in shapes.values() if "s16[" in shape]
        assert len(kernels) == 4
        assert all("bf16[" in shape for shape in kernels)


# --- means in eight bits


def near_codes(dtype):
    """Numbers that eight bits hold, and others that are rounded to them."""
    rng = np.random.default_rng(0)
    if dtype == jnp.int8:
        codes = rng.integers(-126, 127, 1024)
        return np.float32(codes), np.float32(codes + 0.25)
    codes = rng.integers(8, 16, 1024) * 2.0 ** rng.integers(-4, 5, 1024)
    codes *= rng.choice([-1, 1], 1024)
    return np.float32(codes), np.float32(codes * (1 + 2.0**-6))


def on_one_device(function, in_specs, out_specs):
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto, devices=jax.devices()[:1])
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


EIGHT_BITS = pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])


@cover()
@EIGHT_BITS
def test_a_mean_in_eight_bits_is_rounded(dtype):
    """No rounding of a cast to eight bits and back is dropped."""
    codes, grads = near_codes(dtype)
    average = lambda g: jamp.sharding.mean(g, "data", dtype=dtype)
    found = on_one_device(average, P("data"), P())(grads)
    check_same_bits(np.asarray(found), codes)
    bad = on_one_device(average, P("data"), P())(np.append(grads, np.float32(np.inf)))
    assert jnp.isnan(bad[-1]) and not jnp.isnan(bad[0])


@cover(quick=0)
@EIGHT_BITS
def test_error_feedback_makes_up_for_what_was_not_sent(dtype):
    codes, grads = near_codes(dtype)
    tx = jamp.sharding.error_feedback("data", 1, dtype=dtype)
    rounds = 40

    def total(grads):
        def body(state, _):
            mean, state = tx.update(grads, state)
            return state, (mean, state.own[0])

        state, (means, own) = lax.scan(body, tx.init(grads), length=rounds)
        return jnp.sum(means, 0), own, state

    specs = P(), P(None, "data"), P("data")
    sums, own, state = on_one_device(total, P("data"), specs)(grads)
    first_lost = grads - codes
    np.testing.assert_array_equal(own[0], first_lost)
    assert np.all(first_lost != 0)
    # The sum is off by at most one rounding of a gradient, twice: not by 40.
    spacing = 1.0 if dtype == jnp.int8 else np.abs(codes) / 8
    assert np.all(np.abs(sums - rounds * grads) <= 2 * spacing)
    assert np.all(np.abs(rounds * (codes - grads)) > 2 * spacing), "the control"
    lost = state.own[0] + state.means.reshape(-1)[:1024]
    np.testing.assert_allclose(sums + lost, rounds * grads, 1e-5)
