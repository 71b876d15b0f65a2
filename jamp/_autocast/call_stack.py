"""Which Python functions called an op, as JAX's traceback records them."""

import functools
import inspect
import os
import sys
import traceback
from types import CodeType, ModuleType
from typing import Any

import jax

from .._checks import JAMP

JAX = os.path.dirname(jax.__file__) + os.sep
PLUMBING = os.path.join(os.path.dirname(jax.__file__), "_src")  # jit, tracebacks
LAYER_LIBRARIES = ("equinox", "flax", "haiku", "keras")


def code_of(function: object) -> CodeType | None:
    """The code object of a function, under jit, custom_jvp and other wrappers."""
    return getattr(unwrapped(function)[-1], "__code__", None)


def unwrapped(function: object) -> list[Any]:
    """The function and those that it wraps, the innermost last."""
    chain = [function]
    while True:
        inner = getattr(function, "__wrapped__", getattr(function, "__func__", None))
        if isinstance(function, functools.partial):
            inner = function.func
        if inner is None or inner is function:
            return chain
        chain.append(function := inner)


@functools.lru_cache(maxsize=1024)
def resolve(path: str, modules: frozenset[str]) -> CodeType | None:
    return code_of(find(path, modules))


def find(path: str, modules: frozenset[str]) -> object:
    """What a path such as "jax.nn.softmax" names, or None."""
    root, *names = path.split(".")
    value = sys.modules[root] if root in modules else None
    for name in names:
        value = inspect.getattr_static(value, name, None) or getattr(value, name, None)
        if isinstance(value, ModuleType) and value.__name__ not in sys.modules:
            return None  # a look into it would import it
    return value


def called_function(codes: tuple[CodeType, ...]) -> CodeType | None:
    """The JAX function that code outside of JAX called for the current op.

    Args:
      codes: the functions that the op comes from, innermost first.
    """
    called = None
    for code in codes:
        file = code.co_filename
        if file.startswith(JAX):
            if os.path.dirname(file) != PLUMBING:
                called = code
        elif not file.startswith(JAMP):
            return called
    return called


def is_in_layer(codes: tuple[CodeType, ...]) -> bool:
    """Whether the current op comes from a library's layer, and not from a user's."""
    files = (code.co_filename for code in codes)
    nearest = next((file for file in files if not file.startswith((JAX, JAMP))), "")
    return nearest.startswith(tuple(map(folder_of, LAYER_LIBRARIES)))


def folder_of(package: str) -> str:
    """Where the files of a package begin; none begins so if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"


def is_library(source: str) -> bool:
    """Whether a function, as `_compat.source_name` names it, is in JAX."""
    return source.partition(" at ")[2].startswith(JAX)


def raised_in(folder: str, error: BaseException) -> bool:
    """Whether an error was raised by code in a folder: JAX or JAMP."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(folder)
