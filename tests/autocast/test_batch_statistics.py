"""A BatchNorm's running statistics are float32, and what follows it half precision."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jamp
from tests.marks import cover

from . import ways

half = jamp.autocast(jnp.float16)
x = 3 * np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
eye = np.eye(4, dtype=np.float32)
WAYS = ("jit inside", "jit around", "live")
pytestmark = pytest.mark.usefixtures("standard_promotion")


def touched(stats):
    return jax.tree.map(lambda s: s * 1, stats)


# Functions of statistics and inputs, with a product before the norm.


def linen(stats, x, axis_name=None, fast=True):
    layer = nn.BatchNorm(
        use_running_average=False, momentum=0.9, axis_name=axis_name,
        use_fast_variance=fast,
        use_bias=False, use_scale=False,
    )  # fmt: skip
    y, new = layer.apply({"batch_stats": stats}, x @ eye, mutable="batch_stats")
    return y, new["batch_stats"]


STATS = {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}
PARAMS = {"bias": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)}
LINEN = {"params": PARAMS, "batch_stats": STATS}


def linen_in_vmap(stats, x, fast=True):
    run = functools.partial(linen, stats, axis_name="batch", fast=fast)
    return jax.vmap(run, axis_name="batch")(x)


def of_nnx():
    parts = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def run(stats, x):
        layer = nnx.merge(*parts[:2], stats, copy=True)
        return layer(x @ eye), nnx.state(layer, nnx.BatchStat)

    return run, parts[2]


def of_haiku():
    import haiku as hk

    norm = lambda x: hk.BatchNorm(True, True, 0.9)(x @ eye, True)
    made = hk.without_apply_rng(hk.transform_with_state(norm))
    params, state = jax.jit(made.init)(None, x)
    return lambda s, x: made.apply(params, s, x), state


def of_equinox():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")

    def run(state, x):
        mapped = jax.vmap(
            lambda x, state: norm(x @ eye, state),
            axis_name="batch", in_axes=(0, None), out_axes=(0, None),
        )  # fmt: skip
        return mapped(x, state)

    return run, state


# Each makes a function, and the statistics that it begins with.
NORMS = {
    "linen": lambda: (linen, STATS),
    "linen in vmap": lambda: (linen_in_vmap, STATS),
    "linen in vmap, slow": lambda: (
        functools.partial(linen_in_vmap, fast=False),
        STATS,
    ),
    "nnx": of_nnx,
    "haiku": of_haiku,
    "equinox": of_equinox,
}


@jax.custom_vjp
def double(y):
    return 2 * y


double.defvjp(lambda y: (2 * y, None), lambda _, g: (2 * g,))


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_any_library(name, way):
    norm, stats = NORMS[name]()

    def block(stats, x):
        y, new = norm(stats, x)
        after = jax.nn.relu(y), y + norm(stats, x)[0], jnp.concatenate([y, x @ eye])
        new = jax.tree.map(lambda s: s * 1 if eqx.is_inexact_array(s) else s, new)
        return after, x + y, new

    after, residual, new = ways.WAYS[way](half, block)(stats, jnp.asarray(x))
    assert [y.dtype for y in after] == [jnp.float16] * 3
    assert residual.dtype == jnp.float32
    expected_after, _, expected = jax.jit(block)(stats, x)
    for y, wanted in zip(after, expected_after, strict=True):
        np.testing.assert_allclose(y.astype(jnp.float32), wanted, atol=0.02, rtol=0.01)
    for found, wanted in zip(*map(jax.tree.leaves, (new, expected)), strict=True):
        assert found.dtype == wanted.dtype and found.dtype != jnp.float16
        rtol = 0 if "linen" in name else 5e-4  # whose averages begin at 1
        np.testing.assert_allclose(found, wanted, rtol, 2e-3)


@pytest.mark.parametrize("fast", [True, False])
def test_linen_with_the_region_inside_vmap(fast):
    # The mean is summed over the mapped axis, and has the shape of one example.
    def run(x):
        return touched(linen(STATS, x, "batch", fast)[1])

    stats = jax.eval_shape(jax.vmap(half(run), axis_name="batch"), x)
    assert {s.dtype for s in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


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
def test_what_follows_a_call_around_it_gets_half_precision(way):
    layer = AROUND[way](lambda s, x: linen(s, x)[0])
    for wrap in (lambda f: f, jax.jit):
        function = half(wrap(lambda s, x: jax.nn.relu(layer(s, x))))
        assert jax.eval_shape(function, STATS, x).dtype == jnp.float16


def test_a_branch_beside_a_norm_keeps_its_float32():
    either = lambda s, x: lax.cond(
        x[0, 0] > 0, lambda s, x: linen(s, x)[0], lambda s, x: x, s, x
    )
    for wrap in (lambda f: f, jax.jit):
        function = half(wrap(lambda s, x: jax.nn.relu(either(s, x))))
        assert jax.eval_shape(function, STATS, x).dtype == jnp.float32


def test_a_custom_vjp_that_follows_gets_half_precision():
    found = half(lambda x: double(linen(STATS, x)[0]))(jnp.asarray(x))
    assert found.dtype == jnp.float16


def test_a_norm_of_float32_gives_float32():
    norm = nn.BatchNorm(use_running_average=True)
    found = half(lambda x: jax.nn.relu(norm.apply(LINEN, x)))(jnp.asarray(x))
    assert found.dtype == jnp.float32


def test_many_steps_reach_the_variance():
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


@cover()
@pytest.mark.parametrize("way", WAYS)
def test_a_map_in_batches_has_one_dtype(way):
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
            for name, y in jax.eval_shape(
                ways.WAYS[way](half, function), x[:n]
            ).items():
                found.setdefault(name, set()).add(y.dtype.name)
    means = {n: found.pop(n) for n in ("mean", "centered")}  # float32 in jitted code
    assert all(len(dtypes) == 1 for dtypes in means.values()), means
    assert set(map(frozenset, found.values())) == {frozenset(["float16"])}, found
