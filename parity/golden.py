"""torch's results in files, so that jamp can be checked without torch.

`golden.npz` has what the parts' `golden` functions return. The tests of this file, in
`tests/torch/`, import only this module from the suite; the names at its end are for
them.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np

from . import (
    behaviors,
    cases,
    float8,
    float8_cases,
    float8_jamp,
    jamp_side,
    ops,
    ops_jamp,
    spread,
    training,
    training_data,
    training_jamp,
)
from .cases import CASES, Case
from .result import Result
from .trajectory import Trajectory, digest

PATH = pathlib.Path(__file__).with_name("golden.npz")


# Their rounding depends on the machine: runs to compare with, and arrays that are
# compared in another way.
ELSEWHERE = ("training/", "behavior/", "torch_version", "torchao_version")


def check(
    results: Mapping[ModuleType, Sequence[Result]], write: bool = False
) -> list[str]:
    """Compares the golden file with what live torch has just given.

    Args:
      results: of the parts; with `write`, of all parts but `spread`.
      write: whether the file is replaced first. What `spread` measured is kept.

    Returns:
      What differs, in words.
    """
    made = pack(results)
    if write:
        save(spread.kept(load()) | made)
    committed = load()
    return differences(committed, made) + behaviors.stale(committed, made)


def pack(results: Mapping[ModuleType, Sequence[Result]]) -> dict[str, np.ndarray]:
    """The arrays of the golden file: the results of each part's `golden`, if any."""
    arrays = {"torch_version": np.array(version("torch").split("+")[0])}
    for part, found in results.items():
        if hasattr(part, "golden"):
            arrays |= part.golden(found)
    return arrays


def differences(
    committed: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> list[str]:
    """Names of the arrays that differ, except those that depend on the machine.

    Of the parts that made arrays, the file may not have others.
    """
    parts = {name.partition("/")[0] for name in made}
    own = {name for name in committed if name.partition("/")[0] in parts}
    return sorted(
        name
        for name in own | made.keys()
        if not name.startswith(ELSEWHERE)
        and not np.array_equal(committed.get(name, ()), made.get(name, ()))
    )


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


# For the tests: the cases of each part, and jamp's side. `CASES` are those of `scale`.
FIRST_OF_KIND, LONG_RUN = cases.FIRST_OF_KIND, cases.LONG_RUN
overflows, fits_optax = cases.overflows, jamp_side.fits_optax
run_nnx, run_optax = jamp_side.run_nnx, jamp_side.run_optax
run_scale = jamp_side.run_scale

BEHAVIORS, LIVE = behaviors.CASES, behaviors.LIVE
compare_behavior = behaviors.compare_with

FLOAT8_CASTS, FLOAT8_PRODUCTS = float8_cases.CASTS, float8_cases.PRODUCTS
FLOAT8_PATHS = float8_jamp.PATHS
float8_casts, float8_product = float8_jamp.casts, float8_jamp.product
FLOAT8_RESULTS = float8.RESULTS

OPS, recorded_dtypes, dtypes_of_op = ops.CASES, ops.recorded, ops_jamp.dtypes

TASKS, SEEDS, TRAINING_STEPS = training.CASES, training_data.SEEDS, training_data.STEPS
NOISE, SKIPS_APART, Trained = training.NOISE, training.SKIPS_APART, training.Trained
recorded_spread, noise = spread.recorded, spread.noise
recorded, replay, train = training.recorded, training.replay, training_jamp.run
