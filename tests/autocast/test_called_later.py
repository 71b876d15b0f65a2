"""What a region has left behind and another one calls: backward passes, jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import jamp
from tests.jaxprs import products

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jnp.linspace(0, 1, 16).reshape(4, 4)
W = jnp.linspace(-1, 2, 16).reshape(4, 4)


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


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in FORWARD
        for what in (backward, forward, again)
        if (name, what) != ("scaled", forward)  # which has no forward mode
    ],
)
def test_another_region_leaves_it_as_it_is(name, what):
    later = jamp.autocast(jnp.bfloat16 if name == "scaled" else jnp.float16)
    wrong = []
    for around, wrap in AROUND.items():
        region = wrap(jamp.autocast(**FORWARD[name])(function))
        for how in (lambda f: f, jax.jit):
            run = how(lambda wrapped=region: what(wrapped, lambda f: f))
            expected = run()
            found = how(lambda wrapped=region: what(wrapped, later))()
            pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
            for x, y in pairs:
                if x.dtype != y.dtype or not np.array_equal(x, y):
                    wrong.append((around, how is jax.jit, str(x.dtype), str(y.dtype)))
            if name in ("bfloat16", "off"):
                dtypes = products(lambda wrapped=region: what(wrapped, later))
                if {"float16"} in dtypes:
                    wrong.append((around, dtypes))
    assert wrong == []


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


@pytest.mark.parametrize("make", [with_jvp, with_vjp])
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


def test_a_batching_rule_runs_in_the_region_that_called_its_function():
    @jax.custom_batching.custom_vmap
    def square(x):
        return x @ x

    @square.def_vmap
    def _(size, batched, x):
        return jax.vmap(lambda x: x @ x)(x), batched[0]

    region, batch = jamp.autocast(jnp.float16), X[None]
    assert products(lambda: jax.vmap(region(square))(batch)) == [{"float16"}]
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
