"""Overrides and arguments of `with_policy`: the same for Linen and for NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp
from tests.jaxprs import products
from tests.marks import walk

MIXED = jamp.get_policy("mixed_float16")
HALF, FULL, OTHER = {"float16"}, {"float32"}, {"bfloat16"}
KEY = jax.random.key(0)
X = jnp.ones((2, 4))

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Linen:
    module, layer = nn.Module, nn.Dense
    with_policy = staticmethod(jamp.linen.with_policy)

    class Layers(nn.Module):
        numbers: tuple = (1, 2, 10)
        dtype: jnp.dtype | None = None
        policy: str | None = None

        @nn.compact
        def __call__(self, x):
            for i in self.numbers:
                own = self.dtype if i == 1 else None
                layer = nn.Dense(4, name=f"layer_{i}", dtype=own)
                if self.policy and i == 1:
                    layer = jamp.linen.with_policy(layer, self.policy)
                x = layer(x)
            return x

    class Model(nn.Module):
        part: nn.Module

        def __call__(self, x):
            return self.part(x)

    @staticmethod
    def model(**arguments):
        return Linen.Model(Linen.Layers(**arguments))

    @staticmethod
    def products(model):
        return products(model.apply, jax.jit(model.init)(KEY, X), X)


class NNX:
    module, layer = nnx.Module, nnx.Linear
    with_policy = staticmethod(jamp.nnx.with_policy)

    class Layers(nnx.Module):
        def __init__(self, numbers=(1, 2, 10), dtype=None, policy=None):
            self.numbers = numbers
            for i in numbers:
                own = dtype if i == 1 else None
                layer = nnx.Linear(4, 4, dtype=own, rngs=nnx.Rngs(0))
                if policy and i == 1:
                    layer = jamp.nnx.with_policy(layer, policy)
                setattr(self, f"layer_{i}", layer)

        def __call__(self, x):
            for i in self.numbers:
                x = getattr(self, f"layer_{i}")(x)
            return x

    class Model(nnx.Module):
        def __init__(self, part):
            self.part = part

        def __call__(self, x):
            return self.part(x)

    @staticmethod
    def model(**arguments):
        return NNX.Model(NNX.Layers(**arguments))

    @staticmethod
    def products(model):
        graphdef, state = nnx.split(model)
        return products(lambda state: nnx.merge(graphdef, state)(X), state)


both = pytest.mark.parametrize("flax", [Linen, NNX], ids=["linen", "nnx"])

LAYER = object()  # stands for the library's class

DECIDED = [
    ({}, [HALF] * 3),
    ({"^part$": "full"}, [FULL] * 3),
    ({"layer_1": "full"}, [FULL, HALF, HALF]),  # not layer_10
    ({"layer_2": "bf16", "part": "full"}, [FULL, OTHER, FULL]),
    ({"part": "full", "layer_2": "bf16"}, [FULL, OTHER, FULL]),
    ({LAYER: "bf16", "part": "full"}, [OTHER] * 3),
    ({LAYER: "bf16", "layer_2": "full"}, [OTHER] * 3),
    ({"layer": "full", "layer_2": "bf16"}, [FULL] * 3),
    ({"layer_2": "bf16", "layer": "full"}, [FULL, OTHER, FULL]),
    ({"": "bf16", "layer_2$": "full"}, [OTHER, FULL, OTHER]),
]


@both
@walk("overrides, expected", DECIDED)
def test_the_innermost_override_decides_then_the_first(flax, overrides, expected):
    overrides = {flax.layer if k is LAYER else k: v for k, v in overrides.items()}
    model = flax.with_policy(flax.model(), MIXED, overrides)
    assert flax.products(model) == expected


@both
def test_a_layers_own_dtype_wins(flax):
    model = flax.with_policy(flax.model(dtype=jnp.float32), MIXED)
    assert flax.products(model) == [FULL, HALF, HALF]


@both
def test_a_policy_in_a_policy_wins(flax):
    model = flax.with_policy(flax.model(policy="bf16"), MIXED)
    assert flax.products(model) == [OTHER, HALF, HALF]


@both
@walk(
    "arguments, error, message",
    [
        ({"module": None}, TypeError, "must be a module.*\\n.*for Flax Linen.*NNX"),
        ({"module": lambda x: x}, TypeError, "policy.wrap"),
        ({"policy": jnp.float16}, TypeError, "policy must be a jamp.Policy"),
        ({"policy": "flaot16"}, ValueError, "float16"),
        ({"overrides": ["Dense"]}, TypeError, "overrides must be a dict"),
        ({"overrides": {"Dense": None}}, TypeError, "None is not a policy"),
        ({"overrides": {3: "half"}}, TypeError, "neither a string nor a class"),
        ({"overrides": {"(": "half"}}, ValueError, "not a regular expression"),
        ({"overrides": {"Dense": "int8"}}, ValueError, "not a floating dtype"),
        ({"float32_for": ("norm",)}, ValueError, "did you mean 'norms'"),
    ],
)
def test_bad_arguments(flax, arguments, error, message):
    module = arguments.get("module", flax.model()) or flax.layer
    given = {"policy": "half"} | {k: v for k, v in arguments.items() if k != "module"}
    with pytest.raises(error, match=message):
        flax.with_policy(module, **given)


@both
def test_one_policy_is_enough(flax):
    model = flax.with_policy(flax.model(), "half")
    with pytest.raises(ValueError, match="already has a policy"):
        flax.with_policy(model, "half")
