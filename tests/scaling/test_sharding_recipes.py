"""Sharded training on eight devices equals that on one; what its collectives cost."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from shared.collectives import (
    ALL_HALF,
    APIS,
    HALF,
    LAYOUTS,
    ROWS,
    collectives_of,
    measure,
    training,
)
from tests.bits import check_near, nudged
from tests.marks import cover

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.usefixtures("standard_promotion"),
]
SIZES = {"layers": 2, "width": 32, "rows": 32}
BAD_STEP, STEPS = 2, 5
FIRST = [("FSDP", "shard_map"), ("data parallel", "jit")]
CASES = sorted(ROWS, key=lambda row: FIRST.index(row[:2]) if row[:2] in FIRST else 2)


def name_of(row):
    return " ".join([*row[:2], *row[2]])


def run(training):
    """Trains; one element of one step's batch is inf. Losses, metrics, parameters."""
    mesh, step, params, opt_state, batch = training
    bad_batch = np.array(batch)
    bad_batch[-1, 3] = np.inf
    bad_batch = jax.device_put(bad_batch, batch.sharding)
    losses, log, states = [], [], [jax.device_get(params)]
    with jax.set_mesh(mesh):
        for i in range(STEPS):
            x = bad_batch if i == BAD_STEP else batch
            params, opt_state, loss = step(params, opt_state, x)
            losses.append(float(loss))
            log.append(jax.device_get(jamp.metrics(opt_state)))
            states.append(jax.device_get(params))
    return losses, log, states, (params, opt_state)


def sgd_training(layout, *args, **kwargs):
    return training(layout, *args, tx=optax.sgd(0.1), **SIZES, **kwargs)


@pytest.fixture(scope="module")
def one_device():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(sgd_training(LAYOUTS["data parallel"]._replace(shape=(1,))))


@pytest.mark.slow
@pytest.mark.parametrize("row", CASES, ids=name_of)
def test_a_sharded_training_is_that_of_one_device(row, one_device):
    name, mode, options = row
    sharded = sgd_training(LAYOUTS[name], mode, **options)
    placed = jax.tree.map(lambda x: x.sharding, sharded.params)
    losses, log, states, (params, opt_state) = run(sharded)
    expected_losses, expected_log, expected_states, _ = one_device

    for entry, expected in zip(log, expected_log, strict=True):
        for key, value in expected.items():
            np.testing.assert_array_equal(entry[key], value, err_msg=key)
    assert [bool(entry["found_inf"]) for entry in log] == [
        i == BAD_STEP for i in range(STEPS)
    ]
    jax.tree.map(np.testing.assert_array_equal, states[BAD_STEP], states[BAD_STEP + 1])
    # float16 rounds by 2**-11 of a number; sums over devices come in another order.
    np.testing.assert_allclose(losses, expected_losses, rtol=2**-9)
    for leaf, expected, start in zip(
        *map(jax.tree.leaves, (states[-1], expected_states[-1], expected_states[0])),
        strict=True,
    ):
        moved = np.max(np.abs(expected - start))
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=2**-7 * moved)

    assert jax.tree.all(
        jax.tree.map(lambda x, place: x.sharding == place, params, placed)
    )
    scalars = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.ndim == 0]
    assert len(scalars) == 8
    for scalar in scalars:
        assert scalar.sharding.is_fully_replicated
        assert len({shard.data.item() for shard in scalar.addressable_shards}) == 1


# Where XLA places the collectives, there is one for each set of axes that parameters
# are split over, and in it a byte for each parameter.
BLOCK = {**SIZES, "layers": 1}
PARTS = 4
MORE = {
    ("FSDP", "jit"): (1, PARTS),
    ("tensor parallel", "jit"): (1, PARTS * 3 // 4),
    ("2-D, FSDP x tensor", "jit"): (3, PARTS + 4),
    ("2-D, FSDP x tensor", "explicit"): (3, PARTS + 4),
    ("2-D, FSDP x tensor", "shard_map"): (2, PARTS * 3 // 4 + 4),
    ("data parallel", "jit"): (0, 0),
    ("data parallel", "explicit"): (0, 0),
}


@cover()
@pytest.mark.parametrize("row", CASES, ids=name_of)
def test_loss_scaling_adds_one_scalar_to_what_devices_exchange(row):
    measured = measure(*row, **BLOCK)
    count, size = MORE.get(row[:2], (1, 4))
    assert measured["plain"]["count"] > 0
    assert measured["extra_count"] <= count
    assert measured["extra_bytes"] <= size


SHARDED = [
    ("FSDP", "shard_map"),
    ("data parallel", "jit"),
    ("FSDP", "jit"),
    ("FSDP", "explicit"),
    ("2-D, FSDP x tensor", "shard_map"),
]


@cover()
@pytest.mark.parametrize("api", APIS[1:])
@pytest.mark.parametrize("layout", SHARDED, ids=" ".join)
def test_each_api_adds_as_many_collectives(layout, api):
    name, mode = layout
    options = ALL_HALF if mode == "shard_map" else {}
    found = measure(name, mode, options, api, **BLOCK)
    count, size = MORE.get((name, mode), (1, 4))
    assert found["extra_count"] <= count
    assert found["extra_bytes"] <= size


def reduced(mode, **options):
    layout = LAYOUTS["data parallel"]
    plain = training(layout, mode, api=None, **BLOCK, **options)
    return collectives_of(plain).by_dtype


KERNELS, BIASES, LOSS = 2 * 32 * 64, 32 + 64, 4


@cover()
@pytest.mark.parametrize(
    "mode, options, expected",
    [
        ("shard_map", HALF, {"f16": 2 * (KERNELS + BIASES), "f32": LOSS}),
        ("shard_map", {}, {"f32": 4 * (KERNELS + BIASES) + LOSS}),
        # A kernel's gradient is reduced as its matrix product comes: in float16.
        ("jit", {}, {"f16": 2 * KERNELS, "f32": 4 * BIASES + LOSS}),
    ],
    ids=["float16", "float32", "under jit"],
)
def test_gradients_are_reduced_in_the_dtype_asked_for(mode, options, expected):
    assert reduced(mode, **options) == expected


@cover()
@pytest.mark.parametrize("dtype, overflows", [("float16", True), ("float32", False)])
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["whole", "split"])
def test_an_overflow_in_the_reduction_skips_the_step_everywhere(dtype, overflows, spec):
    # Every device's gradient is 2 * 40000: finite in float32, not in float16.
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0, axis_name="data")

    def local_step(w, opt_state, x):
        def loss_fn(w):
            w = jamp.sharding.gather(w, "data", spec, reduce_dtype=dtype)
            return jnp.sum(w * x)

        _, grads = jamp.value_and_grad(loss_fn, opt_state)(w)
        return jamp.step(tx, grads, opt_state, w)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        local_step, mesh=mesh, in_specs=(spec, P(), P()), out_specs=(spec, P())
    )
    w = np.ones(8, np.float32)
    moved, opt_state = jax.jit(step)(w, tx.init(w), np.full(8, 4e4, np.float32))
    assert opt_state.found_inf == overflows
    np.testing.assert_array_equal(moved, 1.0 if overflows else 1.0 - 40000.0)


def test_an_overflow_in_a_reduction_that_xla_placed_is_caught():
    # Parts of the sum are finite in float16, the sum is not.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=1.0)
    w = {"w": np.zeros((4, 4), np.float32)}

    def loss_fn(params, x):
        with jamp.autocast(dtype=jnp.float16):
            return jnp.sum(x @ params["w"])

    @jax.jit
    def step(params, opt_state, x):
        _, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
        return *jamp.step(tx, grads, opt_state, params), grads

    x = np.full((8, 4), 10000.0, np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    hlo = step.lower(w, tx.init(w), x).compile().as_text()
    assert "f16[4,4]{1,0} all-reduce" in hlo
    params, opt_state, grads = step(w, tx.init(w), x)
    assert np.all(np.isinf(grads["w"])) and opt_state.found_inf
    np.testing.assert_array_equal(params["w"], 0.0)


class LinenBlock(nn.Module):
    """Kernels split over two axes by Flax's metadata."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.with_partitioning(init, ("data", "model"))
        down = nn.with_partitioning(init, ("model", "data"))
        hidden = nn.gelu(nn.LayerNorm()(nn.Dense(32, kernel_init=up)(x)))
        return nn.Dense(16, kernel_init=down)(hidden)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("data", "model"))
        down = nnx.with_partitioning(init, ("model", "data"))
        self.up = nnx.Linear(16, 32, kernel_init=up, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


def two_axes():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def batches(mesh):
    x = jax.random.normal(jax.random.key(1), (16, 16))
    bad = x.at[7, 3].set(jnp.nan)
    return [jax.device_put(b, NamedSharding(mesh, P("data"))) for b in (x, bad, x)]


@pytest.mark.slow
def test_linen_with_partitioned_parameters():
    model, mesh = LinenBlock(), two_axes()

    def init(key):
        return jamp.linen.TrainState.create(
            apply_fn=model.apply,
            params=jax.jit(model.init)(key, jnp.ones((1, 16)))["params"],
            tx=jamp.dynamic_loss_scale(optax.adamw(1e-2)),
        )

    specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, P),
    )
    state = jax.jit(init, out_shardings=places)(jax.random.key(0))

    @jax.jit
    def train_step(state, x):
        def loss_fn(params):
            with jamp.autocast(dtype=jnp.float16):
                return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        loss, grads = jamp.value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    found, losses = [], []
    for x in batches(mesh):
        state, loss = train_step(state, x)
        found.append(bool(jamp.metrics(state)["found_inf"]))
        losses.append(float(loss))
    assert found == [False, True, False] and losses[2] < losses[0]
    kernel = state.params["Dense_0"]["kernel"]
    moment = state.opt_state.inner_state[0].mu["Dense_0"]["kernel"]
    assert kernel.value.sharding.spec == moment.value.sharding.spec == P(*kernel.names)
    assert jamp.loss_scale(state).sharding.is_fully_replicated
    assert jamp.loss_scale(state) == 2.0**15


@pytest.mark.slow
def test_nnx_with_partitioned_parameters():
    mesh = two_axes()
    with jax.set_mesh(mesh):

        @nnx.jit
        def create():
            model = NnxBlock(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            return model, optimizer, jamp.GradScaler()

        @nnx.jit
        def train_step(model, optimizer, scaler, x):
            def loss_fn(model):
                with jamp.autocast(dtype=jnp.float16):
                    loss = jnp.mean(model(x) ** 2)
                return scaler.scale(loss), loss

            grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
            skipped = scaler.step(optimizer, model, grads)
            scaler.update()
            return loss, skipped

        model, optimizer, scaler = create()
        results = [train_step(model, optimizer, scaler, x) for x in batches(mesh)]
    losses, skipped = zip(*results, strict=True)
    assert [bool(s) for s in skipped] == [False, True, False]
    assert losses[2] < losses[0]
    assert model.up.kernel[...].sharding.spec == P("data", "model")
    assert scaler.loss_scale[...].sharding.is_fully_replicated
    assert scaler.get_scale() == 2.0**15


def test_explicit_sharding_keeps_what_update_returns():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, P("data"))
    tx = jamp.dynamic_loss_scale(optax.adam(0.1))
    ones = lambda *shape: np.ones(shape, np.float32)
    params = {"w": jax.device_put(ones(16, 2), split), "b": jax.device_put(ones(2))}
    state = tx.init(params)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = dict(params)
    for bad in (False, True):
        if bad:
            one_inf = np.ones((16, 2), np.float32)
            one_inf[9, 1] = np.inf
            grads["w"] = jax.device_put(one_inf, split)
        moved, state = update(grads, state, params)  # and with no mesh set
        assert state.found_inf == bad
        same = np.array_equal(moved["w"], params["w"])
        assert same == bad
        assert jax.typeof(moved["w"]).sharding.spec == P("data", None)
        params = moved


def gathered(params, in_specs, *args, **kwargs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gather = lambda params: jamp.sharding.gather(params, "data", *args, **kwargs)
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=(in_specs,), out_specs=P("data"))
    return jax.jit(mapped)(params)


def test_gather_leaves_integers_and_takes_a_tree_of_specs():
    w, n = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8, dtype=np.int32)
    params = {"w": w, "n": n, "none": None}
    specs = {"w": P("data"), "n": P("data"), "none": None}
    whole = gathered(params, specs, specs, param_dtype=jnp.float16)
    assert whole["w"].shape == (64, 2) and whole["w"].dtype == jnp.float16
    np.testing.assert_array_equal(whole["w"][8:16], params["w"])
    np.testing.assert_array_equal(whole["n"], params["n"])


def test_gather_refuses_specs_that_are_not_those_of_the_parameters():
    params = {"w": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"\['w'\], of shape \(1,\) .*split by P\(\)"):
        gathered(params, P("data"))
    with pytest.raises(
        ValueError, match=r"split by P\('data', 'data'\).* Pass the in_specs"
    ):
        gathered(params, P("data"), P("data", "data"))


@cover()
@pytest.mark.parametrize("spec", [P(None, "inner"), P()], ids=["split", "whole"])
def test_gather_averages_over_two_axes(spec):
    mesh = jax.make_mesh((4, 2), ("inner", "outer"), axis_types=(AxisType.Auto,) * 2)
    axes = ("inner", "outer")
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 4)).astype(np.float32) for n in (16, 2))

    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x * w[:1] + w[1:]))

    def local_gradient(w, x):
        whole = lambda w: jamp.sharding.gather(w, axes, spec)
        return jax.grad(lambda w: loss_fn(whole(w), x))(w)

    for check_vma in (True, False):
        mapped = jax.shard_map(
            local_gradient,
            mesh=mesh,
            in_specs=(spec, P(axes)),
            out_specs=spec,
            check_vma=check_vma,
        )
        gradient = jax.jit(mapped)(w, x)
        plain = jax.jit(jax.grad(loss_fn))
        expected, *nearby = (plain(*a) for a in [(w, x), *nudged((w, x))])
        check_near(gradient, expected, nearby)


def test_two_calls_reduce_first_in_float16_and_then_in_float32():
    mesh = jax.make_mesh((4, 2), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
    both = ("host", "chip")

    def local_gradient(w, x):
        def loss_fn(w):
            w = jamp.sharding.gather(w, "host", reduce_dtype=jnp.float32)
            w = jamp.sharding.gather(w, "chip", reduce_dtype=jnp.float16)
            return jnp.sum(w * x)

        return jax.grad(loss_fn)(w)

    step = jax.jit(
        jax.shard_map(local_gradient, mesh=mesh, in_specs=(P(), P(both)), out_specs=P())
    )
    # Exact in float16 on each host; their mean, 1 + 2**-12, is not.
    one, steps = np.ones(1, np.float32), lambda *n: np.repeat(1 + np.array(n) / 1024, 2)
    x = steps(0, 0, 1, 3).astype(np.float32)
    assert step(one, x)[0] == 1.0 + 2.0**-10
    x = steps(0, 0, 0, 1).astype(np.float32)
    assert step(one, x)[0] == 1.0 + 2.0**-12
    hlo = step.lower(one, x).compile().as_text()
    assert "f16[1]{0} all-reduce" in hlo and "f32[1]{0} all-reduce" in hlo


@cover()
@pytest.mark.parametrize("spec", [P(("a", "b")), P(("b", "a")), P("b", "a")])
def test_gather_undoes_a_split_over_two_axes_in_one_call_and_in_two(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    w, gather = np.arange(64, dtype=np.float32).reshape(8, 8), jamp.sharding.gather

    def run(f):
        mapped = jax.shard_map(
            lambda w: f(w)[None], mesh=mesh, in_specs=spec, out_specs=P(("a", "b"))
        )
        return jax.jit(mapped)(w)

    whole = np.broadcast_to(w, (8, 8, 8))
    np.testing.assert_array_equal(run(lambda w: gather(w, ("a", "b"), spec)), whole)
    in_two = {
        P(("a", "b")): lambda w: gather(gather(w, "b", spec), "a", P("a")),
        P(("b", "a")): lambda w: gather(gather(w, "a", spec), "b", P("b")),
        P("b", "a"): lambda w: gather(gather(w, "a", spec), "b", spec),
    }[spec]
    np.testing.assert_array_equal(run(in_two), whole)
    if len(spec) == 1:
        first = spec[0][0]
        with pytest.raises(ValueError, match=rf"\('{first}',\) cannot be gathered bef"):
            run(lambda w: gather(w, first, spec))


def test_gather_inside_the_region_and_under_checkpoint():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(n, 8)).astype(np.float32) for n in (8, 16))

    def local_gradient(w, x, inside):
        @jax.checkpoint
        def layer(w, x):
            return jnp.tanh(x @ jamp.sharding.gather(w, "data", P("data")))

        def loss_fn(w):
            with jamp.autocast(dtype=jnp.float16):
                return jnp.mean(layer(w, layer(w, x)) ** 2)

        def outside(w):
            whole = jamp.sharding.gather(w, "data", P("data"))
            with jamp.autocast(dtype=jnp.float16):
                return jnp.mean(jnp.tanh(jnp.tanh(x @ whole) @ whole) ** 2)

        return jax.grad(loss_fn if inside else outside)(w)

    inside, outside = (
        jax.jit(
            jax.shard_map(
                lambda w, x, i=i: local_gradient(w, x, i),
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P("data"),
            )
        )(w, x)
        for i in (True, False)
    )
    assert inside.dtype == jnp.float32
    np.testing.assert_allclose(
        inside, outside, atol=2**-10 * float(np.max(abs(np.asarray(outside))))
    )


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"axis_name": 3}, TypeError, "axis_name must be a name or a sequence"),
        ({"axis_name": ()}, TypeError, "axis_name must name a mapped axis; got"),
        ({"axis_name": ("a", "a")}, ValueError, "axis_name must name each axis once"),
        ({"reduce_dtype": "int4"}, TypeError, "reduce_dtype must be a floating dtype"),
        ({"block": 0}, ValueError, "block must be >= 1 and < 2..31; got 0"),
        ({"param_dtype": "text"}, TypeError, "param_dtype must be a floating dtype"),
        (
            {"specs": "data"},
            TypeError,
            "specs must be PartitionSpecs or None; got .data",
        ),
        ({"specs": {"b": P()}}, ValueError, "specs must be one PartitionSpec, or a"),
        ({"axis_name": "data"}, ValueError, "axis_name 'data' is not a mapped axis"),
    ],
)
def test_gather_refuses(kwargs, error, message):
    with pytest.raises(error, match=message):
        jamp.sharding.gather({"w": jnp.ones(2)}, **{"axis_name": "data", **kwargs})
