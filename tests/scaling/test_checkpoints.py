"""Training from a restored checkpoint continues bit for bit as if never interrupted.

Checkpoints are saved by orbax, msgpack or pickle, on one device or many, and restored
onto the same mesh or another.
"""

import functools
import itertools
import json
import pickle

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
import jamp.linen
from tests.bits import check_same_bits
from tests.marks import cover
from tests.trainers import nnx_trainer, optax_trainer

pytestmark = pytest.mark.usefixtures("standard_promotion")

SCALING = {"init_scale": 2.0**10, "growth_interval": 3, "hysteresis": 2}
BAD = (1, 2, 8)  # steps with an inf in the batch
SAVED, END = 7, 14  # a step in the middle of an accumulation, and the last one


def make_batch(step):
    x = np.random.default_rng(step).normal(size=(8, 8)).astype(np.float32)
    if step in BAD:
        x[3, 2] = np.inf
    return x


def make_params(dtype):
    rng = np.random.default_rng(99)
    shapes = {"w1": (8, 16), "b1": (16,), "w2": (16, 8)}
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}


def loss_fn(params, x):
    with jamp.autocast(dtype=jnp.float16):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - 1) ** 2)


def trainer(make, inner, dtype=jnp.float32):
    carry, step = make(loss_fn, make_params(dtype), inner, **SCALING)
    return carry, jax.jit(step)


TRAINERS = {
    "adam": lambda: trainer(optax_trainer, optax.adam(0.01)),
    "GradScaler": lambda: trainer(nnx_trainer, optax.adam(0.01)),
    "MultiSteps": lambda: trainer(optax_trainer, optax.MultiSteps(optax.adam(0.01), 2)),
    "master_weights": lambda: trainer(
        optax_trainer, jamp.master_weights(optax.adam(0.01)), jnp.float16
    ),
}


def train(step, carry, start, end, put=lambda x: x):
    losses = []
    for number in range(start, end):
        carry, loss, *_ = step(carry, put(make_batch(number)))
        losses.append(loss)
    return carry, np.stack(losses)


def through_orbax(carry, target, folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", carry)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", target)


def through_msgpack(carry, target, folder):
    path = folder / "saved.msgpack"
    path.write_bytes(flax.serialization.to_bytes(plain(carry)))
    saved = flax.serialization.from_bytes(plain(target), path.read_bytes())
    return filled(target, saved)


def through_state_dict(carry, target, folder):
    del folder
    saved = flax.serialization.to_state_dict(plain(carry))
    return filled(target, flax.serialization.from_state_dict(plain(target), saved))


def through_pickle(carry, target, folder):
    del target
    path = folder / "saved.pickle"
    path.write_bytes(pickle.dumps(carry))
    return pickle.loads(path.read_bytes())


def plain(tree):
    """Flax's serialization does not know `nnx.State`."""
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def filled(target, saved):
    if isinstance(target, nnx.State):
        nnx.replace_by_pure_dict(target, saved)
        return target
    return saved


@functools.cache
def trained(kind):
    """A step, what it made until it was saved and until the end, and its losses."""
    start, step = TRAINERS[kind]()
    middle, _ = train(step, start, 0, SAVED)
    return step, middle, *train(step, middle, SAVED, END)


CARRIERS = [through_orbax, through_msgpack, through_pickle, through_state_dict]


@cover(quick=3, ci=len(TRAINERS) * len(CARRIERS))
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_saved_and_restored_on_one_device(kind, carrier, tmp_path):
    step, middle, expected, losses = trained(kind)
    fresh, _ = TRAINERS[kind]()
    restored = carrier(middle, fresh, tmp_path)
    check_same_bits(restored, middle)
    resumed, resumed_losses = train(step, restored, SAVED, END)
    check_same_bits(resumed, expected)
    np.testing.assert_array_equal(resumed_losses, losses)


def scaling(carry):
    """What `SCALING` and `BAD` determine, on any placement of the arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(carry)
    names = ("loss_scale", "growth_tracker", "skipped_steps", "hysteresis_tracker")
    return {
        name: float(leaf)
        for path, leaf in leaves
        for name in names
        if name in jax.tree_util.keystr(path)
    }


def shardings_on(mesh, carry):
    def sharding(leaf):
        names = mesh.axis_names[: leaf.ndim]
        return NamedSharding(mesh, P(*names))

    return jax.tree.map(sharding, carry)


def make_mesh(shape):
    axes = ("data", "model")[: len(shape)]
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, axes, axis_types=auto, devices=devices)


@pytest.mark.devices(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_saved_sharded_and_restored_onto_other_meshes(kind, tmp_path):
    carry, step = TRAINERS[kind]()
    alone, _ = train(step, carry, 0, 15)
    carry = jax.device_put(carry, shardings_on(make_mesh((8,)), carry))
    for number, shape in enumerate([(8,), (4, 2), (2,)]):
        mesh = make_mesh(shape)
        shardings = shardings_on(mesh, carry)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            carry,
            shardings,
        )
        restored = through_orbax(carry, target, tmp_path / str(number))
        moved = jax.device_put(carry, shardings)  # by hand, without a checkpoint
        check_same_bits(restored, moved)
        for leaf, sharding in pairs(restored, shardings):
            assert leaf.sharding == sharding

        put = lambda x, mesh=mesh: jax.device_put(x, NamedSharding(mesh, P("data")))
        start, end = 5 * number, 5 * (number + 1)
        carry, losses = train(step, moved, start, end, put)
        resumed, resumed_losses = train(step, restored, start, end, put)
        check_same_bits(resumed, carry)
        np.testing.assert_array_equal(resumed_losses, losses)
    assert scaling(carry) == scaling(alone)


def pairs(a, b):
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


@pytest.mark.devices(8)
@cover()
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_init_outside_jit_keeps_the_sharding_of_each_parameter(dtype):
    params = make_params(dtype)
    params = jax.device_put(params, shardings_on(make_mesh((4, 2)), params))
    for inner in (optax.adam(0.01), jamp.master_weights(optax.adam(0.01))):
        opt_state = jamp.dynamic_loss_scale(inner).init(params)
        ((_, moments),) = optax.tree.get_all_with_path(opt_state, "mu")
        for moment, param in pairs(moments, params):
            assert moment.sharding == param.sharding


@cover(ci=3)
@pytest.mark.parametrize(
    "carrier", [through_state_dict, through_orbax, through_msgpack]
)
def test_linen_train_state(carrier, tmp_path):
    def create():
        return jamp.linen.TrainState.create(
            apply_fn=None,
            params=make_params(jnp.float32),
            tx=jamp.dynamic_loss_scale(optax.adam(0.01), **SCALING),
        )

    @jax.jit
    def step(state, x):
        loss, grads = jamp.value_and_grad(loss_fn, state)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    middle, _ = train(step, create(), 0, SAVED)
    expected, losses = train(step, middle, SAVED, END)
    fresh = create()
    restored = carrier(middle, fresh, tmp_path)
    assert restored.tx is fresh.tx
    resumed, resumed_losses = train(step, restored, SAVED, END)
    np.testing.assert_array_equal(resumed_losses, losses)
    for a, b in pairs(resumed, expected):
        check_same_bits(a, b)


def drive(scaler, overflows):
    """Scale and tracker after each step of a scaler; one step for each flag."""
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    seen = []
    for overflow in overflows:
        grad = jnp.full((2, 1), jnp.inf if overflow else 1.0)
        scaler.step(optimizer, model, nnx.State({"kernel": nnx.Param(grad)}))
        scaler.update()
        seen.append((scaler.get_scale(), int(scaler.growth_tracker[...])))
    return seen


OVERFLOWS = [False, False, True, False, False, False, False, True, False]


@cover(quick=3)
@pytest.mark.parametrize("split", [4, 0, 8, 1, 2, 3, 5, 6, 7])
def test_state_dict_goes_through_json(split):
    numbers = dict(growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
    scaler = jamp.GradScaler(1000.1, **numbers)
    drive(scaler, OVERFLOWS[:split])
    restored = jamp.GradScaler()
    restored.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert restored.state_dict() == scaler.state_dict()
    assert drive(restored, OVERFLOWS[split:]) == drive(scaler, OVERFLOWS[split:])


# What torch.amp.GradScaler.state_dict() returns.
TORCHS = {
    "scale": 4096.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 1,
}


def test_torchs_state_dict_in_and_out():
    scaler = jamp.GradScaler()
    scaler.load_state_dict(TORCHS)
    assert scaler.state_dict() == TORCHS
    for name, value in scaler.state_dict().items():
        assert type(value) is type(TORCHS[name])
    seen = drive(scaler, [False, False, True, False])
    assert seen == [(4096.0, 2), (8192.0, 0), (4096.0, 0), (4096.0, 1)]


def test_torchs_state_dict_into_an_optimizer_state():
    names = ("growth_factor", "backoff_factor", "growth_interval")
    numbers = {name: TORCHS[name] for name in names}
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), **numbers)
    params = {"w": jnp.ones(2)}
    opt_state = optax.tree.set(
        tx.init(params),
        loss_scale=jnp.float32(TORCHS["scale"]),
        growth_tracker=jnp.int32(TORCHS["_growth_tracker"]),
    )
    seen = []
    for value in (1.0, 1.0, jnp.inf, 1.0):
        grads = {"w": jnp.full(2, value)}
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        metrics = jamp.metrics(opt_state)
        seen.append((float(metrics["loss_scale"]), int(metrics["growth_tracker"])))
    assert seen == [(4096.0, 2), (8192.0, 0), (4096.0, 0), (4096.0, 1)]


@cover()
@pytest.mark.parametrize("other", ["plain", "another optimizer"])
def test_a_checkpoint_of_another_structure_is_refused(other, tmp_path):
    (params, opt_state), _ = TRAINERS["MultiSteps"]()
    tx = optax.adam(0.01)
    if other != "plain":
        tx = jamp.dynamic_loss_scale(tx)
    target = tx.init(params)
    with pytest.raises(ValueError, match="tree structures do not match"):
        through_orbax(opt_state, target, tmp_path)
    with pytest.raises(ValueError, match="list and the state dict do not match"):
        through_msgpack(opt_state, target, tmp_path)


def overflown(steps, **kwargs):
    tx, params = jamp.dynamic_loss_scale(optax.sgd(0.1), **kwargs), jnp.ones(2)
    state = tx.init(params)
    for _ in range(steps):
        _, state = tx.update(params * jnp.inf, state, params)
    return state, params


def test_a_run_goes_on_with_less_hysteresis():
    state, params = overflown(3, hysteresis=4)
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), hysteresis=2)
    _, state = tx.update(params, state, params)
    assert state.hysteresis_tracker == 1 and jamp.loss_scale(state) == 2.0**16


def test_a_run_that_is_switched_off_after_a_skip_has_not_skipped():
    state, params = overflown(1)
    off = jamp.dynamic_loss_scale(optax.sgd(0.1), enabled=False)
    _, after = off.update(params, state, params)
    assert state.found_inf and not after.found_inf and jamp.loss_scale(after) == 1


def test_a_run_that_is_switched_off_keeps_wide_moments_of_half_parameters():
    params, inner = jnp.ones(2, jnp.bfloat16), optax.adam(0.1, mu_dtype=jnp.bfloat16)
    state = jamp.dynamic_loss_scale(inner).init(params)
    off = jamp.dynamic_loss_scale(inner, enabled=False)
    _, after = off.update(params, state, params)
    dtypes = lambda state: [x.dtype for x in jax.tree.leaves(state.inner_state)]
    assert dtypes(after) == dtypes(state) == [jnp.int32, jnp.bfloat16, jnp.float32]


def test_moments_of_a_half_parameter_beside_a_wide_one_are_wide():
    params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    state = jamp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9)).init(params)
    moments = jax.tree.leaves(optax.tree.get(state, "trace"))
    assert [x.dtype for x in moments] == [jnp.float32] * 2


@cover(ci=2)
@pytest.mark.parametrize("carrier", [through_msgpack, through_orbax])
def test_a_checkpoint_from_before_there_were_retries(carrier, tmp_path):
    """As docs/checkpoints.md says: flax and orbax compare names, and one is missing."""
    step, (params, opt_state), expected, losses = trained("adam")
    older = opt_state._asdict()
    del older["retried_steps"]
    fresh = TRAINERS["adam"]()[0][1]
    folders = [tmp_path / name for name in ("refused", "loaded")]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(ValueError, match="do not match"):
        carrier(older, fresh, folders[0])
    target = fresh._asdict()
    del target["retried_steps"]
    restored = jamp.DynamicLossScaleState(**carrier(older, target, folders[1]))
    resumed, resumed_losses = train(step, (params, restored), SAVED, END)
    check_same_bits(resumed, expected)
    np.testing.assert_array_equal(resumed_losses, losses)


def test_without_a_target_there_is_no_state_to_be_found(tmp_path):
    (params, opt_state), _ = TRAINERS["adam"]()
    restored = through_orbax(opt_state, None, tmp_path)
    assert restored["loss_scale"] == SCALING["init_scale"]
    with pytest.raises(ValueError, match="opt_state holds no loss scale; found a dict"):
        jamp.metrics(restored)
    tx = jamp.dynamic_loss_scale(optax.adam(0.01))
    with pytest.raises(ValueError, match=r"must be a DynamicLossScaleState.* a dict"):
        jamp.step(tx, params, restored, params)


def rebuilt(tree, at, kind):
    """A tree with another container at a path, as a checkpoint may restore it."""
    if not at:
        fields = getattr(tree, "_fields", range(len(tree)))
        return dict(zip(fields, tree, strict=True)) if kind is dict else kind(tree)
    name, *rest = at
    if isinstance(tree, dict):
        return tree | {name: rebuilt(tree[name], rest, kind)}
    if isinstance(name, str):
        return tree._replace(**{name: rebuilt(getattr(tree, name), rest, kind)})
    return (*tree[:name], rebuilt(tree[name], rest, kind), *tree[name + 1 :])


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
LABELLED = optax.multi_transform({"a": optax.adam(1e-3)}, {"w": "a"})
SCALED = jamp.dynamic_loss_scale
RESTORED = {
    "chain": (SCALED(ADAM), ["inner_state"], ".inner_state"),
    "in a chain": (SCALED(ADAM), ["inner_state", 1], ".inner_state[1]"),
    "of adam": (SCALED(ADAM), ["inner_state", 1, 0], ".inner_state[1][0]"),
    "labels": (
        SCALED(LABELLED),
        ["inner_state", "inner_states", "a", "inner_state"],
        ".inner_state.inner_states['a'].inner_state",
    ),
    "around": (optax.chain(SCALED(ADAM), optax.scale(1.0)), [0, "inner_state"], None),
    "masters": (jamp.master_weights(ADAM), ["inner_state", 1], ".inner_state[1]"),
    "both": (
        SCALED(jamp.master_weights(ADAM)),
        ["inner_state", "inner_state", 1],
        ".inner_state.inner_state[1]",
    ),
}


@cover(quick=3)
@pytest.mark.parametrize("name", RESTORED)
def test_a_container_of_another_kind_is_named_with_its_path(name):
    tx, at, path = RESTORED[name]
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    steps = {
        "step": lambda state: jamp.step(tx, grads, state, params),
        "update": lambda state: tx.update(grads, state, params),
    }
    kinds = (dict,) if name == "masters" else (dict, list)  # optax takes a list itself
    for (called, step), kind in itertools.product(steps.items(), kinds):
        with pytest.raises(ValueError) as caught:
            step(rebuilt(state, at, kind))
        text = str(caught.value)
        assert f"at {path or ''}" in text and f"of type {kind.__name__}," in text, (
            called
        )
