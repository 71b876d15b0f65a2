"""Autocast, op by op: dtypes, values and gradients against torch's lists for CUDA.

Each op that JAX has runs in a float16 region and in a bfloat16 region, in jit and
jitted inside the region, and in float16 also outside jit. Its inputs are all float32,
or all of the region's dtype (`half`). If it has several inputs and JAX accepts mixed
dtypes, it also runs with the first input in one of the two and the rest in the other.
The table has the dtypes of torch's results in this order, once if they are the same.
Gradients are taken outside the region, with the same random cotangents on both sides.

Without a GPU torch's results come from the CPU under CUDA's lists. `test_ops.py` shows
that they have the dtypes of fake tensors on CUDA. The golden file has these results, so
that jamp can be compared with them on a machine without torch.

Values may be 8 units in the last place (ULPs) apart, in the narrower dtype of the two
results, and where torch's are rounded to half precision, jamp's must be too. A star
says that ULPs are those of the array's largest element, since small elements remain
where large terms cancel. `NO_COUNTERPART` in `ops_table.py` has the ops of torch's
lists that JAX lacks, and why.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast.ops import Kind

from . import devices, ops_jamp
from .ops_table import DIFFERENCES, HALVES, OPS, UNLISTED_DIFFERENCES, Op, Side
from .result import Result

TITLE = "Autocast, op by op"
PREFIX = "ops/"

# An op rounds a few times, and each library in its own order; three bits cover that.
# A value that passed through half precision where torch's did not is thousands away.
MOST_ULPS = 8

FIELDS = ("dtype", "value", "gradient dtype", "gradient value")


class Case(NamedTuple):
    """An op in a region with one dtype."""

    title: str
    half: str

    @property
    def name(self) -> str:
        return f"{self.title}, {self.half}"

    @property
    def op(self) -> Op:
        return OPS[self.title]


CASES = {case.name: case for title in OPS for case in (Case(title, h) for h in HALVES)}


def ulps(x: np.ndarray, y: np.ndarray, dtype: Any, cancels: bool = False) -> Any:
    """The distances of two arrays' elements in units in the last place of a dtype.

    Args:
      cancels: whether to count in units of the largest element of `x`, not of each.

    Raises:
      ValueError: the shapes differ, or an element is not finite.
    """
    x, y = (array.astype(dtype) for array in (x, y))
    wide = [array.astype(np.float64) for array in (x, y)]
    if x.shape != y.shape or not np.isfinite(wide).all():
        raise ValueError(f"not comparable: {x}, {y}")
    if cancels:
        info = jnp.finfo(dtype)
        largest = max(np.abs(wide[0]).max(), float(info.smallest_normal))
        unit = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
        return np.abs(wide[0] - wide[1]) / unit
    return np.abs(_ordered(x) - _ordered(y))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Integers that count the floating-point numbers from zero to x."""
    integer = np.dtype(f"int{8 * x.itemsize}")
    bits = x.view(integer).astype(np.int64)
    return np.where(bits < 0, np.iinfo(integer).min - bits, bits)


def _narrowest(arrays: Sequence[np.ndarray]) -> np.dtype:
    return min((x.dtype for x in arrays), key=lambda dtype: dtype.itemsize)


class _Comparison:
    """Counts what was compared, and what differs."""

    def __init__(self, op: Op):
        self.op = op
        self.most = MOST_ULPS * op.condition
        self.compared = 0
        self.mismatches: dict[str, int] = dict.fromkeys(FIELDS, 0)
        self.where = ""
        self.ulps = {"value": 0.0, "gradient value": 0.0}

    def _count(self, field: str, compared: int, wrong: int, where: str) -> None:
        self.compared += compared
        self.mismatches[field] += wrong
        if wrong and not self.where:
            self.where = where

    def dtypes(self, field: str, torch: list[str], jamp: list[str], at: str) -> None:
        wrong = sum(x != y for x, y in zip(torch, jamp, strict=True))
        where = f"{at}: {field} is {', '.join(jamp)}, torch has {', '.join(torch)}"
        self._count(field, len(torch), wrong, where)

    def values(self, torch: Side, jamp: Side, at: str) -> None:
        """Compares values in the narrower dtype of the two sides.

        The float32 gradient of a half-precision result was computed in half precision.
        """
        if self.op.dtypes_only:
            return
        narrow = _narrowest(torch.results + jamp.results)
        cancels = bool(self.op.cancels)
        for x, y in zip(torch.results, jamp.results, strict=True):
            self._values("value", x, y, narrow, cancels, at)
        if not jamp.grads:
            return
        cancels |= bool(self.op.grad_cancels)
        for x, y in zip(torch.grads, jamp.grads, strict=True):
            dtype = min(narrow, _narrowest([x, y]), key=lambda dtype: dtype.itemsize)
            self._values("gradient value", x, y, dtype, cancels, at)

    def _values(self, field: str, x: Any, y: Any, dtype: Any, cancels: bool, at: str):
        distances = ulps(x, y, dtype, cancels)
        largest, name = float(distances.max()), np.dtype(dtype).name
        self.ulps[field] = max(self.ulps[field], largest)
        wrong = int(np.count_nonzero(distances > self.most))
        where = f"{at}: {field} is {largest:.0f} ULPs of {name} from torch's"
        if not wrong and not _unrounded(x, dtype):
            wrong = _unrounded(y, dtype)
            where = f"{at}: {field} is not rounded to {name}, torch's is"
        self._count(field, x.size, wrong, where)


def _unrounded(x: np.ndarray, dtype: Any) -> int:
    """How many elements a dtype cannot hold exactly."""
    return int(np.count_nonzero(x.astype(dtype).astype(x.dtype) != x))


def _names(arrays: Sequence[np.ndarray]) -> list[str]:
    return [x.dtype.name for x in arrays]


def run(case: Case, device: str) -> Result:
    return run_together([case], device)[0]


def program(case: Case) -> str:
    """Any ops in regions of one dtype may run in one program."""
    return case.half


def run_together(cases: Sequence[Case], device: str) -> list[Result]:
    """`run` for several cases, with one program of jamp's for all of them."""
    from . import (
        ops_torch,
        torch_autocast,
    )  # here, so that the golden file needs no torch

    kinds, place = torch_autocast.lists(), devices.of_torch(device)
    precise = contextlib.nullcontext()
    if device != devices.CPU:  # where JAX would multiply float32 in TensorFloat-32
        precise = jax.default_matmul_precision("highest")
    with precise:
        found = ops_jamp.run([(case.op, case.half) for case in cases])
    return [
        compared(
            case,
            ops_torch.run(case.op, case.half, place),
            jamp,
            kinds.get(case.op.name),
        )
        for case, jamp in zip(cases, found, strict=True)
    ]


def compare_with(case: Case, golden: Mapping[str, np.ndarray]) -> Result:
    """Runs an op in jamp and compares it with a golden file.

    Raises:
      KeyError: the file lacks the case.
    """
    return compare(case, unpack(golden[f"{PREFIX}{case.name}"]))


def compare(case: Case, torch: Mapping[str, Side]) -> Result:
    """Runs an op in jamp and compares every value with torch's."""
    (jamp,) = ops_jamp.run([(case.op, case.half)])
    return compared(case, torch, jamp)


def compared(
    case: Case,
    torch: Mapping[str, Side],
    jamp: Mapping[str, Mapping[str, Side]],
    kind: Kind | None = None,
) -> Result:
    """Compares every value of an op in jamp with torch's.

    Args:
      case: the op and the region's dtype.
      torch: torch's side, by the inputs.
      jamp: jamp's sides, by the inputs and the path.
      kind: of torch's list that has the op, for the report.
    """
    comparison = _Comparison(case.op)
    dtypes: list[str] = []
    for name, side in torch.items():
        dtypes.append("/".join(_names(side.results)).replace(case.half, "half"))
        for path, y in jamp[name].items():
            at = f"{case.name}, inputs {name}, {path}"
            comparison.dtypes("dtype", _names(side.results), _names(y.results), at)
            if y.grads:
                comparison.dtypes(
                    "gradient dtype", _names(side.grads), _names(y.grads), at
                )
            comparison.values(side, y, at)
    stars = case.op.cancels, case.op.cancels or case.op.grad_cancels
    figures = {
        "torch's list": kind.value if kind else "none",
        "dtypes in torch": ", ".join(dtypes if len({*dtypes}) > 1 else dtypes[:1]),
        "ULPs of values": _class(comparison.ulps["value"], stars[0]),
        "of gradients": _class(comparison.ulps["gradient value"], stars[1]),
    }
    return Result(
        case.name,
        comparison.compared,
        comparison.mismatches,
        comparison.where,
        (DIFFERENCES | UNLISTED_DIFFERENCES).get(case.op.base, ""),
        torch,
        case.title,
        figures,
    )


def _class(distance: float, star: str) -> str:
    """A coarse bound, since the last bit depends on the processor."""
    bound = next((n for n in (1, 2, 4, MOST_ULPS) if distance <= n), None)
    text = f"> {MOST_ULPS}" if bound is None else f"{bound}"
    return text + "\\*" * bool(star)


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's results and gradients, for the golden file: a record for each case."""
    return {f"{PREFIX}{r.case}": pack(r.data) for r in results}


def pack(sides: Mapping[str, Side]) -> np.ndarray:
    """A record with a field for each array, named by the inputs and the part.

    bfloat16 is stored as its bits, since files of NumPy do not name it.
    """
    arrays = {
        f"{inputs}/{part}/{i}": x.view(np.uint16) if x.dtype == jnp.bfloat16 else x
        for inputs, side in sides.items()
        for part, those in side._asdict().items()
        for i, x in enumerate(those)
    }
    fields = [(name, x.dtype, x.shape) for name, x in arrays.items()]
    return np.array(tuple(arrays.values()), fields)


def unpack(record: np.ndarray) -> dict[str, Side]:
    """What `pack` was given."""
    sides: dict[str, Side] = {}
    for field in record.dtype.names or ():
        inputs, part, _ = field.rsplit("/", 2)
        side, x = sides.setdefault(inputs, Side([], [])), record[field]
        getattr(side, part).append(x.view(jnp.bfloat16) if x.dtype == np.uint16 else x)
    return sides


def agree(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Whether two records of torch's are the same, as far as the processor allows.

    Values need only agree as closely as jamp's must.
    """
    if committed.dtype != made.dtype:  # other inputs, dtypes or shapes
        return False
    comparison = _Comparison(CASES[name.removeprefix(PREFIX)].op)
    live = unpack(made)
    for inputs, side in unpack(committed).items():
        comparison.values(side, live[inputs], inputs)
    return not comparison.where
