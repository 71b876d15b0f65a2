"""autocast."""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat
from ._rules import CASTABLE, REGION, Settings, compile_rules
from ._trace import AutocastTrace, Record, mark

BAD_DTYPE = """autocast({}={!r}): the dtype must be float16 or bfloat16.
There is no device argument: write `with jamp.autocast(dtype=jnp.float16):`. To run in \
float32, write `enabled=False`."""

UNUSED_RULES = """autocast(rules=...): no op matched {}. A module path is searched for \
in the name stack, which Flax Linen, Haiku and jax.named_scope write; a function \
matches while it runs in the region."""

NOT_A_DECORATOR = """autocast(cast_inputs=...) decorates a function, whose inputs it \
casts; it cannot be entered with `with`."""


def is_autocast_enabled() -> bool:
    """Whether ops are cast here.

    >>> with autocast(dtype=jnp.float16):
    ...     is_autocast_enabled()
    True
    """
    return REGION.value is not None


def get_autocast_dtype() -> Any:
    """The dtype of the innermost region, or what `autocast()` would take by default.

    >>> with autocast(dtype=jnp.float16):
    ...     get_autocast_dtype()
    dtype('float16')
    """
    return default_dtype() if REGION.value is None else REGION.value.dtype


def default_dtype() -> Any:
    return jnp.dtype("float16" if jax.default_backend() == "gpu" else "bfloat16")


class autocast:
    """Runs matrix products in half precision, and what needs it in float32.

    Args:
      dtype: float16 or bfloat16; by default float16 on a GPU, bfloat16 elsewhere.
      enabled: False makes a region in which nothing is cast, also inside another one.
      rules: the user's table, looked up before jamp's: {key: dtype}. A key is a JAX
        primitive, a Python function or module class, or a regular expression searched
        for in the module path; the first that matches decides. With a dtype, all the
        floating inputs of an op are cast to it; with None, they are left.
      cast_inputs: for a decorated function that needs this dtype: in a region, its
        floating inputs are cast and it runs with autocast off.

    Raises:
      ValueError: for another dtype, for a bad rule, and at the region's end for a rule
        that matched nothing.
    """

    def __init__(
        self,
        dtype: Any = None,
        enabled: bool = True,
        *,
        rules: Mapping[Any, Any] | None = None,
        cast_inputs: Any = None,
    ):
        if not isinstance(enabled, bool):
            raise TypeError(f"autocast(enabled=...) must be a bool, got {enabled!r}")
        dtype = dtype_argument("dtype", default_dtype() if dtype is None else dtype)
        if dtype not in CASTABLE[:2]:
            raise ValueError(BAD_DTYPE.format("dtype", str(dtype)))
        if cast_inputs is not None:
            cast_inputs = dtype_argument("cast_inputs", cast_inputs)
        self.settings = Settings(dtype, compile_rules(rules))
        self.enabled, self.cast_inputs = enabled, cast_inputs
        self._entered = threading.local()

    def __enter__(self):
        if self.cast_inputs is not None:
            raise TypeError(NOT_A_DECORATOR)
        region = contextlib.ExitStack()
        outer = REGION.value
        depth = 0 if outer is None else outer.depth + 1
        settings = self.settings._replace(depth=depth)
        region.enter_context(REGION(settings if self.enabled else None))
        name = settings.dtype.name if self.enabled else "off"
        region.enter_context(jax.named_scope(mark(name, depth)))
        trace = None
        if self.enabled:
            trace = AutocastTrace(_compat.current_trace(), settings, Record())
            region.enter_context(_compat.set_current_trace(trace))
        self._entered.__dict__.setdefault("stack", []).append((region, trace))
        return self

    def __exit__(self, error_type, error, traceback):
        region, trace = self._entered.stack.pop()
        region.close()
        if trace is not None:
            trace.notes.clear()
            if error_type is None:
                self._check_all_used(trace.record.hits)

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            if self.cast_inputs is None:
                with self:
                    return function(*args, **kwargs)
            if not is_autocast_enabled():
                return function(*args, **kwargs)
            args, kwargs = jax.tree.map(self._cast_input, (args, kwargs))
            with autocast(enabled=False):
                return function(*args, **kwargs)

        return wrapped

    def _cast_input(self, x):
        is_array = isinstance(x, jax.Array | np.ndarray)
        return x.astype(self.cast_inputs) if is_array and x.dtype in CASTABLE else x

    def _check_all_used(self, hits):
        rules = enumerate(self.settings.rules)
        unused = [rule.name for index, rule in rules if index not in hits]
        if unused:
            raise ValueError(UNUSED_RULES.format(", ".join(map(repr, unused))))


def dtype_argument(name: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(BAD_DTYPE.format(name, value)) from None
    if dtype not in CASTABLE:
        raise ValueError(BAD_DTYPE.format(name, str(dtype)))
    return dtype
