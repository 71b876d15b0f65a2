"""Where an op comes from: the Python functions that called it, and the regions around.

JAX records both with each op: the functions in a traceback, and a region's marks in the
name stack.
"""

import functools
import inspect
import itertools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

import jax

from .._checks import JAMP
from .decision import NO_REASON, Reason

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
    modules = (sys.modules.get(name) for name in LAYER_LIBRARIES)
    found = (getattr(module, "__file__", None) for module in modules)
    roots = tuple(os.path.dirname(file) + os.sep for file in found if file)
    files = (code.co_filename for code in codes)
    own = next((file for file in files if not file.startswith((JAX, JAMP))), "")
    return own.startswith(roots)


def is_library(source: str) -> bool:
    """Whether a function, as `_compat.source_name` names it, is in JAX."""
    return source.partition(" at ")[2].startswith(JAX)


def raised_in(folder: str, error: BaseException) -> bool:
    """Whether an error was raised by code in a folder: JAX or JAMP."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(folder)


# Each region leaves its mark in the name stack, so that an outer one knows what an
# inner one has decided. A region that is observed adds why each op runs as it does, by
# a number that stays valid: JAX keeps the programs that it is in.

# A region's mark, with its depth if it is in another one.
MARK = re.compile(r"jamp\.autocast(?:\[(\d+)\])?\((\w+)\)")
REASON = "jamp.rule "
REASONS: dict[str, Reason] = {}  # by their entries
NUMBERS = itertools.count()


def mark(dtype: str, depth: int) -> str:
    """The mark of a region: its depth, and a dtype's name or "off"."""
    return f"jamp.autocast[{depth}]({dtype})" if depth else f"jamp.autocast({dtype})"


def marks_in(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Depth and dtype of the regions in a name stack, the outermost first."""
    for found in filter(None, map(MARK.fullmatch, names)):
        yield int(found[1] or 0), found[2]


@functools.cache
def written(reason: Reason) -> str:
    """The entry of a reason in a name stack."""
    entry = f"{REASON}{next(NUMBERS)}"
    REASONS[entry] = reason
    return entry


def reason_in(names: Iterable[str]) -> Reason:
    """The innermost reason in a name stack."""
    return next(filter(None, map(REASONS.get, reversed([*names]))), NO_REASON)


def is_jamps(name: str) -> bool:
    """Whether a region wrote an entry of a name stack."""
    return MARK.fullmatch(name) is not None or name.startswith(REASON)
