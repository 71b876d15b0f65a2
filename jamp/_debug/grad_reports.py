"""Which gradients overflowed, and which float16 flushes to zero: reports by path."""

from collections.abc import Sized

import jax
import numpy as np
from jax.typing import ArrayLike

from .._tree import PyTree
from .grad_numbers import FLOAT16_MAX, numbers
from .report import (
    SHOWN,
    Report,
    Table,
    check_single,
    percent,
    report,
    stacked_text,
    static,
)


@report
class OverflowReport(Report):
    """How many elements of each gradient are inf or nan. From `overflow_report`.

    Attributes:
      inf: uint32 [leaves]: elements that are inf.
      nan: uint32 [leaves]: elements that are nan.
      scale: float32 [].
      paths: of the leaves.
      sizes: of the leaves, in elements.

    Raises:
      TypeError: it was read inside a trace, where it has no numbers, or as a bool.
      ValueError: it was read while stacked, with several steps: index it first.

    Examples:
      >>> import jax.numpy as jnp
      >>> report = overflow_report({"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])})
      >>> report.found, report.to_dict()
      (['w'], {'w': {'inf': 1, 'nan': 0, 'size': 2}})
    """

    inf: jax.Array
    nan: jax.Array
    scale: jax.Array
    paths: tuple[str, ...] = static()
    sizes: tuple[int, ...] = static()

    @property
    def found(self) -> list[str]:
        """The paths of the gradients that hold an inf or nan."""
        return list(self.to_dict())

    def to_dict(self) -> dict[str, dict[str, int]]:
        """`{path: {"inf": n, "nan": n, "size": n}}` for those that hold any."""
        check_single(self)
        inf, nan = np.asarray(self.inf), np.asarray(self.nan)
        rows = zip(self.paths, inf.tolist(), nan.tolist(), self.sizes, strict=True)
        return {p: {"inf": i, "nan": n, "size": s} for p, i, n, s in rows if i or n}

    def _parts(self, table: Table) -> list[str]:
        if self._stacked_shape():
            is_found = (np.asarray(self.inf) > 0) | (np.asarray(self.nan) > 0)
            return [stacked_text(self, is_found)]
        by_path = self.to_dict().items()
        rows = [(path, row["inf"], row["nan"], row["size"]) for path, row in by_path]
        at = f", with a scale of {self.scale:g}" if self.scale != 1 else ""
        first = f"{len(rows)} of {len(self.paths)} gradients hold an inf or nan{at}"
        if not rows:
            return [f"none of {len(self.paths)} gradients holds an inf or nan{at}"]
        rows.sort(key=lambda row: -(row[1] + row[2]) / max(row[3], 1))
        shown = table(("gradient", "inf", "nan", "of elements"), rows[:SHOWN])
        return [first, shown, _more(rows)]


def overflow_report(
    grads: PyTree, scale: ArrayLike = 1.0, *, when: ArrayLike | None = None
) -> OverflowReport:
    """Counts the infs and nans of each gradient.

    It works inside jit, where it costs one read of the gradients. With `when`, it costs
    that only on steps where `when` is true:

        grads = ...
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        skipped = jamp.metrics(opt_state)["found_inf"]
        report = jamp.debug.overflow_report(grads, when=skipped)

    Args:
      grads: pytree of gradients; leaves that are not floating or complex are ignored.
      scale: the loss scale of the gradients, a number or float32 [], which is printed.
      when: bool [], or None to count always. If it is false, all counts are 0.

    Returns:
      An `OverflowReport`: a pytree of counts. It prints as a table of the gradients
      that hold an inf or nan. `found` is a list of their paths, and `to_dict()` and
      `to_markdown()` have the rest. `report[i]` is one step of a stacked report.

    Raises:
      TypeError: a leaf is not an array, the scale is not a number, or `when` is not a
        bool.
      ValueError: the scale is not in float32's normal range.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads = {"embed": jnp.ones(3), "head": jnp.array([1.0, jnp.inf, jnp.nan])}
      >>> jamp.debug.overflow_report(grads)
      1 of 2 gradients hold an inf or nan
      gradient  inf  nan  of elements
      head        1    1            3

    PyTorch: no counterpart; `torch.amp.GradScaler` keeps one flag for all gradients.
    """
    counted = numbers("overflow_report", grads, scale, when, "inf", "nan")
    inf, nan = counted.columns
    return OverflowReport(inf, nan, counted.scale, counted.paths, counted.sizes)


@report
class UnderflowReport(Report):
    """How much of each gradient float16 flushes to zero. From `underflow_report`.

    Attributes:
      flushed: uint32 [leaves]: elements that float16 flushes to zero.
      flushed_unscaled: uint32 [leaves]: the same without the scale.
      zeros: uint32 [leaves]: elements that are zero.
      largest: float32 [leaves]: the largest finite magnitude, scaled.
      scale: float32 [].
      paths: of the leaves.
      sizes: of the leaves, in elements.

    Raises:
      TypeError: it was read inside a trace, where it has no numbers, or as a bool.
      ValueError: it was read while stacked, with several steps: index it first.

    Examples:
      >>> import jax.numpy as jnp
      >>> scaled = {"w": jnp.array([1e-8, 1.0]) * 1024}
      >>> row = underflow_report(scaled, 1024.0).to_dict()["w"]
      >>> row["flushed_unscaled"], row["flushed"]
      (0.5, 0.0)
    """

    flushed: jax.Array
    flushed_unscaled: jax.Array
    zeros: jax.Array
    largest: jax.Array
    scale: jax.Array
    paths: tuple[str, ...] = static()
    sizes: tuple[int, ...] = static()

    @property
    def found(self) -> list[str]:
        """The paths of the gradients that lose more than 1 % with the scale, or whose
        elements are all zero."""
        rows = self.to_dict().items()
        return [p for p, r in rows if r["flushed"] > 0.01 or r["zeros"] == 1]

    def to_dict(self) -> dict[str, dict[str, float]]:
        """By path: the shares `flushed`, `flushed_unscaled` and `zeros`, the `largest`
        magnitude, scaled, and `headroom_bits`, the doublings that it has left up to
        65504."""
        check_single(self)
        counts = (self.flushed, self.flushed_unscaled, self.zeros)
        shares = [np.asarray(count) / np.maximum(self.sizes, 1) for count in counts]
        largest = np.asarray(self.largest, np.float64)
        with np.errstate(divide="ignore"):
            bits = np.log2(FLOAT16_MAX / largest)
        rows = zip(*(c.tolist() for c in (*shares, largest, bits)), strict=True)
        names = ("flushed", "flushed_unscaled", "zeros", "largest", "headroom_bits")
        return {
            path: dict(zip(names, row, strict=True))
            for path, row in zip(self.paths, rows, strict=True)
        }

    def _parts(self, table: Table) -> list[str]:
        if self._stacked_shape():
            sizes = np.maximum(np.asarray(self.sizes), 1)
            return [stacked_text(self, np.asarray(self.flushed) / sizes > 0.01)]
        total = max(sum(self.sizes), 1)
        scaled, unscaled = np.sum(self.flushed) / total, np.sum(self.flushed_unscaled)
        rows = [
            (
                path,
                percent(row["flushed"]),
                percent(row["flushed_unscaled"]),
                percent(row["zeros"]),
                f"{row['headroom_bits']:.1f}",
                row["flushed"],
                row["flushed_unscaled"],
            )
            for path, row in self.to_dict().items()
        ]
        rows.sort(key=lambda row: row[-2:], reverse=True)
        header = ("gradient", "flushed", "without scale", "zero before", "bits left")
        return [
            f"float16 flushes {percent(scaled)} of the gradients to zero with a scale "
            f"of {float(self.scale):g}, {percent(unscaled / total)} without",
            table(header, [row[:-2] for row in rows[:SHOWN]]) if rows else "",
            _more(rows),
        ]


def underflow_report(
    grads: PyTree, scale: ArrayLike = 1.0, *, when: ArrayLike | None = None
) -> UnderflowReport:
    """How much of each gradient float16 flushes to zero, with the scale and without.

    An element is flushed if float16 rounds it to zero: it is not zero, and at most
    2**-25. Elements that were zero before, for example because the backward pass
    flushed them, are counted separately. It works inside jit.

    Args:
      grads: pytree of *scaled* gradients, as `jamp.value_and_grad` and `nnx.grad` of a
        scaled loss return them.
      scale: the loss scale of the gradients, a number or float32 []: the value of
        `jamp.loss_scale(opt_state)` or `scaler.get_scale()` before the step.
      when: as for `overflow_report`.

    Returns:
      An `UnderflowReport`: a pytree of counts. It prints as a table with, by path, the
      share that is flushed with the scale and without, the share that is already zero,
      and the headroom: how often the largest element can double before it exceeds
      65504. `found` lists the paths that lose more than 1 % with the scale, or that are
      all zero.

    Raises:
      TypeError, ValueError: as `overflow_report`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads = {"w": jnp.array([1e-5, 2e-9, 0.0, 4.0])}
      >>> jamp.debug.underflow_report(grads, scale=1024.0)
      float16 flushes 25 % of the gradients to zero with a scale of 1024, 50 % without
      gradient  flushed  without scale  zero before  bits left
      w            25 %           50 %         25 %       14.0

    PyTorch: no counterpart.
    """
    kinds = ("flushed", "flushed_unscaled", "zeros", "largest")
    counted = numbers("underflow_report", grads, scale, when, *kinds)
    scaled, unscaled, zeros, top = counted.columns
    return UnderflowReport(
        scaled, unscaled, zeros, top, counted.scale, counted.paths, counted.real_sizes
    )


def _more(rows: Sized) -> str:
    return f"... and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
