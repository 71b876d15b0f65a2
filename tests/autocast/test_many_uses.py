"""A weight that is used many times: in which dtype its gradient is summed."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import mostly_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

USES = 300  # a sum of ones stops at 256 in bfloat16
X, W, B = jnp.ones((1, 4)), jnp.eye(4), jnp.zeros(4)


def unrolled(x, w, b):
    return sum(jnp.sum((x @ w + b).astype(jnp.float32)) for _ in range(USES))


def called(x, w, b):
    layer = jax.jit(lambda x, w, b: jnp.sum((x @ w + b).astype(jnp.float32)))
    return sum(layer(x, w, b) for _ in range(USES))


MODELS = {"unrolled": unrolled, "called": called}
WAYS = {
    "grad": lambda f: jax.grad(f, (1, 2)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (1, 2))),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (1, 2)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (1, 2)),
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "grad", "grad of jit"))
@pytest.mark.parametrize("name", MODELS)
def test_without_the_cache_a_gradient_is_summed_in_float32(name, way):
    loss = jamp.autocast(jnp.bfloat16, cache_enabled=False)(MODELS[name])
    expected = jax.jit(jax.grad(MODELS[name], (1, 2)))(X, W, B)
    for found, exact in zip(WAYS[way](loss)(X, W, B), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, exact)


def test_with_the_cache_it_is_summed_as_in_torch():
    grad = jax.grad(jamp.autocast(jnp.bfloat16)(unrolled), 1)(X, W, B)
    np.testing.assert_array_equal(grad, 256)


def test_the_program_casts_once_either_way():
    """XLA finds that the casts are equal."""

    def casts(**wishes):
        run = jax.jit(jamp.autocast(jnp.bfloat16, **wishes)(unrolled))
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
