"""Primitives that hold a function in ways of their own, in a region."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import scheduling_groups
from jax.experimental.custom_partitioning import custom_partitioning

import jamp
from tests.jaxprs import all_half, products
from tests.marks import mostly_slow, slow

from .squares import arrays, half

pytestmark = [pytest.mark.usefixtures("standard_promotion")]


def close(found, expected, tolerance=0.02):
    assert found.dtype == expected.dtype == jnp.float32
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


# A gradient, inside the region, of a `jax.checkpoint` around a loop.


def scan(w, x):
    carry, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
    return jnp.sum(carry)


def fori_loop(w, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x))


def lax_map(w, x):
    return jnp.sum(lax.map(lambda row: jnp.sin(row[None] @ w), x))


LOOPS = pytest.mark.parametrize(
    "loop", [scan, fori_loop, lax_map], ids=lambda f: f.__name__
)


@LOOPS
@pytest.mark.parametrize("jit", mostly_slow([False, True], True))
def test_a_gradient_inside_of_a_rematerialized_loop(loop, jit):
    x, w = arrays()
    gradient = jax.grad(jax.checkpoint(loop))
    inside = half()(jax.jit(gradient) if jit else gradient)
    close(inside(w, x), gradient(w, x))
    all_half(inside, w, x)


@LOOPS
@pytest.mark.parametrize(
    "order", mostly_slow(["one region", "region inside", "both"], "both")
)
def test_a_gradient_penalty_over_a_rematerialized_loop(order, loop):
    x, w = arrays()

    def penalty(w, x, inner, outer):
        with outer():
            gradient = jax.grad(inner()(jax.checkpoint(loop)))(w, x)
            return jnp.sum(gradient**2)

    nothing = functools.partial(jamp.autocast, enabled=False)
    inner, outer = {
        "one region": (nothing, half),
        "region inside": (half, nothing),
        "both": (half, half),
    }[order]
    if order == "one region":
        inner = lambda: lambda function: function
    found = jax.jit(jax.grad(functools.partial(penalty, inner=inner, outer=outer)))
    expected = jax.grad(functools.partial(penalty, inner=nothing, outer=nothing))
    close(found(w, x), expected(w, x))
    all_half(found, w, x)


# `optimize_remat` of a custom_vjp and `linear_call`: they run as they were traced.


def with_optimized_remat():
    @jax.custom_vjp
    def function(x, w):
        return jnp.sin(x @ w)

    def forward(x, w):
        return jnp.sin(x @ w), (x, w)

    def backward(residuals, g):
        x, w = residuals
        g = g * jnp.cos(x @ w)
        return g @ w.T, x.T @ g

    function.defvjp(forward, backward, optimize_remat=True)
    return function


@pytest.mark.parametrize("way", ["jit", "checkpoint", "vmap", "inside"])
def test_optimized_remat_of_a_custom_vjp(way):
    x, w = arrays()
    function = with_optimized_remat()
    wrapped = {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w),
    }.get(way, lambda f: f)

    def loss(w):
        return jnp.sum(wrapped(function)(x, w) ** 2)

    expected = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w) ** 2))(w)
    found = half()(jax.grad(loss)) if way == "inside" else jax.grad(half()(loss))
    close(jax.jit(found)(w), expected)
    close(half()(loss)(w), loss(w))


@pytest.mark.parametrize("inside", [False, True])
def test_linear_call(inside):
    x, w = arrays()

    @jax.jit
    def linear(x):
        return linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)

    def loss(x):
        return jnp.sum(jnp.sin(linear(x @ w)))

    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ w @ w)))(x)
    found = half()(jax.grad(loss)) if inside else jax.grad(half()(loss))
    close(found(x), expected)


# compute_on and custom_partitioning


def on_host(function):
    from jax.experimental import compute_on

    make = getattr(compute_on, "compute_on2", compute_on.compute_on)
    space = jax.memory.Space.Device
    return make(function, compute_type="device_host", out_memory_spaces=space)


def in_a_group(function):
    return scheduling_groups.scheduling_group("first")(function)


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="JAX 0.10.0 fails itself")
@pytest.mark.parametrize("annotate", [on_host, in_a_group], ids=lambda f: f.__name__)
@pytest.mark.parametrize("jit", [False, True])
def test_functions_with_a_word_for_the_compiler(jit, annotate):
    x, w = arrays()
    function = annotate(lambda x: jnp.sin(x @ w))

    def loss(x):
        return jnp.sum((jax.jit(function) if jit else function)(x @ w))

    gradient = jax.grad(half()(loss))
    close(gradient(x), jax.grad(lambda x: jnp.sum(jnp.sin(x @ w @ w)))(x))
    all_half(gradient, x)
    with half():
        assert function(x).dtype == jnp.float16


@pytest.mark.parametrize("jit", [False, True])
def test_custom_partitioning_is_left_alone(jit):
    x, _ = arrays()

    @custom_partitioning
    def squared(x):
        return x @ x

    squared.def_partition(
        partition=lambda mesh, given, made: None, sharding_rule="i j -> i j"
    )
    function = jax.jit(squared) if jit else squared
    with half():
        found = function(x)
    np.testing.assert_array_equal(found, squared(x))


# Custom derivatives that an inner region has decided about, seen by an outer one.


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


@pytest.mark.parametrize("function", [jax.nn.relu, sine, cosine, jax.checkpoint(sine)])
@pytest.mark.parametrize("inner", [{"dtype": jnp.bfloat16}, {"enabled": False}])
@pytest.mark.parametrize("outer", [True, slow(False)])
def test_custom_derivatives_in_an_inner_region(function, inner, outer):
    x, _ = arrays()

    def loss(x):
        with jamp.autocast(**inner):
            return jnp.sum(function(x) ** 2)

    plain = lambda x: jnp.sum(function(x) ** 2)
    around = half() if outer else jamp.autocast(enabled=False)
    expected = plain(x), jax.grad(plain)(x)
    tolerance = 1e-5 if inner == {"enabled": False} else 0.05
    for found in (jax.jit(loss), jax.jit(jax.jit(loss))):
        np.testing.assert_allclose(around(found)(x), expected[0], rtol=tolerance)
    for found in (
        jax.grad(jax.jit(loss)),
        jax.jit(jax.grad(loss)),
        jax.grad(jax.checkpoint(loss)),
        jax.grad(around(jax.jit(loss))),
    ):
        close(around(found)(x), expected[1], tolerance)


@pytest.mark.parametrize("loop", ["scan", "hoisted", "fori", "checkpoint", "cond"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_inside_keeps_to_an_inner_region_in_a_loop(loop, jit):
    x, w = arrays()

    def step(carry, w):
        with jamp.autocast(enabled=False):
            return jnp.sin(carry @ w)

    run = {
        "scan": lambda w: lax.scan(lambda c, _: (step(c, w), None), x, None, 2)[0],
        # JAX computes what is the same in all iterations once, before the loop.
        "hoisted": lambda w: lax.fori_loop(0, 2, lambda _, c: c + step(x, w), x),
        "fori": lambda w: lax.fori_loop(0, 2, lambda _, c: step(c, w), x),
        "checkpoint": lambda w: jax.checkpoint(step)(x, w),
        "cond": lambda w: lax.cond(jnp.sum(w) > -99.0, step, lambda x, w: x, x, w),
    }[loop]
    gradient = jax.grad(lambda w: jnp.sum(run(w) ** 2))
    inside = half()(jax.jit(gradient) if jit else gradient)
    assert all(dtypes == {"float32"} for dtypes in products(inside, w))
    np.testing.assert_allclose(inside(w), gradient(w), rtol=1e-5, atol=1e-6)
