"""Functions that take a number from the dtype of their input: float32, or refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy import linalg, signal
from jax.scipy.sparse.linalg import gmres

import jamp
from tests.marks import cover

half = jamp.autocast(jnp.float16)
tall = np.random.default_rng(0).normal(size=(120, 12)).astype(np.float32)
square = tall[:12] + 4 * np.eye(12, dtype=np.float32)
line = np.linspace(0, 1, 200, dtype=np.float32)
wave = np.sin(line)
chances = np.full(9, 0.5, np.float32)

CASES = {
    "lstsq": (lambda a: jnp.linalg.lstsq(a, a[:, 0])[0], tall),
    "polyfit": (lambda y: jnp.polyfit(line, y, 3), wave),
    "detrend": (signal.detrend, wave),
    "matrix_rank": (jnp.linalg.matrix_rank, tall),
    "pinv": (jnp.linalg.pinv, tall),
    "roots": (lambda p: jnp.roots(p, strip_zeros=False), np.float32([1, -6, 11, -6])),
    "expm": (lambda a: linalg.expm(a / 12), square),
    "gmres": (lambda a: gmres(lambda v: a @ v, a[0])[0], square),
    "binomial": (lambda p: random.binomial(random.key(0), 3000.0, p, (9,)), chances),
    "bernoulli": (lambda p: random.bernoulli(random.key(0), p), chances),
    "categorical": (lambda x: random.categorical(random.key(0), x, shape=(99,)), wave),
    "choice": (lambda p: random.choice(random.key(0), 9, (99,), p=p / 4.5), chances),
    "geometric": (lambda p: random.geometric(random.key(0), p), chances),
    "multivariate_normal": (
        lambda x: random.multivariate_normal(random.key(0), x, jnp.diag(1 + x**2)),
        wave[:9],
    ),
}
WAYS = {
    "jit inside": lambda function: half(jax.jit(function)),
    "jit around": lambda function: jax.jit(half(function)),
    "live": half,
}


def ways(function):
    return [way(function) for way in WAYS.values()]


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_float32_gives_what_it_gives_outside(name, way, standard_promotion):
    function, value = CASES[name]
    expected = jax.jit(function)(value)
    found = WAYS[way](function)(jnp.asarray(value))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


NO_REFUSAL = ("expm", "pinv")
# JAX 0.12 refuses some of it by itself; then its error has a note.
CURE = "(?s)({} got a float16.*Cast the input|Cast its input)"


@cover(quick=4)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_REFUSAL])
def test_half_precision_is_refused_with_the_cure(name, standard_promotion):
    function, value = CASES[name]
    for run in ways(function):
        with pytest.raises(TypeError, match=CURE.format(name)):
            run(jnp.asarray(value, jnp.float16))


def test_pinv_gives_the_answer_of_float32_or_is_refused(standard_promotion):
    # Called by Python, it gets float32 before it reads the dtype.
    value = jnp.asarray(tall, jnp.float16)
    expected = np.linalg.pinv(np.asarray(value, np.float32))
    for run in ways(jnp.linalg.pinv):
        try:
            found = run(value)
        except TypeError as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            assert re.search(CURE.format("pinv"), text)
        else:
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_layer_before_and_a_cast_between(standard_promotion):
    # What the message says to write.
    def rank(a):
        return jnp.linalg.matrix_rank((a @ jnp.eye(12)).astype(jnp.float32))

    for run in (half(rank), jax.jit(half(rank))):
        assert int(run(jnp.asarray(tall))) == 12


def test_a_well_conditioned_system_of_many_rows(standard_promotion):
    a = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    solve = lambda a: jnp.linalg.lstsq(a, a @ jnp.arange(3.0))[0]
    np.testing.assert_allclose(half(jax.jit(solve))(a), [0, 1, 2], atol=5e-3)


QUANTILES = {
    "median": jnp.median,
    "quantile": lambda h: jnp.quantile(h, jnp.float32(0.5)),
    "percentile": lambda h: jnp.percentile(h, jnp.float32(50.0)),
}


@cover()
@pytest.mark.parametrize("name", QUANTILES)
def test_a_quantile_of_more_than_half_precision_counts(name, standard_promotion):
    h = jnp.asarray(np.linspace(0, 1, 10_000), jnp.float16)
    for run in ways(QUANTILES[name]):
        with pytest.raises(TypeError, match=rf"(?s){name}.*Cast the input"):
            run(h)
        assert abs(float(run(h[::100])) - 0.5) < 0.01
        assert abs(float(run(h.astype(jnp.float32))) - 0.5) < 0.001


def test_noise_has_the_dtype_that_it_is_asked_for(standard_promotion):
    for draw in (random.uniform, random.normal, random.gumbel):
        noise = lambda: draw(random.key(0), (16,), jnp.float16)  # noqa: B023
        expected = jax.jit(noise)()
        for run in ways(noise):
            assert run().dtype == jnp.float16
            np.testing.assert_allclose(run(), expected, rtol=2e-3)
