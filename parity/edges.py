"""Values and gradients over the whole range of half precision.

Each function of `edges.txt` runs on half-precision inputs in a region of their dtype,
in jit and jitted inside the region, with a cotangent of 1. Inputs of both signs cover
the range of the dtype: in float16 from the smallest subnormal to the largest number, in
bfloat16 from the smallest normal one, since XLA takes what is subnormal in float32,
which bfloat16's subnormals are, as zero. Among the functions are all ops of `ops.txt`
that are functions of each element.

What is right is what the same function gives in float64, without jamp. How far torch is
from it says what half precision can do: a number is wrong if it is more than 2% plus
1e-5 away, and more than 4 times as far as torch's. The table has the largest relative
error of values and derivatives, as a coarse bound.

The golden file has torch's results, so that jamp can be compared on a machine without
torch.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shared.cells import rows

from . import devices, ops_jamp
from .cells import in_jax
from .ops import pack, unpack
from .ops_table import HALVES, OPS, Shape, Side
from .result import Result, grouped

TITLE = "Values and gradients over the range of half precision"
PREFIX = "edges/"

# An error of rounding is below a hundredth, also in bfloat16, and so small a number
# that half precision loses its digits need not be near.
RELATIVE, ABSOLUTE = 0.02, 1e-5
# How much farther away than torch's a number may be.
TIMES_TORCH = 4.0
FIELDS = ("value", "gradient")
INPUTS = "half"
Domain = Callable[[np.ndarray], np.ndarray]
SHAPE = (16, 8)
# The exponents of most numbers that are drawn; few of bfloat16's are beyond.
_USUAL = {"float16": (-24, 16), "bfloat16": (-20, 20)}
_N_ANYWHERE, _N_TIES = 12, 16
OF_OPS = "of each element, all that `ops.txt` has"


class Edge(NamedTuple):
    """A function on both sides.

    It has the attributes of an `Op` that `ops_jamp` and `ops_torch` ask for.

    Attributes:
      title: how it reads in JAX.
      torch: the function in torch, as a cell.
      jax: the function in JAX.
      domains: for each operand, what maps numbers of the whole range into its domain.
      section: of `edges.txt`.
    """

    title: str
    torch: str
    jax: Callable[..., Any]
    domains: tuple[Domain, ...]
    section: str

    @property
    def inputs(self) -> list[str]:
        """The kinds of inputs that it runs with: the region's dtype."""
        return [INPUTS]

    def arrays(self, inputs: str, half: str) -> list[np.ndarray]:
        """The operands, in half precision."""
        dtype = jnp.dtype(half)
        both = numbers(half), partners(half)
        pairs = zip(self.domains, both, strict=False)
        largest = float(jnp.finfo(dtype).max)
        with np.errstate(over="ignore"):
            found = [np.clip(domain(x), -largest, largest) for domain, x in pairs]
        return [x.astype(dtype) for x in found]

    def cotangents(self, shapes: list[Shape]) -> list[np.ndarray]:
        """One for each number of the results."""
        return [np.ones(shape) for shape in shapes]


def numbers(half: str) -> np.ndarray:
    """Numbers of both signs over the whole range of a dtype, in float64.

    They are sorted by magnitude, so that each row of the matrix has its own.
    """
    info = jnp.finfo(jnp.dtype(half))
    least, normal, eps = (
        float(x) for x in (info.smallest_subnormal, info.smallest_normal, info.eps)
    )
    largest, (low, high) = float(info.max), _USUAL[half]
    if half == "bfloat16":  # as the module says
        edges = [normal, normal * (1 + eps), 2 * normal]
    else:
        edges = [least, 2 * least, 3 * least, normal - least, normal, normal + least]
    edges += [1 - eps / 2, 1.0, 1 + eps, 2048.0, largest * (1 - eps), largest]
    edges += [2.0**k for k in range(low, high, 4)]
    random = np.random.RandomState(0)
    ends = np.log2(min(edges)), np.log2(largest)
    few, n = _N_ANYWHERE, int(np.prod(SHAPE))
    usual = random.uniform(low, high, n - 2 * len(edges) - few)
    drawn = 2.0 ** np.concatenate([random.uniform(*ends, few), usual])
    signs = np.where(random.random_sample(len(drawn)) < 0.5, -1.0, 1.0)
    every = np.concatenate([edges, -np.array(edges), drawn * signs])
    # What is drawn is rounded here, so that a domain gets numbers of the dtype.
    every = every.astype(jnp.dtype(half)).astype(np.float64)
    return every[np.argsort(np.abs(every), kind="stable")].reshape(SHAPE)


def partners(half: str) -> np.ndarray:
    """The second operands: the same numbers in another order, and some ties."""
    random = np.random.RandomState(1)
    x = numbers(half).ravel()
    y = random.permutation(x)
    ties = random.choice(len(x), _N_TIES, replace=False)
    y[ties] = x[ties] * np.where(np.arange(_N_TIES) % 2, -1.0, 1.0)
    return y.reshape(SHAPE)


def anything(x: np.ndarray) -> np.ndarray:
    """No number is left out."""
    return x


def inside(x: np.ndarray) -> np.ndarray:
    """Numbers from -1 to 1: those beyond are inverted."""
    return np.where(np.abs(x) > 1, 1 / x, x)


def above_minus_one(x: np.ndarray) -> np.ndarray:
    """Positive numbers stay as they are, negative ones come inside."""
    return np.where(x > 0, x, inside(x))


def above_one(x: np.ndarray) -> np.ndarray:
    """Numbers from 1 on."""
    return 1 + np.abs(x)


def from_zero_to_one(x: np.ndarray) -> np.ndarray:
    """Positive numbers up to 1."""
    return np.abs(inside(x))


def within(largest: float, least: float = 0.0) -> Domain:
    """Numbers of both signs in a range of magnitudes; others come to its ends."""
    return lambda x: np.sign(x) * np.clip(np.abs(x), least, largest)


def positive_within(largest: float, least: float = 0.0) -> Domain:
    """Positive numbers in a range; others come to its ends."""
    return lambda x: np.clip(np.abs(x), least, largest)


# Numbers whose squares float32 holds. The derivatives of some functions have squares,
# and beyond these JAX's own float32 differs from torch's too.
squared = within(2.0**60, 2.0**-60)
positive_squared = positive_within(2.0**60, 2.0**-60)
# In JAX 0.10 the derivative of sinc loses its digits close to 0, in float32 too.
not_small = within(2.0**60, 2.0**-4)


def sigmoid_of(x: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1, close to both ends: what logit inverts."""
    return 1 / (1 + np.exp(-np.clip(x, -80, 80)))


def _edges() -> Iterator[Edge]:
    of_ops = {op.written: op.torch for op in OPS.values()}
    path = pathlib.Path(__file__).with_name("edges.txt")
    for section, (torch, title, domains) in rows(path):
        torch = of_ops[title] if torch == "ops" else torch
        named = tuple(eval(name, globals()) for name in domains.split())
        yield Edge(title, torch, in_jax(title), named, section)


EDGES = tuple(_edges())
TOGETHER = len(EDGES)  # how many cases share a program
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
    """The largest relative error of numbers that are off by more than `ABSOLUTE`."""
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
    figures = {f"{case.half}, {x}": _class(e) for x, e in largest_errors.items()}
    return Result(case.name, n, mismatches, where, "", torch, case.title, figures)


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


_CLASSES = (0.01, 0.1, 1.0)


def _class(error: float) -> str:
    """A coarse bound, since the last bits depend on the processor."""
    bound = next((b for b in _CLASSES if error < b), None)
    return f"≥ {_CLASSES[-1]:.0%}" if bound is None else f"< {bound:.0%}"


def golden(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """torch's results and gradients, for the golden file: a record for each dtype."""
    by_half = grouped(results, lambda result: CASES[result.case].half)
    return {
        f"{PREFIX}{half}": pack({CASES[r.case].title: r.data for r in found})
        for half, found in by_half.items()
    }


def agree(name: str, committed: np.ndarray, made: np.ndarray) -> bool:
    """Whether two records of torch's are the same, as far as the processor allows.

    They may differ by a part of what is allowed to jamp.
    """
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
