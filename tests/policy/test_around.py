"""A policy's result does not depend on what ran before it, or runs in other threads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jamp

from ..around import alike, alone, one_after_another, side_by_side
from ..marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPE = jax.ShapeDtypeStruct((4, 16), jnp.float32)
HEAD = "head"


def linen(pause):
    """Calls of modules of the same classes under many policies."""

    class Block(nn.Module):
        fails: bool = False

        @nn.compact
        def __call__(self, x):
            h = nn.Dense(16)(x)
            pause()
            if self.fails:
                raise ZeroDivisionError
            return jax.nn.softmax(h @ nn.Dense(16, name="last")(h).T) @ h

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, use_bias=False)(x)

    class Model(nn.Module):
        fails: bool = False

        def setup(self):
            self.body = Block(fails=self.fails)
            self.norm, self.head = nn.LayerNorm(), nn.Dense(16)

        def encode(self, x):
            return self.norm(self.body(x))

        def __call__(self, x):
            return self.head(self.encode(x)) + x

    class Around(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return x * self.inner(x)

    key = jax.random.key(0)
    made = jax.eval_shape(Model().init, key, SHAPE)
    given = functools.partial(jamp.linen.with_policy, Model())
    half, brain = given("c=float16"), given("c=bfloat16,o=float32")

    def init(module):
        return lambda: jax.tree.leaves(jax.eval_shape(module.init, key, SHAPE))

    def apply(module, variables=made, around=lambda f: f, **wishes):
        def run(variables, x):
            return module.apply(variables, x, **wishes)

        return lambda: jax.make_jaxpr(around(run))(variables, SHAPE)

    def region(run):
        return jamp.autocast(jnp.bfloat16)(run)

    def inside(variables, x):
        return half.apply(variables, x) + brain.apply(variables, x)

    def gradient(run):
        return jax.grad(lambda variables, x: jnp.sum(run(variables, x)))

    around = {"params": {"inner": made["params"]}}
    other = jamp.linen.with_policy(Other(), "c=float16", {"Dense_0": "full"})
    return {
        "plain": apply(Model()),
        "half": apply(half),
        "brain": apply(brain),
        "full head": apply(given("c=float16", {HEAD: "full"})),
        "body in bfloat16": apply(given("c=float16", {"body": "c=bfloat16"})),
        "nothing kept": apply(given("c=float16", float32_for=())),
        "norms kept": apply(given("c=float16", float32_for=("norms",))),
        "half parameters": init(given("p=float16,c=float16", {HEAD: "full"})),
        "parameters": init(half),
        "with an override": init(given("c=float16", {HEAD: "full"})),
        "without a module": init(given("c=float16", {"tail": "full"})),
        "of other modules": init(other),
        "encoding": apply(half, method="encode"),
        "encoding by function": apply(half, method=Model.encode),
        "failing": apply(jamp.linen.with_policy(Model(fails=True), "c=float16")),
        "in a plain module": apply(Around(half), around),
        "in one with a policy": apply(
            jamp.linen.with_policy(Around(half), "c=bfloat16"), around
        ),
        "as a whole": apply(jamp.linen.with_policy(Around(Model()), "half"), around),
        "one and another": lambda: jax.make_jaxpr(inside)(made, SHAPE),
        "in a region": apply(half, around=region),
        "jitted": apply(half, around=jax.jit),
        "differentiated": apply(half, around=gradient),
    }


class Running(nnx.Module):
    """Keeps an average as a parameter, which a call may read or write."""

    def __init__(self):
        self.average = nnx.Param(jnp.full(4, 1 / 3))

    def read(self, x):
        return x * self.average[...]

    def write(self, x):
        self.average[...] = jnp.full(4, 1 / 3)
        return x


def nnx_modules(pause):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 16, rngs=rngs)
            self.last = nnx.Linear(16, 16, rngs=rngs)
            self.fails = False

        def __call__(self, x):
            h = self.first(x)
            pause()
            if self.fails:
                raise ZeroDivisionError
            return jax.nn.softmax(h @ self.last(h).T) @ h

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.body, self.norm = Block(rngs), nnx.LayerNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, 16, rngs=rngs)

        def encode(self, x):
            return self.norm(self.body(x))

        def __call__(self, x):
            return self.head(self.encode(x)) + x

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    plain = nnx.merge(
        graph, jax.tree.map(lambda s: np.full(s.shape, 0.1, s.dtype), shapes)
    )
    given = functools.partial(jamp.nnx.with_policy, plain)
    half, brain = given("c=float16"), given("c=bfloat16,o=float32")
    failing = given("c=float16")
    failing.body.fails = True
    average = jamp.nnx.with_policy(Running(), "c=float16")
    named = jamp.nnx.named_scopes(plain)
    named_half = jamp.nnx.named_scopes(half)

    def call(function):
        return lambda: jax.make_jaxpr(lambda x: function(x))(SHAPE)

    def ruled(model, **rules):
        def run(x):
            with jamp.autocast(jnp.float16, rules=rules):
                return model(x)

        return call(run)

    def differentiated(x):
        graph, state = nnx.split(half)
        return jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x)))(state)

    run = lambda name: lambda: getattr(average, name)(jnp.ones(4))
    return {
        "plain": call(plain),
        "half": call(half),
        "brain": call(brain),
        "full head": call(given("c=float16", {HEAD: "full"})),
        "nothing kept": call(given("c=float16", float32_for=())),
        "norms kept": call(given("c=float16", float32_for=("norms",))),
        "encoding": call(half.encode),
        "a part": call(half.body),
        "failing": call(failing),
        "one and another": call(lambda x: half(x) + brain(x)),
        "one on another": call(lambda x: half(brain(x))),
        "in a region": call(jamp.autocast(jnp.bfloat16)(half)),
        "differentiated": call(differentiated),
        "reading": run("read"),
        "writing": run("write"),
        "reading as stored": lambda: average.average[...],
        "head by its path": ruled(named, head=jnp.float32),
        "body by its path": ruled(named, body=jnp.bfloat16),
        "a path below": ruled(named, **{"body/last": jnp.float32}),
        "a part by its path": ruled(named.body, **{"body/last": jnp.float32}),
        "a policy with paths": call(named_half),
    }


# What raises an error when it is alone, too.
REFUSED = {
    linen: {"failing", "without a module"},
    nnx_modules: {"failing", "writing"},
}


# What gives the same program.
ALIKE = {
    linen: [
        ["half", "in a region"],
        ["parameters", "with an override"],
        ["encoding", "encoding by function"],
    ],
    nnx_modules: [
        ["half", "in a region", "a policy with paths"],
    ],
}


@functools.cache
def expected_of(case):
    return alone(case)


def only(case, *names):
    """A case with few of its calls."""

    def few(pause):
        calls = case(pause)
        return {name: calls[name] for name in names}

    return few


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_the_same_after_one_of_each_kind(case):
    few = only(case, "half", "plain", "full head", "failing")
    expected = alone(few)
    assert alike(expected) == []
    assert one_after_another(few, expected) == []


def test_a_call_is_the_same_beside_one_of_another_kind():
    few = only(linen, "half", "full head")
    assert side_by_side(few, alone(few), [1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_the_same_after_others(case):
    expected = expected_of(case)
    refused = {name for name, found in expected.items() if isinstance(found, tuple)}
    assert refused == REFUSED[case]
    assert alike(expected) == ALIKE[case]
    assert one_after_another(case, expected) == []


@pytest.mark.slow
@cover()
@pytest.mark.parametrize("distance", [1, 2, 9, 13])
@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_the_same_beside_another(case, distance):
    assert side_by_side(case, expected_of(case), [distance]) == []
