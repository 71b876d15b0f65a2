"""What is not lowered: products of nothing, or of HIGHEST, and what float32 makes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.bits import check_near, nudged
from tests.marks import cover, walk

from . import ways

pytestmark = pytest.mark.usefixtures("default_precision", "standard_promotion")

half = jamp.autocast(jnp.float16)
HIGHEST = lax.Precision.HIGHEST
PRESETS = lax.DotAlgorithmPreset
WAYS = ("jit inside", "live", "jit around")
x, w = np.full((4, 8), 0.1, np.float32), np.full((8, 4), 0.1, np.float32)


def run(way, function, x=x):
    return ways.WAYS[way](half, function)(jnp.asarray(x))


def dense(precision):
    layer = nn.Dense(4, precision=precision, use_bias=False)
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
def test_a_call_that_says_highest_runs_in_float32(name, way):
    function = ASKED[name]
    found = run(way, function)
    assert found.dtype == jnp.float32
    if name == "widened":
        np.testing.assert_allclose(found, function(x), rtol=1e-3)
    else:
        check_near(found, function(x), list(map(function, nudged(x))))


# Of an input or of a product: how it is written decides, wherever the region stands.
LOWERED = {
    "default": lambda x: jnp.matmul(x, w),
    "high": lambda x: jnp.matmul(x, w, precision="high"),
    "dense": dense(None),
    "of_halves": lambda x: jnp.matmul(
        x.astype(jnp.float16), w.astype(jnp.float16), precision=HIGHEST
    ),
    # An array that asks for half precision gets it.
    "linspace": lambda x: (
        jnp.linspace(0.0, 1.0, 8, dtype=jnp.float16) * x[0].astype(jnp.float16)
    ),
    "full": lambda x: jnp.full((4,), x[0, 0], jnp.float16),
    "astype": lambda x: (jnp.arange(4) * 0.1).astype(jnp.float16),
    "asarray": lambda x: jnp.asarray(jnp.arange(4) * 0.1, jnp.float16),
}
MADE_IN_FLOAT32 = {
    "zeros": lambda h: jnp.zeros((4, 4)) + h,
    "zeros_on_the_right": lambda h: h + jnp.zeros((4, 4)),
    "full": lambda h: jnp.full((4, 4), 2.0) * h,
    "ones": lambda h: jnp.ones((4, 4)) * h,
    "lax_full": lambda h: lax.full((4, 4), 2.0) + h,
    "broadcast_to": lambda h: jnp.broadcast_to(2.0, (4, 4)) * h,
    "dynamic_update_slice": lambda h: jax.jit(
        lambda h: lax.dynamic_update_slice(jnp.zeros((4, 4)), h, (0, 0))
    )(h.astype(jnp.float32)),
    "set": lambda h: jnp.zeros((4, 4)).at[0].set(h[0]),
    "where": lambda h: jnp.where(h > 0, h, jnp.zeros((4, 4))),
    "weak": lambda h: jnp.arange(4)[:, None] * 0.1 + h,
    "weak_stack": lambda h: jnp.concatenate([jnp.arange(4)[:, None] * 0.1, h], 1),
    "loop": lambda h: sum([h, h], start=jnp.zeros((4, 4))),
}
FOLLOWS = {
    "number": lambda h: 2.0 * h + 1.0,
    "zeros_like": lambda h: jnp.zeros_like(h) + h,
    "full_like": lambda h: jnp.full_like(h, 3.0) * h,
    "where": lambda h: jnp.where(h > 0, h, 0.0),
    "maximum": lambda h: jnp.maximum(h, 0.0),
    "bias": lambda h: h + jnp.zeros(4)[None],
    "pad": lambda h: jnp.pad(h, 1),
}


def of_product(function, before=lambda h: h):
    return lambda x: function(before(x @ w))


WRITTEN = {name: (function, jnp.float16) for name, function in LOWERED.items()}
WRITTEN |= {f"{n}, of it": (of_product(f), jnp.float16) for n, f in FOLLOWS.items()}
WRITTEN |= {
    f"{name}, {of}": (of_product(function, before), jnp.float32)
    for name, function in MADE_IN_FLOAT32.items()
    for of, before in (("of it", lambda h: h), ("of its tanh", jnp.tanh))
}


@cover()
@pytest.mark.parametrize("way", WAYS)
@walk("name", WRITTEN)
def test_a_dtype_depends_on_how_it_is_written(name, way):
    function, dtype = WRITTEN[name]
    if way == "live":
        y = half(function)(jnp.asarray(x))
    else:
        y = jax.eval_shape(ways.WAYS[way](half, function), x)
    assert y.dtype == dtype
    # After the region too.
    after = jax.eval_shape(lambda y: y + y.astype(jnp.float16), y)
    assert after.dtype == dtype


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
def test_the_angles_of_positions_are_exact(form, way, dtype):
    cosines = lambda t, k: jnp.cos(ANGLES[form](t, k))
    function = ways.WAYS[way](jamp.autocast(dtype), cosines)
    found = function(np.float32(POSITIONS), FREQUENCIES)
    expected = np.cos(np.float64(POSITIONS)[:, None] * np.float64(FREQUENCIES))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_loop_does_not_change_the_type_of_its_carry():
    c = jnp.full((4, 4), 0.25)  # it is weakly typed: it follows other arrays
    body = lambda c: c @ c + c
    loops = (
        lambda c: lax.scan(lambda c, _: (body(c), None), c, None, 3)[0],
        lambda c: lax.fori_loop(0, 3, lambda i, c: body(c), c),
        lambda c: lax.while_loop(lambda c: c[0, 0] < 9, body, c),
    )
    for loop in loops:
        assert jax.typeof(half(loop)(c)) == jax.typeof(loop(c)) == jax.typeof(c)


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_keeps_its_small_terms(way):
    x, w = np.full((4, 8), 0.25, np.float32), np.full((8, 4), 0.5, np.float32)

    def total(x):
        acc = jnp.zeros((4, 4))
        for _ in range(8):
            acc = acc + x @ w  # each adds 1
            acc = acc + 512 * (x @ w)
        return acc + 0.25 * (x @ w)

    assert run(way, total, x)[0, 0] == 8 + 8 * 512 + 0.25  # float16: 4104
