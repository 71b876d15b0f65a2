"""The section of the report on products in float8."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .float8_cases import CASTS, FORMATS, RECIPES, SOURCES, Product
from .result import Result, table

_TEXT = """\
`jamp.autocast(jamp.Float8(recipe))` runs beside `torchao.float8` {torchao} on the CPU,
whose recipe has the same name and `round_scales_to_power_of_2=True`. It also has
`emulate=True`, since torchao's float8 kernels are for GPUs: torchao then quantizes as
on a GPU, and multiplies in float32.

### Casts

{arrays} arrays of random numbers are quantized on both sides. They have magnitudes
around 2^-60 to 2^60 (in float16 as far as it reaches), zeros, subnormal numbers,
numbers up to 3e38, largest numbers at or close to 1.75 * 2^n, and numbers at or next to
the midpoint of two float8 numbers. A scale holds for the whole array, for each row (all
numbers along the last axis), or for each column (along the first). The float8 numbers
and the inverses of the scales are compared bit for bit.

{casts}

One thing differs on purpose. The largest number of E4M3 is 448, or 1.75 * 2^8, so an
array's scale changes where its largest number passes 1.75 * 2^n. jamp reads the power
of two from the number's bits, which is exact. torchao takes the logarithm in float32,
which rounds. For a few float32 numbers right above 1.75 * 2^n its scale is twice what
its own rule asks for. The scaled largest number is then slightly above 448, and becomes
448. This loses nothing: torchao's scale even keeps one more digit of the smallest
numbers. bfloat16 and float16 have no numbers that close above 1.75 * 2^n.

{edges}

Where an array has an inf or nan, both sides turn all numbers that share its scale into
nan. For an inf, however, torchao's scale is 0 and jamp's is nan, so these cases are
compared in products instead.

### Results and gradients

`x @ w` and its gradients run in a region, in jit and outside, beside a Linear from
`torchao.float8.convert_to_float8_training`. Inputs and cotangents are bfloat16: normal,
with outliers, with an inf and a nan, or whole numbers, whose sums float32 holds
exactly. In one case `x` has three dimensions, in another the weight is float32. XLA was
told to round wherever a cast says so (`xla_allow_excess_precision=false`). ULPs are the
largest distance in units in the last place of bfloat16. In small products no number may
differ with `tensorwise`, and the other recipes may differ by one ULP.

In large products (512 x 256 x 512, in jit) a few numbers differ with every recipe. Each
library adds float32 numbers in its own order, and a sum halfway between two bfloat16
numbers may round to either. These products may differ by one ULP of the array's largest
number, since small numbers remain where large terms cancel.

{products}

### Error

The table shows how far the large products of normal numbers are from float64, in dB: 20
log10(norm / norm of the error), the lower of the two cases. Both libraries must reach
28 dB for the result and 24.5 dB for the gradients. (In small products the error depends
on chance: for 64 x 128 numbers in E5M2 it may be 0.1 dB larger.)

{errors}"""

EDGE_REASON = (
    "torchao rounds the logarithm of a scale, which is twice as large as it should be "
    "right above 1.75 * 2^n; jamp's is exact"
)
LIBRARIES = ("jamp", "torchao", "bfloat16")
RESULTS = ("result", "gradient of x", "gradient of w")
SIZES = {False: "small", True: "large"}


class Shown(NamedTuple):
    """What the section and the golden file need from casts, or from a product.

    Attributes:
      arrays: how many were cast.
      product: what was multiplied.
      values: how many were compared, of the result and of each gradient.
      differ: how many of the values are not equal.
      ulps: how far they are apart at most.
      decibels: the errors, by library.
      golden: torchao's results for the golden file, by name.
    """

    arrays: int = 0
    product: Product | None = None
    values: Sequence[int] = ()
    differ: Sequence[int] = ()
    ulps: Sequence[float] = ()
    decibels: Mapping[str, Sequence[float]] = {}
    golden: Mapping[str, np.ndarray] = {}


class Edge(NamedTuple):
    """An array whose largest number is right above 1.75 * 2**n."""

    n: int
    x: np.ndarray
    torch: tuple[np.ndarray, np.ndarray]  # E4M3 numbers, and the inverse scale
    jamp: tuple[np.ndarray, np.ndarray]
    reach: int  # how many float32 numbers above 1.75 * 2**n have another scale


def section(results: Sequence[Result]) -> str:
    from importlib.metadata import version

    shown = [r.data for r in results if isinstance(r.data, Shown)]
    return _TEXT.format(
        torchao=version("torchao").split("+")[0],
        arrays=sum(s.arrays for s in shown),
        casts=_casts({r.case: r for r in results}),
        edges="".join(_edges(r.data) for r in results if isinstance(r.data, list)),
        products=_products([s for s in shown if s.product is not None]),
        errors=_errors([s for s in shown if s.decibels]),
    )


def _casts(results: Mapping[str, Result]) -> str:
    head = ["format", "of", "arrays:", "values compared:", "numbers differ:"]
    rows = []
    for format, source in itertools.product(FORMATS, SOURCES):
        names = [c.name for c in CASTS if (c.format, c.source) == (format, source)]
        found = [results[name] for name in names if name in results]
        rows.append(
            [
                format,
                source,
                sum(r.data.arrays for r in found),
                sum(r.compared for r in found),
                sum(r.mismatches["values"] for r in found),
                sum(r.mismatches["scales"] for r in found),
            ]
        )
    return table([*head, "scales differ:"], rows)


def _edges(edges: Sequence[Edge]) -> str:
    head = ["n:", "array:", "inverse scale: torchao:", "jamp:", "numbers: torchao:"]
    rows = []
    for e in edges:
        numbers = [", ".join(f"{v:g}" for v in side[0]) for side in (e.torch, e.jamp)]
        inverses = [f"2^{np.log2(side[1]):.0f}" for side in (e.torch, e.jamp)]
        array = f"{e.x[0]:.9g}, 2^{np.log2(e.x[1]):.0f}"
        rows.append([e.n, array, *inverses, *numbers, e.reach])
    return table([*head, "jamp:", "float32 numbers above that differ:"], rows)


def _products(shown: Sequence[Shown]) -> str:
    head = ["recipe", "sizes", "cases:", "numbers in x and w:"]
    for name in RESULTS:
        head += [f"{name}: values:", "differ:", "ULPs:"]
    rows = []
    for is_large, recipe in itertools.product((False, True), RECIPES):
        kind = recipe, is_large
        found = [
            (s, p) for s in shown if (p := s.product) and (p.recipe, p.is_large) == kind
        ]
        inputs = sum(x.size for _, p in found for x in p.inputs()[:2])
        row = [f"`{recipe}`", SIZES[is_large], len(found), inputs]
        for i in range(len(RESULTS)):
            row += [sum(s.values[i] for s, _ in found)]
            row += [sum(s.differ[i] for s, _ in found)]
            row += [f"{max((s.ulps[i] for s, _ in found), default=0):.2g}"]
        rows.append(row)
    return table(head, rows)


def _errors(shown: Sequence[Shown]) -> str:
    head = ["recipe"]
    for name in RESULTS:
        head += [f"{name}: jamp:", "torchao:", "bfloat16:"]
    rows = []
    for recipe in RECIPES:
        found = [s.decibels for s in shown if s.product and s.product.recipe == recipe]
        row = [f"`{recipe}`"]
        for i in range(len(RESULTS)):
            for name in LIBRARIES:
                least = min((errors[name][i] for errors in found), default=np.nan)
                row.append(f"{least:.1f}")
        rows.append(row)
    return table(head, rows)
