"""Draws in a region are those of float32, also under `vmap` of keys and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

import jamp
from jamp._autocast import sampling
from tests.bits import check_rounded, check_same_bits
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")
HALVES = [jnp.float16, jnp.bfloat16]
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


WAYS = [jit_inside, eager, jit_around, scanned]


@pytest.mark.slow
@cover()
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
def test_frequencies_are_those_of_float32(dtype, way):
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


DRAWS = {
    "categorical": random.categorical,
    "bernoulli, high": functools.partial(random.bernoulli, mode="high"),
    "categorical, high": functools.partial(random.categorical, mode="high"),
    "bernoulli": random.bernoulli,
    "geometric": random.geometric,
    "categorical without replacement": lambda key, x: random.categorical(
        key, x, shape=(3,), replace=False
    ),
    "choice without replacement": lambda key, p: random.choice(
        key, 5, (3,), replace=False, p=p
    ),
    "choice": lambda key, p: random.choice(key, 5, (3,), p=p),
    "two draws": lambda key, p: (random.bernoulli(key, p), random.categorical(key, p)),
}
BATCHED = {
    "keys": lambda draw: lambda keys, p: jax.vmap(draw, (0, None))(keys[0], p[0, 0]),
    "scan of keys": lambda draw: (
        lambda keys, p: lax.map(lambda key: draw(key, p[0, 0]), keys[0])
    ),
    "neither": lambda draw: lambda keys, p: draw(keys[0, 0], p[0, 0]),
    "values": lambda draw: lambda keys, p: jax.vmap(draw, (None, 0))(keys[0, 0], p[0]),
    "both": lambda draw: lambda keys, p: jax.vmap(draw)(keys[0], p[0]),
    "both twice": lambda draw: jax.vmap(jax.vmap(draw)),
    "keys twice": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw, (0, None)), (0, None))(keys, p[0, 0])
    ),
    "both, and keys around": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw), (0, None))(keys, p[0])
    ),
    "keys, and values around": lambda draw: (
        lambda keys, p: jax.vmap(jax.vmap(draw, (0, None)), (None, 0))(keys[0], p[0])
    ),
}
# A draw of two numbers for each element, with a key for each example, arrives in a form
# that the region does not take apart.
TAKEN = {"scan of keys", "neither", "values", "keys, and values around"}
REFUSED = {("bernoulli, high", how) for how in BATCHED.keys() - TAKEN}


@pytest.fixture(scope="module")
def split_keys():
    return random.split(random.key(0), (2, 3))


@cover(quick=4)
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("how", BATCHED)
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_that_of_float32_or_refused(name, how, dtype, split_keys):
    draw = BATCHED[how](DRAWS[name])
    weights = np.exp(np.linspace(-2, 2, 30)).reshape(2, 3, 5)
    given = jnp.asarray(weights / weights.sum(-1, keepdims=True), dtype)
    expected = jax.jit(draw)(split_keys, given.astype(jnp.float32))
    for way in (lambda f: f, jax.jit):
        run = jamp.autocast(dtype)(way(draw))
        if (name, how) in REFUSED:
            with pytest.raises(NotImplementedError, match="would draw in half prec"):
                run(split_keys, given)
        else:
            check_same_bits(run(split_keys, given), expected)


@cover()
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_normal_vector_is_drawn_in_float32(way):
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


@cover()
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


def test_logits_of_a_model_in_a_gradient():
    # The draw is a number that the loss uses: the region is inside, and outside.
    key, x = random.key(6), np.ones((4, 8), np.float32)
    w = np.random.default_rng(7).normal(size=(8, 256)).astype(np.float32)

    def loss_fn(w):
        logits = x @ w
        token = random.categorical(key, logits)
        log_p = jax.nn.log_softmax(logits)
        return jnp.mean(jnp.take_along_axis(log_p, token[:, None], 1)), token

    region = jamp.autocast(jnp.bfloat16)
    logits = jax.jit(region(jnp.matmul))(x, w)
    expected = random.categorical(key, logits.astype(jnp.float32))
    inside = jax.jit(jax.value_and_grad(region(loss_fn), has_aux=True))
    (_, token), grad = inside(w)
    np.testing.assert_array_equal(token, expected)
    assert grad.dtype == jnp.float32
    around = region(jax.value_and_grad(loss_fn, has_aux=True))
    assert jax.eval_shape(around, w)[1].dtype == jnp.float32


def test_a_draw_from_half_precision_in_a_gradient():
    key, w = random.key(8), jnp.eye(4)

    def loss_fn(w):
        mean = (jnp.ones((1, 4)) @ w)[0].astype(jnp.float16)
        drawn = random.multivariate_normal(key, mean, jnp.eye(4, dtype=mean.dtype))
        return jnp.sum(drawn), drawn

    try:
        jax.eval_shape(loss_fn, w)
    except TypeError:
        pytest.skip("this version of JAX does not draw from half precision")
    expected = jax.jit(random.multivariate_normal)(key, jnp.ones(4), jnp.eye(4))
    gradient = jax.grad(loss_fn, has_aux=True)
    for run in (gradient, jax.jit(gradient)):
        with jamp.autocast(jnp.float16):
            _, drawn = run(w)
        assert drawn.dtype == jnp.float32
        # JAX draws a normal number by a polynomial with nine coefficients.
        check_rounded(drawn, expected, 9)


@cover()
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
