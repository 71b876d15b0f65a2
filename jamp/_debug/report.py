"""What the reports of `jamp.debug` have in common: pytrees that print as tables.

A report is a pytree of small arrays, and of names that stay in Python. It can be made
inside jit, returned, stacked by `lax.scan`, and fetched when it is read. Only printing
needs the values.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._checks import brief, is_traced
from .._scaling.mesh import zeros_like
from .._tree import T

SHOWN = 20  # rows of a printed table
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns side by side; columns of numbers are aligned to the right.

    >>> print(text_table(("op", "count"), [("add", 12), ("dot_general", 3)]))
    op           count
    add             12
    dot_general      3
    """
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(_is_numeric(row[i]) for row in cells) for i in range(len(header))]

    def line(row):
        placed = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(placed).rstrip()

    return "\n".join(map(line, [header, *cells]))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same for Markdown, as notebooks and GitHub show it.

    >>> print(markdown_table(("op", "count"), [("a|b", 3)]))
    | op | count |
    | --- | --- |
    | a\\|b | 3 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
        for cells in lines
    )


def _is_numeric(cell: str) -> bool:
    return (
        cell in ("", "inf", "nan")
        or cell[0].isdigit()
        or (cell[0] in "+-<" and cell[1:2].isdigit())
    )


def percent(share: float) -> str:
    """A share as text that never rounds a small share to 0, or nearly all to 100 %.

    >>> percent(0), percent(1e-9), percent(0.5), percent(0.99999), percent(1)
    ('0 %', '<0.01 %', '50 %', '>99.99 %', '100 %')
    """
    if 0 < share < 1e-4:
        return "<0.01 %"
    if 1 - 1e-4 < share < 1:
        return ">99.99 %"
    return f"{100 * share:.4g} %"


def shortened(text: str, width: int) -> str:
    """The end of a long text: in a path, it says more than the beginning.

    >>> shortened("encoder/layers/3/kernel", 12)
    '...s/3/kernel'
    """
    return text if len(text) <= width + 3 else "..." + text[-(width - 2) :]


class Report:
    """What the reports have in common: they print as tables."""

    _ask_for = "found"

    def __str__(self) -> str:
        if any(map(is_traced, jax.tree.leaves(self))):
            return f"{type(self).__name__}, inside a trace"
        return "\n".join(filter(None, self._parts(text_table)))

    __repr__ = __str__

    def to_markdown(self) -> str:
        """The printed table in Markdown."""
        return "\n\n".join(filter(None, self._parts(markdown_table)))

    _repr_markdown_ = to_markdown  # what a notebook shows

    def _parts(self, table: Table) -> list[str]:
        raise NotImplementedError

    def _stacked_shape(self) -> tuple[int, ...]:
        """The steps of a report that `lax.scan` or `vmap` has stacked, or ()."""
        first, *_ = jax.tree.leaves(self)  # its own last axis is not of steps
        return () if first is self else np.shape(first)[:-1]  # itself: no pytree

    def __len__(self) -> int:
        shape = self._stacked_shape()
        if not shape:
            raise TypeError(
                f"this {type(self).__name__} is of one step, so it has no len."
            )
        return shape[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Self:
        """One step of a stacked report."""
        if not self._stacked_shape():
            raise TypeError(
                f"this {type(self).__name__} is of one step and cannot be indexed; "
                "to_dict() has its parts."
            )
        steps = len(self)
        if not isinstance(index, int | np.integer):
            raise TypeError(f"report[i] takes the number of a step; got {index!r}.")
        if not -steps <= operator.index(index) < steps:
            raise IndexError(
                f"report[{index}] is out of range: the report has {steps} steps."
            )

        def pick(leaf):  # by NumPy, which does not ask how an array is sharded
            return leaf[index] if is_traced(leaf) else np.asarray(leaf)[index]

        return jax.tree.map(pick, self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"a report is neither true nor false; ask for report.{self._ask_for}."
        )


def static() -> Any:
    """A field of a report that is not an array, and stays in Python."""
    return dataclasses.field(metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def report(cls: type[T]) -> type[T]:
    """A frozen dataclass that is a pytree of the fields not marked as static."""
    made: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(made)
    kept = {field.name for field in fields if field.metadata.get("static")}
    data = [field.name for field in fields if field.name not in kept]
    return jax.tree_util.register_dataclass(made, data, sorted(kept))


def only_when(when: ArrayLike | None, compute: Callable[[], T]) -> T:
    """`compute()`, or zeros of its shapes where `when` is false."""
    if when is None:
        return compute()
    is_bool = isinstance(when, bool) or getattr(when, "dtype", None) == jnp.bool_
    if not is_bool or jnp.shape(when) != ():
        raise TypeError(
            f"when must be a bool or a bool array of shape []; got {brief(when)}. "
            'Pass jamp.metrics(opt_state)["found_inf"], or what scaler.step returned.'
        )
    shapes = jax.eval_shape(compute)
    return lax.cond(when, compute, lambda: jax.tree.map(zeros_like, shapes))


def check_single(report: Report) -> None:
    """Raises ValueError if a report is stacked, TypeError if it has no values yet."""
    if any(map(is_traced, jax.tree.leaves(report))):
        raise TypeError(
            f"this {type(report).__name__} is inside a trace, where it has no numbers; "
            "return it from the jitted function and read it outside."
        )
    if shape := report._stacked_shape():
        raise ValueError(
            f"this {type(report).__name__} is stacked, of {shape[0]} steps; index it "
            "first: report[i]."
        )


def stacked_text(report: Report, is_found: np.ndarray) -> str:
    """The text of a stacked report, with the steps in which something was found."""
    shape = report._stacked_shape()
    steps = np.flatnonzero(np.asarray(is_found).reshape(shape[0], -1).any(axis=1))
    shown = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    text = f"something found in {len(steps)}: {shown}" if len(steps) else "all clean"
    return f"{type(report).__name__} of {shape[0]} steps, {text}. Index it: report[i]."
