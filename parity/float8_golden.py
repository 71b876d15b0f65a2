"""A file of torchao's float8 results, to check jamp without torch.

For casts the file has digests of each array's float8 numbers and inverse scales. For
products it has the results, where no machine rounds a sum.
"""

import pathlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version

import numpy as np

from . import float8
from .result import Result

PATH = pathlib.Path(__file__).with_name("golden_float8.npz")
VERSION = "torchao_version"


def pack(results: Iterable[Result]) -> dict[str, np.ndarray]:
    """The arrays, by case and by content."""
    made = {VERSION: np.array(version("torchao").split("+")[0])}
    for result in results:
        made |= float8.golden_of(result)
    return made


def write_golden(results: Iterable[Result]) -> None:
    """Replaces the committed file."""
    arrays: Mapping[str, np.ndarray] = pack(results)
    np.savez_compressed(PATH, **arrays)  # type: ignore[arg-type]


def load() -> dict[str, np.ndarray]:
    """The committed file."""
    with np.load(PATH) as file:
        return dict(file)


def differences(results: Iterable[Result]) -> list[str]:
    """The arrays that the committed file lacks, has in excess, or has different."""
    made, committed = pack(results), load()
    names = (made.keys() | committed.keys()) - {VERSION}
    return sorted(
        name
        for name in names
        if name not in made
        or name not in committed
        or not np.array_equal(made[name], committed[name])
    )
