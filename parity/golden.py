"""torch's results in one file, so that jamp can be checked without torch."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .cases import CASES, Case
from .trajectory import Trajectory, digest

PATH = pathlib.Path(__file__).with_name("golden.npz")


def pack(
    runs: Sequence[Trajectory], long_run: Sequence[np.ndarray], torch_version: str
) -> dict[str, np.ndarray]:
    """The arrays of the golden file, the runs of `CASES` laid end to end.

    Parameters and the long run are there as digests, the other fields in full.
    """
    return {
        "names": np.array([case.name for case in CASES]),
        "scale": np.concatenate([run.scale for run in runs]),
        "tracker": np.concatenate([run.tracker.astype(np.uint16) for run in runs]),
        "skipped": np.packbits(np.concatenate([run.skipped.ravel() for run in runs])),
        "params": np.stack([digest(run.params) for run in runs]),
        "long_run": digest(*long_run),
        "torch_version": np.array(torch_version),
    }


def differences(
    committed: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> list[str]:
    """Names of the arrays that differ; another version of torch is no difference."""
    return [
        name
        for name in made
        if name != "torch_version"
        and not (name in committed and np.array_equal(committed[name], made[name]))
    ]


def load() -> dict[str, np.ndarray]:
    """The committed file."""
    with np.load(PATH) as file:
        return dict(file)


def save(arrays: Mapping[str, Any]) -> None:
    """Replaces the committed file."""
    np.savez_compressed(PATH, **arrays)


def expected(golden: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """What torch left behind, by name of the case.

    Raises:
      ValueError: the file was made for other cases.
    """
    if list(golden["names"]) != [case.name for case in CASES]:
        raise ValueError(
            "parity/golden.npz was made for other cases; run "
            "`python -m parity --write-golden` where torch is installed."
        )
    skipped = np.unpackbits(golden["skipped"]).astype(np.bool_)
    steps = np.cumsum([0] + [case.steps for case in CASES])
    flags = np.cumsum([0] + [case.steps * case.n_optimizers for case in CASES])
    return {
        case.name: {
            "scale": golden["scale"][slice(*of_steps)],
            "tracker": golden["tracker"][slice(*of_steps)],
            "skipped": skipped[slice(*of_flags)].reshape(-1, case.n_optimizers),
            "params": params,
        }
        for case, of_steps, of_flags, params in zip(
            CASES,
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
