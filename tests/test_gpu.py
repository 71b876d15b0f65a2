"""What may differ on a GPU: `make gpu` runs this there, and CI on a CPU.

What only a GPU can show is asked where `ON_GPU`. Numbers that are compared as bits are
exact on both, so that neither another order of a sum nor a fused product moves them.
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
from benchmarks import measure
from jamp import _targets
from jamp._autocast.float8 import RECIPES
from jamp._scaling import rule
from jamp._scaling.rule import LossScaleConfig
from shared import hlo, products
from shared.jaxprs import equations
from shared.master_weights import nearest
from tests.bits import check_same_bits
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

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


def test_the_product_with_a_factor_is_formed_in_float64():
    config = LossScaleConfig(growth_factor=1.1, backoff_factor=0.7, growth_interval=2)
    flags = np.random.default_rng(0).random(2000) < 0.15

    def step(state, found_inf):
        state = rule.update(state, found_inf, config)
        return state, state.loss_scale

    found = jax.jit(lambda f: lax.scan(step, rule.init(config), f)[1])(flags)
    scale, tracker, expected = np.float32(config.init_scale), 0, []
    for found_inf in flags:
        tracker = 0 if found_inf else tracker + 1
        factor = config.backoff_factor if found_inf else 1.0
        if tracker == config.growth_interval:
            tracker, factor = 0, config.growth_factor
        scale = np.float32(np.float64(scale) * factor)
        expected.append(scale)
    assert 2.0**-126 < min(expected) < max(expected) < 2.0**127
    np.testing.assert_array_equal(np.asarray(found), np.float32(expected))


@pytest.mark.slow
def test_float16_training_overflows_and_recovers():
    params = {name: normal(64, 64) / 8 for name in ("first", "second")}
    tx = jamp.dynamic_loss_scale(optax.adamw(3e-3), 2.0**40, growth_interval=20)
    x = normal(64, 64, seed=1, dtype=jnp.float16)

    def loss_fn(params):
        hidden = jax.nn.relu(x @ params["first"].astype(jnp.float16))
        output = (hidden @ params["second"].astype(jnp.float16)).astype(jnp.float32)
        return jnp.mean((output - x.astype(jnp.float32)) ** 2)

    @jax.jit
    def train_step(carry, _):
        params, state = carry
        loss, grads = jamp.value_and_grad(loss_fn, state)(params)
        params, state = jamp.step(tx, grads, state, params)
        return (params, state), (loss, jamp.metrics(state)["found_inf"])

    carry = params, tx.init(params)
    (_, state), (losses, skipped) = lax.scan(train_step, carry, length=200)
    # The loss is finite, and its gradient is a float16 operand of the products: about
    # the scale times 2**-10, which overflows until the scale is 2**26 or so.
    assert skipped[:10].all() and not skipped[20:25].any()
    assert skipped[40:].any(), "the scale grows until a step overflows again"
    assert skipped.sum() == jamp.metrics(state)["skipped_steps"] < 60
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_grad_scaler_makes_no_transfer():
    model = nnx.Linear(256, 256, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    scaler = jamp.GradScaler(growth_interval=5)

    @nnx.jit
    def train_step(model, optimizer, scaler, x):
        loss_fn = lambda m: scaler.scale(jnp.mean(m(x).astype(jnp.float32) ** 2))
        skipped = scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
        scaler.update()
        return skipped

    x = jax.device_put(jnp.ones((32, 256)))
    program = train_step.lower(model, optimizer, scaler, x).compile()
    assert hlo.summarize(program).host == 0
    train_step(model, optimizer, scaler, x)
    with jax.transfer_guard("disallow"):
        for _ in range(20):
            train_step(model, optimizer, scaler, x)
    assert scaler.get_scale() > 2.0**16


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


@pytest.mark.slow
def test_a_retried_step_ends_as_with_the_right_scale_and_never_asks_the_host():
    """One program from two scales, whose numbers are the same at each power of two."""
    tx = jamp.dynamic_loss_scale(optax.adam(1e-2))
    x = normal(16, 32, seed=1, dtype=jnp.float16)

    def loss_fn(w, x):
        return jnp.mean((x @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jamp.retry, attempts=30)
    def step(state, x):
        w, opt_state, steps = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(w, x)
        return (*jamp.step(tx, grads, opt_state, w), steps + 1), loss

    def train(scale):
        w = normal(32, 16) / 4
        opt_state = tx.init(w)._replace(loss_scale=jnp.asarray(scale, jnp.float32))
        state = w, opt_state, jnp.int32(0)
        step(jax.tree.map(jnp.copy, state), x)  # compiles
        with jax.transfer_guard("disallow"):
            for _ in range(5):
                state, _ = step(state, x)
        return state

    w, lossy, steps = train(2.0**40)
    metrics = jamp.metrics(lossy)
    assert metrics["retried_steps"] > 10 and metrics["skipped_steps"] == 0
    assert steps == 5, "what a step counts itself is counted once"
    right_w, right, _ = train(metrics["loss_scale"])
    assert jamp.metrics(right)["retried_steps"] == 0
    check_same_bits((w, lossy.inner_state), (right_w, right.inner_state))


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


@cover(quick=0)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_in_float8_is_near_one_in_bfloat16(recipe):
    params = {"up": normal(64, 128) / 8, "down": normal(128, 32, seed=1) / 11}
    x = normal(48, 64, seed=2)
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0))

    def loss_fn(params):
        hidden = jax.nn.gelu(x @ params["up"])
        return jnp.mean(jnp.float32(hidden @ params["down"]) ** 2)

    def moves(region):
        @jax.jit
        def train_step(params, state):
            loss_of = in_region(loss_fn, region)
            loss, grads = jamp.value_and_grad(loss_of, state)(params)
            return jamp.step(tx, grads, state, params), loss

        (moved, _), loss = train_step(params, tx.init(params))
        return loss, jax.tree.map(jnp.subtract, moved, params)

    (loss, found), (near, expected) = map(moves, (jamp.Float8(recipe), jnp.bfloat16))
    np.testing.assert_allclose(loss, near, rtol=0.05)
    for name, there in expected.items():
        far = jnp.linalg.norm(found[name] - there) / jnp.linalg.norm(there)
        assert far < 0.15, name
        assert far > (0.005 if ROUNDS_FLOAT8 else -1), f"{name}: not in float8"


@pytest.mark.slow
def test_policy_with_master_weights():
    model = jamp.nnx.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "half")
    tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(3e-4)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x).astype(jnp.float32) - x) ** 2)
            return jamp.scale_loss(loss, optimizer.opt_state), loss

        grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss

    x = normal(64, 64, seed=1)
    losses = [float(train_step(model, optimizer, x)) for _ in range(100)]
    assert losses[-1] < 0.9 * losses[0]
    kernel = nnx.as_pure(nnx.state(model, nnx.Param))["kernel"]
    master = nnx.as_pure(optimizer.opt_state).inner_state.master["kernel"]
    assert kernel.dtype == jnp.float16
    check_same_bits(np.asarray(kernel), nearest(master, jnp.float16))


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


# --- reports


@pytest.mark.slow
def test_history_does_not_wait_for_the_device():
    size, rounds = (4096, 200) if ON_GPU else (256, 400)

    @jax.jit
    def slow(x):
        return jnp.sum(lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), x))

    x = normal(size, size) / 64
    jax.block_until_ready(slow(x))
    history = jamp.debug.History(every=2)
    for _ in range(2):  # compiles what append runs
        history.append({"loss": jnp.float32(0)})
    history.fetch()
    with jax.transfer_guard("disallow"):
        late = slow(x)
        for _ in range(4):
            history.append({"loss": late})
        assert not late.is_ready()
    assert history["loss"].shape == (6,)


@pytest.mark.slow
def test_an_overflow_is_named():
    def loss_fn(params, x):
        with jamp.autocast(dtype=jnp.float16):
            with jax.named_scope("head"):
                return jnp.mean((x @ params["w"]) ** 2)

    params, x = {"w": jnp.full((256, 64), 30.0)}, jnp.full((32, 256), 60.0)
    find = jamp.debug.find_nonfinite(jax.grad(loss_fn))
    for report in (find(params, x), jax.jit(find)(params, x)):
        (op, *_) = report.to_dict()["ops"]
        assert op["primitive"] == "dot_general" and op["path"] == "head"
    assert find(params, x / 1000).found == []


def test_gradients_are_counted_as_float16_has_them():
    """Subnormals of float16 count as numbers, and what it rounds to zero does not."""
    tiny = 2.0 ** np.array([-23, -24, -25, -26, -100])
    grads = {
        "tiny": jnp.asarray([*tiny, 0.0], jnp.float32),
        "large": jnp.asarray([1.0, jnp.inf, -jnp.inf, jnp.nan], jnp.float16),
    }

    @jax.jit
    def reports(grads):
        overflow = jamp.debug.overflow_report(grads)
        return overflow, jamp.debug.underflow_report(grads, 2.0)

    overflow, underflow = reports(grads)
    assert overflow.to_dict() == {"large": {"inf": 2, "nan": 1, "size": 4}}
    row = underflow.to_dict()["tiny"]
    counts = {
        name: round(row[name] * 6, 4)
        for name in ("flushed", "flushed_unscaled", "zeros")
    }
    assert counts == {"flushed": 3, "flushed_unscaled": 4, "zeros": 1}


def test_explain_shows_the_dtype_of_the_device():
    def loss_fn(w, x):
        with jamp.autocast():
            return jnp.sum(jnp.float32(x @ w))

    (row, *_) = jamp.debug.explain(loss_fn)(jnp.ones((32, 16)), jnp.ones((8, 32))).rows
    assert (row.op, row.dtypes) == ("dot_general", f"float32 -> {HALF}")
    casts = jax.make_jaxpr(loss_fn)(jnp.ones((32, 16)), jnp.ones((8, 32)))
    made = {str(e.outvars[0].aval.dtype) for e in equations(casts) if e.outvars}
    assert HALF.name in made


@pytest.mark.slow
def test_calibrate_finds_rows_that_one_scale_loses():
    """Its measurements are made beside the program and sent to the host."""

    def loss_fn(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(jnp.sin(x @ w))

    x = normal(64, 64, seed=1) * 2.0 ** -jnp.linspace(0, 20, 64)[:, None]
    report = jamp.calibrate(loss_fn, skip_small=False)(normal(64, 64) / 8, x)
    (row,) = (row for row in report.rows if row.path == "layer")
    assert row.choice == "rowwise"
    assert row.errors["tensorwise"]["forward"][1] > 0.2
    assert max(row.errors["rowwise"]["forward"]) < 0.11


@pytest.mark.slow
def test_measure_measures_each_precision_of_the_device(monkeypatch, capsys):
    """`python -m benchmarks.measure` at a small size."""
    small = {
        "WIDTHS": (64,),
        "BATCHES": (1,),
        "SEQUENCE": 32,
        "ROW_SECONDS": 0.0,
        "MODELS": {"MLP": measure.MODELS["MLP"]},
        "flops_per_second": functools.partial(measure.flops_per_second, size=256),
    }
    if not ON_GPU:  # one for each way to a program; tests/testmeasure.py has all
        names = "float32", "float16", "float8"
        small["PRECISIONS"] = {name: measure.PRECISIONS[name] for name in names}
    for name, value in small.items():
        monkeypatch.setattr(measure, name, value)
    assert measure.main() == 0
    *lines, _, advice = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[4:]]
    units = {"float32", *(UNITS or ("bfloat16", "float16", "float8"))}
    asked = [
        n for n, precision in measure.PRECISIONS.items() if precision.unit in units
    ]
    assert [row[1] for row in rows] == asked
    for _, precision, milliseconds, ratio, *_ in rows:
        assert float(milliseconds) > 0 and float(ratio) > 0, precision
    assert advice.startswith("Choose ") if ON_GPU else advice == measure.CPU
