"""The loss scale and an optimizer on streams of finite, inf, -inf and nan gradients.

The same streams (`cases.py`) run through torch's own `GradScaler` and through jamp.
After every step the bits of the scale, the growth tracker, the skipped flags and the
parameters are compared. A run of a million steps compares the scale and the tracker.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import devices, jamp_side
from .cases import CASES as STREAMS
from .cases import FIRST_OF_KIND, LONG_RUN, Case, overflows
from .result import Result
from .trajectory import Trajectory, bits, compare, digest

TITLE = "Loss scale on streams of gradients"
LONG = "long run"
CASES = {LONG: LONG_RUN} | {case.name: case for case in STREAMS}


class Streamed(NamedTuple):
    """torch's run, for the golden file."""

    torch: Trajectory


class LongRun(NamedTuple):
    """torch's scales and trackers in the long run."""

    torch: tuple[np.ndarray, np.ndarray]


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
        data=Streamed(expected),
        row=case.kind,
        figures={"in jamp": ", ".join(runs)},
    )


def _long_run(device: str) -> Result:
    from . import torch_side

    found_inf = overflows(LONG_RUN)
    if device != devices.CPU:  # where each step of torch waits for the GPU
        found_inf = found_inf[:100_000]
    torch = torch_side.run_scale(LONG_RUN, found_inf, devices.of_torch(device))
    jamp = jamp_side.run_scale(LONG_RUN, found_inf)
    differ = {
        "scale": bits(torch[0]) != bits(jamp[0]),
        "tracker": torch[1] != jamp[1],
    }
    first = [f"{LONG}, step {np.argmax(d)}: {n}" for n, d in differ.items() if d.any()]
    return Result(
        LONG,
        2 * len(found_inf),
        {name: int(np.count_nonzero(d)) for name, d in differ.items()},
        "; ".join(first),
        data=LongRun(torch),
        figures={"in jamp": "the scale alone"},
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
