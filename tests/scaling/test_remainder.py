"""Masters kept as remainders train as full ones do, bit for bit, in every combination.

Each run is made twice, with `remainder=True` and without it. Their gradients are made
from their own parameters, so that one bit of difference would grow. With LLVM's
optimizations (`pytest --optimized`) two programs may round a product and a sum in one
step or in two, and their numbers are only compared as numbers.
"""

import os
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import NamedSharding, PartitionSpec

import jamp
from shared.master_weights import FORMS as FORMS_OF
from shared.master_weights import both_forms
from tests.bits import check_rounded, check_same_bits
from tests.marks import cover

from .masters import (
    NESTINGS,
    SCALE,
    bits,
    check_nearest,
    is_master,
    masters_in,
    stepped,
    updated,
)
from .optimizers import NEEDS_VALUE
from .optimizers import OPTIMIZERS as ALL

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPE = (16, 128)
FULL, REST = FORMS = False, True
SKIPPED = (2, 3, 6)  # steps with an inf among the gradients
STEPS = 10
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
}
scale = partial(jamp.dynamic_loss_scale, init_scale=SCALE, growth_interval=3)


NESTS = [name for name in NESTINGS if name not in ("masked", "named chain")]
SCALED = [n for n in NESTS if n == "half frozen" or ("scaled" in n and "off" not in n)]
WAYS = {"step": stepped, "update": updated}


def make(nesting, optimizer, form):
    wrap = partial(jamp.master_weights, remainder=form)
    return NESTINGS[nesting](wrap, scale, OPTIMIZERS[optimizer]())


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    leaves = {"w": rng.normal(size=SHAPE).astype(jnp.bfloat16)}
    leaves["b"] = rng.normal(size=SHAPE[1]).astype(jnp.bfloat16)
    leaves["b"][:2] = 0
    return jax.device_put(leaves | {"full": rng.normal(size=4).astype(np.float32)})


def make_noise():
    rng = np.random.default_rng(7)
    shapes = SHAPE, SHAPE[1:], (4,)
    return {s: rng.normal(size=(STEPS, *s)).astype(np.float32) for s in shapes}


NOISE = make_noise()  # of each shape of a parameter, in each step


def scale_of(state):
    found = optax.tree.get_all_with_path(state, "loss_scale")
    return found[0][1] if found else jnp.float32(1)


def trainer(tx, way):
    """A jitted step whose gradients depend on the parameters, and an inf if bad."""

    @jax.jit
    def step(params, state, number, bad):
        def grad(p):
            noise = jnp.asarray(NOISE[p.shape])[number]
            g = noise * jnp.exp2(-4.0 * p.astype(jnp.float32))
            g = (g * scale_of(state)).astype(p.dtype)
            return jnp.where(bad, jnp.full_like(g, jnp.inf), g)

        return WAYS[way](tx)(params, state, jax.tree.map(grad, params))

    return step


def run(step, params, state, numbers, bad=SKIPPED):
    for i in numbers:
        params, state = step(params, state, i, i in bad)
    return params, state


def assert_same_numbers(got, want):
    """The same bits, if both programs have been compiled as they are written."""
    if "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", ""):
        check_same_bits(got, want)
    else:
        assert_close(got, want)


def assert_close(got, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            wide = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(*wide, rtol=2.0**-5, atol=2.0**-10)


def beside(state):
    """What a state holds beside its masters."""
    strip = lambda node: node.inner_state if is_master(node) else node
    return jax.tree.map(strip, state, is_leaf=is_master)


masters_of = jax.jit(jamp.master_params)


def kept(state):
    return jax.tree.leaves(masters_in(state))


def assert_same_run(full, rest):
    """Parameters, masters and everything beside them, in the form of each."""
    assert_same_numbers(rest[0], full[0])
    assert_same_numbers(beside(rest[1]), beside(full[1]))
    assert_same_numbers(masters_of(*rest), masters_of(*full))
    assert {leaf.dtype for leaf in kept(full[1])} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in kept(rest[1])} == {jnp.dtype(jnp.int16)}


@cover(quick=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("nesting", NESTS)
def test_a_run_is_the_same_in_both_forms(nesting, optimizer, way):
    runs = []
    for form in FORMS:
        tx, params = make(nesting, optimizer, form), make_params()
        state, step = tx.init(params), trainer(tx, way)
        history, bad = [(params, state)], SKIPPED if nesting in SCALED else ()
        for i in range(STEPS):
            history.append(run(step, *history[-1], [i], bad))
        runs.append(history)
        chex.assert_trees_all_equal_shapes_and_dtypes(history[-1], history[0])
    for full, rest in zip(*runs, strict=True):
        assert_same_run(full, rest)
    first, last = runs[REST][0], runs[REST][-1]
    assert np.any(bits(last[0]["w"]) != bits(first[0]["w"])), "the control"
    assert any(np.any(np.asarray(x) != 0) for x in kept(last[1])), "the control"
    if nesting in SCALED:
        for i in SKIPPED:
            before, after = runs[REST][i], runs[REST][i + 1]
            check_same_bits(after[0], before[0])
            check_same_bits(kept(after[1]), kept(before[1]))


def through_msgpack(tree, target, folder):
    return serialization.from_bytes(target, serialization.to_bytes(tree))


def through_orbax(tree, target, folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", target)


@cover()
@pytest.mark.parametrize("through", [through_msgpack, through_orbax])
@pytest.mark.parametrize("nesting", NESTS)
@pytest.mark.parametrize("old", FORMS, ids=["from full", "from rest"])
@pytest.mark.parametrize("new", FORMS[::-1], ids=["to rest", "to full"])
def test_a_checkpoint_goes_on_in_each_form(nesting, old, new, through, tmp_path):
    """Killed in the middle, at a skipped step too, and resumed in either form."""
    one, other = make(nesting, "adamw", old), make(nesting, "adamw", new)
    params, bad = make_params(), SKIPPED if nesting in SCALED else ()
    steps = trainer(one, "step"), trainer(other, "step")
    before = run(steps[0], params, one.init(params), range(5), bad)
    target = make_params(1), one.init(make_params(1))
    restored = through(before, target, tmp_path)
    for numbers in (range(5, 9), range(6, 9)):  # 6 is skipped
        want = run(steps[0], *before, numbers, bad)
        got = run(steps[1], *restored, numbers, bad)
        assert_same_numbers(got[0], want[0])
        assert_same_numbers(beside(got[1]), beside(want[1]))
        masters = jamp.master_params(*got), jamp.master_params(*want)
        assert_same_numbers(*masters)
        dtype = jnp.dtype(jnp.int16 if new else jnp.float32)
        assert {leaf.dtype for leaf in kept(got[1])} == {dtype}


@cover()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_state_has_its_size_and_shares_no_buffer(way, form):
    """Both are donated: one buffer donated twice is an error."""
    tx, params = make("scaled", "momentum", form), make_params()
    state, dtype = tx.init(params), jnp.dtype(jnp.int16 if form else jnp.float32)
    assert [(m.dtype, m.nbytes) for m in kept(state)] == [
        (dtype, p.size * dtype.itemsize) for p in (params["b"], params["w"])
    ]
    assert not any(m is p for m in kept(state) for p in params.values())
    grads = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(WAYS[way](tx), donate_argnums=(0, 1))
    for _ in range(3):
        last = params, state
        params, state = step(params, state, grads)
        assert all(x.is_deleted() for x in [*kept(last[1]), last[0]["w"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ALL} - NEEDS_VALUE))
def test_each_optimizer_of_optax_steps_the_same_in_both_forms(name):
    runs = []
    for form in FORMS:
        tx, params = jamp.master_weights(ALL[name](), remainder=form), make_params()
        step = trainer(tx, "step")
        runs.append(run(step, params, tx.init(params), range(3), bad=()))
    assert_same_run(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS_OF)
def test_a_long_training_is_the_same_in_both_forms(name):
    """`benchmarks.master_weights --steps 10000` runs longer ones."""
    found = both_forms(FORMS_OF[name], 1500, seed=0)
    assert found.differ == 0
    assert found.skipped >= 15 and found.ties > 0 and found.lost > 0.1, "the control"


def test_a_scan_of_steps():
    runs = []
    for form in FORMS:
        tx, params = make("scaled", "momentum", form), make_params()
        step = trainer(tx, "step")
        body = lambda carry, i, step=step: (step(*carry, i, i == 3), None)
        carry = params, tx.init(params)
        runs.append(jax.lax.scan(body, carry, jnp.arange(8))[0])
    assert_same_run(*runs)


def test_vmap_over_models():
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    models = [make_params(seed) for seed in range(3)]
    runs = []
    for form in FORMS:
        tx = make("scaled", "momentum", form)
        step = jax.jit(jax.vmap(trainer(tx, "step"), in_axes=(0, 0, None, 0)))
        params = stack(models)
        state = jax.jit(jax.vmap(tx.init))(params)
        for i in range(4):
            params, state = step(params, state, i, np.array([False, i == 2, True]))
        runs.append((params, state))
    assert_same_run(*runs)
    check_nearest(*runs[FULL])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["scaled", "scaled inside"])
def test_nnx_optimizer(order):
    runs = []
    for form in FORMS:
        kinds = dict(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0), **kinds)
        tx = make(order, "adamw", form)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, x):
            def loss_fn(model):
                loss = jnp.mean(model(x).astype(jnp.float32) ** 2)
                return jamp.scale_loss(loss, optimizer.opt_state)

            optimizer.update(model, nnx.grad(loss_fn)(model))

        x = jax.random.normal(jax.random.key(0), (4, 8), jnp.bfloat16)
        for i in range(6):
            before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model)))
            train_step(model, optimizer, x * (jnp.inf if i == 3 else 1))
            if i == 3:
                check_same_bits(nnx.as_pure(nnx.state(model)), before)
        params = nnx.state(model, nnx.Param)
        pure = nnx.as_pure((params, optimizer.opt_state))
        masters = jamp.master_params(params, optimizer.opt_state)
        check_same_bits(nnx.as_pure(masters), jamp.master_params(*pure))
        runs.append(pure)
        assert jamp.metrics(optimizer.opt_state)["skipped_steps"] == 1
    assert_same_run(*runs)
    check_nearest(*runs[FULL])


def sharded():
    """Parameters over eight devices, and the shardings of those of two bytes."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=auto)
    specs = {"b": ("y",), "w": ("x", "y"), "full": ()}
    places = {n: NamedSharding(mesh, PartitionSpec(*s)) for n, s in specs.items()}
    return jax.device_put(make_params(), places), [places["b"], places["w"]]


def check_placed(state, places):
    for leaf, place in zip(kept(state), places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@pytest.mark.devices(8)
@pytest.mark.parametrize("form", FORMS)
def test_init_gives_masters_the_sharding_of_their_parameters(form):
    params, places = sharded()
    check_placed(jax.jit(make("scaled", "momentum", form).init)(params), places)


@pytest.mark.slow
@pytest.mark.devices(8)
@pytest.mark.parametrize("nesting", ["scaled", "alone"])
def test_fsdp_over_eight_devices(nesting, tmp_path):
    """Masters have the sharding of their parameters; killed and resumed."""
    runs = []
    for form in FORMS:
        tx, (params, places) = make(nesting, "adamw", form), sharded()
        step, states = trainer(tx, "step"), [tx.init(params), jax.jit(tx.init)(params)]
        check_same_bits(*states)
        bad = SKIPPED if nesting in SCALED else ()
        middle = run(step, params, states[0], range(5), bad)
        for state in (*states, middle[1]):
            check_placed(state, places)
        end = run(step, *middle, range(5, STEPS), bad)
        local = make_params(), tx.init(make_params())
        alone = run(step, *local, range(STEPS), bad)
        assert_close(end, alone)
        restored = through_orbax(middle, middle, tmp_path / str(form))
        assert restored[0]["w"].sharding.is_equivalent_to(places[1], 2)
        check_same_bits(run(step, *restored, range(5, STEPS), bad), end)
        runs.append(end)
    assert_same_run(*runs)
    check_nearest(*runs[FULL])


# The masters as a tree.


def test_master_params_are_float32_and_leave_the_rest():
    params = make_params() | {"i": jnp.arange(2), "none": None}
    labels = {"w": "a", "b": "f", "full": "a", "i": "f", "none": None}
    inner = {"a": optax.sgd(0.1), "f": optax.set_to_zero()}
    tx = jamp.master_weights(optax.multi_transform(inner, labels), remainder=True)
    masters = jamp.master_params(params, tx.init(params))
    np.testing.assert_array_equal(masters["b"], params["b"])  # frozen
    dtypes = {name: leaf.dtype for name, leaf in masters.items() if leaf is not None}
    wide = jnp.dtype(jnp.float32)
    assert dtypes == {"w": wide, "b": wide, "full": wide, "i": jnp.dtype("int32")}
    assert masters["none"] is None and masters["full"] is params["full"]


TWO = np.ones(2, jnp.bfloat16)


@pytest.mark.parametrize(
    "tx, change, error",
    [
        (optax.adam(0.1), {}, "holds no master weights"),
        (make("alone", "adamw", REST), {"more": TWO}, "'more'"),
        (make("alone", "adamw", FULL), {"more": TWO}, "'more'"),
        (make("alone", "adamw", REST), {"b": TWO}, r"'b'.*\(2,\)"),
    ],
)
def test_a_state_without_these_masters_is_refused(tx, change, error):
    params = make_params()
    with pytest.raises(ValueError, match=f"master_params: .*{error}"):
        jamp.master_params(params, tx.init(params | change))


@pytest.mark.parametrize("form", FORMS)
def test_update_refuses_the_other_form(form):
    """`MultiSteps` around it would choose between the two, element by element."""
    params = make_params()
    state = make("alone", "adamw", not form).init(params)
    with pytest.raises(ValueError, match=r"Make the first step with jamp\.step"):
        make("alone", "adamw", form).update(params, state, params)


@pytest.mark.parametrize("form", FORMS)
def test_an_average_of_the_masters_follows_float32(form):
    """One of bfloat16 parameters would not move."""
    tx, params = jamp.master_weights(optax.sgd(1.0), remainder=form), make_params()
    state = tx.init(params)
    ema = start = jamp.master_params(params, state)
    grads = jax.tree.map(lambda p: np.full(p.shape, 2.0**-14, p.dtype), params)

    @jax.jit
    def step(params, state, ema):
        params, state = jamp.step(tx, grads, state, params)
        masters = jamp.master_params(params, state)
        return params, state, optax.incremental_update(masters, ema, 0.01)

    for _ in range(20):
        params, state, ema = step(params, state, ema)
    want = (
        start["w"] - sum(0.01 * 0.99 ** (19 - i) * (i + 1) for i in range(20)) / 2**14
    )
    check_rounded(ema["w"], want, 20)
    assert np.max(abs(ema["w"] - start["w"])) < 2.0**-11


# Parameters that other code changes.


def test_a_changed_parameter_is_kept_and_its_remainder_stays():
    tx = jamp.master_weights(optax.sgd(1.0), remainder=True)
    step = jax.jit(lambda grads, state, params: jamp.step(tx, grads, state, params))
    params = {"w": np.array([1.0, 1.0, 1.0, -1.0], jnp.bfloat16)}
    state = tx.init(params)
    grads = {"w": np.full(4, 2.0**-12, np.float32)}
    params, state = step(grads, state, params)
    rest = np.asarray(state.master["w"])
    assert (rest != 0).all()
    changed = {"w": np.array([5.0, 0.0, np.inf, -1.0], jnp.bfloat16)}
    masters = np.asarray(jamp.master_params(changed, state)["w"])
    assert masters[0] == 5 + rest[0] * 2.0**-21 != 5
    assert masters[2] > 3.39e38  # inf, or a float32 that is inf in bfloat16
    assert masters[1] == 0 and masters[3] == -1 - 2.0**-12  # unchanged
    zero = {"w": np.zeros(4, np.float32)}
    after, state = step(zero, state, changed)
    np.testing.assert_array_equal(np.asarray(after["w"])[[0, 1, 3]], [5, 0, -1])
    fresh = state._replace(master=jax.tree.map(np.zeros_like, state.master))
    assert jamp.master_params(after, fresh)["w"][0] == 5


# What cannot have a remainder.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn])
def test_other_dtypes_are_refused_where_they_move(dtype):
    params = {"w": jnp.ones(2, jnp.bfloat16), "h": jnp.ones(2, dtype)}
    tx = jamp.master_weights(optax.sgd(0.1), remainder=True)
    name = jnp.dtype(dtype).name
    with pytest.raises(ValueError, match=rf"\['h'\] is {name}. remainder=True needs"):
        tx.init(params)
    parts = {"a": tx, "f": optax.set_to_zero()}
    frozen = optax.multi_transform(parts, {"w": "a", "h": "f"})
    assert len(kept(frozen.init(params))) == 1
