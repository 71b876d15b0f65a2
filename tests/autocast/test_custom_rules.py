"""User code in custom derivative rules sees the dtypes that it sees without a region.

A rule was written for float32. In half precision its intermediate numbers overflow.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = jnp.float16, jnp.bfloat16
HUGE = 2.0**17  # inf in float16
MESH = jax.make_mesh(
    (1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
)


class Seen:
    """The dtypes that code has seen, by the name of the place."""

    def __init__(self):
        self.dtypes = {}

    def __call__(self, place, *values):
        """Notes the dtypes, also of what is made of the values, and returns them."""
        names = [str(jnp.result_type(v)) for v in values]
        names += [str(jnp.result_type(v @ v.T)) for v in values[:1] if np.ndim(v) == 2]
        self.dtypes.setdefault(place, set()).add(tuple(names))


def through_huge(x):
    """`x`, by way of numbers that float16 does not hold."""
    return (x @ jnp.eye(x.shape[-1], dtype=x.dtype) * HUGE) / HUGE


# Each makes a function of two matrices whose rules are the user's. Its own code runs as
# any other in a region: in half precision, and so without huge numbers.


def with_jvp(seen):
    @jax.custom_jvp
    def function(x, w):
        return x @ w

    @function.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        seen("jvp", x, w, dx, dw)
        tangent = through_huge(dx @ w + x @ dw)
        seen("tangent", tangent)
        return function(x, w), tangent

    return function


def with_jvp_of_zeros(seen):
    @jax.custom_jvp
    def function(x, w):
        return x @ w

    def jvp(primals, tangents):
        (x, w), tangents = primals, tangents
        dx, dw = (
            jnp.zeros_like(p) if type(t).__name__ == "SymbolicZero" else t
            for p, t in zip(primals, tangents, strict=True)
        )
        seen("jvp", x, w, dx, dw)
        return function(x, w), through_huge(dx @ w + x @ dw)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def with_vjp(seen, **wishes):
    @jax.custom_vjp
    def function(x, w):
        return x @ w

    def fwd(x, w):
        seen("fwd", x, w)
        y = through_huge(x @ w)
        seen("result", y)
        return y, (x, w, x @ w)

    def bwd(kept, cotangent):
        x, w, y = kept
        seen("bwd", x, w, y, cotangent)
        cotangent = through_huge(cotangent)
        seen("cotangent", cotangent)
        return cotangent @ w.T, x.T @ cotangent

    function.defvjp(fwd, bwd, **wishes)
    return function


def with_static_argument(seen):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(n, x, w):
        return x @ w * n

    def fwd(n, x, w):
        seen("fwd", x, w)
        return through_huge(x @ w) * n, (x, w)

    def bwd(n, kept, cotangent):
        x, w = kept
        seen("bwd", x, w, cotangent)
        cotangent = through_huge(cotangent) * n
        return cotangent @ w.T, x.T @ cotangent

    function.defvjp(fwd, bwd)
    return lambda x, w: function(2, x, w)


def with_gradient(seen):
    @jax.custom_gradient
    def function(x, w):
        def bwd(cotangent):
            seen("bwd", cotangent)
            cotangent = through_huge(cotangent)
            return cotangent @ w.T, x.T @ cotangent

        return x @ w, bwd

    return function


RULES = {
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
    "custom_jvp with symbolic zeros": with_jvp_of_zeros,
    "custom_vjp with optimize_remat": functools.partial(with_vjp, optimize_remat=True),
    "custom_vjp with a static argument": with_static_argument,
    "custom_gradient": with_gradient,
}


def plainly(function, region):
    return jax.grad(region(function), (0, 1))


def inside(function, region):
    return region(jax.grad(function, (0, 1)))


def later(function, region):
    """The backward pass runs when the region has ended."""

    def run(x, w):
        with_region = region(lambda: jax.vjp(function, x, w))
        out, pull_back = with_region()
        return pull_back(jnp.ones_like(out))

    return run


def scanned(function):
    step = lambda total, x: (total, function(x, total[0]))
    return lambda x, w: jnp.sum(lax.scan(step, (w, x), x[None])[1])


def chosen(function):
    return lambda x, w: lax.cond(x[0, 0] > -99, function, lambda x, w: 0.0, x, w)


def sharded(function):
    specs = {"mesh": MESH, "in_specs": P(), "out_specs": P()}
    return jax.jit(jax.shard_map(function, **specs))


AROUND = {  # what is around the call
    "jit": jax.jit,
    "scan": scanned,
    "cond": chosen,
    "checkpoint": jax.checkpoint,
    "shard_map": sharded,
    "eagerly": lambda f: f,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}
WAYS = {"grad around": plainly, "later": later, "grad inside": inside}


def recorded(rule, around, way, region):
    """What a rule saw, and the gradients."""
    seen = Seen()
    function = RULES[rule](seen)
    loss = AROUND[around](lambda x, w: jnp.sum(function(x, w).astype(jnp.float32)))
    x = np.linspace(0.5, 1.5, 16, dtype=np.float32).reshape(4, 4)
    w = np.linspace(1.5, 0.25, 16, dtype=np.float32).reshape(4, 4)
    grads = WAYS[way](loss, region)(x, w)
    return seen.dtypes, grads


@cover(quick=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_sees_what_it_sees_without_a_region(rule, around, way):
    expected, grads = recorded(rule, around, way, lambda f: f)
    for dtype in (*HALVES, jamp.ScaledFloat16()):
        found, given = recorded(rule, around, way, jamp.autocast(dtype))
        assert found == expected, dtype
        for x, y in zip(given, grads, strict=True):
            assert x.dtype == y.dtype, dtype
            np.testing.assert_allclose(x, y, rtol=0.05, atol=1e-8, err_msg=str(dtype))


# Rules that multiply, of functions that compute nothing in which a region casts.


def doubled(x, w):
    return x * 2


def vjp_that_multiplies():
    function = jax.custom_vjp(doubled)
    function.defvjp(lambda x, w: (x * 2, w), lambda w, g: (g @ w, jnp.zeros_like(w)))
    return function


def jvp_that_multiplies():
    function = jax.custom_jvp(doubled)
    function.defjvp(lambda args, dots: (doubled(*args), dots[0] @ args[1].T))
    return function


def carried(function):
    step = lambda carry, w: (function(carry, w), None)
    return lambda x, w: lax.scan(step, x, w[None])[0]


def over_one(function):
    return lambda x, w: jax.vmap(function, (0, None))(x[None], w)[0]


CALLERS = {
    "live": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(lambda *args: jax.jit(f)(*args)),
    "checkpoint": jax.checkpoint,
    "scan": carried,
    "jit of scan": lambda f: jax.jit(carried(f)),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] < 9, f, f, x, w),
    "jit of vmap": lambda f: lambda *args: jax.jit(over_one(f))(*args),
}


@cover(quick=4)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rule", [vjp_that_multiplies, jvp_that_multiplies])
@pytest.mark.parametrize("around", CALLERS)
def test_a_rule_that_multiplies_alone_is_in_half_precision(around, rule, jit):
    """The numbers tell: half precision rounds the weights to one."""
    w = jnp.full((4, 4), 1 + 2.0**-12)
    function = jamp.autocast(jnp.float16)(CALLERS[around](rule()))
    gradient = jax.grad(lambda x: jnp.sum(function(x, w)))
    found = (jax.jit(gradient) if jit else gradient)(jnp.ones((4, 4)))
    np.testing.assert_array_equal(found, np.full((4, 4), 4.0))
