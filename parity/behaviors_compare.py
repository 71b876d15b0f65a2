"""torch's run of a behavior: how it is compared, and how the golden file stores it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .behaviors_table import (
    LEAVES,
    STEPS,
    TOLERANCE,
    Behavior,
    Record,
    Saved,
)
from .trajectory import bits

PREFIX = "behavior/"
GOLDEN_ROWS = range(15, STEPS, 16)  # steps after which the file has the parameters


class Reference(NamedTuple):
    """torch's run of a behavior."""

    record: Record  # parameters only after the steps in `rows`
    rows: Sequence[int] = range(STEPS)
    saved: Saved | None = None  # at the step HANDOVER

    def beside(self, found: Record) -> tuple[list[int], Record, Record]:
        """The parts that can be compared with a run that may have begun later.

        Returns:
          The steps whose parameters both runs have, this run and the other one.
        """
        start = STEPS - len(found.scale)
        rows = [row for row in self.rows if row >= start]
        mine = self.record.params[len(self.rows) - len(rows) :]
        theirs = found.params[[row - start for row in rows]]
        return (
            rows,
            Record(*(a[start:] for a in self.record[:-1]), params=mine),
            found._replace(params=theirs),
        )


def differences(
    behavior: Behavior, torch: Reference, found: Record
) -> tuple[dict[str, np.ndarray], str]:
    """Which values of two runs differ, by field, and the first difference in words."""
    rows, expected, found = torch.beside(found)
    of_loss = max(behavior.tolerance, TOLERANCE) * np.abs(expected.loss)
    limits = np.zeros_like(expected.params)
    for part, _ in LEAVES.values():
        largest = np.abs(expected.params[..., part]).max(-1, keepdims=True)
        finite = np.where(np.isfinite(largest), largest, 0)
        limits[..., part] = behavior.tolerance * finite
    differ = {
        "scale": _apart(expected.scale, found.scale),
        "tracker": expected.tracker != found.tracker,
        "skipped": expected.skipped != found.skipped,
        "loss": _apart(expected.loss, found.loss, of_loss),
        "params": _apart(expected.params, found.params, limits),
    }
    firsts = [
        (steps[np.argwhere(wrong)[0][0]], name)
        for name, wrong in differ.items()
        for steps in [rows if name == "params" else range(STEPS - len(wrong), STEPS)]
        if wrong.any()
    ]
    where = "step {}: {} differs".format(*min(firsts)) if firsts else ""
    return differ, where


def _apart(expected: np.ndarray, found: np.ndarray, limit: Any = 0.0) -> np.ndarray:
    """Where the bits of float32 values differ and, if finite, by more than a limit."""
    with np.errstate(invalid="ignore"):  # inf - inf
        close = np.abs(expected - found) <= limit
    close &= np.isfinite(expected) & np.isfinite(found)
    return (bits(expected) != bits(found)) & ~close


def share_equal(torch: Reference, found: Record) -> float:
    """The share of the parameters that are equal bit for bit."""
    _, expected, found = torch.beside(found)
    return float(np.mean(bits(expected.params) == bits(found.params)))


def pack(behavior: Behavior, torch: Reference) -> dict[str, np.ndarray]:
    """torch's run as arrays of the golden file."""
    record, saved = torch.record, torch.saved
    arrays = record._asdict() | {
        "scale": bits(record.scale),
        "tracker": record.tracker.astype(np.uint16),
        "loss": bits(record.loss),
        "params": bits(record.params[[torch.rows.index(row) for row in GOLDEN_ROWS]]),
    }
    if saved is not None:
        arrays |= {f"saved_{k}": np.array(v) for k, v in saved._asdict().items()}
    return {f"{PREFIX}{behavior.name}/{name}": a for name, a in arrays.items()}


def unpack(behavior: Behavior, golden: Mapping[str, np.ndarray]) -> Reference:
    """torch's run from a golden file.

    Raises:
      KeyError: the file lacks it.
    """
    start = f"{PREFIX}{behavior.name}/"
    arrays = {name: golden[f"{start}{name}"] for name in Record._fields}
    for name in ("scale", "loss", "params"):
        arrays[name] = arrays[name].view(np.float32)
    record = Record(**arrays)._replace(tracker=arrays["tracker"].astype(np.int32))
    saved = None
    if behavior.resumed:
        scaler, *arrays = (golden[f"{start}saved_{name}"] for name in Saved._fields)
        saved = Saved(str(scaler), *arrays)
    return Reference(record, GOLDEN_ROWS, saved)
