"""The report's pictures: torch's line thick and light, jamp's thin and dark."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .cases import LONG_RUN
from .result import Result
from .scale import LONG, PANELS
from .training import CASES, SEEDS, Trained
from .trajectory import floats

TORCH = {"color": "#f5b971", "lw": 4, "label": "torch", "solid_joinstyle": "round"}
JAMP = {"color": "#1b3a57", "lw": 0.9, "label": "jamp", "solid_joinstyle": "round"}
SKIP = {"color": "#c0392b", "markersize": 7, "markeredgewidth": 0.6}


def _scales(axis: Any, steps: np.ndarray, torch: np.ndarray, jamp: np.ndarray) -> None:
    axis.plot(steps, np.log2(torch), drawstyle="steps-post", **TORCH)
    axis.plot(steps, np.log2(jamp), drawstyle="steps-post", **JAMP)


def _skips(axis: Any, steps: np.ndarray, height: float, label: str) -> None:
    heights = np.full(steps.shape, height)
    transform = axis.get_xaxis_transform()
    axis.plot(steps, heights, "|", transform=transform, label=label, **SKIP)


def _save(figure: Figure, axes: np.ndarray, path: pathlib.Path) -> None:
    for axis in axes.flat:
        axis.margins(x=0.01, y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def trajectories(path: pathlib.Path, results: Mapping[str, Result]) -> None:
    """Draws torch's and jamp's scales on top of each other.

    Args:
      path: the PNG file to write.
      results: of `scale`, by case.
    """
    figure = Figure(figsize=(13, 6.5), layout="constrained")  # draws with Agg
    axes = figure.subplots(2, 3)
    for axis, (title, name) in zip(axes.flat, PANELS.items(), strict=False):
        torch, jamp = results[name].data.torch, results[name].data.jamp
        steps = np.arange(len(torch.scale))
        _scales(axis, steps, floats(torch.scale), floats(jamp.scale))
        _skips(axis, steps[torch.skipped[:, 0]], 0.02, "skipped step")
        axis.set_title(title, fontsize=11)
    long, thinned = results[LONG].data, np.arange(0, LONG_RUN.steps, 500)
    _scales(axes.flat[-1], thinned, long.torch[0][thinned], long.jamp[0][thinned])
    axes.flat[-1].set_title(
        f"{LONG_RUN.steps:,} steps, growth 1.1, backoff 0.7", fontsize=11
    )
    axes.flat[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes[:, 0]:
        axis.set_ylabel("log2 of the scale")
    _save(figure, axes, path)


def training(path: pathlib.Path, results: Sequence[Result]) -> None:
    """Draws losses and scales of the first seed: a column for each model.

    Args:
      path: the PNG file to write.
      results: of `training`, model by model, each with the same optimizers.
    """
    blocks = len({CASES[result.case].optimizer for result in results})
    columns = len(results) // blocks
    figure = Figure(figsize=(3.4 * columns, 4.6 * blocks), layout="constrained")
    axes = figure.subplots(2 * blocks, columns, squeeze=False, sharex=True)
    pairs = axes.T.reshape(-1, 2)  # in the order of the results
    for (top, bottom), result in zip(pairs, results, strict=True):
        trained: Trained = result.data[SEEDS[0]]
        torch, jamp = trained.torch, trained.jamp
        steps = np.arange(len(torch.loss))
        top.plot(steps, torch.loss, **TORCH)
        top.plot(steps, jamp.loss, **JAMP)
        top.set_title(result.case, fontsize=11)
        _scales(bottom, steps, torch.scale, jamp.scale)
        for axis in (top, bottom):
            _skips(axis, steps[torch.skipped.any(1)], 0.05, "step that torch skipped")
            _skips(axis, steps[jamp.skipped.any(1)], 0.01, "step that jamp skipped")
    for top, bottom in pairs[:blocks]:
        top.set_ylabel("loss")
        bottom.set_ylabel("log2 of the scale")
    _save(figure, axes, path)
