"""Products in float8, against torchao: casts, results and gradients, and their error.

jamp's recipes are torchao's with power-of-two scales. torchao's float8 kernels are for
GPUs, so it runs with `emulate=True`: it quantizes as on a GPU, and multiplies in
float32. Casts (`float8_cases.py` has the arrays) must agree bit for bit, and so must
products with one scale per array. Products with a scale per row may be one unit in the
last place (ULP) of bfloat16 apart.

In large products a few numbers differ with every recipe: each library adds float32
numbers in its own order, and a sum halfway between two bfloat16 numbers may round to
either. These may differ by one ULP of the array's largest number. Both libraries are
also compared with the exact product in float64, in decibels: 20 log10(norm / norm of
the error) must be at least 28 for the result and 24.5 for the gradients.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import float8_jamp
from .float8_cases import ABOVE_EDGE, CASTS, PRODUCTS, AboveEdge, Casts, Product
from .ops import ulps
from .result import Result
from .trajectory import digest

TITLE = "Products in float8"

EDGE_REASON = (
    "torchao rounds the logarithm of a scale, which is twice as large as it should be "
    "right above 1.75 * 2^n; jamp's is exact"
)
RESULTS = ("result", "gradient of x", "gradient of w")
Case = Casts | AboveEdge | Product
CASES: dict[str, Case] = {case.name: case for case in (*CASTS, ABOVE_EDGE, *PRODUCTS)}
# How many units in the last place of bfloat16 a result may be from torchao's: sums are
# in float32, and each library adds in its own order.
MOST_ULPS = {"tensorwise": 0, "rowwise": 1, "rowwise_with_gw_hp": 1}
LEAST_DECIBELS = (28.0, 24.5, 24.5)  # of `RESULTS`


def run(case: Case, device: str) -> Result:
    """Casts or multiplies in torchao and in jamp, always on the CPU.

    A GPU's float8 kernels add with fewer digits than float32 has.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        if isinstance(case, Casts):
            return _run_casts(case)
        return _run_edge(case) if isinstance(case, AboveEdge) else _run_product(case)


def _run_casts(case: Casts) -> Result:
    from . import float8_torch  # here, so that the golden file needs no torch

    mismatches = {"values": 0, "scales": 0}
    compared, where, digests = 0, "", []
    found = float8_jamp.casts(case)
    for name, x in case.arrays().items():
        torch = float8_torch.cast(x, case.format, case.axiswise_dim)
        digests.append(digest(*torch))
        for field, here, there in zip(mismatches, found[name], torch, strict=True):
            wrong = differing(here, there)
            mismatches[field] += wrong
            compared += there.size
            if wrong and not where:
                where = f"{case.name}, {name}: {wrong} of {there.size} {field} differ"
    data = {"digests": np.stack(digests)}
    row = f"cast: {case.source} to {case.format}"
    return Result(case.name, compared, mismatches, where, data=data, row=row)


def differing(x: np.ndarray, y: np.ndarray) -> int:
    """How many elements of two arrays differ; all, if the shapes do."""
    return int(np.count_nonzero(x != y)) if x.shape == y.shape else max(x.size, 1)


def _run_edge(case: AboveEdge) -> Result:
    from . import float8_torch

    differ = 0
    for n in case.exponents:
        x = case.array(n)
        torch = float8_torch.cast(x, "E4M3", None)
        jamp = float8_jamp.cast(x, "E4M3", None)
        differ += sum(differing(a, b) for a, b in zip(jamp, torch, strict=True))
    where = f"{case.name}: {differ} numbers and scales differ"
    compared = 3 * len(case.exponents)  # two numbers and a scale
    return Result(case.name, compared, {"above": differ}, where, EDGE_REASON, {})


def stands_for(cast: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The E4M3 numbers, and the inverse of their scale."""
    values, inverse = cast
    return values.view(jnp.float8_e4m3fn).astype(np.float32), inverse


class Comparison(NamedTuple):
    """An array from jamp beside torchao's."""

    wrong: int  # how many elements are not as close as they must be
    differ: int  # how many are not equal
    ulps: float  # the largest distance of two that are finite
    where: str  # what is wrong, in words


def compare(
    torch: np.ndarray, jamp: np.ndarray, most: float, cancels: bool = False
) -> Comparison:
    """Compares two arrays of numbers that bfloat16 can hold.

    Args:
      torch: torchao's.
      jamp: jamp's.
      most: how many units in the last place of bfloat16 they may be apart.
      cancels: whether to count in units of the largest number, not of each number.
    """
    kinds = [(x.shape, x.dtype.name) for x in (jamp, torch)]
    if kinds[0] != kinds[1]:
        where = f"is of {kinds[0]}, torchao's of {kinds[1]}"
        return Comparison(torch.size, torch.size, np.inf, where)
    half = jamp.astype(jnp.bfloat16)
    unrounded = int(np.count_nonzero(differ_as_numbers(half.astype(jamp.dtype), jamp)))
    if unrounded:
        where = f"is not rounded to bfloat16 in {unrounded} places"
        return Comparison(unrounded, unrounded, np.inf, where)
    differ = differ_as_numbers(torch, jamp)
    finite = [np.isfinite(x.astype(np.float64)) for x in (torch, jamp)]
    both, largest, wrong = finite[0] & finite[1], 0.0, 0
    if both.any():
        apart = ulps(torch[both], jamp[both], jnp.bfloat16, cancels)
        largest, wrong = float(apart.max()), int(np.count_nonzero(apart > most))
    wrong += int(np.count_nonzero(differ & ~both))
    where = f"differs in {wrong} places, by up to {largest:.0f} ULPs" if wrong else ""
    return Comparison(wrong, int(np.count_nonzero(differ)), largest, where)


def differ_as_numbers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where the numbers of two arrays differ; all nans are equal."""
    return (x != y) & ~(np.isnan(x) & np.isnan(y))


def _run_product(case: Product) -> Result:
    from . import float8_torch

    torch = float8_torch.product(case)
    mismatches: dict[str, int] = dict.fromkeys(RESULTS, 0)
    where = ""
    found: dict[str, list[Comparison]] = {name: [] for name in RESULTS}
    paths = (float8_jamp.JIT,) if case.is_large else float8_jamp.PATHS
    most = 1 if case.is_large else MOST_ULPS[case.recipe]
    jamp: list[np.ndarray] = []
    for path in paths:
        jamp = float8_jamp.product(case, path)
        for name, x, y in zip(RESULTS, torch, jamp, strict=True):
            compared = compare(x, y, most, cancels=case.is_large)
            found[name].append(compared)
            mismatches[name] += compared.wrong
            if compared.where and not where:
                where = f"{case.name}, {path}: the {name} {compared.where}"
    data = {}
    if case.is_in_golden_file:
        data = {name: x.view(np.uint16) for name, x in zip(RESULTS, torch, strict=True)}
    compared = sum(len(paths) * x.size for x in torch)
    figures: dict[str, Any] = {
        "differ": max(c.differ for of in found.values() for c in of),
        "ULPs": max(c.ulps for of in found.values() for c in of),
    }
    if case.is_large:
        half = float8_jamp.product(case, float8_jamp.JIT, jnp.bfloat16)
        sides = {"jamp": jamp, "torchao": torch, "bfloat16": half}
        errors = {name: error_of(case, x) for name, x in sides.items()}
        for name, of_side in errors.items():
            figures[f"dB, {name}"] = ", ".join(f"{x:.1f}" for x in of_side)
        low = too_far(errors)
        mismatches["error"] = len(low)
        compared += 2 * len(RESULTS)
        where = where or "".join(f"{case.name}: {text}" for text in low[:1])
    row = f"product: {case.recipe}, {'large' if case.is_large else 'small'}"
    return Result(case.name, compared, mismatches, where, "", data, row, figures)


def too_far(errors: Mapping[str, Sequence[float]]) -> list[str]:
    """Which errors of jamp and torchao are larger than allowed, in words."""
    return [
        f"{library}'s {name} is {error:.2f} dB from exact, less than {least}"
        for library in ("jamp", "torchao")
        for name, error, least in zip(
            RESULTS, errors[library], LEAST_DECIBELS, strict=True
        )
        if not error >= least
    ]


def error_of(case: Product, found: Iterable[np.ndarray]) -> list[float]:
    """How far the product and the gradients are from exact, in decibels.

    Returns:
      For each of them, 20 log10(its norm / the norm of its error).
    """
    return [decibels(e, x) for e, x in zip(exact(case), found, strict=True)]


def decibels(exact: np.ndarray, found: np.ndarray) -> float:
    """20 log10(norm / norm of the error).

    >>> decibels(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    20.0
    """
    error = np.linalg.norm(found.astype(np.float64) - exact)
    return float(20 * np.log10(np.linalg.norm(exact) / error))


@functools.lru_cache(maxsize=1)  # for three sides of a case
def exact(case: Product) -> list[np.ndarray]:
    """The product and the gradients in float64."""
    x, w, ct = (a.astype(np.float64) for a in case.inputs())
    flat_x, flat_ct = x.reshape(-1, x.shape[-1]), ct.reshape(-1, ct.shape[-1])
    return [x @ w, ct @ w.T, flat_x.T @ flat_ct]


def golden(results: Iterable[Result]) -> dict[str, np.ndarray]:
    """torchao's side of the cases, for the golden file.

    Of casts it has digests of each array's float8 numbers and inverse scales, and of
    products the results, where no machine rounds a sum.
    """
    arrays = {"torchao_version": np.array(version("torchao").split("+")[0])}
    for result in results:
        arrays |= {f"float8/{result.case}/{k}": a for k, a in result.data.items()}
    return arrays
