"""Meshes of explicit axes: a step's results may be split otherwise than what it holds.

With ZeRO-1, parameters are whole and moments split, so a step returns split parameters.
One that is skipped holds them, and must return the same types.

One table: how a parameter, its moment and its gradient lie on the mesh, and what makes
the step. Where the optimizer alone takes a layout, so does jamp, and returns the same
types. The night goes through all layouts. The numbers are exact in any order, and equal
those of one device.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jamp
from tests.bits import check_same_bits
from tests.marks import cover

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.usefixtures("standard_promotion"),
]

SCALE = 2.0**10
BARE = optax.sgd(optax.constant_schedule(0.25), momentum=0.5)
PARTS = "trace", "count", "acc_grads", "mini_step"  # of a state, by their names


class Layout(NamedTuple):
    """How arrays lie on the mesh. None is not on it."""

    param: P | None
    moment: P | None
    grad: P | None

    def __str__(self) -> str:
        name = lambda spec: "off" if spec is None else "-".join(map(axes, spec))
        axes = lambda axes: "".join(axes or "*")
        return " ".join(map(name, self))


WHOLE, ROWS, COLUMNS = P(None, None), P("d", None), P(None, "d")
ZERO1 = Layout(WHOLE, ROWS, WHOLE)
SPECS = {
    (8,): [WHOLE, ROWS, None],
    (4, 2): [WHOLE, ROWS, COLUMNS, P(None, "m")],
}
LAYOUTS = {
    sizes: [Layout(*specs) for specs in itertools.product(specs, repeat=3)]
    for sizes, specs in SPECS.items()
}


def mesh_of(sizes):
    types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(sizes, ("d", "m")[: len(sizes)], axis_types=types)


class Arrays(NamedTuple):
    grad: jax.Array
    state: Any  # of the optimizer
    param: jax.Array


def arrays(tx, dtype, scale, is_bad, place):
    """The arrays of a step, whose gradient is scaled."""
    values = lambda seed: np.random.default_rng(seed).integers(-4, 5, (8, 8))
    param, grad = values(0).astype(dtype), np.float32(values(1) * scale)
    if is_bad:
        grad[5, 6] = np.inf
    param, grad = jnp.asarray(param), jnp.asarray(grad)
    moments = lambda leaf: place(leaf, 1) if leaf.ndim else leaf
    state = jax.tree.map(moments, tx.init(param))
    return Arrays(place(grad, 2), state, place(param, 0))


def placed(mesh, layout):
    def place(x, which):
        if mesh is None or layout[which] is None:
            return x
        return jax.device_put(x, NamedSharding(mesh, layout[which]))

    return place


# What makes a step: from its arrays to a parameter and a state.


def alone(tx, grad, state, param):
    updates, state = tx.update(grad, state, param)
    return optax.apply_updates(param, updates), state


def step(tx, grad, state, param):
    return jamp.step(tx, grad, state, param)


def in_scan(step):
    """Two steps. The loop carries each array as the first one got it."""

    def scanned(tx, grad, state, param):
        first = state, param

        def as_given(x, like):
            sharding = jax.typeof(like).sharding
            return x if sharding.mesh.empty else reshard(x, sharding)

        def body(carry, _):
            param, state = step(tx, grad, *carry)
            return jax.tree.map(as_given, (state, param), first), None

        (state, param), _ = jax.lax.scan(body, first, length=2)
        return param, state

    return scanned


def retried(tx, grad, state, param):
    """It overflows at the first scale, twice."""

    def step(state, grad):
        param, opt_state = state
        high = jamp.loss_scale(opt_state) > SCALE / 4
        grad = jnp.where(high, jnp.float32(jnp.inf), grad / 4)
        return jamp.step(tx, grad, opt_state, param), opt_state.found_inf

    return jamp.retry(step)((param, state), grad)[0]


def of_nnx(update):
    """A step of an NNX optimizer, as a function of arrays."""

    def run(tx, grad, state, param):
        model = nnx.Module()
        model.w = nnx.Param(param)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        is_variable = lambda node: isinstance(node, nnx.Variable)
        variables = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
        for variable, leaf in zip(variables, jax.tree.leaves(state), strict=True):
            variable.set_value(leaf)
        update(optimizer, model, nnx.State({"w": nnx.Param(grad)}))
        leaves = [variable.get_value() for variable in variables]
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return model.w.get_value(), state

    return run


class Way(NamedTuple):
    """How a step is made with jamp, and what does the same without."""

    tx: optax.GradientTransformation
    run: Callable = step
    inner: optax.GradientTransformation = BARE
    plain: Callable = alone
    dtype: Any = jnp.float32
    scale: float = SCALE
    skips: bool = True


HALVED = optax.chain(BARE, optax.scale(0.5))
EVERY_2 = optax.MultiSteps(BARE, 2).gradient_transformation()
MASTERS = jamp.master_weights(BARE)
REMAINDERS = jamp.master_weights(BARE, remainder=True)


def ways(axis_name=None):
    axes = {"axis_name": axis_name}
    dynamic = lambda inner: jamp.dynamic_loss_scale(inner, SCALE, **axes)
    scaled, static = dynamic(BARE), jamp.static_loss_scale(BARE, SCALE, **axes)
    disabled = jamp.dynamic_loss_scale(BARE, enabled=False, **axes)
    chain = optax.chain(scaled, optax.scale(0.5))
    half = {"dtype": jnp.bfloat16}
    unscaled = {"scale": 1.0, "skips": False}

    def scaler_step(optimizer, model, grads):
        jamp.GradScaler(SCALE, **axes).step(optimizer, model, grads)

    def unscaled_step(optimizer, model, grads):
        scaler = jamp.GradScaler(SCALE, **axes)
        scaler.step(optimizer, model, scaler.unscale_(optimizer, grads))

    nnx_alone = of_nnx(nnx.Optimizer.update)
    return {
        "step": Way(scaled),
        "masters, scaled": Way(dynamic(MASTERS), **half),
        "GradScaler": Way(BARE, of_nnx(scaler_step), plain=nnx_alone),
        "update": Way(scaled, alone),
        "scan": Way(scaled, in_scan(step), plain=in_scan(alone)),
        "remainders": Way(REMAINDERS, **half, **unscaled),
        "static": Way(static),
        "disabled": Way(disabled, **unscaled),
        "chain": Way(chain, inner=HALVED),
        "chain, update": Way(chain, alone, HALVED),
        "masters": Way(MASTERS, **half, **unscaled),
        "masters, update": Way(MASTERS, alone, **half, **unscaled),
        "masters, scaled inside": Way(jamp.master_weights(scaled), **half),
        "remainders, scaled": Way(dynamic(REMAINDERS), **half),
        "remainders, scaled, update": Way(dynamic(REMAINDERS), alone, **half),
        "MultiSteps": Way(dynamic(EVERY_2), inner=EVERY_2),
        "scan of updates": Way(scaled, in_scan(alone), plain=in_scan(alone)),
        "retry": Way(scaled, retried),
        "GradScaler, unscale_": Way(BARE, of_nnx(unscaled_step), plain=nnx_alone),
    }


WAYS, MAPPED_WAYS = ways(), ways("d")
# Which of its arrays a jitted step closes over.
CLOSED = {"nothing": (), "the gradient": ("grad",), "the state": ("state", "param")}


def parts(result):
    """A parameter, or its master, and what the optimizer keeps of it."""
    param, state = result
    kept = {name: optax.tree.get(state, name) for name in PARTS}
    if param.dtype == jnp.bfloat16:
        kept["rounded"] = param
        (param,) = jax.tree.leaves(jamp.master_params(param, state))
    return {name: leaf for name, leaf in kept.items() if leaf is not None} | {
        "param": param
    }


def jitted(run, tx, given, closed=()):
    """A jitted step, and its arguments."""
    held = {name: getattr(given, name) for name in closed}
    rest = {n: leaf for n, leaf in given._asdict().items() if n not in closed}
    return jax.jit(lambda rest: parts(run(tx, **held, **rest))), rest


def spec_of(leaf):
    of = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    is_on_mesh = of.sharding is not None and not of.sharding.mesh.empty
    return tuple(of.sharding.spec) if is_on_mesh else (None,) * len(leaf.shape)


def types(run, tx, given, closed=()):
    """The dtype and sharding of each part, or the error."""
    function, arguments = jitted(run, tx, given, closed)
    try:
        made = jax.eval_shape(function, arguments)
    except Exception as error:  # JAX has an error of its own, which is not public
        return error
    return {name: (leaf.dtype, spec_of(leaf)) for name, leaf in made.items()}


def specs_of(way, mesh, layout, closed):
    """The types without jamp and with it, or None if the optimizer refuses these."""
    place = placed(mesh, layout)
    plain = arrays(way.inner, jnp.float32, 1.0, False, place)
    expected = types(way.plain, way.inner, plain, CLOSED[closed])
    if isinstance(expected, Exception):
        return None
    given = arrays(way.tx, way.dtype, way.scale, False, place)
    found = types(way.run, way.tx, given, CLOSED[closed])
    if way.dtype == jnp.bfloat16:
        expected["rounded"] = jnp.dtype(jnp.bfloat16), expected["param"][1]
    return found, expected


def check_types(name, sizes, layouts, closed, mesh_is):
    """How many of the layouts the optimizer alone takes."""
    mesh, wrong, right = mesh_of(sizes), {}, 0
    with jax.set_mesh(mesh) if mesh_is == "set" else contextlib.nullcontext():
        for layout in layouts:
            pair = specs_of(WAYS[name], mesh, layout, closed)
            right += pair is not None
            if pair is not None and pair[0] != pair[1]:
                wrong[str(layout)] = pair
    assert not wrong
    return right


# Layouts in which each parameter meets each moment, and both meet each gradient.
SQUARES = {
    f"{sizes}, {place}": (
        sizes,
        [
            Layout(spec, moment, specs[(place + i) % len(specs)])
            for i, moment in enumerate(specs)
        ],
    )
    for place in range(4)
    for sizes, specs in SPECS.items()
    for spec in specs[place : place + 1]
}


@cover(quick=5)
@pytest.mark.parametrize("mesh_is", ["set", "not set"])
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("square", SQUARES)
def test_types_are_those_of_the_optimizer_alone(square, name, closed, mesh_is):
    assert check_types(name, *SQUARES[square], closed, mesh_is)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh_is", ["set", "not set"])
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("name", WAYS)
def test_types_in_every_layout(name, sizes, closed, mesh_is):
    assert check_types(name, sizes, LAYOUTS[sizes], closed, mesh_is) > 12


NUMBERS = [
    ZERO1,
    Layout(WHOLE, ROWS, ROWS),
    Layout(WHOLE, WHOLE, ROWS),
    Layout(COLUMNS, WHOLE, WHOLE),
    Layout(WHOLE, None, ROWS),
    Layout(None, ROWS, None),
    Layout(None, None, ROWS),
]


@cover(quick=4, ci=60)
@pytest.mark.parametrize("layout", NUMBERS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_numbers_are_those_of_one_device(name, layout):
    way, mesh = WAYS[name], mesh_of((8,))
    one = arrays(way.inner, jnp.float32, 1.0, False, placed(None, layout))
    function, arguments = jitted(way.plain, way.inner, one)
    moved, held = function(arguments), parts((one.param, one.state))
    place = placed(mesh, layout)
    plain = arrays(way.inner, jnp.float32, 1.0, False, place)
    given = arrays(way.tx, way.dtype, way.scale, False, place)
    bad = arrays(way.tx, way.dtype, way.scale, True, place)
    with jax.set_mesh(mesh):
        expected = types(way.plain, way.inner, plain)
        if isinstance(expected, Exception):
            pytest.skip("the optimizer alone refuses this layout")
        function, _ = jitted(way.run, way.tx, given)
        for arguments, truth in [(given, moved), (bad, held)][: 1 + way.skips]:
            result = jax.block_until_ready(function(arguments._asdict()))
            rounded = result.pop("rounded", truth["param"])
            check_same_bits(result, truth)
            np.testing.assert_array_equal(rounded, truth["param"])
            found = {n: (leaf.dtype, spec_of(leaf)) for n, leaf in result.items()}
            assert found == expected


@pytest.mark.slow
def test_a_scale_is_found_and_nothing_else_is_changed():
    tx, mesh = WAYS["step"].tx, mesh_of((8,))
    given = arrays(tx, jnp.float32, 1.0, False, placed(mesh, ZERO1))

    def step(state, grad):
        param, opt_state = state
        grad = grad * jamp.loss_scale(opt_state)
        return jamp.step(tx, grad, opt_state, param), opt_state.found_inf

    before = given.param, given.state
    with jax.set_mesh(mesh):
        param, state = jamp.find_loss_scale(step, before, given.grad)
    assert jamp.loss_scale(state) == 2.0**32
    check_same_bits((param, state._replace(loss_scale=given.state.loss_scale)), before)


def to(spec):
    """It moves gradients or updates to other devices, and changes none."""
    return optax.stateless(
        lambda tree, _: jax.tree.map(lambda x: reshard(x, spec), tree)
    )


@cover(quick=2, ci=6)
@pytest.mark.parametrize("name", ["step", "masters", "remainders, scaled"])
def test_what_reshards_gradients_may_stand_inside(name):
    way, mesh = WAYS[name], mesh_of((8,))
    inside = optax.chain(to(ROWS), way.inner)
    tx = {"step": jamp.dynamic_loss_scale, "masters": jamp.master_weights}.get(name)
    tx = (
        tx(inside)
        if tx
        else jamp.dynamic_loss_scale(jamp.master_weights(inside, remainder=True))
    )
    given = arrays(tx, way.dtype, way.scale, False, placed(mesh, ZERO1))
    with jax.set_mesh(mesh):
        found = types(step, tx, given)
    assert found["trace"] == (jnp.float32, tuple(ROWS))


def varying(run, tx, given, which):
    """Over which axes of a `shard_map` each part varies, or the error."""
    found = {}

    def local(given):
        vary = lambda x: jax.lax.pcast(x, "d", to="varying") if x.ndim else x
        varied = {n: jax.tree.map(vary, getattr(given, n)) for n in which}
        made = parts(run(tx, **given._asdict() | varied))
        for name, leaf in made.items():
            found[name] = jax.typeof(leaf).manual_axis_type.varying
        return 0

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    try:
        jax.eval_shape(mapped, given)
    except Exception as error:
        return error
    return found


WHICH = [
    which
    for count in range(4)
    for which in itertools.combinations(Arrays._fields, count)
]


@cover(quick=4)
@pytest.mark.parametrize("name", MAPPED_WAYS)
def test_parts_vary_as_those_of_the_optimizer_alone(name):
    way, wrong, right = MAPPED_WAYS[name], {}, 0
    nowhere = placed(None, ZERO1)
    plain = arrays(way.inner, jnp.float32, 1.0, False, nowhere)
    given = arrays(way.tx, way.dtype, way.scale, False, nowhere)
    for which in WHICH:
        expected = varying(way.plain, way.inner, plain, which)
        if isinstance(expected, Exception):
            continue
        right += 1
        found = varying(way.run, way.tx, given, which)
        if way.dtype == jnp.bfloat16:
            expected["rounded"] = expected["param"]
        if found != expected:
            wrong[which] = found, expected
    assert not wrong
    assert right > 2
