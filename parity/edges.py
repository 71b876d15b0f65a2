"""Values and gradients over the whole range of half precision.

Each function of `edges_table` runs on half-precision inputs in a region of their dtype,
in jit and jitted inside the region, with a cotangent of 1. Inputs of both signs cover
the range of the dtype. What is right is what the same function gives in float64,
without jamp. How far torch is from it says what half precision can do.

The golden file has torch's results, so that jamp can be compared on a machine without
torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import devices, ops_jamp
from .edges_table import EDGES, SHAPE, Edge
from .ops import pack, unpack
from .ops_table import HALVES, Side
from .result import Result, grouped, table

TITLE = "Values and gradients over the range of half precision"
PREFIX = "edges/"
TOGETHER = len(EDGES)  # how many cases share a program

# An error of rounding is below a hundredth, also in bfloat16, and so small a number
# that half precision loses its digits need not be near.
RELATIVE, ABSOLUTE = 0.02, 1e-5
# How much farther away than torch's a number may be.
TIMES_TORCH = 4.0
FIELDS = ("value", "gradient")
INPUTS = "half"
_ROWS = {edge.title: edge for edge in EDGES}


class Case(NamedTuple):
    """A function in a region with one dtype."""

    title: str
    half: str

    @property
    def name(self) -> str:
        return f"{self.title}, {self.half}"

    @property
    def edge(self) -> Edge:
        return _ROWS[self.title]


CASES = {case.name: case for half in HALVES for case in (Case(t, half) for t in _ROWS)}


class Found(NamedTuple):
    """What a case found, for the section and the golden file.

    Attributes:
      case: the function and the region's dtype.
      torch: torch's results and gradients.
      errors: the largest errors of torch's and of jamp's numbers, by library. They are
        relative, and 0 where a number is not wrong by more than `ABSOLUTE`.
    """

    case: Case
    torch: Side
    errors: Mapping[str, float]


def program(case: Case) -> str:
    """All functions in regions of one dtype run in one program."""
    return case.half


def run(case: Case, device: str) -> Result:
    return run_together([case], device)[0]


def run_together(cases: Sequence[Case], device: str) -> list[Result]:
    """`run` for several cases, with one program of jamp's for all of them."""
    from . import ops_torch  # here, so that the golden file needs no torch

    place = devices.of_torch(device)
    return compare(cases, [ops_torch.run(c.edge, c.half, place)[INPUTS] for c in cases])


def compare_with(
    cases: Sequence[Case], golden: Mapping[str, np.ndarray]
) -> list[Result]:
    """Runs functions in jamp and compares them with a golden file.

    Raises:
      KeyError: the file lacks a case.
    """
    sides = {
        half: unpack(golden[f"{PREFIX}{half}"]) for half in {c.half for c in cases}
    }
    return compare(cases, [sides[case.half][case.title] for case in cases])


def compare(cases: Sequence[Case], torch: Sequence[Side]) -> list[Result]:
    """Runs functions in jamp and compares every number with torch's."""
    found = ops_jamp.run([(c.edge, c.half) for c in cases], outside_jit=False)
    sides = zip(cases, torch, [f[INPUTS] for f in found], reference(cases), strict=True)
    return [compared(*of_case) for of_case in sides]


def reference(cases: Sequence[Case]) -> list[Side]:
    """What the functions and their derivatives give in float64, without jamp."""
    inputs = [case.edge.arrays(INPUTS, case.half) for case in cases]
    functions = [
        ops_jamp.derivative_of(c.edge, lambda *x, f=c.edge.jax: [f(*x)]) for c in cases
    ]

    def derivatives(inputs):
        return [function(*x) for function, x in zip(functions, inputs, strict=True)]

    with ops_jamp.settings(), jax.enable_x64(True):
        wide = [[jnp.asarray(x.astype(np.float64)) for x in those] for those in inputs]
        return [ops_jamp.side_of(*x) for x in ops_jamp.compiled(derivatives, wide)]


def errors(found: Any, right: np.ndarray, largest: float) -> np.ndarray:
    """Distances from the right numbers, where all beyond the largest count as it.

    That of nan is infinite.
    """
    found, right = (
        np.clip(np.asarray(x, np.float64), -largest, largest) for x in (found, right)
    )
    distances = np.abs(found - right)
    return np.where(np.isnan(distances), np.inf, distances)


def _relative(distances: np.ndarray, right: np.ndarray, largest: float) -> float:
    """The largest relative error, of the numbers that are wrong by more than a bit."""
    size = np.clip(np.abs(right), ABSOLUTE, largest)
    return float(np.where(distances > ABSOLUTE, distances / size, 0.0).max())


def compared(case: Case, torch: Side, jamp: Mapping[str, Side], right: Side) -> Result:
    """Compares every number of a function in jamp with torch's and with float64's.

    Args:
      case: the function and the region's dtype.
      torch: torch's side.
      jamp: jamp's sides, by the path.
      right: the side in float64.
    """
    n, where = 0, ""
    mismatches: dict[str, int] = dict.fromkeys(FIELDS, 0)
    largest_errors = {"torch": 0.0, "jamp": 0.0}
    operands = case.edge.arrays(INPUTS, case.half)
    for path, side in jamp.items():
        for field, i, x, t, r in _arrays(side, torch, right):
            if not x.shape == t.shape == r.shape:
                raise ValueError(f"{case.name}: {x.shape}, {t.shape} and {r.shape}")
            largest = float(jnp.finfo(t.dtype).max)
            judged = ~np.isnan(t.astype(np.float64))
            own, others = errors(x, r, largest), errors(t, r, largest)
            bound = RELATIVE * np.clip(np.abs(r), 0, largest) + ABSOLUTE
            bad = judged & (own > np.maximum(bound, TIMES_TORCH * others))
            n += x.size
            mismatches[field] += int(bad.sum())
            for library, of in (("torch", others), ("jamp", own)):
                of = _relative(np.where(judged, of, 0.0), r, largest)
                largest_errors[library] = max(largest_errors[library], of)
            if bad.any() and not where:
                at = tuple(np.argwhere(bad)[0])
                by = field == "gradient" and len(operands) > 1
                what = f"{field} by {'xy'[i]}" if by else field
                where = (
                    f"{case.name}, {path}: {what} at {_at(operands, at)} is "
                    f"{x[at]:.6g}, {r[at]:.6g} in float64, torch has {t[at]:.6g}"
                )
    found = Found(case, torch, largest_errors)
    return Result(case.name, n, mismatches, where, data=found)


def _arrays(*sides: Side) -> list[tuple[Any, ...]]:
    """What belongs together: the field, the operand's number, and each side's array."""
    found = []
    for field, of_field in zip(FIELDS, zip(*sides, strict=True), strict=True):
        of_each = zip(*of_field, strict=True)
        found += [(field, i, *arrays) for i, arrays in enumerate(of_each)]
    return found


def _at(operands: Sequence[np.ndarray], at: tuple[int, ...]) -> str:
    """The operands of a number; rows of them where a result is of a whole row."""
    return ", ".join(
        f"{x[at]:.6g}" if x[at].ndim == 0 else " ".join(str(x[at]).split())
        for x in operands
    )


_TEXT = """\
{n} functions run on {numbers} numbers of both signs in a region of their dtype, in jit
and jitted inside the region: in float16 from the smallest subnormal to the largest
number, in bfloat16 from the smallest normal one, since XLA takes subnormal numbers of
float32 as zero. Among the functions are all ops of autocast's tables that are functions
of each element, and some that JAX composes of several ops. Each value, and each
derivative with a cotangent of 1, is held against the same function of JAX in float64.
A number is wrong if it is more than {relative:.0%} plus {absolute:g} away, and more
than {times:g} times as far as torch's. What is beyond the largest number must be that
number or an infinity of the same sign. Where torch has nan, nothing is asked.

**{right} of the {n} functions are right in both dtypes.** The columns have the largest
relative error of values and derivatives, which is large where torch, too, loses what a
derivative needs. Errors below {absolute:g} do not count.

{table}
"""
_CLASSES = (0.01, 0.1, 1.0)


def section(results: Sequence[Result]) -> str:
    """The section, with the two cases of a function in one row."""
    rows = grouped(results, lambda result: result.data.case.title)
    libraries = "torch", "jamp"
    columns = [(half, library) for half in HALVES for library in libraries]
    lines = []
    for title, of_row in rows.items():
        found = {r.data.case.half: r.data.errors for r in of_row}
        numbers = [_class(found[h][x]) if h in found else "-" for h, x in columns]
        wrong = " (jamp is wrong)" if any(r.differs for r in of_row) else ""
        lines.append([f"`{title}`{wrong}", *numbers])
    return _TEXT.format(
        n=len(rows),
        numbers=np.prod(SHAPE),
        relative=RELATIVE,
        absolute=ABSOLUTE,
        times=TIMES_TORCH,
        right=sum(not any(r.differs for r in of_row) for of_row in rows.values()),
        table=table(["function", *(f"{half}, {x}:" for half, x in columns)], lines),
    )


def _class(error: float) -> str:
    """A coarse bound, since the last bits depend on the processor."""
    bound = next((b for b in _CLASSES if error < b), None)
    return f"≥ {_CLASSES[-1]:.0%}" if bound is None else f"< {bound:.0%}"


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's results and gradients, for the golden file: a record for each dtype."""
    by_half = grouped(results, lambda result: result.data.case.half)
    return {
        f"{PREFIX}{half}": pack({r.data.case.title: r.data.torch for r in found})
        for half, found in by_half.items()
    }


def confirmed(
    committed: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The records of a golden file for which live torch gives the same results.

    They may differ by a part of what is allowed to jamp, since torch's last bits depend
    on the processor.
    """
    return {
        name: committed[name]
        for name in committed.keys() & made.keys()
        if name.startswith(PREFIX) and _agree(committed[name], made[name])
    }


def _agree(committed: np.ndarray, made: np.ndarray) -> bool:
    if committed.dtype != made.dtype:  # other functions, dtypes or shapes
        return False
    pairs = zip(unpack(committed).values(), unpack(made).values(), strict=True)
    return all(
        np.allclose(
            x.astype(np.float64),
            y.astype(np.float64),
            RELATIVE / 4,
            ABSOLUTE / 4,
            equal_nan=True,
        )
        for sides in pairs
        for _, _, x, y in _arrays(*sides)
    )
