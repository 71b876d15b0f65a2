"""Arrays of one shape share a reduction, unless devices may hold parts of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jamp._scaling import arithmetic
from shared.jaxprs import equations

from ..marks import cover

LAYERS = 6


def leaves(dtype=jnp.float32):
    """Kernels of one shape, biases of another, and one array with its own shape."""
    tree = {f"layer{i}": {"w": (8, 4), "b": (4,)} for i in range(LAYERS)}
    tree["head"] = (8, 3)
    is_shape = lambda node: isinstance(node, tuple)
    ones = lambda shape: jnp.asarray(np.ones(shape, dtype))
    return jax.tree.map(ones, tree, is_leaf=is_shape)


def reductions(check, tree):
    jaxpr = jax.make_jaxpr(lambda tree: check(tree))(tree).jaxpr  # never traced before
    return sum(eqn.primitive.name == "reduce_and" for eqn in equations(jaxpr))


def all_finite(tree):
    return arithmetic.all_finite(tree)


def mesh_of(axis_type, shape=(2, 4)):
    return jax.make_mesh(shape, ("a", "b"), axis_types=(axis_type,) * 2)


GROUPS, EACH = 3, 2 * LAYERS + 1


def test_on_one_device_arrays_of_one_shape_take_one_reduction(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert reductions(all_finite, leaves()) == GROUPS


@pytest.mark.devices(2)
def test_where_jit_may_split_them_each_array_takes_its_own():
    assert reductions(all_finite, leaves()) == EACH


def test_on_a_mesh_that_xla_splits_over_each_array_takes_its_own(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # must not be asked
    placed = jax.device_put(leaves(), NamedSharding(mesh_of(AxisType.Auto), P()))
    assert reductions(jax.jit(all_finite), placed) == EACH


@pytest.mark.parametrize("manual", [{"a", "b"}, {"a"}], ids=["whole", "part"])
def test_in_shard_map_they_are_whole_if_the_mesh_is(manual):
    check = jax.shard_map(
        lambda tree: jax.lax.pmin(jnp.int32(all_finite(tree)), "a"),
        mesh=mesh_of(AxisType.Auto),
        in_specs=P("a"),
        out_specs=P(),
        axis_names=manual,
    )
    tree = jax.tree.map(lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1)), leaves())
    expected = GROUPS if manual == {"a", "b"} else EACH
    assert reductions(check, tree) == expected


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b")])
def test_where_types_say_what_is_split(spec):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        tree = {f"w{i}": jnp.ones((8, 4), jnp.float16) for i in range(LAYERS)}
        tree = jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree
        )
        assert reductions(all_finite, tree) == 1
        assert jax.jit(all_finite)(tree)
        assert not jax.jit(all_finite)(tree | {"w3": tree["w3"] * jnp.nan})


def test_explicit_arrays_that_are_split_unlike_each_other():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = [P("a"), P("b"), P(), P(None, "b"), P("a", "b")]
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        one = np.ones((8, 8), np.float32)
        other = one.copy()
        other[5, 6] = np.inf
        good = [put(one, spec) for spec in specs]
        assert jax.jit(all_finite)(good)
        for index, spec in enumerate(specs):
            bad = list(good)
            bad[index] = put(other, spec)
            assert not jax.jit(all_finite)(bad)


@cover(quick=3, ci=8)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    "dtype, value",
    [
        (jnp.float16, jnp.inf),
        (jnp.float32, -jnp.inf),
        (jnp.bfloat16, jnp.nan),
        (jnp.complex64, complex(1, jnp.nan)),
    ],
)
def test_one_inf_or_nan_anywhere_is_found(grouped, dtype, value, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1 if grouped else 8)
    flat, treedef = jax.tree.flatten(leaves(dtype))

    @jax.jit
    def check(place):
        bad = [
            jnp.where(index == place, leaf.at[(-1,) * leaf.ndim].set(value), leaf)
            for index, leaf in enumerate(flat)
        ]
        return arithmetic.all_finite(jax.tree.unflatten(treedef, bad))

    found = [bool(check(place)) for place in range(len(flat) + 1)]
    assert found == [False] * len(flat) + [True]


def test_mixed_dtypes_of_one_shape_and_nothing_at_all(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    shape = (3, 5)
    tree = [jnp.ones(shape, d) for d in (jnp.float16, jnp.float32, jnp.complex64)]
    tree += [jnp.ones(shape, jnp.int32), None, jnp.zeros((0, 4)), 1.0]
    assert reductions(all_finite, tree) == 3
    assert jax.jit(all_finite)(tree)
    assert not jax.jit(all_finite)([*tree[1:], tree[0].at[0, 0].set(jnp.inf)])
    assert arithmetic.all_finite([])
