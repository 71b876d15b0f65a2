"""Whole training runs in float16, with the same weights and batches on both sides.

`training_data` defines the tasks, and `training_torch` and `training_jamp` the models.
Both sides use autocast in float16 and a scaler with a short growth interval, so that
the scale finds the edge of float16 and stays there.

jamp's distance from torch is compared with torch's distance from itself, which `spread`
measures: on a CPU from the golden file, elsewhere live.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import devices, spread
from .cases import SIZE, Case
from .result import Result, table
from .spread import Spread
from .training_data import (
    GROWTH_INTERVAL,
    LAST,
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
      spread: how far torch's runs are apart.
      jamp: jamp's run.
      replayed: how many of jamp's scales and trackers differ when its scalers replay
        torch's skipped steps.
    """

    torch: Run
    spread: Spread
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

    kept, trained = golden.load(), []
    for seed in SEEDS:
        torch = training_torch.run(task, seed, Variant(), devices.of_torch(device))
        apart = (
            spread.recorded(kept, task, seed)
            if device == devices.CPU
            else spread.measure(task, seed, device)
        )
        jamp = training_jamp.run(task, seed)
        trained.append(Trained(torch, apart, jamp, replay(torch)))
    return compare(task, trained)


def compare(task: Task, trained: Sequence[Trained]) -> Result:
    """Compares jamp's distance from torch with torch's distance from itself.

    The noise of a task is the largest among its seeds.
    """
    noise = spread.noise([seed.spread for seed in trained])
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
    )


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's runs, for jamp's scalers to replay and to compare losses with."""
    arrays = {}
    for result in results:
        for seed, trained in zip(SEEDS, result.data, strict=True):
            run = trained.torch
            for field in ("loss", "scale", "tracker", "skipped"):
                name = f"training/{result.case}/{seed}/{field}"
                arrays[name] = getattr(run, field)
    return arrays


def recorded(golden: Mapping[str, np.ndarray], task: Task, seed: int) -> Run:
    """torch's run in the golden file, without its parameters."""
    fields = ("loss", "scale", "tracker", "skipped")
    prefix = f"training/{task.name}/{seed}"
    return Run(*(golden[f"{prefix}/{field}"] for field in fields), params={})


_SECTION = """\
Both sides train for {steps} steps with the same weights, batches and hyperparameters,
autocast in float16 and a scaler with a growth interval of {interval}, with {seeds}
seeds. torch uses CUDA's lists, also on the CPU. The MLP and the transformer are Linen
modules under `jamp.dynamic_loss_scale`; the CNN and the GAN are NNX modules under
`jamp.GradScaler`.

torch's distance from itself comes from {variants} runs that add the same numbers in
different orders. One variant reorders the rows of each batch and uses other kernels,
one adds a bias after its product has been rounded, and one does both. On a CPU the runs
are those of the golden file (`python -m parity --only spread` measures them again). The
final loss is the mean of the last {last} steps. Distances between parameters are norms,
relative to torch's. When both of jamp's scalers replay the steps that torch skipped,
scale and tracker are the same at each step, bit for bit, in {exact} of {runs} runs.

{table}

Skips are counted for each optimizer. "scales apart" is the largest distance between the
scales' base-2 logarithms."""


def section(results: Sequence[Result]) -> str:
    head = ["run", "seed", "skips: torch:", "torch, other orders:", "jamp:"]
    head += ["final loss: torch:", "jamp:", "apart:", "torch from itself:"]
    head += ["parameters apart:", "torch from itself:", "steps with equal scale:"]
    head += ["torch with itself:", "scales apart:", "as expected"]
    rows = []
    for result in results:
        noise = spread.noise([seed.spread for seed in result.data])
        for seed, trained in zip(SEEDS, result.data, strict=True):
            rows.append([result.case, str(seed), *_figures(trained, noise)])
    replays = [trained.replayed for result in results for trained in result.data]
    return _SECTION.format(
        steps=STEPS,
        interval=GROWTH_INTERVAL,
        seeds=len(SEEDS),
        variants=len(spread.VARIANTS),
        last=LAST,
        exact=sum(not count for count in replays),
        runs=len(replays),
        table=table(head, rows),
    )


def _figures(trained: Trained, noise: float) -> list[str]:
    first, apart = trained.torch, trained.spread
    ratios = np.abs(np.log2(first.scale) - np.log2(trained.jamp.scale))
    is_close = trained.loss_apart <= NOISE * noise  # False for a nan
    is_close &= trained.skips_apart <= SKIPS_APART and not trained.replayed
    return [
        _skips(first),
        ", ".join("+".join(map(str, skipped)) for skipped in apart.skipped),
        _skips(trained.jamp),
        f"{first.final_loss:.3f}",
        f"{trained.jamp.final_loss:.3f}",
        f"{trained.loss_apart:.1g}",
        f"{noise:.1g}",
        f"{spread.distance(first, trained.jamp):.1g}",
        f"{apart.params:.1g}",
        f"{spread.equal_scales(first, trained.jamp):.0%}",
        f"{apart.equal:.0%}",
        f"{ratios.max():.0f}",
        "yes" if is_close else "no",
    ]


def _skips(run: Run) -> str:
    return "+".join(map(str, run.skipped.sum(0)))
