"""Checks of arguments, how messages show a value, and what this JAX does not have."""

import difflib
import functools
import math
import operator
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._targets import half_dtype

Given = ParamSpec("Given")

# The first name of a dtype is the one that `str` of a policy shows, as in jmp. NumPy
# reads some of them otherwise: "f16" has sixteen bytes there.
DTYPE_NAMES = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("f16", "fp16", "float16"),
    "float32": ("full", "f32", "fp32", "float32"),
    "float64": ("f64", "fp64", "float64"),
}
DTYPES = {name: dtype for dtype, names in DTYPE_NAMES.items() for name in names}
FLOAT8_NAMES = "float8", "fp8", "f8"  # of a recipe, and of no dtype
HALF = "half"

# Whether a step is proved in float32: regions cast nothing, and inf is a loss scale.
# JAX keys its caches by it.
PROVES = jax.make_user_context(False)


def check_count(name: str, value: object, lowest: int = 0) -> int:
    """The value as a Python integer; ValueError if it is too low, or not an int32."""
    count = number(name, value, operator.index)
    check_range(name, count, f">= {lowest} and < 2**31", lowest, 2**31 - 1)
    return count


def positive(name: str, value: object) -> int:
    """The value as a Python integer of at least 1, or an error naming the argument."""
    if is_traced(value):
        raise TypeError(f"{name} must be a Python integer; got {shown(value)}.")
    return check_count(name, value, 1)


def check_range(
    name: str, value: float, allowed: str, lowest: float, highest: float
) -> None:
    """Raises ValueError unless a known value is in [lowest, highest]."""
    if not is_traced(value) and not lowest <= value <= highest:
        raise ValueError(f"{name} must be {allowed}; got {value!r}.")


def number(name: str, value: Any, convert: Callable[[Any], float]) -> Any:
    """A Python number, or the traced scalar that `optax.inject_hyperparams` passes."""
    kind = "an integer" if convert is operator.index else "a number"
    refused = lambda: TypeError(f"{name} must be {kind}; got {shown(value)}.")
    if isinstance(value, bool | str | bytes) or not _is_scalar(value):
        raise refused()
    if is_traced(value):
        return value
    try:
        return convert(value)
    except OverflowError:  # an integer that no float holds
        return math.inf if operator.gt(value, 0) else -math.inf
    except (TypeError, ValueError):
        raise refused() from None


def _is_scalar(value: object) -> bool:
    """Whether an array is a real number of shape []; True for anything else."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return True
    is_real = any(jnp.issubdtype(value.dtype, d) for d in (jnp.integer, jnp.floating))
    return is_real and value.shape == ()


def axis_names(axis_name: str | Sequence[str] | None) -> tuple[str, ...] | None:
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    is_sequence = isinstance(names, Sequence) and all(isinstance(n, str) for n in names)
    if names is not None and not is_sequence:
        raise TypeError(
            f"axis_name must be a name or a sequence of names; got {axis_name!r}."
        )
    if names is not None and len(set(names)) < len(names):
        raise ValueError(f"axis_name must name each axis once; got {axis_name!r}.")
    return None if names is None else tuple(names)


def is_traced(value: object) -> TypeGuard[Any]:
    """Whether a value is known only when the traced function runs."""
    return isinstance(value, Tracer)


def as_dtype(value: Any) -> np.dtype:
    """The dtype that a value is or names, or TypeError.

    A name is one of this list, or JAX's own ("int8"). An array is refused.
    """
    name = value if isinstance(value, str) else None
    if name == HALF:
        return half_dtype()
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array and value is not None:  # which NumPy reads as float64
        dtype = jnp.dtype(DTYPES.get(name, value) if name else value)
        if name is None or name in DTYPES or dtype.name == name:
            return dtype
    raise TypeError(f"{shown(value)} is not a dtype")


def dtype_or_none(value: object) -> np.dtype | None:
    """`as_dtype(value)`, or None if the value is not a dtype."""
    try:
        return as_dtype(value)
    except (TypeError, ValueError):
        return None


def similar(value: object, dtypes: Iterable[object] = DTYPE_NAMES) -> list[str]:
    """The names of some dtypes, or of a recipe, that a user may have meant.

    The best comes first. A name may have a library in front, and be a dtype of torch.
    """
    known = [n for dtype in map(str, dtypes) for n in DTYPE_NAMES.get(dtype, (dtype,))]
    name = str(value).lower().rpartition(".")[2]
    return difflib.get_close_matches(name, [*known, HALF], n=4, cutoff=0.6)


def did_you_mean(value: object, dtypes: Iterable[object] = DTYPE_NAMES) -> str:
    """These names, for the end of a message, or "" where a dtype is the wrong one."""
    near = [] if dtype_or_none(value) is not None else similar(value, dtypes)
    return f" Did you mean {' or '.join(map(repr, near[:2]))}?" if near else ""


def floating(name: str, dtype: Any) -> np.dtype | None:
    """A floating dtype or None, or TypeError naming the argument."""
    if dtype is None:
        return None
    known = dtype_or_none(dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise TypeError(
            f"{name} must be a floating dtype or None; got {shown(dtype)}."
            f"{did_you_mean(dtype)}"
        )
    return known


def flag(name: str, value: object) -> bool:
    """A bool, or 0 or 1; otherwise TypeError, because "False" and 0.5 are true."""
    is_bool = isinstance(value, bool | np.bool)
    if not is_bool and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(f"{name} must be a bool; got {shown(value)}.")
    return bool(value)


def imported(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a library for `isinstance`, if the library is imported."""
    # Another thread may be importing it.
    found = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(cls for cls in found if isinstance(cls, type))


def shown(value: object) -> str:
    return f"{brief(value)} of type {type(value).__name__}"


def brief(value: object) -> str:
    """The `repr` of a value in one line, or the beginning of it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 72 else f"{text[:69]}..."


JAMP = os.path.dirname(__file__) + os.sep
LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")}
    | {os.path.dirname(os.path.dirname(jax.__file__)) + os.sep}
    | {JAMP}
)


def described(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{os.path.basename(file)}:{line} in {function.split('.')[-1]}"


MOVED = """{name} does not run on JAX {jax}: the JAX internals that jamp {jamp} needs \
for autocast have moved ({error}). Loss scaling and the casts of a Policy run. Install \
a JAX that this jamp knows (0.10 to 0.12), or a newer jamp."""


def unavailable(name: str, error: Exception) -> ImportError:
    version = sys.modules["jamp"].__version__
    problem = f"{type(error).__name__}: {error}"
    text = MOVED.format(name=name, jax=jax.__version__, jamp=version, error=problem)
    return ImportError(text)


class Unavailable:
    """Stands for a public name that does not work with this JAX. Using it raises."""

    def __init__(self, name: str, error: Exception):
        self._name, self._error = name, error

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise unavailable(self._name, self._error) from self._error

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unavailable(f"{self._name}.{name}", self._error) from self._error


def stand_ins(namespace: str, error: Exception, *names: str) -> dict[str, Unavailable]:
    return {name: Unavailable(f"{namespace}.{name}", error) for name in names}


def without_device(
    first: str, message: str
) -> Callable[[Callable[Given, None]], Callable[Given, None]]:
    """Explains an `__init__` with torch's device better than Python's error does.

    Args:
      first: the name of the first argument.
    """

    def wrapped(init: Callable[Given, None]) -> Callable[Given, None]:
        @functools.wraps(init)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> None:
            has_device = not {"device", "device_type"}.isdisjoint(kwargs)
            if has_device or (args[1:] and first in kwargs):
                raise TypeError(message)
            init(*args, **kwargs)

        return checked

    return wrapped
