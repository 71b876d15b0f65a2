"""Pictures of a training run: the loss scale over steps.

Nothing here imports matplotlib before something is drawn, and nothing changes pyplot's
global state: without `ax`, a plot gets a new figure, which needs no display.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, RED = "#1761b0", "#c8102e"


def plot_scale(history: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Draws the loss scale over the steps, and marks those that were skipped.

    Args:
      history: a `History`, or another mapping with sequences "loss_scale" and
        "found_inf" of the same length.
      ax: matplotlib Axes to draw into, or None for a new figure.

    Returns:
      The Axes; `ax.figure.savefig(path)` writes a file, and in a notebook `ax.figure`
      shows it.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: `history` is not a mapping, or `ax` is not Axes.
      ValueError: `history` lacks one of the two, or their lengths differ.

    Examples:
      >>> import jamp
      >>> history = {"loss_scale": [8.0, 4.0, 4.0], "found_inf": [False, True, False]}
      >>> ax = jamp.debug.plot_scale(history)  # doctest: +SKIP
      >>> ax.figure.savefig("scale.png")  # doctest: +SKIP

    PyTorch: no counterpart.
    """
    if not hasattr(history, "keys"):
        raise TypeError(
            "plot_scale: history must be a jamp.debug.History or a mapping; got "
            f"{shown(history)}."
        )
    if not {"loss_scale", "found_inf"} <= set(history.keys()):
        raise ValueError(
            'plot_scale: history needs "loss_scale" and "found_inf", as in '
            "jamp.metrics; it has "
            f"{', '.join(map(str, history.keys())) or 'nothing'}."
        )
    scale, flags = np.asarray(history["loss_scale"]), np.asarray(history["found_inf"])
    if scale.ndim != 1 or scale.shape != flags.shape:
        raise ValueError(
            'plot_scale: "loss_scale" and "found_inf" must be sequences of one length, '
            f"with a value for each step; got shapes {scale.shape} and {flags.shape}."
        )
    scale, skipped = scale.astype(np.float64), np.flatnonzero(flags)
    steps = getattr(history, "steps", np.arange(len(scale)))

    ax = axes("plot_scale", ax, (8, 3.5))
    ax.step(steps, scale, where="post", color=BLUE, label="loss scale")
    label = f"skipped step ({len(skipped)} of {len(scale)})"
    ax.plot(steps[skipped], scale[skipped], "X", color=RED, label=label)
    ax.set_yscale("log", base=2)
    if len(scale) and 0 < scale.min() and scale.max() < np.inf:
        ax.set_ylim(scale.min() / 2, scale.max() * 2)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.margins(x=0.01)
    return finish(ax, 2)


def finish(ax: "Axes", n_labels: int) -> "Axes":
    """A legend above the picture, and thin lines."""
    ax.legend(frameon=False, ncols=n_labels, loc="lower right", bbox_to_anchor=(1, 1))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def axes(caller: str, ax: "Axes | None", size: tuple[float, float]) -> "Axes":
    """The user's Axes, or new ones in a figure that pyplot does not know."""
    if ax is not None:
        if not hasattr(ax, "plot"):
            raise TypeError(
                f"{caller}: ax must be matplotlib Axes or None; got {shown(ax)}. To "
                "write a file, call figure.savefig(path) on the Axes that it returns."
            )
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'{caller} needs matplotlib. Run: pip install "jamp-jax[plot]"'
        ) from error
    return Figure(figsize=size, layout="constrained").subplots()
