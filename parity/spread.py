"""torch's distance from itself in float16: how far rounding alone moves a training run.

Two float16 runs that round differently drift apart, so `training` compares jamp's
distance from torch with torch's distance from itself. torch runs each task of
`training` in `VARIANTS` that differ only in the order in which numbers are added, and
thus in rounding. That takes three more runs of torch for each seed, so the golden file
keeps what was found. `python -m parity --only spread` measures it again.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from . import devices
from . import golden as file
from .result import Result
from .training_data import SEEDS, TASKS, Task, Variant

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


def measure(task: Task, seed: int, device: str) -> float:
    """The largest distance between the final losses of torch's runs of one seed."""
    from . import training_torch

    place = devices.of_torch(device)
    finals = [training_torch.run(task, seed, v, place).final_loss for v in VARIANTS]
    return max(finals) - min(finals)


def recorded(golden: Mapping[str, np.ndarray], task: Task) -> float:
    """What the golden file has, or nan; a task's noise is the largest of its seeds."""
    found = [golden.get(_key(task, seed), np.float32(np.nan)) for seed in SEEDS]
    return float(max(found))


def widened(
    golden: Mapping[str, np.ndarray], results: Sequence[Result]
) -> dict[str, np.ndarray]:
    """The golden file with what was just measured.

    Processors round differently, so the larger of two measurements stays.
    """
    arrays = dict(golden)
    for result in results:
        for seed, noise in zip(SEEDS, result.data, strict=True):
            key = _key(CASES[result.case], seed)
            arrays[key] = np.fmax(arrays.get(key, np.nan), np.float32(noise))
    return arrays


def run(task: Task, device: str) -> Result:
    """Measures a task, and holds the golden file's noise against it."""
    found = [measure(task, seed, device) for seed in SEEDS]
    before = recorded(file.load(), task)
    outdated = not max(found) <= before * FACTOR
    where = f"{task.name}: torch's noise is {max(found):.2g}, recorded {before:.2g}"
    return Result(
        task.name,
        1,
        {"noise": int(outdated)},
        where if outdated else "",
        data=found,
        figures={"distance of final losses": max(found)},
    )


def _key(task: Task, seed: int) -> str:
    return f"training/{task.name}/{seed}/spread/noise"
