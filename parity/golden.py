"""torch's results in files, so that jamp can be checked without torch.

`golden.npz` has what the parts' `golden` functions return. The tests in `tests/torch/`
read it; they import no module whose name ends in `_torch`.
"""

import pathlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np

from . import behaviors, edges, ops
from .result import Result

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
      write: whether the file is replaced first. What `spread` measured is kept, and
        results of functions that agree.

    Returns:
      What differs, in words.
    """
    old, made = load(), pack(results)
    for part in (ops, edges):
        made |= part.confirmed(old, made)
    if write:
        spread = {name: value for name, value in old.items() if "/spread/" in name}
        save(spread | made)
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
        and not (
            name in committed
            and name in made
            and committed[name].dtype == made[name].dtype  # or records do not compare
            and _equal(committed[name], made[name])
        )
    )


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether arrays of one dtype are equal, or have the same bits, as nan may have."""
    return np.array_equal(x, y) or (x.shape == y.shape and x.tobytes() == y.tobytes())


def load() -> dict[str, np.ndarray]:
    with np.load(PATH) as file:
        return dict(file)


def save(arrays: Mapping[str, Any]) -> None:
    np.savez_compressed(PATH, **arrays)
