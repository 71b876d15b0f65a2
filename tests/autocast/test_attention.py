"""`jax.nn.dot_product_attention` has float32 logits, wherever JAX traced it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

from . import ways

WAYS = {n: w for n, w in ways.WAYS.items() if n not in ("live", "vmap around")}
x = 40 * jax.random.normal(jax.random.key(0), (2, 8, 16))
w = jax.random.normal(jax.random.key(1), (16, 4 * 16))
bias = jax.random.normal(jax.random.key(2), (2, 4, 8, 8))


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
    "masked": attention(4, mask=jnp.ones((2, 4, 8, 8), bool).at[..., 3].set(False)),
    "lengths": attention(4, key_value_seq_lengths=jnp.array([3, 8])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_are_float32_in_every_function(dtype, way, standard_promotion):
    """Products of queries and keys above 65504 are scaled before they are rounded."""

    def all_of_them(*args):
        return jnp.stack([f(*args) for f in ATTENTIONS.values()])

    half = jamp.autocast(dtype)
    expected = half(all_of_them)(x, w, bias)
    found = WAYS[way](half, all_of_them)(x, w, bias)
    assert found.dtype == expected.dtype == dtype
    q = (x @ w).reshape(2, 8, 4, 16)
    assert jnp.einsum("btnh,bsnh->bnts", q, q).max() > 2 * 65504
    np.testing.assert_allclose(
        np.float32(found), np.float32(expected), 1e-2, 1e-2, err_msg=list(ATTENTIONS)
    )


@pytest.mark.parametrize("way", WAYS)
def test_its_gradient_is_finite(way, standard_promotion):
    function = WAYS[way](jamp.autocast(jnp.float16), attention(4))
    loss = lambda w: jnp.sum(function(x, w, bias).astype(jnp.float32))
    grad = jax.grad(loss)(w)
    assert grad.dtype == jnp.float32 and np.isfinite(grad).all()


@pytest.mark.parametrize("way", ways.WAYS)
def test_the_log_sum_exp_of_attention_is_float32(way, standard_promotion):
    """By it ring attention merges blocks; torch's flash attention gives float32."""
    x = 4 * jax.random.normal(jax.random.key(0), (2, 5, 2, 8))

    def with_residual(x):
        q = x @ jnp.eye(8)
        return jax.nn.dot_product_attention(q, q, q, return_residual=True)

    rounded = x.astype(jnp.float16).astype(jnp.float32)
    expected = with_residual(rounded)
    out, residual = ways.WAYS[way](jamp.autocast(jnp.float16), with_residual)(x)
    assert (out.dtype, residual.dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_allclose(residual, expected[1], 1e-5)
