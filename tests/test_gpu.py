"""What only a GPU can show; skipped without one. `make gpu` runs it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from jamp._scaling import rule
from jamp._scaling.rule import LossScaleConfig
from shared import hlo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("standard_promotion"),
]


def test_the_float64_product_is_the_hosts():
    config = LossScaleConfig(growth_factor=1.1, backoff_factor=0.7, growth_interval=2)
    flags = np.random.default_rng(0).random(2000) < 0.35

    def step(state, found_inf):
        state = rule.update(state, found_inf, config)
        return state, state.loss_scale

    train = jax.jit(lambda f: jax.lax.scan(step, rule.init(config), f)[1])
    on_gpu = np.asarray(train(flags))
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = np.asarray(train(flags))
    np.testing.assert_array_equal(on_gpu.view(np.uint32), on_cpu.view(np.uint32))


def test_float16_training_overflows_and_recovers():
    kernel = jax.random.normal(jax.random.key(0), (256, 256)) / 16
    params = {"first": kernel, "second": kernel}
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3), 2.0**20, growth_interval=20)
    x = jax.random.normal(jax.random.key(1), (64, 256), jnp.float16)

    def loss_fn(params):
        hidden = jax.nn.relu(x @ params["first"].astype(jnp.float16))
        output = (hidden @ params["second"].astype(jnp.float16)).astype(jnp.float32)
        return jnp.mean((output - x.astype(jnp.float32)) ** 2)

    @jax.jit
    def train_step(params, state):
        loss, grads = jamp.value_and_grad(loss_fn, state)(params)
        params, state = jamp.step(tx, grads, state, params)
        return params, state, loss

    state, losses = tx.init(params), []
    for _ in range(200):
        params, state, loss = train_step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert 0 < jamp.metrics(state)["skipped_steps"] < 100


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
    train_step(model, optimizer, scaler, x)
    with jax.transfer_guard("disallow"):
        for _ in range(20):
            train_step(model, optimizer, scaler, x)
    assert scaler.get_scale() > 2.0**16


def test_a_step_copies_no_parameter_and_never_asks_the_host():
    tx = jamp.dynamic_loss_scale(optax.adamw(1e-3))
    params = [jnp.ones((512, 512)) for _ in range(4)]

    def train_step(params, state, grads):
        return jamp.step(tx, grads, state, params)

    step = jax.jit(train_step, donate_argnums=(0, 1))
    figures = hlo.summarize(step.lower(params, tx.init(params), params).compile())
    assert figures.conditionals == figures.host == 0
    assert figures.temporary_bytes < 2**20  # not as much as one parameter


def test_autocast_runs_its_products_in_float16():
    model = nnx.MultiHeadAttention(8, 256, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 128, 256))

    def loss(model):
        with jamp.autocast():  # float16 is the default on a GPU
            y = model(x)
        assert y.dtype == jnp.float16
        return jnp.mean(y.astype(jnp.float32) ** 2)

    step = nnx.jit(nnx.value_and_grad(loss))
    value, gradients = step(model)
    expected = jnp.mean(model(x) ** 2)
    np.testing.assert_allclose(value, expected, rtol=0.01)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda s: jax.grad(lambda s: loss(nnx.merge(graph, s)))(s))
    text = compiled.lower(state).compile().as_text()
    assert "f16[" in text


def test_policy_with_master_weights():
    model = jamp.nnx.with_policy(nnx.Linear(256, 256, rngs=nnx.Rngs(0)), "half")
    tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(1e-4)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x).astype(jnp.float32) - x) ** 2)
            return jamp.scale_loss(loss, optimizer.opt_state), loss

        grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss

    x = jax.random.normal(jax.random.key(1), (64, 256))
    losses = [float(train_step(model, optimizer, x)) for _ in range(100)]
    assert losses[-1] < 0.9 * losses[0]
    kernel = nnx.as_pure(nnx.state(model, nnx.Param))["kernel"]
    master = nnx.as_pure(optimizer.opt_state).inner_state.master["kernel"]
    assert kernel.dtype == jnp.float16
    rounded = np.asarray(master).astype(np.float16)
    np.testing.assert_array_equal(
        rounded.view("uint16"), np.asarray(kernel).view("uint16")
    )


def test_history_does_not_wait_for_the_gpu():
    @jax.jit
    def slow(x):
        return jnp.sum(jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x))

    x = jax.random.normal(jax.random.key(0), (4096, 4096)) / 64
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


def test_an_overflow_on_the_gpu_is_named():
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


@pytest.mark.parametrize("scaled", [False, True])
def test_a_parameter_and_its_remainder_are_results_of_one_kernel(scaled):
    """Two sums that differ in the last bit would make halves that do not fit."""
    tx = jamp.master_weights(optax.adamw(1e-3), remainder=True)
    tx = jamp.dynamic_loss_scale(tx) if scaled else tx
    params = {name: jnp.ones((1024, 1024), jnp.bfloat16) for name in "abcd"}
    step = lambda params, state: jamp.step(tx, params, state, params)
    jitted = jax.jit(step, donate_argnums=1)
    program = jitted.lower(params, tx.init(params)).compile()
    instructions = itertools.chain(*hlo.parse(program.as_text()).values())
    shapes = {i.name: i.shape for i in instructions if i.op == "fusion"}
    kernels = [shape for shape in shapes.values() if "s16[" in shape]
    assert len(kernels) == 4
    assert all("bf16[" in shape for shape in kernels)
