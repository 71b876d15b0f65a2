"""Which gradients overflowed, and which float16 flushes to zero: reports by path."""

from collections.abc import Sized

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._checks import is_traced, shown
from .._scaling.rule import check_scale
from .._tree import PyTree
from .call import named_leaves
from .report import SHOWN, Report, check_single, only_when, report, stacked, static
from .table import Table, percent

FLOAT16_MAX = 65504.0
# Half of float16's smallest number: this number and smaller ones round to zero.
FLUSHED = 2.0**-25


@report
class OverflowReport(Report):
    """How many elements of each gradient are inf or nan. From `overflow_report`.

    Attributes:
      inf: uint32 [leaves]: elements that are inf.
      nan: uint32 [leaves]: elements that are nan.
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
    paths: tuple[str, ...] = static()
    sizes: tuple[int, ...] = static()

    def _stacked_shape(self) -> tuple[int, ...]:
        return np.shape(self.inf)[:-1]

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
            return [stacked(self, is_found)]
        found = self.to_dict().items()
        rows = [(path, row["inf"], row["nan"], row["size"]) for path, row in found]
        first = f"{len(rows)} of {len(self.paths)} gradients hold an inf or nan"
        if not rows:
            return [f"none of {len(self.paths)} gradients holds an inf or nan"]
        rows.sort(key=lambda row: -(row[1] + row[2]) / max(row[3], 1))
        shown = table(("gradient", "inf", "nan", "of elements"), rows[:SHOWN])
        return [first, shown, _more(rows)]


def overflow_report(grads: PyTree, *, when: ArrayLike | None = None) -> OverflowReport:
    """Counts the infs and nans of each gradient.

    It works inside jit, where it costs one read of the gradients. With `when`, it costs
    that only on steps where `when` is true:

        grads = ...
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        skipped = jamp.metrics(opt_state)["found_inf"]
        report = jamp.debug.overflow_report(grads, when=skipped)

    Args:
      grads: pytree of gradients, which may be scaled; leaves that are not floating or
        complex are ignored.
      when: bool [], or None to count always. If it is false, all counts are 0.

    Returns:
      An `OverflowReport`: a pytree of counts. It prints as a table of the gradients
      that hold an inf or nan. `found` is a list of their paths, and `to_dict()` and
      `to_markdown()` have the rest. `report[i]` is one step of a stacked report.

    Raises:
      TypeError: a leaf is not an array.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads = {"embed": jnp.ones(3), "head": jnp.array([1.0, jnp.inf, jnp.nan])}
      >>> jamp.debug.overflow_report(grads)
      1 of 2 gradients hold an inf or nan
      gradient  inf  nan  of elements
      head        1    1            3

    PyTorch: no counterpart; `torch.amp.GradScaler` keeps one flag for all gradients.
    """
    named = named_leaves("overflow_report", grads)

    def count(test):
        counts = [jnp.sum(test(leaf), dtype=jnp.uint32) for _, leaf in named]
        return jnp.stack(counts) if counts else jnp.zeros(0, jnp.uint32)

    inf, nan = only_when(when, lambda: (count(jnp.isinf), count(jnp.isnan)))
    paths = tuple(path for path, _ in named)
    return OverflowReport(inf, nan, paths, tuple(jnp.size(leaf) for _, leaf in named))


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

    def _stacked_shape(self) -> tuple[int, ...]:
        return np.shape(self.flushed)[:-1]

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
        columns = (self.flushed, self.flushed_unscaled, self.zeros, self.largest)
        rows = zip(*(np.asarray(c).tolist() for c in columns), strict=True)
        result = {}
        for path, size, (flushed, unscaled, zeros, largest) in zip(
            self.paths, self.sizes, rows, strict=True
        ):
            result[path] = {
                "flushed": flushed / max(size, 1),
                "flushed_unscaled": unscaled / max(size, 1),
                "zeros": zeros / max(size, 1),
                "largest": largest,
                "headroom_bits": float(
                    np.log2(FLOAT16_MAX / largest) if largest else np.inf
                ),
            }
        return result

    def _parts(self, table: Table) -> list[str]:
        if self._stacked_shape():
            sizes = np.maximum(np.asarray(self.sizes), 1)
            return [stacked(self, np.asarray(self.flushed) / sizes > 0.01)]
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


def underflow_report(grads: PyTree, scale: ArrayLike) -> UnderflowReport:
    """How much of each gradient float16 flushes to zero, with the scale and without.

    An element is flushed if float16 rounds it to zero: it is not zero, and at most
    2**-25. Elements that were zero before, for example because the backward pass
    flushed them, are counted separately. It works inside jit.

    Args:
      grads: pytree of *scaled* gradients, as `jamp.value_and_grad` and `nnx.grad` of a
        scaled loss return them.
      scale: the loss scale of the gradients, a number or float32 []: the value of
        `jamp.loss_scale(opt_state)` or `scaler.get_scale()` before the step.

    Returns:
      An `UnderflowReport`: a pytree of counts. It prints as a table with, by path, the
      share that is flushed with the scale and without, the share that is already zero,
      and the headroom: how often the largest element can double before it exceeds
      65504. `found` lists the paths that lose more than 1 % with the scale, or that are
      all zero.

    Raises:
      TypeError: a leaf is not an array, or the scale is not a number.
      ValueError: the scale is not in float32's normal range.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads = {"w": jnp.array([1e-5, 2e-9, 0.0, 4.0])}
      >>> jamp.debug.underflow_report(grads, scale=1024.0)
      float16 flushes 25 % of the gradients to zero with a scale of 1024, 50 % without
      gradient  flushed  without scale  zero before  bits left
      w            25 %           50 %         25 %       14.0

    PyTorch: no counterpart.
    """
    scale = scale_argument("underflow_report", scale)
    named = named_leaves("underflow_report", grads)

    def measure(leaf):
        magnitude = magnitudes(leaf)
        count = lambda x: jnp.sum(x, dtype=jnp.uint32)
        nonzero = magnitude > 0
        finite = jnp.where(jnp.isfinite(magnitude), magnitude, 0)
        return (
            count(nonzero & (magnitude <= FLUSHED)),
            count(nonzero & (magnitude <= FLUSHED * scale.astype(magnitude.dtype))),
            count(magnitude == 0),
            jnp.max(finite, initial=0).astype(jnp.float32),
        )

    columns = [
        jnp.stack(c) for c in zip(*(measure(leaf) for _, leaf in named), strict=True)
    ]
    columns = columns or [jnp.zeros(0, jnp.uint32)] * 3 + [jnp.zeros(0, jnp.float32)]
    sizes = tuple(jnp.size(leaf) * (1 + jnp.iscomplexobj(leaf)) for _, leaf in named)
    flushed, unscaled, zeros, largest = columns
    paths = tuple(path for path, _ in named)
    return UnderflowReport(flushed, unscaled, zeros, largest, scale, paths, sizes)


def scale_argument(caller: str, scale: ArrayLike) -> jax.Array:
    """A loss scale from the user, as float32 []."""
    if isinstance(scale, jax.Array | np.ndarray | np.generic):
        kinds = (jnp.integer, jnp.floating)
        is_real = any(jnp.issubdtype(scale.dtype, kind) for kind in kinds)
    else:
        is_real = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_real:
        raise TypeError(
            f"{caller}: scale must be a number; got {shown(scale)}. "
            "jamp.loss_scale(opt_state) and scaler.get_scale() return it."
        )
    if jnp.size(scale) != 1:
        raise ValueError(
            f"{caller}: scale must be one number; got shape {jnp.shape(scale)}."
        )
    if not is_traced(scale):
        check_scale(f"{caller}: scale", np.asarray(scale).item())
    return jnp.reshape(jnp.asarray(scale), []).astype(jnp.float32)


def magnitudes(leaf: ArrayLike) -> jax.Array:
    """|x| in float32 at least; the two parts of a complex number as two elements."""
    x = jnp.asarray(leaf)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
    return jnp.abs(x)


def _more(rows: Sized) -> str:
    return f"... and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
