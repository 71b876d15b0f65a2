"""What a region decided, seen by another one around it, or by one that comes later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import jamp
from tests.bits import check_near, nudged
from tests.jaxprs import products
from tests.marks import cover

from .squares import arrays, half

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
W = np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)


def function(x, w):
    return jnp.sin(x @ w) @ w


FORWARD = {
    "bfloat16": {"dtype": jnp.bfloat16},
    "off": {"enabled": False},
    "float8": {"dtype": "float8"},
    "scaled": {"dtype": jamp.ScaledFloat16()},
}
AROUND = {
    "eagerly": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}


def backward(run, later):
    out, pull_back = jax.vjp(run, X, W)
    return later(pull_back)(jnp.ones_like(out))


def forward(run, later):
    _, push = jax.linearize(run, X, W)
    return later(push)(X, W)


def again(run, later):
    made = jax.make_jaxpr(run)(X, W)
    return later(lambda x, w: jaxpr_as_fun(made)(x, w))(X, W)


@cover(quick=3, ci=44)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in FORWARD
        for what in (backward, forward, again)
        if (name, what) != ("scaled", forward)  # which has no forward mode
    ],
)
def test_another_region_leaves_it_as_it_is(name, what, around):
    later = jamp.autocast(jnp.bfloat16 if name == "scaled" else jnp.float16)
    region = AROUND[around](jamp.autocast(**FORWARD[name])(function))
    for how in (lambda f: f, jax.jit):
        expected = how(lambda: what(region, lambda f: f))()
        found = how(lambda: what(region, later))()
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
    if name in ("bfloat16", "off"):
        assert {"float16"} not in products(lambda: what(region, later))


def with_jvp(look):
    function = jax.custom_jvp(lambda x, w: x @ w)

    @function.defjvp
    def _(primals, tangents):
        look()
        return function(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]

    return function


def with_vjp(look):
    function = jax.custom_vjp(lambda x, w: x @ w)

    def bwd(kept, cotangent):
        look()
        x, w = kept
        return cotangent @ w.T, x.T @ cotangent

    function.defvjp(lambda x, w: (x @ w, (x, w)), bwd)
    return function


@cover()
@pytest.mark.parametrize("make", [with_vjp, with_jvp])
def test_a_rule_asks_for_the_region_that_called_its_function(make):
    """Also where the region has ended, or another one has begun."""
    others = [{"enabled": False}, {"dtype": jnp.bfloat16}, {"dtype": jnp.float16}]
    for around, wrap in AROUND.items():
        for later in others:
            seen = set()

            def look(seen=seen):
                jitted = jax.jit(lambda x: x.astype(jamp.get_autocast_dtype()))
                is_on, dtype = jamp.is_autocast_enabled(), jamp.get_autocast_dtype()
                seen.add((is_on, dtype.name, jax.eval_shape(jitted, X).dtype.name))

            region = wrap(jamp.autocast(jnp.float16)(make(look)))
            out, pull_back = jax.vjp(region, X, W)
            with jamp.autocast(**later):
                pull_back(jnp.ones_like(out))
            assert seen == {(True, "float16", "float16")}, (around, later)


def test_a_batching_rule_runs_in_the_region_around_its_vmap():
    """In a region inside of the `vmap`, the function runs as it was traced."""

    @jax.custom_batching.custom_vmap
    def square(x):
        return x @ x

    @square.def_vmap
    def _(size, batched, x):
        return jax.vmap(lambda x: x @ x)(x), batched[0]

    region, batch = jamp.autocast(jnp.float16), X[None]
    assert products(lambda: jax.vmap(region(square))(batch)) == [{"float32"}]
    assert products(lambda: region(jax.vmap(square))(batch)) == [{"float16"}]
    assert products(lambda: jax.vmap(square)(batch)) == [{"float32"}]


@pytest.mark.parametrize("inner", [{"enabled": False}, {"dtype": jnp.bfloat16}])
def test_an_inner_region_around_a_sharded_function_decides(inner):
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])
    square = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P(), out_specs=P())
    own = jamp.autocast(**inner)(square)
    made = jax.make_jaxpr(own)(X)
    expected = products(lambda: own(X))
    assert expected == [{"bfloat16"} if "dtype" in inner else {"float32"}]
    for function in (own, jax.jit(own), jaxpr_as_fun(made)):
        assert products(lambda f=function: jamp.autocast(jnp.float16)(f)(X)) == expected


# Custom derivatives that an inner region has decided about, seen by an outer one.


def close(found, expected, tolerance=0.02):
    assert found.dtype == expected.dtype == jnp.float32
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x @ x)


@sine.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return sine(x), jnp.cos(x @ x) * (dx @ x + x @ dx)


@jax.custom_vjp
def cosine(x):
    return jnp.cos(x @ x)


cosine.defvjp(
    lambda x: (cosine(x), x),
    lambda x, g: ((-g * jnp.sin(x @ x)) @ x.T + x.T @ (-g * jnp.sin(x @ x)),),
)


@cover(quick=2, ci=16)
@pytest.mark.parametrize("function", [jax.nn.relu, sine, cosine, jax.checkpoint(sine)])
@pytest.mark.parametrize("inner", [{"dtype": jnp.bfloat16}, {"enabled": False}])
@pytest.mark.parametrize("outer", [True, False])
def test_custom_derivatives_in_an_inner_region(function, inner, outer):
    x, _ = arrays()

    def loss(x):
        with jamp.autocast(**inner):
            return jnp.sum(function(x) ** 2)

    plain = lambda x: jnp.sum(function(x) ** 2)
    around = half() if outer else jamp.autocast(enabled=False)
    both = jax.jit(jax.value_and_grad(plain))
    (value, gradient), *nearby = map(both, [x, *nudged(x)])

    def check(found, expected, nearby):
        if inner == {"enabled": False}:
            check_near(found, expected, nearby)
        else:
            close(found, expected, 0.05)

    values, gradients = zip(*nearby, strict=True)
    for found in (jax.jit(loss), jax.jit(jax.jit(loss))):
        check(around(found)(x), value, values)
    for found in (
        jax.grad(jax.jit(loss)),
        jax.jit(jax.grad(loss)),
        jax.grad(jax.checkpoint(loss)),
        jax.grad(around(jax.jit(loss))),
    ):
        check(around(found)(x), gradient, gradients)


@cover(quick=7, ci=28)
@pytest.mark.parametrize("inner", [{"dtype": jnp.bfloat16}, {"enabled": False}])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(
    "loop", ["scan", "hoisted", "fori", "checkpoint", "cond", "vmap", "custom_vjp"]
)
def test_a_gradient_keeps_to_an_inner_region_in_a_construct(loop, around, inner):
    x, w = arrays()

    def step(carry, w):
        with jamp.autocast(**inner):
            return jnp.sin(carry @ w).astype(jnp.float32)

    custom = jax.custom_vjp(step)
    custom.defvjp(
        lambda x, w: (step(x, w), (x, w)), lambda kept, g: jax.vjp(step, *kept)[1](g)
    )
    run = {
        "scan": lambda w: lax.scan(lambda c, _: (step(c, w), None), x, None, 2)[0],
        # JAX computes what is the same in all iterations once, before the loop.
        "hoisted": lambda w: lax.fori_loop(0, 2, lambda _, c: c + step(x, w), x),
        "fori": lambda w: lax.fori_loop(0, 2, lambda _, c: step(c, w), x),
        "checkpoint": lambda w: jax.checkpoint(step)(x, w),
        "cond": lambda w: lax.cond(jnp.sum(w) > -99.0, step, lambda x, w: x, x, w),
        "vmap": lambda w: jax.vmap(step, (0, None))(x[None], w),
        "custom_vjp": lambda w: custom(x, w),
    }[loop]
    loss = lambda w: jnp.sum(run(w) ** 2)
    expected, *nearby = map(jax.jit(jax.grad(loss)), [w, *nudged(w)])
    dtype = "bfloat16" if "dtype" in inner else "float32"
    for jit in (lambda f: f, jax.jit):
        found = jax.grad(half()(jit(loss))) if around else half()(jit(jax.grad(loss)))
        assert all(dtypes == {dtype} for dtypes in products(found, w))
        if dtype == "float32":
            check_near(found(w), expected, nearby)
        close(found(w), expected)
