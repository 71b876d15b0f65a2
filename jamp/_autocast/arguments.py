"""The arguments of `autocast`, and the errors that wrong ones raise."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import as_dtype, brief
from .._tree import HALVES
from .decision import CASTABLE, SCALED, Dtypes
from .float8 import Float8, as_float8

BAD_DTYPE = """autocast(dtype={}): the dtype must be float16 or bfloat16 (or \
"float8", or a jamp.Float8).
autocast takes no device: write `with jamp.autocast(dtype=jnp.float16):`. To run in \
float32, write `enabled=False`."""

NO_DEVICE = """autocast takes no device: write `with \
jamp.autocast(dtype=jnp.float16):`. It works wherever JAX runs."""

BAD_RECIPE = """autocast(recipe={}): the recipe must be "scaled", for float16. A \
float8 recipe goes into the dtype: `jamp.autocast(jamp.Float8("rowwise"))`."""

NOT_SCALED = """autocast(dtype={}, recipe="scaled"): the dtype must be float16, \
because the scales are for its range: write `jamp.autocast(jnp.float16, \
recipe="scaled")`. bfloat16 has the range of float32, and float8 has its own scales."""

BAD_INPUTS = """autocast(cast_inputs={}): the dtype must be float16, bfloat16 or \
float32."""

Of = TypeVar("Of")
Given = ParamSpec("Given")


def without_device(
    init: Callable[Concatenate[Of, Given], None],
) -> Callable[Concatenate[Of, Given], None]:
    """Explains a call with torch's arguments better than Python's error does."""

    @functools.wraps(init)
    def checked(self: Of, *args: Given.args, **kwargs: Given.kwargs) -> None:
        if (args and "dtype" in kwargs) or "device_type" in kwargs:
            raise TypeError(NO_DEVICE)
        init(self, *args, **kwargs)

    return checked


def default_dtype() -> np.dtype:
    return jnp.dtype("float16" if jax.default_backend() == "gpu" else "bfloat16")


def region_dtype(
    value: DTypeLike | Float8 | None, enabled: bool, recipe: str | None
) -> tuple[np.dtype, str | None]:
    """The dtype of a region, and the recipe of its products."""
    if recipe is not None and not (isinstance(recipe, str) and recipe == SCALED):
        raise ValueError(BAD_RECIPE.format(brief(recipe)))
    if (float8 := as_float8(value)) is not None:
        dtype, found = jnp.dtype("bfloat16"), float8.recipe
    else:
        allowed = CASTABLE if enabled is False else HALVES
        dtype = default_dtype() if value is None else value
        dtype, found = dtype_argument(dtype, allowed, BAD_DTYPE), recipe
    if recipe is not None and dtype != jnp.float16:
        name = brief(value) if float8 else repr(str(dtype))
        raise ValueError(NOT_SCALED.format(name))
    return dtype, found


def dtype_argument(value: object, allowed: Dtypes, message: str) -> np.dtype:
    """The dtype that a user gave, or ValueError with the message."""
    try:
        dtype = as_dtype(value)
    except (TypeError, ValueError):
        raise ValueError(message.format(brief(value))) from None
    if dtype not in allowed:
        raise ValueError(message.format(repr(str(dtype))))
    return dtype
