"""Losses of Keras, which cast the labels to the dtype of the predictions."""

import functools
import inspect
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from shared.keras_on_jax import import_keras
from tests.marks import cover

from . import ways

half = jamp.autocast(jnp.float16)
if find_spec("keras") is None:
    pytest.skip("Keras is in the extras parity", allow_module_level=True)
keras = import_keras()
LOSSES = sorted(
    name
    for name, function in vars(keras.losses).items()
    if inspect.isfunction(function) and name not in ("deserialize", "get", "serialize")
)
OTHERS = "concordance_correlation", "pearson_correlation"
OF_CLASSES = (
    "categorical_generalized_cross_entropy",
    "circle",
    "sparse_categorical_crossentropy",
)
RNG = np.random.default_rng(0)
PREDICTIONS = RNG.dirichlet(np.ones(3), 4).astype(np.float16).astype(np.float32)
CLASSES = np.array([0, 1, 2, 0])
LABELS = {
    "large": RNG.uniform(1000, 123456, (4, 3)).astype(np.float32),
    "near the predictions": PREDICTIONS + np.float32(1e-5),
    "one-hot": np.eye(3, dtype=np.float32)[CLASSES],
}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def function_of(name):
    function = getattr(keras.metrics if name in OTHERS else keras.losses, name)
    takes_power = name == "categorical_generalized_cross_entropy"
    return functools.partial(function, q=0.5) if takes_power else function


def calls(name):
    """The arguments of a loss, and the labels that it takes."""
    if name == "ctc":
        return [(np.array([[1], [2], [1], [2]]), jnp.stack([PREDICTIONS] * 5, 1))]
    if name in OF_CLASSES:
        return [(CLASSES, PREDICTIONS)]
    kinds = list(LABELS.values())
    if name == "mean_absolute_percentage_error":  # divides zeros by Keras's 1e-7
        kinds.pop()
    return [(labels, PREDICTIONS) for labels in kinds]


QUICK = "mean_squared_error", "kl_divergence"
NAMES = [*QUICK, *(name for name in [*LOSSES, *OTHERS] if name not in QUICK)]


@cover(quick=2, ci=4 * len(NAMES))
@pytest.mark.parametrize("way", ("jit inside", "live", "jit around", "vmap inside"))
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_keras_is_float32_of_its_labels(name, way):
    function = function_of(name)

    def loss(labels, x):
        return function(labels, x @ jnp.eye(3))

    for labels, x in calls(name):
        expected = function(labels, x)
        found = ways.WAYS[way](half, loss)(jnp.asarray(labels), x)
        assert found.dtype == jnp.float32
        # Keras rounds its 1e-7 to the dtype of the predictions, too.
        np.testing.assert_allclose(found, expected, 1e-4, 1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("labels", (123456.0, np.full((4, 3), 0.3), [[7e4, 0, 0]] * 4))
def test_labels_that_were_rounded_on_the_host_are_refused(labels):
    with half, pytest.raises(TypeError, match="Pass y_true as a JAX array"):
        keras.losses.mean_squared_error(labels, PREDICTIONS @ jnp.eye(3))


@pytest.mark.parametrize("labels", (1.0, LABELS["one-hot"], CLASSES[:, None]))
def test_labels_that_are_exact_in_half_precision_are_not(labels):
    with half:
        found = keras.losses.mean_squared_error(labels, PREDICTIONS @ jnp.eye(3))
    expected = keras.losses.mean_squared_error(labels, PREDICTIONS)
    np.testing.assert_allclose(found, expected, 1e-4)
