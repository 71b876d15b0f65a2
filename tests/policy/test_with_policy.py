"""What `with_policy` does alike for Linen and for NNX: overrides, norms, carries."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp
from shared.jaxprs import equations
from tests.jaxprs import products_of
from tests.marks import mostly_slow, walk

MIXED = jamp.get_policy("mixed_float16")
HALF, FULL, OTHER = {"float16"}, {"float32"}, {"bfloat16"}
KEY = jax.random.key(0)
X = jnp.ones((2, 4))
OPTIONS = {"GroupNorm": {"num_groups": 2}, "BatchNorm": {"use_running_average": False}}

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Linen:
    package, layer = nn, nn.Dense
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
                x = layer(inputs=x)
            return x

    class Model(nn.Module):
        part: nn.Module

        def __call__(self, x):
            return self.part(x)

    @staticmethod
    def model(**arguments):
        return Linen.Model(Linen.Layers(**arguments))

    class Normed(nn.Module):
        norm: str

        @nn.compact
        def __call__(self, x):
            norm = getattr(nn, self.norm)
            h = norm(**OPTIONS.get(self.norm, {}), name="norm")(x)
            return jax.nn.softmax(nn.Dense(4, name="layer")(h)), 1 * h

    @staticmethod
    def rnn(cell):
        return nn.RNN(getattr(nn, cell)(4), return_carry=True)

    @staticmethod
    def traced(model, x=X):
        """The jaxpr of a call, and the parameters."""
        variables = jax.eval_shape(model.init, KEY, x)
        run = lambda variables: model.apply(variables, x, mutable="batch_stats")[0]
        return jax.make_jaxpr(run)(variables), variables["params"]


class NNX:
    package, layer = nnx, nnx.Linear
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
                x = getattr(self, f"layer_{i}")(inputs=x)
            return x

    class Model(nnx.Module):
        def __init__(self, part):
            self.part = part

        def __call__(self, x):
            return self.part(x)

    @staticmethod
    def model(**arguments):
        return NNX.Model(NNX.Layers(**arguments))

    class Normed(nnx.Module):
        def __init__(self, norm):
            rngs, options = nnx.Rngs(0), OPTIONS.get(norm, {})
            self.norm = getattr(nnx, norm)(4, **options, rngs=rngs)
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            h = self.norm(x)
            return jax.nn.softmax(self.layer(h)), 1 * h

    @staticmethod
    def rnn(cell):
        cell = getattr(nnx, cell)(4, 4, rngs=nnx.Rngs(0))
        return nnx.RNN(cell, return_carry=True)

    @staticmethod
    def traced(model, x=X):
        """The jaxpr of a call, and the parameters."""
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        run = lambda params: nnx.merge(graphdef, params, rest, copy=True)(x)
        return jax.make_jaxpr(run)(params), nnx.to_pure_dict(params)


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
    assert products_of(flax.traced(model)[0]) == expected


@both
def test_a_layers_own_dtype_wins(flax):
    model = flax.with_policy(flax.model(dtype=jnp.float32), MIXED)
    assert products_of(flax.traced(model)[0]) == [FULL, HALF, HALF]


@both
def test_a_policy_in_a_policy_wins(flax):
    model = flax.with_policy(flax.model(policy="bf16"), MIXED)
    assert products_of(flax.traced(model)[0]) == [OTHER, HALF, HALF]


@both
@walk("norm", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm"])
def test_norms_and_softmax_are_in_float32_unless_they_are_not_named(flax, norm):
    kept = [("norms", "softmax", "losses"), ("softmax",), ("norms",), ()]
    for names in kept:
        model = flax.with_policy(flax.Normed(norm), "half", float32_for=names)
        jaxpr, params = flax.traced(model)
        dtypes = {name: set() for name in ("rsqrt", "exp")}
        for eqn in equations(jaxpr):
            if eqn.primitive.name in dtypes:
                dtypes[eqn.primitive.name].add(eqn.invars[0].aval.dtype.name)
        assert dtypes["exp"] == (FULL if "softmax" in names else HALF)
        assert dtypes["rsqrt"] == FULL  # Flax's norms compute there themselves
        assert {aval.dtype.name for aval in jaxpr.out_avals} == HALF
        assert products_of(jaxpr) == [HALF]
        own = "float32" if "norms" in names else "float16"
        assert params["norm"]["scale"].dtype == own
        assert params["layer"]["kernel"].dtype == "float16"


@both
def test_norms_stay_in_float32_in_what_an_override_names(flax):
    norm = flax.package.LayerNorm
    for overrides, dtype in (
        ({"": "half"}, jnp.float32),
        ({flax.Normed: "half"}, jnp.float32),
        ({"norm": "half"}, jnp.float16),
        ({norm: "half"}, jnp.float16),
    ):
        model = flax.with_policy(flax.Normed("LayerNorm"), MIXED, overrides)
        assert flax.traced(model)[1]["norm"]["scale"].dtype == dtype, overrides


@both
@pytest.mark.parametrize(
    "cell", mostly_slow(["LSTMCell", "GRUCell", "SimpleCell"], "GRUCell")
)
def test_a_recurrent_carry_keeps_its_dtype(flax, cell):
    for own in (None, "c=bf16,o=f16"):
        overrides = {getattr(flax.package, cell): own} if own else None
        model = flax.with_policy(flax.rnn(cell), MIXED, overrides)
        jaxpr, _ = flax.traced(model, X[None])
        assert {aval.dtype.name for aval in jaxpr.out_avals} == FULL
        inside = OTHER if own else HALF
        if flax.package is nnx and cell == "SimpleCell":
            inside = FULL  # its own dtype, unless it is told another one
        products = products_of(jaxpr)
        assert products and all(dtypes == inside for dtypes in products)
