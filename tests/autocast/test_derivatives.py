"""Every derivative of products with a rule of their own: right, or jamp's error.

A table: how a region computes, what is in it or around it, the derivative.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.marks import cover

REGIONS = {
    "scaled": jamp.autocast(jamp.ScaledFloat16()),
    "tensorwise": jamp.autocast("float8"),
    "rowwise": jamp.autocast(jamp.Float8("rowwise")),
    "rowwise_with_gw_hp": jamp.autocast(jamp.Float8("rowwise_with_gw_hp")),
}
RNG = np.random.default_rng(0)
# JAX takes no NumPy array into a `custom_vjp` under `vmap` in `jit`.
X, DX = jnp.asarray(RNG.normal(size=(2, 32, 64)), jnp.float32)
W = RNG.normal(size=(64, 48)).astype(np.float32) / 8
DY = np.ones((32, 48), np.float32)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def plain(x):
    return jnp.matmul(x, W)


def scanned(f):
    return lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0]


BETWEEN = {
    "nothing": lambda f: f,
    "arithmetic": lambda f: lambda x: f(2 * x) / 2,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "cond": lambda f: lambda x: lax.cond(jnp.less(W[0, 0], 100), f, f, x),
}


def with_tangent(f):
    return jax.jvp(f, (X,), (DX,))


def linearized(f):
    y, linear = jax.linearize(f, X)
    return y, linear(DX)


def linear_at_many(f):
    y, linear = jax.linearize(f, X)
    return y, jax.vmap(linear)(DX[None])[0]


def linear_and_transposed(f):
    y, linear = jax.linearize(f, X)
    return y, *jax.linear_transpose(linear, X)(DY)


def jacobian(f):
    """A row of it, in forward mode: along one number."""
    return f(X), jax.jacfwd(lambda t: f(X + t * DX))(0.0)


def both_modes(f):
    """The product of a Hessian and a vector."""
    return jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 2)), (X,), (DX,))


def penalty(f):
    squares = lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x) ** 2)
    return (jax.grad(squares)(X),)


DERIVATIVES = {
    "grad": lambda f: (jax.grad(lambda x: jnp.sum(f(x) * DY))(X),),
    "linear_transpose": lambda f: jax.linear_transpose(f, X)(DY),
    "vjp": lambda f: (f(X), *jax.vjp(f, X)[1](DY)),
    "jvp": with_tangent,
    "vmap of vjp": lambda f: (jax.vmap(jax.vjp(f, X)[1])(jnp.asarray(DY)[None])[0][0],),
    "jacfwd": jacobian,
    "linearize": linearized,
    "vmap of linearize": linear_at_many,
    "transpose of linearize": linear_and_transposed,
    "jvp of grad": both_modes,
    "grad of grad": penalty,
}
WORK = {"grad", "vjp", "vmap of vjp", "transpose of linearize"}  # in reverse mode
REFUSED = {
    "linear_transpose": (NotImplementedError, "custom_vjp"),
    "jvp of grad": ((NotImplementedError, TypeError), "custom_vjp|has one derivative"),
    "grad of grad": (NotImplementedError, "product has one derivative"),
}
FORWARD = TypeError, "forward-mode autodiff"


@functools.cache
def truth(derivative, compiled):
    run = lambda: DERIVATIVES[derivative](plain)
    return jax.jit(run)() if compiled else run()


@cover(quick=5, ci=160)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", REGIONS)
def test_a_derivative_is_right_or_refused(name, compiled, where, between, derivative):
    """Of the product in a region, with a thing in the region or around it."""
    region, wrap = REGIONS[name], BETWEEN[between]
    function = region(wrap(plain)) if where == "inside" else wrap(region(plain))
    run = lambda: DERIVATIVES[derivative](lambda x: jnp.float32(function(x)))
    run = jax.jit(run) if compiled else run
    if derivative not in WORK:
        error, text = REFUSED.get(derivative, FORWARD)
        with pytest.raises(error, match=text):
            run()
        return
    for a, b in zip(run(), truth(derivative, compiled), strict=True):
        error = np.linalg.norm(np.float64(a) - np.float64(b))
        assert error <= 0.15 * np.linalg.norm(np.float64(b))


@cover(quick=2)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_a_second_derivative_that_would_be_wrong_is_refused(name, linear):
    """Scales count as constants in it, and values in low precision as well."""

    @jax.jit
    def inner(x, w):
        with REGIONS[name]:
            y = jnp.float32(x @ w)
        return jnp.sum(y if linear else y**2)

    def penalty(w):
        return jnp.sum(jax.grad(inner)(X, w) ** 2)

    with pytest.raises(NotImplementedError, match="product has one derivative"):
        jax.eval_shape(jax.grad(penalty), W)
    jax.jit(penalty)(W)  # one derivative
