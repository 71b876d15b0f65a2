"""Programs of other libraries give right numbers.

numpyro, penzai, optax, Keras and TensorFlow Probability do what these programs do: they
branch on a dtype in Python, write norms of their own, and define JVP rules that mix
dtypes. Their sums by scatters are in `test_sums.py`.
"""

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, random
from jax.scipy import special

import jamp
from shared.keras_on_jax import import_keras
from tests.marks import cover

from .ways import (
    HALF_WAYS,
    by_dtype,
    by_half_way,
    checkpointed,
    eye,
    half_into_jit,
    jit_inside,
    live,
    rounded,
)

pytestmark = [pytest.mark.usefixtures("standard_promotion")]

NEEDS_KERAS = pytest.mark.skipif(
    find_spec("keras") is None, reason="Keras is in the extras parity and ecosystem"
)
# Functions that branch on the dtype.

NEGATIVE = np.linspace(-9, 3, 16).reshape(4, 4)
POSITIVE = np.linspace(0.1, 9, 16).reshape(4, 4)
SHARE = np.linspace(0.02, 0.98, 16).reshape(4, 4)
SPECIAL = {
    "log_ndtr": NEGATIVE,  # float16: -inf below -6
    "erfcx": POSITIVE,
    "ndtr": NEGATIVE,
    "ndtri": SHARE,
    "spence": POSITIVE,
    "dawsn": POSITIVE,
    "expi": POSITIVE,
    "exp1": POSITIVE,
    "fresnel": POSITIVE,
    "sici": POSITIVE,
}
OTHERS = {
    "expn": (lambda x: special.expn(jnp.full(x.shape, 2), x), POSITIVE),
    "logcdf": (jax.scipy.stats.norm.logcdf, NEGATIVE),
}
BRANCHING = OTHERS | {
    name: (getattr(special, name), x)
    for name, x in SPECIAL.items()
    if hasattr(special, name)
}


@cover(ci=24)
@by_dtype
@pytest.mark.parametrize("name", sorted(BRANCHING, key=["log_ndtr", *BRANCHING].index))
def test_a_function_that_branches_on_the_dtype_is_float32(name, dtype):
    function, x = BRANCHING[name]
    x = rounded(x, dtype)
    expected = jax.jit(function)(x)
    for way in (jit_inside, checkpointed):
        found = way(function, dtype)(x)
        for y, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert y.dtype == jnp.float32
            np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-6)


def test_a_custom_derivative_that_branches_on_the_dtype_takes_half_precision():
    x = rounded(NEGATIVE, jnp.float16)
    log_ndtr = lambda x: jnp.sum(special.log_ndtr(x))
    expected = jax.jit(jax.value_and_grad(log_ndtr))(x)
    for way in (live, jit_inside):
        found = jax.jit(jax.value_and_grad(way(log_ndtr, jnp.float16)))(x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-3), found, expected
        )


# Norms of one's own.

wide = np.asarray(1000 * np.random.default_rng(1).normal(size=(8, 4)))


def norm_by_var(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def norm_by_std(h):
    return (h - h.mean(-1, keepdims=True)) / (jnp.std(h, -1, keepdims=True) + 1e-5)


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5)


NORMS = [norm_by_var, norm_by_std, rms_norm, jax.nn.standardize]


@cover(quick=5, ci=16)
@by_dtype
@by_half_way
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_a_norm_of_large_activations(norm, way, dtype):
    x = rounded(wide, dtype)
    found = way(norm, dtype)(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, norm(x), atol=2e-2)


@pytest.mark.parametrize("function", [jnp.var, jnp.std])
def test_var_and_std_are_float32_wherever_jit_stands(function):
    x = rounded(wide, jnp.float16)
    for way in HALF_WAYS:
        found = way(function, jnp.float16)(x)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, function(x), rtol=1e-3)


def test_a_mean_is_half_precision_of_half_precision_alone():
    x = rounded(wide, jnp.float16)
    assert live(jnp.mean, jnp.float16)(x).dtype == jnp.float16
    assert half_into_jit(jnp.mean, jnp.float16)(x).dtype == jnp.float16
    squares = lambda h: jnp.mean(jnp.square(h))  # squares are float32
    for way in (live, half_into_jit):
        assert way(squares, jnp.float16)(x).dtype == jnp.float32


def test_a_mean_in_code_that_was_traced_in_float32_is_float32():
    x = rounded(wide, jnp.float16)
    half = live(jnp.mean, jnp.float16)(x / 100)
    found = jit_inside(jnp.mean, jnp.float16)(x / 100)
    assert (half.dtype, found.dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_allclose(half, found, rtol=1e-3)


def norm_by_two_means(h):
    h = h.astype(jnp.float32)
    mean = jnp.mean(h, -1, keepdims=True)
    var = jnp.mean(jnp.square(h), -1, keepdims=True, dtype=jnp.float32) - mean**2
    return (h - mean) * lax.rsqrt(var + 1e-5)


def scanned(function, dtype):
    run = lambda x: lax.scan(lambda c, x: (c, function(x @ eye)), 0.0, x[None])[1][0]
    return jamp.autocast(dtype)(run)


@cover(ci=10)
@by_dtype
@pytest.mark.parametrize(
    "way", [*HALF_WAYS, checkpointed, scanned], ids=lambda way: way.__name__
)
def test_a_mean_that_is_asked_for_in_float32_keeps_its_digits(way, dtype):
    """What JAX traces in float32 has no cast to it: a mean must not be rounded."""
    x = rounded(np.random.default_rng(2).normal(size=(8, 4)) + 10, dtype)
    found = way(norm_by_two_means, dtype)(x)
    np.testing.assert_allclose(found, norm_by_two_means(x), atol=1e-3)
    loss = lambda run: lambda x: jnp.sum(run(x) ** 3)
    grad = jax.grad(loss(way(norm_by_two_means, dtype)))(x)
    expected = jax.jit(jax.grad(loss(norm_by_two_means)))(x)
    np.testing.assert_allclose(grad, expected, rtol=5e-2, atol=5e-2)


def test_jax_traces_a_mean_alike_whether_or_not_float32_is_asked_for():
    """So what it is in a region depends on neither, and nobody gets less than asked."""
    asked = [
        lambda h: jnp.mean(h),
        lambda h: jnp.mean(h, dtype=jnp.float32),
        lambda h: jnp.mean(h.astype(jnp.float32)),
    ]
    programs = [jax.make_jaxpr(lambda x, f=f: f(x @ eye))(eye) for f in asked]
    assert len(set(map(str, programs))) == 1
    run = [way(f, jnp.float16) for f in asked for way in (live, jit_inside)]
    half, full = jnp.float16, jnp.float32
    assert [f(eye).dtype for f in run] == [half, full, full, full, full, full]


def moments(h):
    h = h.astype(jnp.float32)
    return jnp.mean(h, -1), jnp.mean(jnp.square(h), -1)


@cover(quick=2, ci=8)
@by_dtype
@by_half_way
def test_moments_that_a_function_returns_keep_their_digits(way, dtype):
    x = rounded(np.random.default_rng(2).normal(size=(8, 4)) + 30, dtype)
    mean, mean_square = way(moments, dtype)(x)
    np.testing.assert_allclose(mean_square - mean**2, jnp.var(x, -1), atol=2e-2)


@cover(quick=2, ci=6)
@by_dtype
@pytest.mark.parametrize("way", HALF_WAYS, ids=lambda way: way.__name__)
def test_a_loop_carries_a_mean(way, dtype):
    def averages(h):
        step = lambda mean: 0.5 * mean + 0.5 * jnp.mean(h).astype(mean.dtype)
        scanned = lax.scan(lambda c, _: (step(c), c), jnp.mean(h), length=3)[0]
        return lax.fori_loop(0, 3, lambda i, c: step(c), scanned)

    x = rounded(wide / 100, dtype)
    value, grad = jax.value_and_grad(way(averages, dtype))(x)
    np.testing.assert_allclose(value, jnp.mean(x), rtol=2e-2)
    np.testing.assert_allclose(grad, jnp.full(x.shape, 1 / x.size), rtol=2e-2)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSLayerNorm"])
def test_norms_of_penzai(name):
    pz = pytest.importorskip("penzai.pz")
    norm = getattr(pz.nn, name).from_config("norm", random.key(0), {"features": 4})

    def run(h):
        named = pz.nx.wrap(h).tag("batch", "features")
        return norm(named).unwrap("batch", "features")

    x = rounded(wide, jnp.float16)
    for way in HALF_WAYS:
        np.testing.assert_allclose(way(run, jnp.float16)(x), run(x), atol=1e-2)


# Sums, squares and norms of other libraries.


def sums_of(library):
    """Functions of a library, for arrays whose squares and sums float16 cannot hold."""
    if library == "optax":
        return [lambda h: optax.tree.vdot(h, h), lambda h: optax.tree.vdot([h], [h])]
    if library == "keras":
        keras = import_keras()
        norm = keras.layers.RMSNormalization()
        norm.build((8, 4))
        ops = keras.ops
        return [ops.var, ops.layer_normalization, ops.rms_normalization, norm]
    if library == "e3nn_jax":
        import e3nn_jax as e3nn

        to = {"dst": jnp.zeros(8, int), "output_size": 1}
        names = ("scatter_sum", "scatter_mean")
        return [partial(getattr(e3nn, name), **to) for name in names]
    import tensorflow_probability.substrates.jax as tfp

    return [tfp.stats.variance, tfp.stats.stddev]


LIBRARIES = [
    name
    for name in ("optax", "keras", "e3nn_jax", "tensorflow_probability")
    if find_spec(name) is not None
]


@cover(ci=2 * len(LIBRARIES))
@by_dtype
@pytest.mark.parametrize("library", LIBRARIES)
def test_sums_of_a_library_are_float32_wherever_jit_stands(library, dtype):
    x = rounded(np.abs(20 * wide), dtype)
    for function in sums_of(library):
        for way in HALF_WAYS:
            found = way(function, dtype)(x)
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, function(x), rtol=1e-3, atol=1e-3)


# JVP rules that mix dtypes.


@jax.custom_jvp
def positive_part(x):
    """As optax's projections: float32 in a region, and a count of elements in it."""
    return jax.nn.relu(x - jnp.cumsum(x)[-1] / x.size)


@positive_part.defjvp
def _(primals, tangents):
    (x,), (tangent,) = primals, tangents
    out = positive_part(x)
    support = out > 0
    tangent = support * tangent - support * (jnp.dot(support, tangent) / x.size)
    return out, tangent


MIXED = {
    "own": positive_part,
    "simplex": optax.projections.projection_simplex,
    "sparsemax": lambda h: optax.losses.multiclass_sparsemax_loss(
        h[None], jnp.array([1])
    ),
}


@cover(ci=12)
@by_dtype
@pytest.mark.parametrize("way", [jit_inside, live], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MIXED)
def test_a_jvp_rule_that_mixes_dtypes(name, way, dtype):
    x = rounded([0.5, -1.0, 2.0, 0.25], dtype)
    function = lambda h: jnp.sum(MIXED[name](h) * jnp.array([1.0, 2.0, 3.0, 4.0]))
    value, grad = jax.value_and_grad(way(function, dtype))(x)
    expected, expected_grad = jax.jit(jax.value_and_grad(function))(x)
    assert grad.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=2e-2)
    np.testing.assert_allclose(grad, expected_grad, rtol=2e-2, atol=2e-2)


def test_a_jvp_rule_with_an_error_of_its_own_raises_it():
    @jax.custom_jvp
    def broken(x):
        return 2 * x

    @broken.defjvp
    def _(primals, tangents):
        raise TypeError("never differentiated")

    run = live(lambda h: jnp.sum(broken(h)), jnp.float16)
    with pytest.raises(TypeError, match="never differentiated"):
        jax.grad(run)(eye)


def test_a_jvp_rule_with_an_error_of_its_own_runs_once():
    calls = []

    @jax.custom_jvp
    def broken(x):
        return 2 * x

    @broken.defjvp
    def _(primals, tangents):
        calls.append(primals)
        try:
            raise KeyError("k")
        except KeyError as error:
            raise TypeError("my rule takes no float16") from error

    with pytest.raises(TypeError, match="my rule") as raised:
        jax.grad(live(lambda h: jnp.sum(broken(h)), jnp.float16))(eye)
    assert len(calls) == 1
    chain = [raised.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert any(isinstance(error, KeyError) for error in chain)


# Keras.

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
IN_KERAS = re.compile(r"```text\n(model\.call = .*?)```", re.DOTALL)


@pytest.mark.slow
@NEEDS_KERAS
def test_fit_of_keras_as_the_page_has_it():
    keras, seen = import_keras(), []

    class Seen(keras.layers.Layer):
        def call(self, x):
            seen.append(str(x.dtype))
            return x

    def fitted(lines):
        keras.utils.set_random_seed(0)
        spy = Seen(autocast=False)  # or Keras casts what it gets to float32
        first, last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((4,)), first, spy, last])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        model.fit = lambda x, y, fit=model.fit: fit(x, y, verbose=0)
        weights, x = model.trainable_variables, np.asarray(wide / 1000, np.float32)
        start = [np.array(v.value) for v in weights]  # `fit` donates them
        seen.clear()
        exec(lines, {"jamp": jamp, "jnp": jnp, "model": model, "x": x, "y": x[:, :1]})
        return [v.value - old for v, old in zip(weights, start, strict=True)]

    expected = fitted("model.fit(x, y)")
    assert "bfloat16" not in seen
    found = fitted(IN_KERAS.search(PAGE.read_text())[1])
    assert "bfloat16" in seen
    for change, wanted in zip(found, expected, strict=True):
        assert change.dtype == jnp.float32 and jnp.any(wanted)
        np.testing.assert_allclose(change, wanted, rtol=0.1, atol=2e-3)


LOSSES = """
layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
loss = keras.losses.BinaryCrossentropy(from_logits=True)
found = loss(jnp.zeros((1, 1)), layer(jnp.full((1, 1), 9.75)))
"""


@pytest.mark.slow
@NEEDS_KERAS
@by_dtype
def test_a_loss_of_logits_in_keras(dtype):
    given = {"keras": import_keras(), "jnp": jnp}
    with jamp.autocast(dtype):
        exec(LOSSES, given)
    np.testing.assert_allclose(given["found"], 9.75, rtol=1e-3)


# Haiku.


@cover(ci=6)
@by_dtype
@pytest.mark.parametrize(
    "way", [jit_inside, live, checkpointed], ids=lambda way: way.__name__
)
def test_a_convolutional_lstm_after_a_layer(way, dtype):
    def run(h):
        core = hk.Conv1DLSTM((4,), 4, 3)
        return core(h[None], core.initial_state(1))[0]

    model = hk.without_apply_rng(hk.transform(run))
    params = jax.jit(model.init)(random.key(0), eye)
    function = lambda h: model.apply(params, h)
    found = way(function, dtype)(eye)
    exact = jax.jit(function)(eye)
    np.testing.assert_allclose(found, exact, rtol=2e-2, atol=2e-3)
