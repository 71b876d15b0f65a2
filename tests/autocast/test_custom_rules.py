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
from tests.marks import mostly_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
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
    "custom_jvp": with_jvp,
    "custom_jvp with symbolic zeros": with_jvp_of_zeros,
    "custom_vjp": with_vjp,
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
    "eagerly": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": scanned,
    "cond": chosen,
    "shard_map": sharded,
}
WAYS = {"grad around": plainly, "grad inside": inside, "later": later}


def recorded(rule, around, way, region):
    """What a rule saw, and the gradients."""
    seen = Seen()
    function = RULES[rule](seen)
    loss = AROUND[around](lambda x, w: jnp.sum(function(x, w).astype(jnp.float32)))
    x = jnp.linspace(0.5, 1.5, 16).reshape(4, 4)
    w = jnp.linspace(1.5, 0.25, 16).reshape(4, 4)
    grads = WAYS[way](loss, region)(x, w)
    return seen.dtypes, grads


@functools.cache
def without(rule, around, way):
    return recorded(rule, around, way, lambda f: f)


@pytest.mark.parametrize("way", mostly_slow(WAYS, "grad around", "later"))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_sees_what_it_sees_without_a_region(rule, way):
    wrong = []
    for around in AROUND:
        for dtype in (*HALVES.values(), jamp.ScaledFloat16()):
            region, case = jamp.autocast(dtype), (around, dtype)
            try:
                expected, grads = without(rule, around, way)
                found, given = recorded(rule, around, way, region)
            except Exception as error:
                wrong.append((*case, f"{type(error).__name__}: {error}"[:150]))
                continue
            if found != expected:
                wrong.append((*case, found, expected))
            for x, y in zip(given, grads, strict=True):
                if x.dtype != y.dtype or not np.allclose(x, y, rtol=0.05):
                    row = x.dtype, np.asarray(x)[0], np.asarray(y)[0]
                    wrong.append((*case, *row))
    assert wrong == []
