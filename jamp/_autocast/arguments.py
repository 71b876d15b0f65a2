"""What `autocast` may be given, and what it says of anything else."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import as_dtype, brief
from .._tree import HALVES
from .decision import CASTABLE, Dtypes
from .float8 import Float8, as_float8

BAD_DTYPE = """autocast(dtype={}): the dtype must be float16 or bfloat16 (or \
"float8", or a jamp.Float8).
There is no device argument: write `with jamp.autocast(dtype=jnp.float16):`. To run in \
float32, write `enabled=False`."""

NO_DEVICE = """autocast takes no device, and no cache_enabled: write `with \
jamp.autocast(dtype=jnp.float16):`. It works wherever JAX runs, and casts a value once \
in a region."""

BAD_INPUTS = """autocast(cast_inputs={}): the dtype must be float16, bfloat16 or \
float32."""

Of = TypeVar("Of")
Given = ParamSpec("Given")


def without_device(
    init: Callable[Concatenate[Of, Given], None],
) -> Callable[Concatenate[Of, Given], None]:
    """Says so where a call has torch's arguments, and Python would say less."""

    @functools.wraps(init)
    def checked(self: Of, *args: Given.args, **kwargs: Given.kwargs) -> None:
        if (args and "dtype" in kwargs) or {"device_type", "cache_enabled"} & {*kwargs}:
            raise TypeError(NO_DEVICE)
        init(self, *args, **kwargs)

    return checked


def default_dtype() -> np.dtype:
    return jnp.dtype("float16" if jax.default_backend() == "gpu" else "bfloat16")


def region_dtype(
    value: DTypeLike | Float8 | None, enabled: bool
) -> tuple[np.dtype, str | None]:
    """The dtype of a region, and the recipe of float8 for products that qualify."""
    if (float8 := as_float8(value)) is not None:
        return jnp.dtype("bfloat16"), float8.recipe
    allowed = CASTABLE if enabled is False else HALVES
    dtype = default_dtype() if value is None else value
    return dtype_argument(dtype, allowed, BAD_DTYPE), None


def dtype_argument(value: object, allowed: Dtypes, message: str) -> np.dtype:
    """The dtype that a user gave, or ValueError with the message."""
    try:
        dtype = as_dtype(value)
    except (TypeError, ValueError):
        raise ValueError(message.format(brief(value))) from None
    if dtype not in allowed:
        raise ValueError(message.format(repr(str(dtype))))
    return dtype
