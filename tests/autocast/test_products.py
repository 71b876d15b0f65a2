"""Products that are not lowered: those that contract nothing, and those of HIGHEST."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.bits import check_near, nudged
from tests.marks import cover

from . import ways

pytestmark = pytest.mark.usefixtures("default_precision")

half = jamp.autocast(jnp.float16)
HIGHEST = lax.Precision.HIGHEST
PRESETS = lax.DotAlgorithmPreset
WAYS = ("jit inside", "live", "jit around")
x, w = np.full((2, 4), 0.1, np.float32), np.full((4, 3), 0.1, np.float32)


def run(way, function):
    return ways.WAYS[way](half, function)(jnp.asarray(x))


def dense(precision):
    layer = nn.Dense(3, precision=precision, use_bias=False)
    return lambda x: layer.apply({"params": {"kernel": w}}, x)


ASKED = {
    "matmul": lambda x: jnp.matmul(x, w, precision=HIGHEST),
    "dot": lambda x: jnp.dot(x, w, precision="highest"),
    "einsum": lambda x: jnp.einsum("ij,jk->ik", x, w, precision=HIGHEST),
    "tensordot": lambda x: jnp.tensordot(x, w, 1, precision=HIGHEST),
    "conv": lambda x: lax.conv(
        x[..., None], w.T[..., None], (1,), "SAME", precision=HIGHEST
    ),
    "algorithm": lambda x: jnp.matmul(x, w, precision=PRESETS.F32_F32_F32),
    "dense": dense(HIGHEST),
    "widened": lambda x: jnp.matmul(
        jnp.matmul(x, w).astype(jnp.float32), w.T, precision=HIGHEST
    ),
}


@cover(quick=4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ASKED)
def test_a_call_that_says_highest_runs_in_float32(name, way, standard_promotion):
    function = ASKED[name]
    found = run(way, function)
    assert found.dtype == jnp.float32
    if name == "widened":
        np.testing.assert_allclose(found, function(x), rtol=1e-3)
    else:
        check_near(found, function(x), list(map(function, nudged(x))))


NOT_ASKED = {
    "default": lambda x: jnp.matmul(x, w),
    "high": lambda x: jnp.matmul(x, w, precision="high"),
    "dense": dense(None),
    "of_halves": lambda x: jnp.matmul(
        x.astype(jnp.float16), w.astype(jnp.float16), precision=HIGHEST
    ),
}


@cover(quick=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NOT_ASKED)
def test_other_products_are_lowered(name, way):
    assert run(way, NOT_ASKED[name]).dtype == jnp.float16


@pytest.mark.parametrize("way", WAYS)
def test_the_default_of_the_config_says_nothing(way):
    with jax.default_matmul_precision("highest"):
        assert run(way, lambda x: x @ w).dtype == jnp.float16


def test_a_rule_of_the_user_wins():
    with jamp.autocast(jnp.float16, rules={lax.dot_general_p: jnp.float16}):
        assert jnp.matmul(x, w, precision=HIGHEST).dtype == jnp.float16


def test_explain_says_why():
    def loss_fn(x):
        angles = jnp.einsum("ij,k->ijk", x, w[0])
        return jnp.sum(jnp.matmul(x, w, precision=HIGHEST)) + jnp.sum(angles)

    rows = jamp.debug.explain(loss_fn, jnp.float16)(x).rows
    rules = {row.rule for row in rows if row.op == "dot_general"}
    assert rules == {"highest", "outer"}


DOTS = {
    "vdot": jnp.vdot,
    "dot": jnp.dot,
    "@": lambda v, u: v @ u,
    "einsum": lambda v, u: jnp.einsum("i,i->", v, u),
}


def test_a_dot_of_two_vectors_under_vmap():
    """It is one of two vectors wherever the region is; not with the same matrix."""
    v = jnp.full((3, 8), 100.0)
    for name, dot in DOTS.items():
        square = lambda v, dot=dot: dot(v, v)
        for dots in (jax.vmap(half(square)), half(jax.vmap(square))):
            np.testing.assert_array_equal(dots(v), np.full(3, 80_000.0), name)
            assert dots(v).dtype == jnp.float32, name
        with_one = half(jax.vmap(dot, (0, None)))(v, v[0])  # `docs/sharp-edges.md`
        assert with_one.dtype == jnp.float16 and np.isinf(with_one).all(), name
    summed = half(jax.vmap(lambda v: jnp.sum(v**2)))(v)
    np.testing.assert_array_equal(summed, np.full(3, 80_000.0))


# Angles of positions, which half precision cannot hold, by sums over one number.
POSITIONS, FREQUENCIES = np.arange(4096), np.float32(10.0 ** -np.arange(4))
ANGLES = {
    "@": lambda t, k: t[:, None] @ k[None],
    "integers": lambda t, k: t.astype(int).reshape(-1, 1)[:, :1] @ k[None],
    "iota": lambda t, k: lax.broadcasted_iota(jnp.float32, (t.size, 1), 0) @ k[None],
    "meshgrid": lambda t, k: jnp.meshgrid(t, t[:1], indexing="ij")[0] @ k[None],
    "stack": lambda t, k: jnp.dot(jnp.stack([t], 1), k[None]),
    "frequencies first": lambda t, k: (k[None, :, None] @ t[None, None])[0].T,
    "einsum": lambda t, k: jnp.einsum("ti,ik->tk", t[:, None], k[None]),
    "tensordot": lambda t, k: jnp.tensordot(t[:, None], k[None], 1),
    "inner": lambda t, k: jnp.inner(jnp.where(t < 0, 0, t)[:, None], k[:, None]),
    "vmap": lambda t, k: jax.vmap(lambda row: row @ k[None])(t[:, None]),
    "scan": lambda t, k: lax.scan(lambda c, row: (c, row @ k[None]), 0, t[:, None])[1],
}


@cover(quick=4, ci=2 * len(ANGLES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ANGLES)
def test_the_angles_of_positions_are_exact(form, way, dtype, standard_promotion):
    cosines = lambda t, k: jnp.cos(ANGLES[form](t, k))
    function = ways.WAYS[way](jamp.autocast(dtype), cosines)
    found = function(np.float32(POSITIONS), FREQUENCIES)
    expected = np.cos(np.float64(POSITIONS)[:, None] * np.float64(FREQUENCIES))
    np.testing.assert_allclose(found, expected, atol=1e-3)
