"""Whole training runs in float16, with the same weights and batches on both sides.

`training_data` defines the tasks, and `training_torch` and `training_jamp` the models.
Both sides use autocast in float16 and a scaler with a short growth interval, so that
the scale finds the edge of float16 and stays there. Each task runs with three seeds.
Both of jamp's scalers replay the steps that torch skipped: scale and tracker must be
the same at each step, bit for bit.

jamp's distance from torch is compared with torch's distance from itself, which `spread`
measures: on a CPU from the golden file, elsewhere live. The final loss is the mean of
the last 50 steps.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import devices, spread
from .cases import SIZE, Case
from .result import Result
from .training_data import (
    GROWTH_INTERVAL,
    SEEDS,
    STEPS,
    TASKS,
    Run,
    Task,
    Variant,
)
from .trajectory import bits

TITLE = "Training runs"
CASES = TASKS

SKIPS_APART = 2  # by how many skipped steps two runs may differ
NOISE = (
    2.0  # how far from torch's a final loss may be, in torch's distances from itself
)


class Trained(NamedTuple):
    """One seed of a task.

    Attributes:
      torch: torch's run.
      jamp: jamp's run.
      replayed: how many of jamp's scales and trackers differ when its scalers replay
        torch's skipped steps.
    """

    torch: Run
    jamp: Run
    replayed: int

    @property
    def loss_apart(self) -> float:
        """The distance of jamp's final loss from torch's."""
        return abs(self.jamp.final_loss - self.torch.final_loss)

    @property
    def skips_apart(self) -> int:
        """By how many skipped steps jamp differs from torch, over all optimizers."""
        skips = [run.skipped.sum(0) for run in (self.torch, self.jamp)]
        return int(np.abs(skips[0] - skips[1]).max())


def replay(run: Run) -> int:
    """Replays torch's overflows with jamp's scalers and counts what differs."""
    from . import jamp_side

    steps, n_optimizers = run.skipped.shape
    case = Case(
        "replay",
        "replay",
        growth_interval=GROWTH_INTERVAL,
        steps=steps,
        n_optimizers=n_optimizers,
    )
    base = np.ones((steps, n_optimizers, SIZE), np.float32)
    gradients = base, np.where(run.skipped[..., None], np.inf, 0 * base)
    found = [jamp_side.run_nnx(case, gradients=gradients)]
    if jamp_side.fits_optax(case):
        found.append(jamp_side.run_optax(case, gradients=gradients))
    return sum(
        int(np.count_nonzero(differ))
        for jamp in found
        for differ in (
            jamp.scale != bits(run.scale),
            jamp.tracker != run.tracker,
            jamp.skipped != run.skipped,
        )
    )


def run(task: Task, device: str) -> Result:
    from . import golden, training_jamp, training_torch

    trained = []
    for seed in SEEDS:
        torch = training_torch.run(task, seed, Variant(), devices.of_torch(device))
        trained.append(Trained(torch, training_jamp.run(task, seed), replay(torch)))
    if device == devices.CPU:
        noise = spread.recorded(golden.load(), task)
    else:
        noise = max(spread.measure(task, seed, device) for seed in SEEDS)
    return compare(task, trained, noise)


def compare(task: Task, trained: Sequence[Trained], noise: float) -> Result:
    """Compares jamp's distance from torch with torch's own, which is the noise."""
    n_flags = trained[0].jamp.skipped.shape[1]
    replays = 1 if n_flags > 1 else 2
    differ = {
        "replayed steps": [seed.replayed for seed in trained],
        "number of skips": [int(s.skips_apart > SKIPS_APART) for s in trained],
        "final loss": [int(not s.loss_apart <= NOISE * noise) for s in trained],
    }
    where = [
        f"seed {seed}: {name}"
        for name, counts in differ.items()
        for seed, count in zip(SEEDS, counts, strict=True)
        if count
    ]
    return Result(
        task.name,
        len(trained) * (replays * STEPS * (2 + n_flags) + n_flags + 1),
        {name: sum(counts) for name, counts in differ.items()},
        f"{task.name}: {', '.join(where)}" if where else "",
        data=list(trained),
        figures={
            "skips in torch": ", ".join(_skips(seed.torch) for seed in trained),
            "in jamp": ", ".join(_skips(seed.jamp) for seed in trained),
            "final losses apart": max(seed.loss_apart for seed in trained),
            "torch's from itself": noise,
        },
    )


def _skips(run: Run) -> str:
    return "+".join(map(str, run.skipped.sum(0)))


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's runs, for jamp's scalers to replay and to compare losses with."""
    arrays = {}
    for result in results:
        for seed, trained in zip(SEEDS, result.data, strict=True):
            run = trained.torch
            for field in Run._fields:
                name = f"training/{result.case}/{seed}/{field}"
                arrays[name] = getattr(run, field)
    return arrays


def recorded(golden: Mapping[str, np.ndarray], task: Task, seed: int) -> Run:
    """torch's run in the golden file."""
    prefix = f"training/{task.name}/{seed}"
    return Run(*(golden[f"{prefix}/{field}"] for field in Run._fields))
