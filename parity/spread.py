"""torch's distance from itself in float16: how far rounding alone moves a training run.

Two float16 runs that round differently drift apart, so `training` compares jamp's
distance from torch with torch's distance from itself. torch runs each task of
`training` in `VARIANTS` that differ only in the order in which numbers are added, and
thus in rounding. That takes three more runs of torch for each seed, so the golden file
keeps what was found. `python -m parity --only spread` measures it again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import devices
from . import golden as file
from .result import Result
from .training_data import SEEDS, TASKS, Run, Task, Variant

TITLE = "torch's distance from itself"
CASES = TASKS

# The first one is the run that jamp is compared with.
VARIANTS = (
    Variant(),
    Variant(rows=lambda rows: rows[::-1].copy(), kernels=True),
    Variant(bias=True),
    Variant(
        rows=lambda rows: np.roll(rows, len(rows) // 3, axis=0), kernels=True, bias=True
    ),
)
# By how much a measurement may exceed the recorded one: both are the largest of a few
# random distances.
FACTOR = 3.0


class Spread(NamedTuple):
    """How far torch's runs of one seed are apart."""

    noise: np.ndarray | np.float32  #: the largest distance between final losses so far
    skipped: np.ndarray  # int32 [others, n_optimizers]: the other runs' skipped steps
    params: np.ndarray | np.float32  #: the largest distance of the parameters
    equal: np.ndarray | np.float32  #: the smallest share of steps with an equal scale


def measure(task: Task, seed: int, device: str) -> Spread:
    from . import training_torch

    place = devices.of_torch(device)
    first, *others = (training_torch.run(task, seed, v, place) for v in VARIANTS)
    finals = [run.final_loss for run in (first, *others)]
    return Spread(
        np.float32(max(finals) - min(finals)),
        np.array([run.skipped.sum(0) for run in others], np.int32),
        np.float32(max(distance(first, run) for run in others)),
        np.float32(min(equal_scales(first, run) for run in others)),
    )


def recorded(golden: Mapping[str, np.ndarray], task: Task, seed: int) -> Spread:
    return Spread(*(golden[f"{_key(task, seed)}/{name}"] for name in Spread._fields))


def widened(
    golden: Mapping[str, np.ndarray], results: Sequence[Result]
) -> dict[str, np.ndarray]:
    """The golden file with what was just measured.

    Processors round differently, so the larger of two measurements of the noise stays.
    """
    arrays = dict(golden)
    for result in results:
        for seed, spread in zip(SEEDS, result.data, strict=True):
            for name, value in spread._asdict().items():
                key = f"{_key(CASES[result.case], seed)}/{name}"
                known = name == "noise" and key in arrays
                arrays[key] = np.maximum(arrays[key], value) if known else value
    return arrays


def run(task: Task, device: str) -> Result:
    """Measures a task, and holds the golden file's noise against it."""
    found = [measure(task, seed, device) for seed in SEEDS]
    arrays = file.load()
    known = f"{_key(task, SEEDS[0])}/noise" in arrays
    before = noise([recorded(arrays, task, s) for s in SEEDS]) if known else np.nan
    outdated = not noise(found) <= before * FACTOR
    where = f"{task.name}: torch's noise is {noise(found):.2g}, recorded {before:.2g}"
    return Result(
        task.name, 1, {"noise": int(outdated)}, where if outdated else "", data=found
    )


def section(results: Sequence[Result]) -> str:
    rows = [
        f"| {result.case} | {noise(result.data):.1g} |"
        for result in results
        if result.data
    ]
    return "\n".join(["| task | distance of final losses |", "|---|---:|", *rows])


def noise(spreads: Sequence[Spread]) -> float:
    """A task's noise is the largest among its seeds."""
    return float(max(spread.noise for spread in spreads))


def distance(first: Run, second: Run) -> float:
    """How far two runs' parameters are apart, as a share of the first's norm."""
    pairs = [(value, second.params[name]) for name, value in first.params.items()]
    apart = sum(float(np.sum((x - y) ** 2, dtype=np.float64)) for x, y in pairs)
    return (apart / sum(float(np.sum(x**2, dtype=np.float64)) for x, _ in pairs)) ** 0.5


def equal_scales(first: Run, second: Run) -> float:
    """The share of steps after which two runs have the same scale."""
    return float((first.scale == second.scale).mean())


def _key(task: Task, seed: int) -> str:
    return f"training/{task.name}/{seed}/spread"
