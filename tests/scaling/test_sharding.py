"""Eight devices: an overflow on one of them skips the step on all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jamp
from tests.bits import check_same_bits
from tests.marks import cover

P = PartitionSpec
DEVICES = 8

pytestmark = [
    pytest.mark.devices(DEVICES),
    pytest.mark.usefixtures("standard_promotion"),
]


def make_mesh(shape=(DEVICES,), names=("data",)):
    return jax.make_mesh(
        shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
    )


def one_bad(device):
    """One gradient row per device, an inf in the row of one of them."""
    grads = np.ones((DEVICES, 4), np.float32)
    if device is not None:
        grads[device, 2] = np.inf
    return grads


@cover(quick=3)
@pytest.mark.parametrize("bad", [0, None, 5])
@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize("axis_name", ["data", ("data",)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_combines_found_inf(bad, how, axis_name, check_vma):
    # Each device has its own parameters and gradients, as experts do.
    tx = jamp.dynamic_loss_scale(
        optax.sgd(1.0), init_scale=4.0, growth_interval=1, axis_name=axis_name
    )
    params = np.zeros((DEVICES, 4), np.float32)

    def local_step(params, grads):
        state = tx.init(params)
        if how == "step":
            params, state = jamp.step(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, jamp.metrics(state)

    sharded_step = jax.shard_map(
        local_step,
        mesh=make_mesh(),
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P()),
        check_vma=check_vma,
    )
    new_params, metrics = jax.jit(sharded_step)(params, one_bad(bad))
    assert metrics["found_inf"] == (bad is not None)
    assert metrics["loss_scale"] == (8.0 if bad is None else 2.0)
    np.testing.assert_array_equal(new_params, -0.25 if bad is None else 0.0)


@pytest.mark.slow  # not jitted: each op is compiled for eight devices
def test_without_axis_name_each_replica_decides_alone():
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0)

    def local_step(params, grads):
        params, _ = jamp.step(tx, grads, tx.init(params), params)
        return params

    new_params = jax.shard_map(
        local_step, mesh=make_mesh(), in_specs=P("data"), out_specs=P("data")
    )(jnp.zeros((DEVICES, 4)), one_bad(3))
    np.testing.assert_array_equal(new_params[3], 0.0)
    np.testing.assert_array_equal(new_params[4], -0.25)


def test_a_static_scale_combines_found_inf_too():
    tx = jamp.static_loss_scale(optax.sgd(1.0), 4.0, axis_name="data")

    def local_step(params, grads):
        return jamp.step(tx, grads, tx.init(params), params)[0]

    sharded_step = jax.shard_map(
        local_step, mesh=make_mesh(), in_specs=P("data"), out_specs=P("data")
    )
    new_params = jax.jit(sharded_step)(jnp.zeros((DEVICES, 4)), one_bad(3))
    np.testing.assert_array_equal(new_params, 0.0)


def test_data_parallel_shard_map_equals_one_device():
    # Small integers, whose sums are exact in any order.
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (DEVICES * 2, 16)).astype(np.float32)
    params = {"w": rng.integers(-4, 5, (16, 4)).astype(np.float32)}

    def train(tx, loss_fn, wrap):
        def step(params, state, x):
            loss, grads = jamp.value_and_grad(loss_fn, state)(params, x)
            return *jamp.step(tx, grads, state, params), loss

        return jax.jit(wrap(step))(params, jax.jit(tx.init)(params), x)

    def mean_loss(params, x):
        return jax.lax.pmean(data_parallel_loss(params, x), "data")

    expected = train(
        jamp.dynamic_loss_scale(optax.sgd(0.5)), data_parallel_loss, lambda f: f
    )
    mapped = train(
        jamp.dynamic_loss_scale(optax.sgd(0.5), axis_name="data"),
        mean_loss,
        lambda step: jax.shard_map(
            step, mesh=make_mesh(), in_specs=(P(), P(), P("data")), out_specs=P()
        ),
    )
    check_same_bits(mapped[0], expected[0])
    check_same_bits(mapped[2], expected[2])


def test_shard_map_over_two_axes():
    mesh = make_mesh((4, 2), ("data", "model"))
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), axis_name=("data", "model"))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=(P(("data", "model")), P()),
    )
    def local_step(grads):
        params = jnp.zeros_like(grads)
        params, state = jamp.step(tx, grads, tx.init(params), params)
        return params, state.found_inf

    params, found_inf = local_step(one_bad(6))
    assert found_inf and not np.any(params)


def test_pmap():
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), axis_name="batch")

    @partial(jax.pmap, axis_name="batch")
    def step(grads):
        params = jnp.zeros_like(grads)
        params, state = jamp.step(tx, grads, tx.init(params), params)
        return params, state.found_inf

    params, found_inf = step(one_bad(1))
    assert np.all(found_inf) and not np.any(params)


def data_parallel_loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@cover(quick=2)
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.parametrize("bad", [True, False])
def test_jit_with_sharded_arrays_needs_no_axis_name(placement, bad):
    mesh = make_mesh()
    spec = {"replicated": P(), "sharded": P("data")}[placement]
    tx = jamp.dynamic_loss_scale(optax.adam(0.1))
    ones = np.ones((16, 4), np.float32)
    params = {"w": jax.device_put(ones, NamedSharding(mesh, spec))}
    state = jax.jit(tx.init)(params)
    x = np.ones((DEVICES * 2, 16), np.float32)
    x[9, 3] = np.inf if bad else 1.0
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    @jax.jit
    def train_step(params, state, x):
        _, grads = jamp.value_and_grad(data_parallel_loss, state)(params, x)
        return jamp.step(tx, grads, state, params)

    for _ in range(3):
        before = np.asarray(params["w"])
        params, state = train_step(params, state, x)
        assert state.found_inf == bad
        assert np.array_equal(before, params["w"]) == bad
    for name in ("loss_scale", "growth_tracker", "found_inf", "skipped_steps"):
        array = getattr(state, name)
        assert array.sharding.is_fully_replicated
        assert len({shard.data.item() for shard in array.addressable_shards}) == 1
    assert state.loss_scale == (2.0**13 if bad else 2.0**16)
    assert params["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_grad_scaler_on_sharded_arrays_and_under_shard_map():
    mesh = make_mesh()
    make = lambda: nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0))
    model = nnx.jit(make)()
    model.kernel[...] = jax.device_put(
        model.kernel[...], NamedSharding(mesh, P("data"))
    )
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    scaler = jamp.GradScaler()

    @nnx.jit
    def train_step(model, optimizer, scaler, x):
        loss_fn = lambda model: scaler.scale(jnp.mean(model(x) ** 2))
        skipped = scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
        scaler.update()
        return skipped

    x = np.ones((16, 16), np.float32)
    placed = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    assert not train_step(model, optimizer, scaler, placed(x))
    before = np.asarray(model.kernel[...])
    x[9, 3] = np.nan
    assert train_step(model, optimizer, scaler, placed(x))
    np.testing.assert_array_equal(model.kernel[...], before)
    assert scaler.loss_scale[...].sharding.is_fully_replicated

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    def mapped(grads):
        local = nnx.Linear(4, 1, use_bias=False, rngs=nnx.Rngs(0))
        local_optimizer = nnx.Optimizer(local, optax.sgd(1.0), wrt=nnx.Param)
        scalers = [jamp.GradScaler(axis_name="data") for _ in range(2)]
        gradient = nnx.State({"kernel": nnx.Param(grads.T)})
        scalers[0].unscale_(local_optimizer, gradient)
        scalers[1].step(local_optimizer, local, gradient)
        for scaler in scalers:
            scaler.update()
        return [scaler.get_scale() for scaler in scalers]

    assert mapped(one_bad(7)) == [2.0**15] * 2


def test_gather_divides_before_it_sums():
    # Eight gradients of 40000 have a mean that float16 can hold; their sum overflows.
    tx = jamp.dynamic_loss_scale(
        optax.sgd(1.0), init_scale=1.0, axis_name="data", growth_interval=10
    )

    def local_step(w, split, x):
        def loss_fn(w, split):
            gathered = jamp.sharding.gather(w, "data", reduce_dtype=jnp.float16)
            whole = jamp.sharding.gather(
                split, "data", P("data"), reduce_dtype=jnp.float16
            )
            return jnp.sum(x * (gathered + whole))

        params = w, split
        return jamp.step(
            tx, jax.grad(loss_fn, (0, 1))(*params), tx.init(params), params
        )

    step = jax.shard_map(
        local_step,
        mesh=make_mesh(),
        in_specs=(P(), P("data"), P("data")),
        out_specs=((P(), P("data")), P()),
        check_vma=False,
    )
    w = np.zeros(DEVICES, np.float32)
    x = np.full((DEVICES, DEVICES), 40000.0, np.float32)
    params, state = jax.jit(step)(w, w, x)
    assert state.skipped_steps == 0
    for new in params:
        np.testing.assert_allclose(new, -40000.0, rtol=1e-3)
