"""The record of a run, as bits, and how two runs are compared."""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from .cases import Case

SMALLEST_NORMAL = np.float32(2.0**-126)


class Trajectory(NamedTuple):
    """One run of a case: the state after every step."""

    scale: np.ndarray  # uint32 [steps]: bits of the float32 scale
    tracker: np.ndarray  # int32 [steps]: growth tracker
    skipped: np.ndarray  # bool [steps, n_optimizers]
    params: np.ndarray  # uint32 [steps, n_optimizers, SIZE]: bits of the parameters


class Mismatch(Exception):
    """Two runs that should be equal differ, or a stream left its range."""


def trajectory(scale: Any, tracker: Any, skipped: Any, params: Any) -> Trajectory:
    """Turns the float32 results of a run into bits."""
    return Trajectory(
        bits(scale),
        np.asarray(tracker, np.int32),
        np.asarray(skipped, np.bool_),
        bits(params),
    )


def bits(values: Any) -> np.ndarray:
    """The bits of float32 values; all nans have the same bits.

    Only a disabled scaler lets a nan reach the parameters, and its sign and payload
    depend on the processor.
    """
    values = np.asarray(values, np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def floats(scale: np.ndarray) -> np.ndarray:
    """The float32 values of scale bits."""
    return scale.view(np.float32)


class Comparison(NamedTuple):
    """torch's run of a case beside jamp's."""

    case: Case
    path: str  # which part of jamp ran it
    values: int  # how many values were compared
    mismatches: dict[str, int]  # how many differ, by field
    where: str  # the first difference in words; empty if there is none


def compare(case: Case, path: str, torch: Trajectory, jamp: Trajectory) -> Comparison:
    """Compares every value of two runs."""
    differ = {
        name: getattr(torch, name) != getattr(jamp, name) for name in torch._fields
    }
    where = ""
    if any(map(np.any, differ.values())):
        first = {n: tuple(np.argwhere(d)[0]) for n, d in differ.items() if d.any()}
        name = min(first, key=lambda name: first[name][0])
        here, there = (_shown(getattr(run, name)[first[name]]) for run in (jamp, torch))
        where = (
            f"{case.name}, {path}, step {first[name][0]}: {name} is {here}, torch has "
            f"{there}"
        )
    return Comparison(
        case,
        path,
        sum(field.size for field in torch),
        {name: int(np.count_nonzero(d)) for name, d in differ.items()},
        where,
    )


def _shown(value: Any) -> str:
    """A value in words; unsigned integers are the bits of float32 values."""
    is_bits = value.dtype == np.uint32
    return f"{value.view(np.float32):.9g}" if is_bits else f"{value}"


def require_normal_scales(case: Case, run: Trajectory) -> None:
    """Raises Mismatch if torch's scale left float32's normal range.

    Below 2**-126 jamp's scale stops and torch's keeps falling, so such a stream shows
    nothing. Choose another seed or chance of overflow.
    """
    if not np.all(floats(run.scale) >= SMALLEST_NORMAL):
        step = int(np.argmin(floats(run.scale) >= SMALLEST_NORMAL))
        raise Mismatch(
            f"{case.name}: torch's scale falls below 2**-126 at step {step}; the case "
            "needs another seed or a smaller chance of overflow."
        )


def digest(*arrays: np.ndarray) -> np.ndarray:
    """SHA-256 of arrays of fixed-size numbers, little-endian: uint8 [32]."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return np.frombuffer(sha.digest(), np.uint8)
