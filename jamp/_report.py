"""What the reports of `jamp.debug` have in common.

A report is a pytree of small arrays, and of names that stay in Python. It can be made
inside jit, returned, stacked by `lax.scan` and fetched when somebody asks. Only
printing needs the values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._table import markdown_table, text_table
from ._tree import is_traced

SHOWN = 20  # rows of a printed table


class Report:
    """What the reports have in common: they print as tables."""

    def __str__(self) -> str:
        if any(map(is_traced, jax.tree.leaves(self))):
            return f"{type(self).__name__}, inside a trace"
        return "\n".join(filter(None, self._parts(text_table)))

    __repr__ = __str__

    def to_markdown(self) -> str:
        """The printed table in Markdown."""
        return "\n\n".join(filter(None, self._parts(markdown_table)))

    _repr_markdown_ = to_markdown  # what a notebook shows

    def _parts(self, table: Callable[..., str]) -> list[str]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], self)


def report(cls: type) -> type:
    """A frozen dataclass that is a pytree of the fields not marked as static."""
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    static = {f.name for f in dataclasses.fields(cls) if f.metadata.get("static")}
    data = [f.name for f in dataclasses.fields(cls) if f.name not in static]
    return jax.tree_util.register_dataclass(cls, data, sorted(static))


def static() -> Any:
    return dataclasses.field(metadata={"static": True})


def only_when(when: Any, compute: Callable[[], Any]) -> Any:
    """`compute()`, or zeros of its shapes where `when` is false."""
    if when is None:
        return compute()
    if jnp.shape(when) != () or jnp.result_type(when) != jnp.bool_:
        raise TypeError(
            f"when must be a bool or a bool array of shape []; got {when!r}. "
            'jamp.metrics(opt_state)["found_inf"] and what scaler.step returns are.'
        )
    shapes = jax.eval_shape(compute)
    zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.cond(when, compute, zeros)


def check_single(array: Any, ndim: int, caller: str) -> None:
    if np.ndim(array) != ndim:
        raise ValueError(
            f"this {caller} is stacked, of {np.shape(array)[: np.ndim(array) - ndim]} "
            "steps; index it first: report[i]."
        )


def stacked(caller: str, array: Any, steps: np.ndarray) -> str:
    shown = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    found = f"something found in {len(steps)}: {shown}" if len(steps) else "all clean"
    return f"{caller} of {len(array)} steps, {found}. Index it: report[i]."
