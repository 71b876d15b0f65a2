"""What models of other projects do that broke, in small."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")


def in_a_region(function, *args):
    with jamp.autocast(jnp.float16):
        return function(*args)


def in_a_jitted_region(function, *args):
    return jax.jit(lambda *args: in_a_region(function, *args))(*args)


def jitted_in_a_region(function, *args):
    return in_a_region(jax.jit(function), *args)


def in_a_policy(function, *args):
    return jamp.Policy("f32", "f16", "f16").wrap(function)(*args)


def in_a_jitted_policy(function, *args):
    return jax.jit(lambda *args: in_a_policy(function, *args))(*args)


PLACES = (
    in_a_region,
    in_a_jitted_region,
    jitted_in_a_region,
    in_a_policy,
    in_a_jitted_policy,
)


@pytest.mark.parametrize("place", PLACES)
def test_weak_types_stay_weak(place):
    """The rate of Equinox's Dropout: a scalar that does not widen what it meets."""
    seen = []

    def keep(x):
        rate = 1 - lax.stop_gradient(0.1)
        number = jnp.asarray(0.5) + 1
        seen.extend(jax.typeof(y).weak_type for y in (rate, number, 2 * number))
        return x / rate

    x = jnp.ones(3, jnp.float16)
    out = place(keep, x)
    assert out.dtype == jnp.float16
    assert seen == [True] * 3
    np.testing.assert_array_equal(out, x / jnp.float16(0.9))


def of_haiku(use):
    """A function of Haiku's LayerNorm under a policy, which reads float32."""
    layer = hk.transform(lambda x: use(hk.LayerNorm(-1, True, True)(x)))
    x = jnp.arange(16.0).reshape(4, 4)
    params = jax.jit(layer.init)(None, x)
    run = lambda params, x: layer.apply(params, None, x)
    return run(params, x), in_a_policy(run, params, x)


def of_batch_norm(use):
    """A function of a BatchNorm in a region, which reads float32."""
    norm = nn.BatchNorm(use_running_average=False)
    x = jnp.arange(16.0).reshape(4, 4)
    variables = jax.jit(norm.init)(jax.random.key(0), x)

    def run(x):
        return use(norm.apply(variables, x @ jnp.eye(4), mutable=["batch_stats"])[0])

    return run(x), in_a_region(run, x)


USES = {
    "select": lambda y: lax.select(y > 0, y, jnp.zeros_like(y)),
    "concatenate": lambda y: lax.concatenate([y, jnp.ones_like(y)], 0),
    "clamp": lambda y: lax.clamp(jnp.zeros_like(y), y, jnp.ones_like(y)),
    "add": lambda y: lax.add(y, jnp.ones_like(y)),
    "write": lambda y: lax.dynamic_update_slice(jnp.zeros((8, 4)), y, (2, 0)),
    "scatter": lambda y: y.at[0].set(1.0),
}


@cover(quick=4, ci=12)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("norm", [of_haiku, of_batch_norm])
def test_what_python_makes_like_a_norms_result_meets_it(norm, use):
    """Python sees float32 and makes more of it; the op gets half precision."""
    plain, out = norm(use)
    assert out.dtype in (jnp.float16, jnp.float32)
    np.testing.assert_allclose(out, plain, atol=2e-3)


MASK = -2.3819763e38  # a number that float16 does not have


@cover(quick=2)
@pytest.mark.parametrize("place", PLACES)
def test_a_row_that_is_masked_whole(place):
    """Padding under a sliding window; nan in the loss stops the training."""
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    x, mask = jnp.asarray(x), np.tril(np.ones((4, 4), bool))
    mask[2] = False

    def attention(x):
        logits = jnp.where(mask, x @ x.T, MASK)
        return jax.nn.softmax(logits, axis=-1) @ x

    out = place(attention, x)
    np.testing.assert_allclose(out, jax.jit(attention)(x), atol=2e-3)
    np.testing.assert_allclose(out[2], np.mean(x, axis=0), atol=2e-3)

    def loss(x):
        return jnp.sum(place(attention, x).astype(jnp.float32) ** 2)

    assert np.isfinite(jax.grad(loss)(x)).all()


def test_a_number_that_fits_does_not_widen():
    with jamp.autocast(jnp.float16):
        h = jnp.eye(2) @ jnp.eye(2)
        assert jnp.where(h > 0, h, -1e4).dtype == jnp.float16
        assert jnp.where(h > 0, h, -jnp.inf).dtype == jnp.float16
        assert jnp.where(h > 0, h, jnp.finfo(h.dtype).min).dtype == jnp.float16
    with jamp.autocast(jnp.bfloat16):
        h = jnp.eye(2) @ jnp.eye(2)
        assert jnp.where(h > 0, h, MASK).dtype == jnp.bfloat16
