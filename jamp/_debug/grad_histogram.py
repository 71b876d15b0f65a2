"""How small gradients are: a histogram by powers of two, printed or drawn."""

import bisect
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike

from .._tree import PyTree
from .grad_numbers import BIAS, numbers, total
from .plots import BLUE, axes, finish
from .report import Report, Table, check_single, percent, report, stacked_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What float16 does to a magnitude between two powers of two. Up to 2**-25, it rounds to
# zero. From 2**-14 on, it keeps all its bits. From 65520 on, it rounds to inf.
LIMITS = ZERO, NORMAL, OVERFLOW = -25, -14, 16
REGIONS = "zero", "subnormal", "normal", "inf"
FATES = {"zero": "become zero", "subnormal": "subnormal", "inf": "overflow"}
COLORS = {"zero": "#d9485f", "subnormal": "#e8912b", "inf": "#7b4ea3"}
LINES, BAR = 24, 30  # of a printed histogram: lines, and columns of the longest bar


@report
class GradHistogram(Report):
    """How many gradients are between two powers of two. From `grad_histogram`.

    It is a pytree of four arrays, so a jitted step may return it and `lax.scan` may
    stack it. `stacked[i]` is one step, and `print` shows one as text.

    Attributes:
      counts: uint32 [256]: by the float32 exponent of the scaled gradient.
      zeros: uint32 []: elements that are zero.
      nonfinite: uint32 []: elements that are inf or nan.
      scale: float32 []: the factor that the gradients are multiplied by.

    Raises:
      TypeError: it was read inside a trace, where it has no numbers.
      ValueError: it was read while stacked, with several steps: index it first.

    Examples:
      >>> import jax.numpy as jnp
      >>> grad_histogram({"w": jnp.array([0.5, 0.6, 0.0])}).to_dict()["exponents"]
      {-1: 2}
    """

    counts: jax.Array
    zeros: jax.Array
    nonfinite: jax.Array
    scale: jax.Array

    def to_dict(self) -> dict[str, Any]:
        """Python numbers; the exponents are those of the unscaled gradients.

        `{"exponents": {e: count}, "zeros": n, "nonfinite": n, "scale": s}`: `count`
        elements with `2**e <= |gradient| < 2**(e + 1)`. A scale that is not a power of
        two counts as the nearest one. Exponent -127, before unscaling, stands for all
        magnitudes below 2**-126.
        """
        counts, zeros, nonfinite, scale = _fetched(self)
        shift = BIAS + round(np.log2(scale))
        exponents = {int(e) - shift: int(counts[e]) for e in np.flatnonzero(counts)}
        return {
            "exponents": exponents,
            "zeros": zeros,
            "nonfinite": nonfinite,
            "scale": scale,
        }

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the share of elements over the magnitude of the unscaled gradients.

        The background colors show what float16 would do to them without a scale. The
        dashed lines show where these regions begin and end with it.

        Args:
          ax: matplotlib Axes to draw into, or None for a new figure.

        Returns:
          The Axes; `ax.figure.savefig(path)` writes a file, and in a notebook
          `ax.figure` shows it.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: the histogram is stacked.
        """
        counts, zeros, nonfinite, scale = _fetched(self)
        ax = axes("GradHistogram.plot", ax, (9, 4.5))
        total = max(int(counts.sum()) + zeros + nonfinite, 1)
        shift = float(np.log2(scale))
        share = counts / total
        edges = np.arange(257) - BIAS - shift  # of the bins, unscaled
        bins = np.flatnonzero(counts)
        ends = [ZERO - shift, OVERFLOW, *(edges[bins[[0, -1]]] if len(bins) else [])]
        left, right = min(ends) - 4, max(ends) + 5
        bottom = share[bins].min() / 3 if len(bins) else 1e-3

        ax.stairs(share, edges, baseline=bottom, fill=True, color=BLUE, zorder=2)
        spans = {"zero": (left, ZERO), "subnormal": (ZERO, NORMAL)}
        for name, span in (spans | {"inf": (OVERFLOW, right)}).items():
            style = {"color": COLORS[name], "alpha": 0.2, "label": FATES[name]}
            ax.axvspan(*span, linewidth=0, **style)
        for limit in LIMITS if shift else ():
            label = f"with a scale of {_power(shift)}" if limit == ZERO else None
            style = {"color": "#444444", "ls": "--", "lw": 0.9}
            ax.axvline(limit - shift, zorder=3, label=label, **style)

        ax.set_yscale("log")
        ax.set(xlim=(left, right), ylim=(bottom, 1.5))
        notes = [f"{percent(zeros / total)} are zero"]
        notes += [f"{percent(nonfinite / total)} are inf or nan"] if nonfinite else []
        notes = ", ".join(filter(None, [*notes, _headroom(bins)]))
        ax.set_xlabel(f"log2 of the unscaled gradient's magnitude\n{notes}")
        ax.set_ylabel(f"share of {total:,} elements")
        return finish(ax, 4)

    def _parts(self, table: Table) -> list[str]:
        if self._stacked_shape():
            return [stacked_text(self, np.asarray(self.nonfinite) > 0)]
        counts, zeros, nonfinite, scale = _fetched(self)
        total = max(int(counts.sum()) + zeros + nonfinite, 1)
        shift = float(np.log2(scale))
        lines = [
            f"{total:,} gradients with a scale of {_power(shift)}: "
            f"{percent(zeros / total)} zero, {percent(nonfinite / total)} inf or nan"
        ]
        bins = np.flatnonzero(counts)
        if not len(bins):
            return lines

        # Where the regions begin, in exponents of the unscaled gradients.
        rulers = {"without a scale": 0, "with the scale": round(shift)}
        if not shift:
            del rulers["with the scale"]
        low = BIAS + round(shift)
        first, end = int(bins[0]), int(bins[-1]) + 1
        width = -(-(end - first) // LINES)
        starts = range(first, end, width)
        sums = [int(counts[start : start + width].sum()) for start in starts]
        rows = []
        for start, number in zip(starts, sums, strict=True):
            bar = "█" * round(BAR * number / max(sums)) or ("▏" if number else "")
            regions = [_region(start - low + moved) for moved in rulers.values()]
            rows.append((f"2^{start - low}", percent(number / total), *regions, bar))
        lines.append(table(("at least", "share", *rulers, ""), rows))
        for name, moved in rulers.items():
            regions = np.array([_region(int(e) - low + moved) for e in bins])
            parts = [
                f"{percent(counts[bins[regions == region]].sum() / total)} {text}"
                for region, text in FATES.items()
            ]
            lines.append(f"float16 {name}: {', '.join(parts)}")
        return [*lines, _headroom(bins)]


def grad_histogram(
    grads: PyTree, scale: ArrayLike = 1.0, *, when: ArrayLike | None = None
) -> GradHistogram:
    """Counts gradients by exponent, as in figure 3 of the mixed-precision paper.

    It shows how much a scale saves: how many gradients are below float16's range
    without it, and how far the largest ones are from overflow with it. It works with
    sharded gradients, and inside jit, where it costs one pass over the gradients.
    Counts stop at 2**32 - 1.

    Args:
      grads: pytree of *scaled* gradients, as `jamp.value_and_grad` returns them. Both
        parts of complex leaves count, and leaves that are not floating are ignored.
      scale: the loss scale of the gradients, a number or float32 []: the value of
        `jamp.loss_scale(opt_state)` or `scaler.get_scale()` before the step.
      when: as for `overflow_report`.

    Returns:
      A `GradHistogram`: print it, `plot()` it, or take its `to_dict()`.

    Raises:
      TypeError, ValueError: as `overflow_report`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> grads = {"w": jnp.array([3e-5, 0.002, 0.003, 0.0]) * 1024}
      >>> histogram = jamp.debug.grad_histogram(grads, scale=1024.0)
      >>> histogram.to_dict()["exponents"]
      {-16: 1, -9: 2}

    PyTorch: no counterpart.

    References:
      Micikevicius et al. 2018, arXiv 1710.03740.
    """
    kinds = ("exponents", "zeros", "nonfinite")
    counted = numbers("grad_histogram", grads, scale, when, *kinds)
    counts, zeros, nonfinite = map(total, counted.columns)
    return GradHistogram(counts, zeros, nonfinite, counted.scale)


def _fetched(histogram: GradHistogram) -> tuple[np.ndarray, int, int, float]:
    check_single(histogram)
    counts, zeros, nonfinite, scale = jax.device_get(jax.tree.leaves(histogram))
    return np.asarray(counts, np.int64), int(zeros), int(nonfinite), float(scale)


def _region(exponent: int) -> str:
    """What float16 does to magnitudes from 2**exponent to its double."""
    return REGIONS[bisect.bisect(LIMITS, exponent)]


def _headroom(bins: np.ndarray) -> str:
    """The headroom: how often the largest finite gradient can double before inf."""
    if not len(bins):
        return ""
    doublings = OVERFLOW - 1 - (int(bins[-1]) - BIAS)
    if doublings < 0:
        return "no headroom: some are above 65504"
    return f"headroom to 65504: {doublings} doublings of the scale"


def _power(shift: float) -> str:
    return f"2^{shift:.4g}"
