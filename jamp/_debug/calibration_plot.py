"""The picture of a `Calibration`: errors by product and dtype."""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .choose_dtype import called
from .plots import BLUE, RED, axes
from .product_row import ProductRow
from .table import percent, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, GREEN, GRAY = "#e8912b", "#5a9e6f", "#777777"
STYLES = {  # a color and a marker
    "tensorwise": (BLUE, "o"),
    "rowwise": (GREEN, "s"),
    "rowwise_with_gw_hp": (GREEN, "s"),
    "bfloat16": (ORANGE, "D"),
    "float16": (BLUE, "o"),
}


class Calibrated(Protocol):
    """The part of a `Calibration` that is drawn."""

    @property
    def rows(self) -> list[ProductRow]: ...
    @property
    def tolerance(self) -> float: ...


def plot_errors(report: Calibrated, ax: "Axes | None") -> "Axes":
    """See `Calibration.plot`."""
    rows = report.rows
    ax = axes("Calibration.plot", ax, (9, 1.6 + 0.32 * max(len(rows), 1)))
    places = np.arange(len(rows))
    names = list(dict.fromkeys(name for row in rows for name in row.errors))
    for name in names:
        worst = [row.worst(name) for row in rows]
        drawn = [(place, min(error, 1.0)) for place, error in enumerate(worst) if error]
        color, marker = STYLES.get(name, (GRAY, "x"))
        where, errors = [p for p, _ in drawn], [e for _, e in drawn]
        ax.plot(errors, where, marker, color=color, label=called(name), zorder=3)
    label = f"tolerance, {percent(report.tolerance)}"
    ax.axvline(report.tolerance, color=RED, ls="--", lw=1, label=label)
    ax.set_xscale("log")
    ax.set(xlabel="largest relative error of a row (1 and more: at the right edge)")
    labels = [
        f"{shortened(row.path or row.line or '-', 32)}  {row.sizes}: {row.choice}"
        for row in rows
    ]
    ax.set_yticks(places, labels, fontsize=8)
    ax.invert_yaxis()
    ax.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
