"""A BatchNorm's running statistics are float32, whatever touches them in a region."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jamp
from tests.marks import slow

half = jamp.autocast(jnp.float16)
x = 3 * jax.random.normal(jax.random.key(0), (16, 4))
WAYS = pytest.mark.parametrize(
    "way", [half, slow(lambda f: jax.jit(half(f))), lambda f: half(jax.jit(f))],
    ids=["live", "jit_around", "jit_inside"],
)  # fmt: skip


def touched(stats):
    return jax.tree.map(lambda s: s * 1, stats)


def linen(stats, x, axis_name=None, fast=True):
    layer = nn.BatchNorm(
        use_running_average=False, momentum=0.9, axis_name=axis_name,
        use_fast_variance=fast,
        use_bias=False, use_scale=False,
    )  # fmt: skip
    y, new = layer.apply({"batch_stats": stats}, x @ jnp.eye(4), mutable="batch_stats")
    return y, new["batch_stats"]


LINEN = jax.jit(nn.BatchNorm(use_running_average=False).init)(jax.random.key(0), x)
STATS = LINEN["batch_stats"]


def in_vmap(stats, x):
    return jax.vmap(lambda x: linen(stats, x, "batch"), axis_name="batch")(x)


def in_slow_vmap(stats, x):
    def run(x):
        y, new = linen(stats, x, "batch", fast=False)
        return y, touched(new)

    return jax.vmap(run, axis_name="batch")(x)


@WAYS
@pytest.mark.parametrize(
    "function", [linen, in_vmap, in_slow_vmap], ids=["plain", "vmap", "slow_vmap"]
)
def test_linen(function, way, standard_promotion):
    y, stats = way(lambda s, x: (function(s, x)[0], touched(function(s, x)[1])))(
        STATS, x
    )
    _, expected = function(STATS, x)
    for found, wanted in zip(*map(jax.tree.leaves, (stats, expected)), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert half(jax.nn.relu)(y).dtype in (jnp.float16, jnp.float32)


@pytest.mark.parametrize("fast", [True, False])
def test_linen_with_the_region_inside_vmap(fast, standard_promotion):
    # The mean is summed over the mapped axis, and has the shape of one example.
    def run(x):
        return touched(linen(STATS, x, "batch", fast)[1])

    stats = jax.vmap(half(run), axis_name="batch")(x)
    assert {s.dtype for s in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


@WAYS
def test_what_follows_gets_half_precision(way, standard_promotion):
    y = way(lambda s, x: jax.nn.relu(linen(s, x)[0]))(STATS, x)
    assert y.dtype == jnp.float16


AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda s, x: lax.cond(x[0, 0] > 0, f, f, s, x),
    "cond of two": lambda f: (
        lambda s, x: lax.cond(x[0, 0] > 0, f, lambda s, x: f(s, 2 * x), s, x)
    ),
    "switch": lambda f: lambda s, x: lax.switch(2, [f, f, f], s, x),
    "scan": lambda f: lambda s, x: lax.scan(lambda c, _: (c, f(s, x)), 0, None, 2)[1],
}


@pytest.mark.parametrize("way", AROUND)
def test_what_follows_a_call_around_it_gets_half_precision(way, standard_promotion):
    layer = AROUND[way](lambda s, x: linen(s, x)[0])
    for wrap in (lambda f: f, jax.jit):
        function = half(wrap(lambda s, x: jax.nn.relu(layer(s, x))))
        assert jax.eval_shape(function, STATS, x).dtype == jnp.float16


def test_nnx(standard_promotion):
    layer = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    for _ in range(3):
        with half:
            h = x @ jnp.eye(4)
            y = layer(h)
            assert jax.nn.relu(y).dtype == jnp.float16
            assert (layer.var[...] * 1.0).dtype == jnp.float32
            assert jnp.stack([layer.var[...], layer.mean[...]]).dtype == jnp.float32
        assert layer.var[...].dtype == jnp.float32


def test_haiku(standard_promotion):
    def model(x):
        return jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x @ jnp.eye(4), True))

    net = hk.without_apply_rng(hk.transform_with_state(model))
    params, state = net.init(None, x)
    with half:
        y, new = net.apply(params, state, x)
        new = touched(new)
    assert y.dtype == jnp.float16
    dtypes = lambda tree: jax.tree.map(lambda leaf: leaf.dtype, tree)
    assert dtypes(new) == dtypes(state)


def test_equinox(standard_promotion):
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")

    def run(x, state):
        y, state = layer(x @ jnp.eye(4), state)
        return jax.nn.relu(y), state

    run = jax.vmap(run, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    with half:
        y, new = run(x, state)
        new = touched(eqx.filter(new, eqx.is_inexact_array))
    assert y.dtype == jnp.float16
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("float32")}


def test_many_steps_reach_the_variance(standard_promotion):
    # In float16 a small step of momentum 0.99 is lost: 8.82 instead of 8.98.
    layer = nn.BatchNorm(
        use_running_average=False, momentum=0.99, axis_name="b",
        use_bias=False, use_scale=False,
    )  # fmt: skip

    def step(stats, x):
        apply = lambda x: layer.apply({"batch_stats": stats}, x, mutable="batch_stats")
        _, new = jax.vmap(apply, axis_name="b")(x @ jnp.eye(4))
        return jax.tree.map(lambda s: s[0] * 1.0, new["batch_stats"])

    steps = {name: jax.jit(f) for name, f in (("half", half(step)), ("full", step))}
    found = {}
    for name, run in steps.items():
        stats = STATS
        for _ in range(600):
            stats = run(stats, x)
        found[name] = np.asarray(stats["var"])
        assert found[name].dtype == np.float32
    np.testing.assert_allclose(found["half"], found["full"], rtol=2e-3)


BODIES = {
    "times": lambda row: row * 2,
    "itself": lambda row: row,
    "mean": lambda row: row.mean(),
    "centered": lambda row: row - row.mean(),
    "product": lambda row: row @ jnp.eye(4),
}


def with_averages(x):
    return nn.BatchNorm(use_running_average=True).apply(LINEN, x @ jnp.eye(4))


@WAYS
def test_a_map_in_batches_has_one_dtype(way, standard_promotion):
    """`lax.map` scans over whole batches, and gives the other rows to `vmap`."""

    def after(x):
        y = linen(STATS, x)[0]
        return {n: lax.map(f, y, batch_size=2) for n, f in BODIES.items()}

    def inside(x):
        y = lax.map(with_averages, x, batch_size=2)
        return {"one": y, "scan": lax.map(with_averages, x) * 2, "batches": y * 2}

    found = {}
    for n in (2, 3, 4):
        for function in (after, inside):
            for name, y in jax.eval_shape(way(function), x[:n]).items():
                found.setdefault(name, set()).add(y.dtype.name)
    means = {n: found.pop(n) for n in ("mean", "centered")}  # float32 in jitted code
    assert all(len(dtypes) == 1 for dtypes in means.values()), means
    assert set(map(frozenset, found.values())) == {frozenset(["float16"])}, found
