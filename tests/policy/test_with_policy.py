"""What `with_policy` does alike for Linen and for NNX: a test a claim.

What the two have of their own is in `test_linen` and `test_nnx`.
"""

import copy
import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from shared.jaxprs import equations
from tests.jaxprs import products, products_of
from tests.marks import cover, walk

from . import linen_models, nnx_models
from .linen_models import Block, Compact, Own, Parent, Setup, SetupParent, X
from .nnx_models import PRODUCTS, TOKENS, Model

MIXED = jamp.get_policy("mixed_float16")
HALF, FULL, OTHER = {"float16"}, {"float32"}, {"bfloat16"}

pytestmark = pytest.mark.usefixtures("standard_promotion")


both = pytest.mark.parametrize("flax", [linen_models, nnx_models], ids=["linen", "nnx"])


def traced(flax, model, x=X):
    """The jaxpr of a call, and the parameters."""
    params, state, predict = flax.functional(model, x, abstract=True)
    run = lambda params, state: predict(params, state, x)[0]
    return jax.make_jaxpr(run)(params, state), params


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
    assert products_of(traced(flax, model)[0]) == expected


@both
def test_a_layers_own_dtype_wins(flax):
    model = flax.with_policy(flax.model(dtype=jnp.float32), MIXED)
    assert products_of(traced(flax, model)[0]) == [FULL, HALF, HALF]


@both
def test_a_policy_in_a_policy_wins(flax):
    model = flax.with_policy(flax.model(policy="bf16"), MIXED)
    assert products_of(traced(flax, model)[0]) == [OTHER, HALF, HALF]


@cover(quick=2, ci=10)
@both
@pytest.mark.parametrize(
    "norm", ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm"]
)
def test_norms_and_softmax_are_in_float32_unless_they_are_not_named(flax, norm):
    kept = [("norms", "softmax", "losses"), ("softmax",), ("norms",), ()]
    for names in kept:
        model = flax.with_policy(flax.Normed(norm), "half", float32_for=names)
        jaxpr, params = traced(flax, model)
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
        assert traced(flax, model)[1]["norm"]["scale"].dtype == dtype, overrides


@cover(quick=2)
@both
@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell", "SimpleCell"])
def test_a_recurrent_carry_keeps_its_dtype(flax, cell):
    for own in (None, "c=bf16,o=f16"):
        overrides = {getattr(flax.package, cell): own} if own else None
        model = flax.with_policy(flax.rnn(cell), MIXED, overrides)
        jaxpr, _ = traced(flax, model, X[None])
        assert {aval.dtype.name for aval in jaxpr.out_avals} == FULL
        inside = OTHER if own else HALF
        if flax is nnx_models and cell == "SimpleCell":
            inside = FULL  # its own dtype, unless it is told another one
        products = products_of(jaxpr)
        assert products and all(dtypes == inside for dtypes in products)


@both
def test_it_is_still_the_model(flax):
    plain = flax.model()
    model = flax.with_policy(plain, MIXED)
    assert type(plain) is flax.Around
    assert isinstance(model, flax.Around)
    assert type(flax.with_policy(plain, "mixed_float16")) is type(model)
    assert type(flax.with_policy(plain, "half")) is not type(model)
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert type(other) is type(model)
        assert products_of(traced(flax, other)[0]) == [HALF] * 3


# Models with all that a library has: lifted transformations, shared and stacked parts.

WIDE = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
CASES = {  # and how many products are in float16 and in float32
    "compact": (linen_models, Compact, WIDE, 7, 0),
    "setup": (linen_models, Setup, WIDE, 3, 0),
    "nnx": (nnx_models, Model, TOKENS, PRODUCTS, 0),
    "part, compact": (linen_models, Parent, WIDE, 7, 1),
    "part, setup": (linen_models, SetupParent, WIDE, 7, 1),
    "part with setup": (linen_models, partial(Parent, Setup), WIDE, 3, 1),
    "part with setup in setup": (linen_models, partial(SetupParent, Setup), WIDE, 3, 1),
}


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_plain_model_with_casts(name):
    """Same variables bit for bit, products in float16, values near float32's."""
    flax, make, x, half, full = CASES[name]
    model = make(policy=MIXED) if full else flax.with_policy(make(), MIXED)
    params, state, predict = flax.functional(model, x)
    plain_params, plain_state, plain = flax.functional(make(), x)
    expected, ours = by_path(plain_params), by_path(params)
    assert expected.keys() == ours.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(ours[path], value)
    y, plain_state = jax.jit(plain)(plain_params, plain_state, x)
    out, new = jax.jit(predict)(params, state, x)
    assert out.dtype == jnp.float32
    size = max(1, float(jnp.abs(y).max()))
    np.testing.assert_allclose(out, y, rtol=1e-2, atol=2e-3 * size)
    assert jax.tree.structure(plain_state) == jax.tree.structure(new)
    for path, value in by_path(plain_state).items():
        if path.endswith(("['mean']", "['var']")):
            assert by_path(new)[path].dtype == jnp.float32
            np.testing.assert_allclose(by_path(new)[path], value, atol=1e-4)

    def loss(params):
        return jnp.sum(predict(params, state, x)[0] ** 2)

    found = products(loss, params)
    assert found.count(HALF) == half
    assert found.count(FULL) == full == len(found) - half
    grads = jax.jit(jax.grad(loss))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    backward = products(jax.grad(loss), params)
    assert backward.count(HALF) >= 3 * half - 1
    assert backward.count(FULL) == 3 * full == len(backward) - backward.count(HALF)


OVERRIDDEN = [
    (
        (linen_models, Compact, WIDE),
        {
            "jitted/Dense": "p=bf16,c=f16",
            "^Dense_1$": "full",
            Own: "c=bf16",
            Block: jamp.get_policy("full"),
        },
        [HALF, FULL, FULL, HALF, HALF, OTHER, FULL],  # the fourth is the jitted one
        {"jitted.*Dense": "bfloat16", "Norm|Own|Block|Dense_1": "float32"},
    ),
    (
        (nnx_models, Model, TOKENS),
        {
            "^head$": "full",
            "blocks/1": "p=bf16,c=bf16,o=f16",
            "stack": "p=bf16,c=f16",
            nnx_models.package.MultiHeadAttention: "c=bf16,o=f16",
        },
        [HALF, OTHER, HALF, *[OTHER] * 6, HALF, HALF, FULL, HALF],
        {"norm|head|attention": "float32", "1.*linear|stack": "bfloat16"},
    ),
]


@pytest.mark.parametrize("case, overrides, expected, stored", OVERRIDDEN)
def test_overrides_reach_into_transformations(case, overrides, expected, stored):
    flax, make, x = case
    jaxpr, params = traced(flax, flax.with_policy(make(), "half", overrides), x)
    assert products_of(jaxpr) == expected
    assert {aval.dtype.name for aval in jaxpr.out_avals} == HALF
    for path, leaf in by_path(params).items():
        found = (d for pattern, d in stored.items() if re.search(pattern, path))
        assert leaf.dtype == next(found, "float16"), path
