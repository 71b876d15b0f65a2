"""Products on meshes of explicit axes: all is sharded as in bfloat16.

One table: how inputs and result lie on the mesh, and how a region computes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from tests.marks import cover

REGIONS = {
    **{name: jamp.autocast(jamp.Float8(name)) for name in ("tensorwise", "rowwise")},
    "rowwise_with_gw_hp": jamp.autocast(jamp.Float8("rowwise_with_gw_hp")),
    "scaled": jamp.autocast(jamp.ScaledFloat16()),
}
BFLOAT16 = jamp.autocast(jnp.bfloat16)
UNPLACED = "not on the mesh"
ON_TWO = ("d", "m")
# For each mesh: specs of x, of w, and of the result if the call says it.
LAYOUTS = {
    (8,): [
        (P("d", None), P(None, None), None),
        (P("d", None), UNPLACED, None),
        (P("d", None), P("d", None), None),
        (P("d", None), P(None, "d"), P("d", None)),
        (P("d", None), P(None, "d"), P(None, "d")),
        (P(None, None), P(None, "d"), None),
        (P(None, None), P("d", None), None),
        (P(None, "d"), P("d", None), P(None, None)),
        (P(None, "d"), P("d", None), P("d", None)),
        (P(None, "d"), P(None, "d"), None),
        (P(None, "d"), P(None, None), None),
        (P(None, "d"), UNPLACED, None),
        (UNPLACED, P("d", None), None),
        (UNPLACED, P(None, "d"), None),
    ],
    (4, 2): [
        (P("d", None), P(None, "m"), None),
        (P("d", None), P("d", "m"), None),
        (P("d", None), P("m", "d"), P("d", None)),
        (P("d", "m"), P(None, None), None),
        (P("d", "m"), P("m", None), P("d", None)),
        (P("d", "m"), P("m", "d"), P("d", "m")),
        (P("d", "m"), P(None, "m"), None),
        (P("d", "m"), UNPLACED, None),
        (P(ON_TWO, None), P(ON_TWO, None), None),
        (P(ON_TWO, None), P(None, "m"), P("d", "m")),
        (P(None, ON_TWO), P(ON_TWO, None), P(None, None)),
        (UNPLACED, P("d", "m"), None),
        (UNPLACED, P(None, ON_TWO), None),
    ],
}
# Of a product of a batch, of experts for example.
BATCHES = {
    (8,): [
        (P("d", None, None), P("d", None, None), None),
        (P(None, "d", None), P(None, None, None), None),
        (P(None, "d", None), P(None, "d", None), None),
        (P(None, None, "d"), P(None, "d", None), P(None, None, None)),
        (P(None, None, "d"), P(None, "d", None), P("d", None, None)),
        (P(None, None, None), P(None, None, "d"), None),
    ],
    (4, 2): [
        (P("d", "m", None), P("d", None, None), None),
        (P("d", None, None), P("d", None, "m"), None),
        (P("d", None, "m"), P("d", "m", None), P("d", None, None)),
        (P(None, "d", None), P(None, None, "m"), None),
    ],
}
SPECS = {
    (8,): [P(None, None), P("d", None), P(None, "d")],
    (4, 2): [
        *(P(*axes) for axes in itertools.product([None, "d"], [None, "m"])),
        *(P("m", "d"), P("m", None), P(None, "d"), P(ON_TWO, None), P(None, ON_TWO)),
    ],
}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def mesh_of(sizes):
    names, types = ON_TWO[: len(sizes)], (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=types)


@functools.cache
def operands(*batch):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(*batch, 64, 128)), rng.normal(size=(*batch, 128, 64)) / 8
    x[..., :32, :] *= 8
    return [jnp.asarray(y.astype(np.float32)) for y in (x, w)]


def placed(mesh, *specs):
    """Both inputs on the mesh; to be called before the mesh is set."""
    has_batch = any(spec != UNPLACED and len(spec) == 3 for spec in specs)
    pairs = zip(operands(8) if has_batch else operands(), specs, strict=True)
    return [
        x if spec == UNPLACED else jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in pairs
    ]


def result_and_gradients(region, out):
    def loss(x, w):
        with region:
            y = jnp.matmul(x, w, out_sharding=out)
        return jnp.mean(jnp.float32(y) ** 2), y

    return jax.grad(loss, (0, 1), has_aux=True)


def shardings(region, out, arguments):
    """The specs of both gradients and of the result, or the error."""
    try:
        made = jax.make_jaxpr(result_and_gradients(region, out))(*arguments)
    except Exception as error:  # JAX has an error of its own, which is not public
        return error
    return [aval.sharding.spec for aval in made.out_avals]


def differences(mesh, layouts):
    """Layouts that are right in bfloat16, and the regions that differ there."""
    right, wrong = 0, []
    layouts = [(placed(mesh, x, w), (x, w, out)) for x, w, out in layouts]
    with jax.set_mesh(mesh):
        for arguments, (x, w, out) in layouts:
            expected = shardings(BFLOAT16, out, arguments)
            if isinstance(expected, Exception):
                continue
            right += 1
            for name, region in REGIONS.items():
                found = shardings(region, out, arguments)
                if found != expected:
                    wrong.append((x, w, out, name, found, expected))
    return right, wrong


ALL = [
    (sizes, layout)
    for table in (LAYOUTS, BATCHES)
    for sizes, layouts in table.items()
    for layout in layouts
]


@cover(quick=6)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_shardings_are_those_of_bfloat16(case):
    sizes, layout = case
    right, wrong = differences(mesh_of(sizes), [layout])
    assert not wrong
    assert right == 1


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_shardings_are_those_of_bfloat16_in_every_layout(sizes):
    inputs = [*SPECS[sizes], UNPLACED]
    layouts = itertools.product(inputs, inputs, [None, *SPECS[sizes]])
    right, wrong = differences(mesh_of(sizes), layouts)
    assert not wrong
    assert right > 30


NUMBERS = [
    ((8,), P("d", None), UNPLACED, None),
    ((8,), P("d", None), P("d", None), None),
    ((8,), P("d", None), P(None, "d"), P("d", None)),
    ((4, 2), P("d", "m"), P("m", "d"), P("d", "m")),
    ((4, 2), P("d", "m"), UNPLACED, None),
    ((8,), P("d", None, None), P("d", None, None), None),
    ((4, 2), P("d", None, "m"), P("d", "m", None), P("d", None, None)),
]


@functools.cache
def on_one_device(name, compiled, *batch):
    run = jax.jit if compiled else lambda function: function
    return run(result_and_gradients(REGIONS[name], None))(*operands(*batch))


@cover(ci=18)
@pytest.mark.parametrize("case", NUMBERS, ids=str)
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_are_those_of_one_device(name, case, compiled):
    sizes, x, w, out = case
    run = jax.jit if compiled else lambda function: function
    truth = on_one_device(name, compiled, *[8] * (len(x) == 3))
    mesh = mesh_of(sizes)
    arguments = placed(mesh, x, w)
    with jax.set_mesh(mesh):
        found = run(result_and_gradients(REGIONS[name], out))(*arguments)
    for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)
