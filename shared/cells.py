"""Reads tables of functions that are written as Python, and evaluates their cells.

A cell is an expression of the inputs, whose names are given, or a function of all of
them.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

_WORDS = re.compile(r"\{([^{}:]+)\}")


def rows(path: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The section and the cells of each row."""
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            yield section, line.split(" | ")


def expanded(cell: str) -> Iterator[str]:
    """The cell with one of the words of each brace.

    >>> [*expanded("jnp.{sin cos}(h)")]
    ['jnp.sin(h)', 'jnp.cos(h)']
    """
    parts = _WORDS.split(cell)
    words = [part.split() if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*words))


def function(cell: str, names: Mapping[str, Any], inputs: str) -> Callable[..., Any]:
    """The function of inputs that a cell stands for.

    Args:
      names: what the cell may use.
      inputs: the letters that stand for them.
    """
    code = compile(cell, f"<{cell}>", "eval")
    names = {"__name__": __name__, **names}
    if not {*_names(code)} & {*inputs}:
        return eval(code, names)
    return lambda *given: eval(code, names | dict(zip(inputs, given, strict=False)))


def _names(code: CodeType) -> Iterator[str]:
    """The names that code looks up, also in its lambdas, but not their own."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)
