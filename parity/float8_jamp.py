"""jamp's side of `float8`: the casts that `autocast` makes, and products in regions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from jamp._autocast.low_precision import quantized

from .float8_cases import FORMATS, Casts, Product

JIT = "in jit"
PATHS = (JIT, "outside jit")
# Otherwise XLA may keep more digits in a float32 gradient than the bfloat16 asked for.
_OPTIONS: Any = {"xla_allow_excess_precision": False}


@functools.partial(jax.jit, static_argnames=("dtype", "axes"))
def _quantized(x: jax.Array, dtype: np.dtype, axes: tuple[int, ...] | None) -> Any:
    return quantized(x, dtype=dtype, axes=axes)


def cast(
    x: np.ndarray, format: str, axes: tuple[int, ...] | None
) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the float8 numbers, and the inverse of their scales."""
    found = _quantized(x, dtype=jnp.dtype(FORMATS[format]), axes=axes)
    return np.asarray(found.values).view(np.uint8), np.asarray(found.inverse)


def casts(case: Casts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        name: cast(x, case.format, case.axes(x.ndim))
        for name, x in case.arrays().items()
    }


def product(case: Product, path: str, dtype: Any = None) -> list[np.ndarray]:
    """The product in a region, and both inputs' gradients, taken outside the region.

    Args:
      case: what is multiplied, and the recipe.
      path: one of `PATHS`.
      dtype: of the region, if it is not float8 with that recipe.
    """
    region = jamp.Float8(case.recipe) if dtype is None else dtype

    def forward(x, w):
        with jamp.autocast(region):
            return x @ w

    def derivative(x, w, ct):
        y, vjp = jax.vjp(forward, x, w)
        return [y, *vjp(ct)]

    inputs = [jnp.asarray(x) for x in case.inputs()]
    run: Any = derivative
    with jax.numpy_dtype_promotion("standard"):  # with a weight of float32
        if path == JIT:
            run = jax.jit(derivative).lower(*inputs).compile(compiler_options=_OPTIONS)
        return [np.asarray(x) for x in run(*inputs)]
