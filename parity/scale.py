"""The loss scale alone: runs every case of `cases` through torch and jamp."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import devices, jamp_side
from .cases import CASES as STREAMS
from .cases import FIRST_OF_KIND, LONG_RUN, Case, overflows
from .result import Result, grouped, table
from .trajectory import Comparison, Trajectory, bits, compare, digest

TITLE = "Loss scale on streams of gradients"
LONG = "long run"
CASES = {LONG: LONG_RUN} | {case.name: case for case in STREAMS}

PANELS = {  # of the picture; title: name of the case
    "torch's defaults": "default: seed=4",
    "growth 1.1, backoff 0.7, interval 3": "factors: init_scale=1000.1, "
    "growth_factor=1.1, backoff_factor=0.7, growth_interval=3, seed=20",
    "growth 3.7, backoff 0.1, interval 1": "factors: init_scale=65536, "
    "growth_factor=3.7, backoff_factor=0.1, growth_interval=1, seed=20",
    "close above 2**-126": "small scale: init_scale=1.9983404e-38, "
    "growth_factor=1.1, backoff_factor=0.9, growth_interval=3, seed=43",
    "update(new_scale)": "update(new_scale): growth_interval=3, seed=60",
}


class Streamed(NamedTuple):
    comparisons: list[Comparison]
    torch: Trajectory
    jamp: Trajectory | None  # if the case is drawn


class LongRun(NamedTuple):
    """torch's and jamp's scales and trackers in the long run."""

    torch: tuple[np.ndarray, np.ndarray]
    jamp: tuple[np.ndarray, np.ndarray]


def run(case: Case, device: str) -> Result:
    from . import torch_side

    if case == LONG_RUN:
        return _long_run(device)
    expected = torch_side.run(case, devices.of_torch(device))
    runs = {}
    if case.kind != "factors" or case.growth_interval == 3:  # others take minutes
        runs["GradScaler, nnx.scan"] = jamp_side.run_nnx(case)
    if case in FIRST_OF_KIND:
        runs["GradScaler, step by step"] = jamp_side.run_nnx(case, step_by_step=True)
    if jamp_side.fits_optax(case):
        runs["dynamic_loss_scale, lax.scan"] = jamp_side.run_optax(case)
    comparisons = [compare(case, path, expected, found) for path, found in runs.items()]
    return Result(
        case.name,
        sum(item.values for item in comparisons),
        {
            field: sum(item.mismatches[field] for item in comparisons)
            for field in Trajectory._fields
        },
        next((item.where for item in comparisons if item.where), ""),
        data=Streamed(comparisons, expected, _drawn(case, runs)),
    )


def _drawn(case: Case, runs: Mapping[str, Trajectory]) -> Trajectory | None:
    return next(iter(runs.values())) if case.name in PANELS.values() else None


def _long_run(device: str) -> Result:
    from . import torch_side

    found_inf = overflows(LONG_RUN)
    if device != devices.CPU:  # where each step of torch waits for the GPU
        found_inf = found_inf[:100_000]
    data = LongRun(
        torch_side.run_scale(LONG_RUN, found_inf, devices.of_torch(device)),
        jamp_side.run_scale(LONG_RUN, found_inf),
    )
    differ = {
        "scale": bits(data.torch[0]) != bits(data.jamp[0]),
        "tracker": data.torch[1] != data.jamp[1],
    }
    first = [f"{LONG}, step {np.argmax(d)}: {n}" for n, d in differ.items() if d.any()]
    return Result(
        LONG,
        2 * len(found_inf),
        {name: int(np.count_nonzero(d)) for name, d in differ.items()},
        "; ".join(first),
        data=data,
    )


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's runs for the golden file, concatenated.

    Parameters and the long run are stored as digests, the other fields in full. A long
    run of fewer steps is left out.
    """
    runs = [r.data.torch for r in results if isinstance(r.data, Streamed)]
    (long,) = (r.data.torch for r in results if isinstance(r.data, LongRun))
    arrays = {"long_run": digest(*long)} if len(long[0]) == LONG_RUN.steps else {}
    return arrays | {
        "names": np.array([r.case for r in results if r.case != LONG]),
        "scale": np.concatenate([run.scale for run in runs]),
        "tracker": np.concatenate([run.tracker.astype(np.uint16) for run in runs]),
        "skipped": np.packbits(np.concatenate([run.skipped.ravel() for run in runs])),
        "params": np.stack([digest(run.params) for run in runs]),
    }


def expected(golden: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """What torch left behind, by name of the case.

    Raises:
      ValueError: the file was made for other cases.
    """
    if list(golden["names"]) != [case.name for case in STREAMS]:
        raise ValueError(
            "parity/golden.npz was made for other cases; run "
            "`python -m parity --write-golden` where torch is installed."
        )
    skipped = np.unpackbits(golden["skipped"]).astype(np.bool_)
    steps = np.cumsum([0] + [case.steps for case in STREAMS])
    flags = np.cumsum([0] + [case.steps * case.n_optimizers for case in STREAMS])
    return {
        case.name: {
            "scale": golden["scale"][slice(*of_steps)],
            "tracker": golden["tracker"][slice(*of_steps)],
            "skipped": skipped[slice(*of_flags)].reshape(-1, case.n_optimizers),
            "params": params,
        }
        for case, of_steps, of_flags, params in zip(
            STREAMS,
            itertools.pairwise(steps),
            itertools.pairwise(flags),
            golden["params"],
            strict=True,
        )
    }


def assert_equal(case: Case, run: Trajectory, torch: Mapping[str, np.ndarray]) -> None:
    """Raises AssertionError naming the first field and step that differ from torch."""
    found = {**run._asdict(), "params": digest(run.params)}
    for name, value in found.items():
        np.testing.assert_array_equal(value, torch[name], f"{case.name}: {name}")


_SECTION = """\
{cases} cases with {configurations} configurations and {steps:,} steps ran through
torch's own `GradScaler` and through jamp, with the same streams of finite, inf, -inf
and nan gradients. After every step the bits of the scale, the growth tracker, the
skipped flags and the parameters were compared. In a run of {long_steps:,} steps with
the scale alone, the scale and the tracker were compared. The cases are in `cases.py`; a
run is a case on one of jamp's sides.

{by_kind}

{by_path}

The long run: {long_run}."""


def section(results: Sequence[Result]) -> str:
    """Two tables: by kind of case, and by jamp's side."""
    streamed = [r.data for r in results if isinstance(r.data, Streamed)]
    comparisons = [item for data in streamed for item in data.comparisons]
    cases = [CASES[r.case] for r in results if r.case != LONG]
    long = [r for r in results if r.case == LONG]
    steps = {r.case: r.compared // 2 for r in long}
    rows = [
        [LONG, 1, steps[LONG], r.compared, sum(r.mismatches.values())] for r in long
    ]
    return _SECTION.format(
        cases=len(cases),
        steps=sum(case.steps for case in cases),
        configurations=len({case.configuration for case in cases}),
        long_steps=steps.get(LONG, 0),
        by_kind=_table("kind", grouped(comparisons, lambda c: c.case.kind), rows),
        by_path=_table("jamp's side", grouped(comparisons, lambda c: c.path), []),
        long_run="; ".join(_describe(*r.data.torch) for r in long) or "left out",
    )


def _table(of: str, groups: Mapping[str, list[Comparison]], last: list[Any]) -> str:
    """A row for each group; a case that ran on several paths counts once for each."""
    head = [of, "runs:", "steps:", "values compared:", "mismatches:"]
    rows = [
        [
            name,
            len(items),
            sum(item.case.steps for item in items),
            sum(item.values for item in items),
            sum(sum(item.mismatches.values()) for item in items),
        ]
        for name, items in groups.items()
    ]
    return table(head, rows + last)


def _describe(scales: np.ndarray, trackers: np.ndarray) -> str:
    ratio = scales[1:] / scales[:-1]
    return (
        f"growth factor {LONG_RUN.growth_factor}, backoff factor "
        f"{LONG_RUN.backoff_factor}, interval {LONG_RUN.growth_interval}; the scale "
        f"grew {np.count_nonzero(ratio > 1):,} times, backed off "
        f"{np.count_nonzero(ratio < 1):,} times, and ranged from "
        f"{scales.min():.3g} to {scales.max():.3g}"
    )
