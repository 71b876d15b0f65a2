"""Draws in a region are those of float32, whatever the dtype of the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

import jamp
from jamp._autocast import sampling
from tests.marks import slow

HALVES = [jnp.float16, slow(jnp.bfloat16)]
N_TOKENS, N_DRAWS, N_FLIPS = 1000, 512, 4096


def eager(sample, dtype):
    def run(key, value):
        with jamp.autocast(dtype):
            return sample(key, value)

    return run


def jit_around(sample, dtype):
    return jax.jit(eager(sample, dtype))


def jit_inside(sample, dtype):
    return eager(jax.jit(sample), dtype)


def scanned(sample, dtype):
    def run(keys, value):
        with jamp.autocast(dtype):
            body = lambda carry, key: (carry, sample(key, value))
            return lax.scan(body, 0, keys)[1]

    return run


def draws(sample, way, dtype, value, n=20):
    """What is drawn with `n` keys, stacked."""
    keys, run = random.split(random.key(3), n), way(sample, dtype)
    if way is scanned:
        return run(keys, value)
    return np.stack([run(key, value) for key in keys])


def expected_draws(sample, value, n=20):
    run = jax.jit(lambda key: sample(key, value.astype(jnp.float32)))
    return np.stack([run(key) for key in random.split(random.key(3), n)])


WAYS = [eager, slow(jit_around), jit_inside, slow(scanned)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
def test_categorical_draws_what_float32_draws(dtype, way, standard_promotion):
    logits = (3 * random.normal(random.key(1), (5, 300))).astype(dtype)
    sample = lambda key, x: random.categorical(key, x, shape=(64, 5))
    drawn = draws(sample, way, dtype, logits)
    np.testing.assert_array_equal(drawn, expected_draws(sample, logits))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
def test_frequencies_are_those_of_float32(dtype, way, standard_promotion):
    # Equal logits: in half precision the lowest tokens would come most often.
    logits = jnp.zeros(N_TOKENS, dtype)
    p = jnp.asarray(3.35e-4, dtype)
    tokens = lambda key, x: random.categorical(key, x, shape=(N_DRAWS,))
    drawn = draws(tokens, way, dtype, logits)
    for part in (drawn < 100, drawn >= 900):
        assert abs(part.mean() - 0.1) <= 5 * np.sqrt(0.1 * 0.9 / drawn.size)
    true = draws(lambda key, p: random.bernoulli(key, p, (N_FLIPS,)), way, dtype, p)
    chance = float(p)
    assert abs(true.mean() - chance) <= 5 * np.sqrt(chance * (1 - chance) / true.size)


def softened(x):
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


SAMPLERS = {
    "without_replacement": lambda k, x: random.categorical(
        k, x, shape=(3,), replace=False
    ),
    "twice_as_many_bits": lambda k, x: random.categorical(
        k, x, shape=(99,), mode="high"
    ),
    "batched": lambda k, x: jax.vmap(random.categorical)(
        random.split(k, 3), jnp.stack([x, x, x])
    ),
    "batched_bernoulli": lambda k, x: jax.vmap(random.bernoulli)(
        random.split(k, 3), jnp.stack([softened(x), softened(x), softened(x)])
    ),
    "bernoulli_of_one_key": lambda k, x: jax.vmap(random.bernoulli, (None, 0))(
        k, jnp.stack([softened(x), softened(x)])
    ),
    "bernoulli": lambda k, x: random.bernoulli(k, softened(x)),
    "bernoulli_of_more_bits": lambda k, x: random.bernoulli(
        k, softened(x), mode="high"
    ),
    "choice": lambda k, x: random.choice(k, 8, (99,), p=softened(x)),
    "choice_without_replacement": lambda k, x: random.choice(
        k, 8, (3,), replace=False, p=softened(x)
    ),
    "geometric": lambda k, x: random.geometric(k, softened(x)),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_what_float32_draws(name, way, standard_promotion):
    # `softened` leaves the region in its dtype, so that both sides have the same input.
    sample = SAMPLERS[name]
    x = random.normal(random.key(2), (8,)).astype(jnp.float16)
    outside = jamp.autocast(enabled=False)(softened)
    given = outside(x) if "softened" in sample.__code__.co_names else x
    names = {"softened": lambda x: x} if given is not x else {}
    bare = type(sample)(sample.__code__, globals() | names)
    drawn = draws(bare, way, jnp.float16, given, 2)
    np.testing.assert_array_equal(drawn, expected_draws(bare, given, 2), strict=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_normal_vector_is_drawn_in_float32(way, standard_promotion):
    def sample(key, mean):
        return random.multivariate_normal(key, mean, jnp.eye(4, dtype=mean.dtype))

    mean = jnp.arange(4, dtype=jnp.float16)
    try:
        drawn = draws(sample, way, jnp.float16, mean, 2)
    except TypeError as error:  # JAX 0.12 takes no half precision
        assert "float16" in str(error)
    else:
        np.testing.assert_array_equal(drawn, expected_draws(sample, mean, 2))


OWN_NOISE = [random.uniform, random.normal, random.gumbel, random.exponential]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("draw", OWN_NOISE, ids=lambda draw: draw.__name__)
def test_noise_of_an_own_dtype_stays_what_it_is(draw, way):
    key = random.key(4)
    # The same noise has been part of a draw in float32 before.
    eager(random.categorical, jnp.float16)(key, jnp.zeros(16, jnp.float16))
    sample = lambda key, _: draw(key, (16,), jnp.float16)
    drawn = draws(sample, way, jnp.float16, jnp.zeros(()), 2)
    expected = expected_draws(sample, jnp.zeros(()), 2)
    assert drawn.dtype == jnp.float16
    # Compiled in a scan, XLA rounds the logarithms of `gumbel` once less.
    rtol = 0 if draw is random.uniform else 2e-3
    np.testing.assert_allclose(drawn, expected, rtol)


def test_an_inner_region_that_is_off_draws_as_jax_does():
    key, logits = random.key(5), jnp.zeros(256, jnp.bfloat16)
    sample = jamp.autocast(enabled=False)(random.categorical)
    with jamp.autocast(jnp.bfloat16):
        drawn = sample(key, logits)
    assert drawn == random.categorical(key, logits)


def test_logits_of_a_model_in_a_gradient(standard_promotion):
    # The draw is a number that the loss uses: the region is inside, and outside.
    key, x = random.key(6), jnp.ones((4, 8))
    w = random.normal(random.key(7), (8, 256))

    def loss_fn(w):
        logits = x @ w
        token = random.categorical(key, logits)
        log_p = jax.nn.log_softmax(logits)
        return jnp.mean(jnp.take_along_axis(log_p, token[:, None], 1)), token

    inside = jamp.autocast(jnp.bfloat16)(loss_fn)
    with jamp.autocast(jnp.bfloat16):
        logits = x @ w
    expected = random.categorical(key, logits.astype(jnp.float32))
    (_, token), grad = jax.value_and_grad(inside, has_aux=True)(w)
    np.testing.assert_array_equal(token, expected)
    assert grad.dtype == jnp.float32
    with jamp.autocast(jnp.bfloat16):
        _, grad = jax.value_and_grad(loss_fn, has_aux=True)(w)
    assert grad.dtype == jnp.float32


def test_a_draw_from_half_precision_in_a_gradient(standard_promotion):
    key, w = random.key(8), jnp.eye(4)

    def loss_fn(w):
        mean = (jnp.ones((1, 4)) @ w)[0].astype(jnp.float16)
        drawn = random.multivariate_normal(key, mean, jnp.eye(4, dtype=mean.dtype))
        return jnp.sum(drawn), drawn

    try:
        jax.eval_shape(loss_fn, w)
    except TypeError:
        pytest.skip("this version of JAX does not draw from half precision")
    expected = random.multivariate_normal(key, jnp.ones(4), jnp.eye(4))
    gradient = jax.grad(loss_fn, has_aux=True)
    for run in (gradient, jax.jit(gradient)):
        with jamp.autocast(jnp.float16):
            _, drawn = run(w)
        assert drawn.dtype == jnp.float32
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_draws_of_an_unknown_version_of_jax_are_refused(dtype, monkeypatch):
    """What JAX's function is called, and how it draws, is for it to change."""
    monkeypatch.setattr(sampling, "DRAWN", {})
    sample = eager(random.categorical, dtype)
    with pytest.raises(NotImplementedError, match="categorical would draw in half"):
        sample(random.key(9), jnp.zeros(8, dtype))
    assert sample(random.key(9), jnp.zeros(8)) < 8


def test_explain_says_that_the_draw_is_in_float32():
    logits = jnp.zeros(16, jnp.float16)
    explained = jamp.debug.explain(random.categorical, jnp.float16)
    rows = explained(random.key(0), logits).rows
    assert {row.rule for row in rows} >= {"draw"}
