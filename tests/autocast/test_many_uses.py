"""A weight that is used many times: in which dtype its gradient is summed."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

# The gradient is the sum of the factors. In bfloat16 it stops at 256.
USES = {"two uses": [256, 1], "300 uses": [1] * 300}
X, W, B = (np.float32(x) for x in (np.ones((1, 4)), np.eye(4), np.zeros(4)))


def layer(x, w, b):
    return jnp.sum((x @ w + b).astype(jnp.float32))


def unrolled(factors):
    return lambda *args: sum(layer(*args) * n for n in factors)


def called(factors):
    jitted = jax.jit(layer)
    return lambda *args: sum(jitted(*args) * n for n in factors)


MODELS = {"called": called, "unrolled": unrolled}
WAYS = {
    "grad of jit": lambda f: jax.grad(jax.jit(f), (1, 2)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (1, 2))),
    "grad": lambda f: jax.grad(f, (1, 2)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (1, 2)),
}


@cover()
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_without_the_cache_a_gradient_is_summed_in_float32(name, way, uses):
    model = MODELS[name](USES[uses])
    loss = jamp.autocast(jnp.bfloat16, cache_enabled=False)(model)
    for found, of in zip(WAYS[way](loss)(X, W, B), (W, B), strict=True):
        assert (found.dtype, found.shape) == (jnp.float32, of.shape)
        np.testing.assert_array_equal(found, sum(USES[uses]))


@cover()
@pytest.mark.parametrize("uses", USES)
def test_with_the_cache_it_is_summed_as_in_torch(uses):
    grad = jax.grad(jamp.autocast(jnp.bfloat16)(unrolled(USES[uses])), 1)(X, W, B)
    np.testing.assert_array_equal(grad, 256)


@cover()
@pytest.mark.parametrize("uses", USES)
def test_the_program_casts_once_either_way(uses):
    """XLA finds that the casts are equal."""

    def casts(**wishes):
        run = jax.jit(jamp.autocast(jnp.bfloat16, **wishes)(unrolled(USES[uses])))
        text = run.lower(X, W, B).compile().as_text()
        return text.count("bf16[4,4]{1,0} convert(")

    assert casts(cache_enabled=False) == casts()


def test_each_op_casts_its_inputs():

    def run(x, w):
        h = jax.nn.softmax(x @ w)  # float32
        return h @ w, h @ w

    for enabled, count in (True, 3), (False, 6):
        region = jamp.autocast(jnp.bfloat16, cache_enabled=enabled)
        text = str(jax.make_jaxpr(region(run))(X, W))
        narrowed = text.count("new_dtype=bfloat16")
        assert narrowed == count, text


def test_the_choice_is_kept_by_a_pickle_and_in_caches():
    region = jamp.autocast(jnp.bfloat16, cache_enabled=False)
    loaded = pickle.loads(pickle.dumps(region))
    assert loaded.settings == region.settings != jamp.autocast(jnp.bfloat16).settings
    layer = jax.jit(lambda x, w: jnp.sum((x @ w + x @ w).astype(jnp.float32)))
    run = lambda region: str(jax.make_jaxpr(jax.grad(region(layer)))(X, W))
    first, second = jamp.autocast(jnp.bfloat16), loaded
    assert run(first) != run(second)
    assert run(first) == run(jamp.autocast(jnp.bfloat16))
