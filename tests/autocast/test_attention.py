"""`jax.nn.dot_product_attention` has float32 logits, wherever JAX traced it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import cover

from . import ways

OTHERS = ("jit inside", "jit twice", "checkpoint", "vmap inside", "scan", "live")
rng = np.random.default_rng(0)
x = 40 * rng.normal(size=(2, 8, 16)).astype(np.float32)
w = rng.normal(size=(16, 4 * 16)).astype(np.float32)
bias = rng.normal(size=(2, 4, 8, 8)).astype(np.float32)
mask = np.arange(8) != 3


def attention(heads, **options):
    def function(x, w, bias):
        q = (x @ w).reshape(2, 8, 4, 16)
        k = q[:, :, :heads]
        return jax.nn.dot_product_attention(q, k, k, bias, **options)

    return function


ATTENTIONS = {
    "plain": attention(4),
    "causal": attention(4, is_causal=True),
    "grouped": attention(2),
    "masked": attention(4, mask=np.broadcast_to(mask, (2, 4, 8, 8))),
    "lengths": attention(4, key_value_seq_lengths=np.int32([3, 8])),
}


def all_of_them(*args):
    return jnp.stack([f(*args) for f in ATTENTIONS.values()])


@functools.cache
def expected_of(dtype):
    with jax.numpy_dtype_promotion("standard"):
        return ways.WAYS["jit around"](jamp.autocast(dtype), all_of_them)(x, w, bias)


@cover(quick=2)
@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_are_float32_in_every_function(dtype, way, standard_promotion):
    """Products of queries and keys above 65504 are scaled before they are rounded."""
    expected = expected_of(dtype)
    args = map(jnp.asarray, (x, w, bias))  # the product is JAX's
    found = ways.WAYS[way](jamp.autocast(dtype), all_of_them)(*args)
    assert found.dtype == expected.dtype == dtype
    q = (x @ w).reshape(2, 8, 4, 16)
    assert np.einsum("btnh,bsnh->bnts", q, q).max() > 2 * 65504
    np.testing.assert_allclose(
        np.float32(found), np.float32(expected), 1e-2, 1e-2, err_msg=list(ATTENTIONS)
    )


@cover(quick=2)
@pytest.mark.parametrize("way", [*OTHERS, "jit around"])
def test_its_gradient_is_finite(way, standard_promotion):
    function = ways.WAYS[way](jamp.autocast(jnp.float16), attention(4))
    loss = lambda w: jnp.sum(function(x, w, bias).astype(jnp.float32))
    grad = jax.jit(jax.grad(loss))(w)
    assert grad.dtype == jnp.float32 and np.isfinite(grad).all()


@cover(quick=2)
@pytest.mark.parametrize("way", [*OTHERS, "jit around", "vmap around"])
def test_the_log_sum_exp_of_attention_is_float32(way, standard_promotion):
    """By it ring attention merges blocks; torch's flash attention gives float32."""
    x = 4 * np.random.default_rng(0).normal(size=(2, 5, 2, 8)).astype(np.float32)

    def with_residual(x):
        q = x @ jnp.eye(8)
        return jax.nn.dot_product_attention(q, q, q, return_residual=True)

    rounded = x.astype(np.float16).astype(np.float32)
    expected = jax.jit(with_residual)(rounded)
    out, residual = ways.WAYS[way](jamp.autocast(jnp.float16), with_residual)(x)
    assert (out.dtype, residual.dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_allclose(residual, expected[1], 1e-5)
