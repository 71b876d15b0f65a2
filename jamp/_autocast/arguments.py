"""The arguments of `autocast`, and the errors that wrong ones raise."""

import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from jax.typing import DTypeLike

from .._checks import FLOAT8_NAMES, as_dtype, brief, did_you_mean, dtype_or_none
from .._targets import default_dtype
from .._tree import HALVES
from .decision import CASTABLE, Dtypes, Recipe
from .float8 import as_recipe

BAD_DTYPE = """autocast(dtype={}): the dtype must be float16 or bfloat16 (or \
"float8", a jamp.Float8 or a jamp.ScaledFloat16).
autocast takes no device: write `with jamp.autocast(dtype=jnp.float16):`. To run in \
float32, write `enabled=False`."""

NO_DEVICE = """autocast takes no device: write `with \
jamp.autocast(dtype=jnp.float16):`. It works wherever JAX runs."""

NO_PARENTHESES = """autocast(dtype={0}): the dtype is a {1}. To decorate it, write \
`@jamp.autocast()` with parentheses, or `@jamp.autocast(jnp.float16)`."""

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


def region_dtype(
    value: DTypeLike | Recipe | None, enabled: bool
) -> tuple[np.dtype, Recipe | None]:
    """The dtype of a region, and the recipe of its products."""
    if (recipe := as_recipe(value)) is not None:
        return recipe.dtype, recipe
    given = dtype_or_none(value)
    if callable(value) and (given is None or given.kind == "O"):
        kind = "class" if isinstance(value, type) else "function"
        raise ValueError(NO_PARENTHESES.format(brief(value), kind))
    allowed = CASTABLE if enabled is False else HALVES
    dtype = default_dtype() if value is None else value
    return dtype_argument(dtype, allowed, BAD_DTYPE, FLOAT8_NAMES), None


def dtype_argument(
    value: object, allowed: Dtypes, message: str, recipes: Sequence[str] = ()
) -> np.dtype:
    """The dtype that a user gave, or ValueError with the message.

    Args:
      recipes: the names of recipes that the argument takes too.
    """
    try:
        dtype = as_dtype(value)
    except (TypeError, ValueError):
        hint = did_you_mean(value, [*allowed, *recipes])
        raise ValueError(message.format(brief(value)) + hint) from None
    if dtype not in allowed:
        raise ValueError(message.format(repr(str(dtype))))
    return dtype
