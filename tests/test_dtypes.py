"""Names of dtypes: one list, wherever a public function takes a dtype or its name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp._checks import DTYPE_NAMES, FLOAT8_NAMES

from .marks import cover

X = np.ones((4, 4), np.float32)
HEADS = np.ones((2, 8, 4, 16), np.float32)


def program(function):
    """What a function of a dtype's name computes."""
    return lambda name: str(jax.make_jaxpr(lambda x: function(name, x))(X))


def on_an_axis(function):
    """The same of a function that needs an axis of a mesh."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("data")

    def compute(name, x):
        local = lambda x: function(name, x)
        return jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)(x)

    return program(compute)


# What each makes of a dtype or of its name, to be compared.
PLACES = {
    "autocast": lambda d: jamp.autocast(d, enabled=False).settings,
    "autocast, a region": program(lambda d, x: jamp.autocast(d)(jnp.matmul)(x, x)),
    "rules": lambda d: jamp.autocast(rules={"a": d}).settings,
    "cast_inputs": lambda d: jamp.autocast(cast_inputs=d).cast_inputs,
    "explain": lambda d: jamp.debug.explain(jnp.matmul, d)(X, X).to_dict(),
    "Policy": lambda d: jamp.Policy(d, d, d),
    "get_policy": lambda d: jamp.get_policy(jnp.dtype(d).name if is_type(d) else d),
    "with_output_dtype": lambda d: jamp.get_policy("f32").with_output_dtype(d),
    "linen.with_policy": lambda d: repr(
        jamp.linen.with_policy(nn.Dense(3), jamp.Policy("f32", d, d))
    ),
    "gather, param_dtype": on_an_axis(
        lambda d, x: jamp.sharding.gather(x, "data", jax.P("data"), param_dtype=d)
    ),
    "gather, reduce_dtype": on_an_axis(
        lambda d, x: jax.grad(
            lambda x: jnp.sum(
                jamp.sharding.gather(x, "data", jax.P("data"), reduce_dtype=d)
            )
        )(x)
    ),
    "mean": on_an_axis(lambda d, x: jamp.sharding.mean(x, "data", dtype=d)),
    "linen.dot_product_attention": program(
        lambda d, x: jamp.linen.dot_product_attention(HEADS, HEADS, HEADS, dtype=d)
    ),
    "nnx.dot_product_attention": program(
        lambda d, x: jamp.nnx.dot_product_attention(HEADS, HEADS, HEADS, dtype=d)
    ),
    "calibrate": lambda d: str(
        jamp.calibrate(lambda x: jnp.sum(x @ x), dtype=d)(np.eye(16, dtype=np.float32))
    ),
}
# Those that take only half precision, and those that take no float64.
HALF_ALONE = {"autocast, a region", "explain", "calibrate"}
TO_FLOAT32 = {"autocast", "rules", "cast_inputs"}
TAKES_FLOAT8 = ("autocast, a region", "rules", "explain", "calibrate")
NAMES = [(name, dtype) for dtype, names in DTYPE_NAMES.items() for name in names]


def is_type(value):
    return not isinstance(value, str)


@cover(quick=len(PLACES) - 1)  # but `calibrate`, which runs a program for each name
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("standard_promotion")
def test_a_name_is_that_dtype_everywhere(place):
    make, failed = PLACES[place], {}
    for name, dtype in [*NAMES, ("half", "float16")]:
        wide = dtype in ("float32", "float64")
        if dtype == "float64" and (place in TO_FLOAT32 or "program" in repr(make)):
            continue
        if wide and place in HALF_ALONE:
            continue
        expected = make(jnp.dtype(dtype).type)
        try:
            found = make(name)
        except (TypeError, ValueError) as error:
            found = error
        if found != expected:
            failed[name] = found
    assert not failed


@cover(quick=len(TAKES_FLOAT8) - 1)
@pytest.mark.parametrize("place", TAKES_FLOAT8)
@pytest.mark.usefixtures("standard_promotion")
def test_a_name_of_float8_is_the_recipe_everywhere(place):
    make = PLACES[place]
    for name in FLOAT8_NAMES:
        assert make(name) == make(jamp.Float8())


@pytest.mark.parametrize("place", PLACES)
def test_another_name_is_refused_with_a_similar_one(place):
    for name in ("flaot16", "torch.float16", "B16", "float", "f2", "e"):
        message = "dtype" if len(name) < 3 else "dtype.*Did you mean"
        with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
            PLACES[place](name)
