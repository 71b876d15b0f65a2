"""Twelve layers whose gradients are 43 powers of two apart, in several dtypes.

Each layer adds its result times its own gain to a stream, as layers with LayerScale do.
The smaller the gain, the smaller the gradient of the layer's weight.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp

LAYERS, ROWS, WIDTH = 12, 64, 32
LARGEST, SMALLEST = -13, -56  # log2 of the gradients' largest numbers
SCALES = 2.0 ** np.arange(-8, 60)  # factors for the loss
WRONG = 0.05

REGIONS: dict[str, dict[str, Any]] = {
    "scaled float16": {"dtype": jamp.ScaledFloat16()},
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16": {"dtype": jnp.float16},
}


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, inputs and targets, all exact in float16."""
    random = np.random.default_rng(0)
    w = random.standard_normal((LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    x, y = random.standard_normal((2, ROWS, WIDTH))
    w, x, y = (a.astype(np.float16).astype(np.float32) for a in (w, x, y))
    return w, x, y


def gains() -> np.ndarray:
    """The layers' gains, 2**0 or less; the first layer has the smallest."""
    return 2.0 ** np.round(np.linspace(SMALLEST - LARGEST - 1, 0, LAYERS))


def loss_fn(ws, x, y):
    for w, gain in zip(ws, gains(), strict=True):
        x = x + jnp.asarray(gain, x.dtype) * jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2) * 2.0**-9


def exact() -> list[np.ndarray]:
    """The gradients in float64."""
    with jax.enable_x64(True):
        w, x, y = (jnp.asarray(a, jnp.float64) for a in problem())
        return [np.asarray(g) for g in jax.jit(jax.grad(loss_fn))(list(w), x, y)]


def gradients(region: jamp.autocast):
    """A function of a loss scale that gives unscaled gradients."""
    w, x, y = map(jnp.asarray, problem())

    def scaled(ws, scale):
        with region:
            return loss_fn(ws, x, y) * scale

    grad = jax.jit(jax.grad(scaled))

    def unscaled(scale: float = 1.0) -> list[np.ndarray]:
        found = grad(list(w), jnp.float32(scale))
        return [np.asarray(g, np.float64) / scale for g in found]

    return unscaled


def errors(found, truth) -> np.ndarray:
    """For each layer the distance from the true gradient, relative to its norm."""
    norm = np.linalg.norm
    return np.array([norm(f - t) / norm(t) for f, t in zip(found, truth, strict=True)])


def wrong(error: np.ndarray) -> int:
    """How many layers are wrong; inf and nan count as wrong."""
    return int(np.sum(~(error <= WRONG)))


def best_scale(truth) -> tuple[float, np.ndarray]:
    """The power of two with the fewest wrong layers in float16, and its errors."""
    grad = gradients(jamp.autocast(**REGIONS["float16"]))
    with np.errstate(invalid="ignore"):
        tried = [(scale, errors(grad(scale), truth)) for scale in SCALES.tolist()]
    return min(
        tried, key=lambda pair: (wrong(pair[1]), np.nansum(np.minimum(pair[1], 1)))
    )
