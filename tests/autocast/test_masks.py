"""A mask that is added to a product: finite numbers stay finite, -inf stays -inf."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

from . import ways

N, SIZE = 16, 32  # of rows, and of what is contracted: enough for float8
MASKED = jnp.arange(16) % 3 == 1
NUMBERS = {
    "-1e9": -1e9,
    "least float32": float(jnp.finfo(jnp.float32).min),
    "least bfloat16": float(jnp.finfo(jnp.bfloat16).min),
    "least float16": -65504.0,
    "-inf": -np.inf,
}
REGIONS = {
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float8": "float8",
}
# Logits that no bias can push out of float16's range, as wide as they may be.
LOGITS = (1.0, -40.0, 3e4, -3e4)


def dense(x, w):
    return nn.Dense(16, use_bias=False).apply({"params": {"kernel": w}}, x)


def channels(x, w):
    conv = nn.Conv(16, (1,), use_bias=False)
    return conv.apply({"params": {"kernel": w[None]}}, x[:, None])[:, 0]


PRODUCTS = {
    "matmul": lambda x, w, mask: x @ w + mask,
    "mask on the left": lambda x, w, mask: mask + x @ w,
    "row": lambda x, w, mask: x @ w + mask[None],
    "mask by rows": lambda x, w, mask: (w.T @ x.T + mask[:, None]).T,
    "einsum": lambda x, w, mask: jnp.einsum("ij,jk->ik", x, w) + mask,
    "dense": lambda x, w, mask: dense(x, w) + mask,
    "convolution": lambda x, w, mask: channels(x, w) + mask,
    "each row": lambda x, w, mask: jax.vmap(lambda row: row @ w + mask)(x),
    "temperature": lambda x, w, mask: (x @ w + mask) / 0.5,
}
PLACES = ways.WAYS | {
    "vmap around": lambda region, f: over_rows(region(f)),
    "vmap inside": lambda region, f: region(over_rows(f)),
}
del PLACES["jit twice"]


def over_rows(f):
    def halves(x, w, mask):
        outs = jax.vmap(f, (0, None, None))(x.reshape(2, N // 2, SIZE), w, mask)
        return jax.tree.map(lambda out: out.reshape(N, *out.shape[2:]), outs)

    return halves


def entropy(logits):
    """The entropy of each row, as reinforcement learning adds it to its loss."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def inputs(logit, mask):
    """A row has logits near `logit`, and a few of them are masked."""
    spread = jax.random.normal(jax.random.key(0), (N, 16)) / 4
    x = jnp.eye(N, SIZE)
    w = jnp.zeros((SIZE, 16)).at[:N].set(logit + spread)
    return x, w, jnp.where(MASKED, mask, 0.0)


def logits_and_gradients(function, *args):
    """Logits and their entropies, and the gradients of the entropies."""

    def loss(*args):
        logits, entropies = function(*args)
        return jnp.sum(entropies), (logits, entropies)

    (_, outs), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
    return *outs, grads


def with_entropy(product):
    def function(*args):
        logits = product(*args)
        return logits, entropy(logits)

    return function


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("place", PLACES)
def test_a_finite_mask_stays_finite(place, region, standard_promotion):
    """Through an entropy and its gradient: a nan there is -inf times a probability."""
    half = jamp.autocast(REGIONS[region])
    way = PLACES[place]
    functions = {name: way(half, with_entropy(f)) for name, f in PRODUCTS.items()}

    @jax.jit
    def all_of_them(*args):
        return {n: logits_and_gradients(f, *args) for n, f in functions.items()}

    for logit, number in itertools.product(LOGITS, NUMBERS):
        found = all_of_them(*inputs(logit, NUMBERS[number]))
        for name, (logits, entropies, grads) in found.items():
            row = f"{name}, logits of {logit}, {number}"
            logits = np.asarray(logits, np.float64)
            if number == "-inf":
                assert (logits[:, MASKED] == -np.inf).all(), row
            elif name != "temperature" or abs(logit) < 100:
                expected = entropy(logits[:, ~MASKED])
                np.testing.assert_allclose(entropies, expected, 1e-3, 1e-5, err_msg=row)
                assert all(np.isfinite(grad).all() for grad in grads), row


def test_a_bias_that_fits_is_not_a_mask(standard_promotion):
    """Numbers down to -7/8 of the range are kept, and positive ones that fit."""
    bias = jnp.array([57000.0, -57000.0, 60000.0, -58000.0, 65504.0, 70000.0])
    expected = [56992.0, -56992.0, 60000.0, -16376.0, 65504.0, 16376.0]
    with jamp.autocast(jnp.float16):
        found = jnp.zeros((2, 4)) @ jnp.zeros((4, 6)) + bias
        number = jnp.zeros((2, 4)) @ jnp.zeros((4, 6)) + jnp.float32(60000.0)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(number, np.full((2, 6), 60000.0))
