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


def _of_this_machine(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Runs to compare with, and versions: each machine has others."""
    return True


def _equal(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Whether arrays of one dtype are equal, or have the same bits, as nan may have."""
    if committed.dtype != made.dtype or committed.shape != made.shape:
        return False
    return np.array_equal(committed, made) or committed.tobytes() == made.tobytes()


# How the arrays of a part are compared, by the first part of their names.
AGREE = {
    "behavior": behaviors.agree,
    "edges": edges.agree,
    "ops": ops.agree,
    "torch_version": _of_this_machine,
    "torchao_version": _of_this_machine,
    "training": _of_this_machine,
}


def agree(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Whether live torch gives what the file has, as far as rounding lets it."""
    return AGREE.get(name.partition("/")[0], _equal)(name, committed, made)


def check(
    results: Mapping[ModuleType, Sequence[Result]], write: bool = False
) -> list[str]:
    """Compares the golden file with what live torch has just given.

    Args:
      results: of the parts; with `write`, of all parts but `spread`.
      write: whether the file is replaced first. What `spread` measured is kept, and
        results of functions that agree.

    Returns:
      The names of the arrays that differ.
    """
    made = pack(results)
    if write:
        old = load()
        kept = {
            name: value
            for name, value in old.items()
            if name.endswith("/spread/noise")
            or (name in made and agree(name, value, made[name]))
        }
        save(made | kept)
    return differences(load(), made)


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
    """Names of the arrays that differ.

    Of the parts that made arrays, the file may not have others, except what `spread`
    measured.
    """
    parts = {name.partition("/")[0] for name in made}
    own = {name for name in committed if name.partition("/")[0] in parts}
    return sorted(
        name
        for name in own | made.keys()
        if not name.endswith("/spread/noise")
        and not (
            name in committed
            and name in made
            and agree(name, committed[name], made[name])
        )
    )


def load() -> dict[str, np.ndarray]:
    with np.load(PATH) as file:
        return dict(file)


def save(arrays: Mapping[str, Any]) -> None:
    np.savez_compressed(PATH, **arrays)
