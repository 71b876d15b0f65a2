"""A mask that is added to a product: finite numbers stay finite, -inf stays -inf."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import cover

from . import ways

N, SIZE = 16, 32  # of rows, and of what is contracted: enough for float8
MASKED = np.arange(16) % 3 == 1
NUMBERS = {
    "-1e5": -1e5,
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
    "mask by rows": lambda x, w, mask: jnp.einsum("ij,jk->ki", x, w).T + mask,
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
    w = np.zeros((SIZE, 16), np.float32)
    w[:N] = logit + np.random.default_rng(0).normal(size=(N, 16)) / 4
    return (
        np.eye(N, SIZE, dtype=np.float32),
        w,
        np.where(MASKED, mask, 0).astype(np.float32),
    )


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


@cover(quick=7, ci=80)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_finite_mask_stays_finite(name, place, region, standard_promotion):
    """Through an entropy and its gradient: a nan there is -inf times a probability."""
    half = jamp.autocast(REGIONS[region])
    function = PLACES[place](half, with_entropy(PRODUCTS[name]))
    run = jax.jit(functools.partial(logits_and_gradients, function))
    for logit, number in itertools.product(LOGITS, NUMBERS):
        row = f"logits of {logit}, {number}"
        logits, entropies, grads = run(*inputs(logit, NUMBERS[number]))
        logits = np.asarray(logits, np.float32)
        if number == "-inf":
            assert (logits[:, MASKED] == -np.inf).all(), row
        elif name != "temperature" or abs(logit) < 100:
            expected = jax.jit(entropy)(logits[:, ~MASKED])
            np.testing.assert_allclose(entropies, expected, 1e-3, 1e-5, err_msg=row)
            assert all(np.isfinite(grad).all() for grad in grads), row


SIZES = (1.0, 5e4, 6e4, 7e4, 1e9, float(jnp.finfo(jnp.float32).max), np.inf)
VALUES = [sign * size for size in SIZES for sign in (1, -1)]
rows, cube, kernel, kernels, image, window = (
    np.full(shape, 0.5, np.float32)
    for shape in (
        *((2, 4), (3, 2, 4), (4, 6), (3, 4, 6)),
        *((1, 2, 2, 4), (1, 1, 4, 6)),
    )
)


def convolved(x, window):
    return jax.lax.conv_general_dilated(
        x, window, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# Sums of a product of ones and a number, by the shape that the number has.
SUMS = {
    "vector": lambda b: jnp.matmul(rows, kernel) + b,
    "vector on the left": lambda b: b + jnp.matmul(rows, kernel),
    "row": lambda b: jnp.matmul(rows, kernel) + b[None],
    "each row": lambda b: jax.vmap(lambda row: row @ kernel + b)(rows),
    "scan": lambda b: jax.lax.scan(lambda c, x: (c, x @ kernel + b), 0, cube)[1],
    "batched": lambda b: jnp.matmul(cube, kernel) + b,
    "each kernel": lambda b: jnp.einsum("bij,bjk->bik", cube, kernels) + b,
    "column": lambda b: (jnp.einsum("ij,jk->ki", rows, kernel) + b[:, None]).T,
    "convolution": lambda b: convolved(image, window) + b,
    "channel": lambda b: jnp.moveaxis(
        jnp.moveaxis(convolved(image, window), -1, 1) + b[:, None, None], 1, -1
    ),
    "scalar": lambda b: jnp.matmul(rows, kernel) + b,
    "scalar, batched": lambda b: jnp.matmul(cube, kernel) + b,
    "scalar, convolution": lambda b: convolved(image, window) + b,
}


def with_bias(numbers, dtype):
    """The results of a layer whose products are ones: the bias is cast, as in torch."""
    with np.errstate(over="ignore"):
        biases = np.asarray(numbers, np.float32).astype(dtype).astype(np.float32)
        return (1 + biases).astype(dtype).astype(np.float64)


@cover(quick=7, ci=50)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("way", ("jit inside", "live", "jit around"))
@pytest.mark.parametrize("sum_", SUMS)
def test_a_number_beyond_the_range_is_a_mask_or_overflows_as_in_torch(
    sum_, way, dtype, standard_promotion
):
    """A positive number is no mask, nor is a scalar: they become inf."""
    largest = float(jnp.finfo(dtype).max)
    is_scalar = sum_.startswith("scalar")
    if is_scalar:
        calls = [jnp.float32(number) for number in VALUES]
    else:
        calls = [jnp.asarray(np.full(6, number, np.float32)) for number in VALUES]
    expected = with_bias(VALUES, jnp.dtype(dtype))
    for i, number in enumerate(VALUES):
        if -np.inf < number <= -largest and not is_scalar:
            expected[i] = np.asarray(1 - largest / 4).astype(dtype)
    function = ways.WAYS[way](jamp.autocast(dtype), SUMS[sum_])
    for call, value in zip(calls, expected, strict=True):
        y = function(call)
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y).astype(float), value)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_torch_overflows_likewise(dtype):
    torch = pytest.importorskip("torch")
    layer, x = torch.nn.functional.linear, torch.full((2, 4), 0.5)
    with torch.autocast("cpu", getattr(torch, dtype)):
        y = layer(x, torch.full((len(VALUES), 4), 0.5), torch.tensor(VALUES))
    expected = with_bias(VALUES, jnp.dtype(dtype))
    np.testing.assert_array_equal(y[0].to(torch.float64).numpy(), expected)


def test_a_mask_is_what_is_at_most_the_least_number(standard_promotion):
    """Whatever number people write for it. -65500 fits, and rounds to the least."""
    mask = np.array(
        [-65504.0, -65505.0, -7e4, -123456.0, -1e8, -3e38, -6e4, -65500.0, 7e4], "f"
    )
    expected = [-16376.0] * 6 + [-6e4, -65504.0, np.inf]
    with jamp.autocast(jnp.float16):
        y = jnp.matmul(np.zeros((2, 4), "f"), np.zeros((4, 9), "f")) + mask
    np.testing.assert_array_equal(y[0], expected)


@pytest.mark.parametrize("temperature, is_finite", [(0.3, True), (0.2, False)])
def test_a_row_of_masks_is_finite_above_a_temperature_of_a_quarter(
    temperature, is_finite, standard_promotion
):
    scores = lambda x, w, mask: (x @ w + mask) / temperature
    args = np.eye(4, dtype="f"), np.ones((4, 4), "f"), np.full(4, -1e9, "f")
    with jamp.autocast(jnp.float16):
        found = jax.jit(scores)(*args)
        assert found.dtype == jnp.float16
        assert np.isfinite(found).all() == is_finite


def test_a_mask_is_compared_and_not_the_scores(standard_promotion):
    """In float16 no score is as low as the mask was."""

    def masked(x, w, mask):
        return x @ w + mask > -1e8, mask > -1e8

    args = np.eye(4, dtype="f"), np.ones((4, 4), "f"), np.full(4, -1e9, "f")
    scores, mask = jax.jit(jamp.autocast(jnp.float16)(masked))(*args)
    assert scores.all() and not mask.any()


@cover(ci=4)
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("number", ("-1e9", "least float32"))
def test_a_row_that_a_layer_masks_as_a_whole_is_no_nan(
    number, batch, standard_promotion
):
    """Linen adds the mask itself, which has as many dimensions as the scores."""
    q, k = (np.ones((batch, n, 2, 4), np.float32) for n in (2, 3))
    mask = np.full((batch, 1, 1, 3), NUMBERS[number], np.float32)
    half = jamp.autocast(jnp.float16)
    y = jax.jit(half(nn.dot_product_attention))(q, k, k, bias=mask)
    np.testing.assert_allclose(np.asarray(y, np.float32), 1, 1e-3)
