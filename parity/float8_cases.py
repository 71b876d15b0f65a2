"""The cases of `float8`: arrays to quantize, and products to run, drawn from seeds.

Cases in the golden file draw random bits only, so that every machine draws the same
numbers. Other products use normal numbers.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FORMATS = {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}
SOURCES = ("float32", "bfloat16", "float16")
DIGITS = {"E4M3": 4, "E5M2": 3}  # of a significand, in bits
# Which numbers share a scale, as torchao's `axiswise_dim`.
SHARING = {"whole array": None, "rows": -1, "columns": 0}
SHAPES = {
    None: ((777,), (37, 48), (3, 5, 64)),
    -1: ((37, 48), (16, 256), (5, 7, 32)),
    0: ((48, 37), (256, 16), (32, 7, 5)),
}
SEEDS = range(3)


class Casts(NamedTuple):
    """Arrays of one dtype that are cast to one format."""

    format: str
    source: str
    sharing: str

    @property
    def name(self) -> str:
        return f"cast: {self.source} to {self.format}, {self.sharing}"

    @property
    def axiswise_dim(self) -> int | None:
        return SHARING[self.sharing]

    def axes(self, ndim: int) -> tuple[int, ...] | None:
        """jamp's name for what shares a scale."""
        dim = self.axiswise_dim
        return None if dim is None else (dim % ndim,)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name: each kind with each seed."""
        return {
            f"{kind}, seed {seed}": self._array(kind, seed)
            for kind, seed in itertools.product(KINDS, SEEDS)
        }

    def _array(self, kind: str, seed: int) -> np.ndarray:
        text = f"{self.name}, {kind}, {seed}"
        random = np.random.RandomState(zlib.crc32(text.encode()))
        shape = SHAPES[self.axiswise_dim][seed]
        draw = Draw(random, shape, self.axes(len(shape)), self.source, self.format)
        wide = np.asarray(KINDS[kind](draw), np.float64)
        most = float(jnp.finfo(self.source).max)
        return np.clip(wide, -most, most).astype(self.source)


class Draw(NamedTuple):
    """What an array is drawn from."""

    random: np.random.RandomState
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    source: str
    format: str

    def base(self) -> np.ndarray:
        """Exponents: one for all elements that share a scale."""
        shared = range(len(self.shape)) if self.axes is None else self.axes
        one = [1 if i in shared else n for i, n in enumerate(self.shape)]
        if self.source == "float16":
            return self.random.randint(-12, 12, one)
        return self.random.randint(-60, 61) + self.random.randint(-9, 10, one)

    @property
    def most(self) -> float:
        return 3e38 if self.source != "float16" else 65504.0

    def signs(self) -> np.ndarray:
        return self.random.choice([-1.0, 1.0], self.shape)

    def flat(self) -> np.ndarray:
        return self.random.uniform(-1.0, 1.0, self.shape)

    def near(self) -> np.ndarray:
        return np.ldexp(self.flat(), self.base())

    def few(self, chance: float) -> np.ndarray:
        return self.random.random_sample(self.shape) < chance

    def integers(self, low: int, high: int) -> np.ndarray:
        return self.random.randint(low, high, self.shape)


def _subnormal(draw: Draw) -> np.ndarray:
    info = jnp.finfo(draw.source)
    count = draw.integers(0, 2**info.nmant)
    return draw.signs() * count * float(info.smallest_subnormal)


def _edge(draw: Draw) -> np.ndarray:
    """The largest number is 1.75 * 2**n, or its neighbor in bfloat16 or float16.

    The next float32 number above it is a separate case: `ABOVE_EDGE`.
    """
    base = draw.base()
    ulp = 2.0 ** -jnp.finfo(draw.source).nmant
    above = max(ulp, 2.0**-12)
    edge = 1.75 + draw.random.choice([0.0, above, -ulp], base.shape)
    largest = np.broadcast_to(np.ldexp(edge, base), draw.shape)
    few, signs = draw.few(0.5), draw.signs()
    return np.where(few, largest * signs, np.ldexp(draw.flat(), base))


def _halfway(draw: Draw) -> np.ndarray:
    """Numbers halfway between two of the format, of several sizes."""
    digits = DIGITS[draw.format]
    number = draw.integers(2 ** (digits - 1), 2**digits) + 0.5
    few = draw.integers(-6, 1) - digits
    return draw.signs() * np.ldexp(number, few + draw.base())


def _beside_halfway(draw: Draw) -> np.ndarray:
    """Such midpoints, and the numbers of the source dtype right beside them.

    A cast through a third dtype would round them to halfway first, and then again.
    """
    unit = 2.0 ** -jnp.finfo(draw.source).nmant
    by = draw.random.choice([-unit, 0.0, unit], draw.shape)
    return _halfway(draw) * (1.0 + by)


KINDS: dict[str, Callable[[Draw], np.ndarray]] = {
    "of one size": Draw.near,
    "of many sizes": lambda d: np.ldexp(d.flat(), d.base() + d.integers(-20, 1)),
    "with zeros": lambda d: np.where(d.few(0.7), 0.0, 1.0) * d.near(),
    "zeros": lambda d: d.signs() * 0.0,
    "subnormal": _subnormal,
    "the largest": lambda d: d.most * np.where(d.few(0.1), 1, d.flat()),
    "at the edge": _edge,
    "halfway": _halfway,
    "beside halfway": _beside_halfway,
}

CASTS = [Casts(*parts) for parts in itertools.product(FORMATS, SOURCES, SHARING)]


class AboveEdge(NamedTuple):
    """Arrays whose largest number is a float32 right above 1.75 * 2**n."""

    exponents: tuple[int, ...] = (-20, -8, 0, 1, 20, 60)

    @property
    def name(self) -> str:
        return "cast: float32 right above 1.75 * 2**n"

    def array(self, n: int) -> np.ndarray:
        """The first number above, and one that E4M3 has only at twice jamp's scale."""
        above = np.nextafter(np.float32(1.75 * 2.0**n), np.float32(np.inf))
        return np.array([above, 2.0 ** (n - 17)], np.float32)


ABOVE_EDGE = AboveEdge()


class Product(NamedTuple):
    """`x @ w`, and its gradients.

    Attributes:
      kind: what the numbers are; see `inputs`.
      shape: of `x`.
      columns: of `w`.
      seed: of the numbers.
      weight: the dtype of `w`; `x` is bfloat16.
    """

    recipe: str
    kind: str
    shape: tuple[int, ...]
    columns: int
    seed: int
    weight: str = "bfloat16"

    @property
    def is_large(self) -> bool:
        """Whether there are enough numbers to measure how far they are from exact."""
        return self.kind == "large"

    @property
    def is_in_golden_file(self) -> bool:
        return self.kind == "whole numbers"

    @property
    def name(self) -> str:
        size = "x".join(map(str, (*self.shape, self.columns)))
        weight = "" if self.weight == "bfloat16" else f", {self.weight} weight"
        return f"product: {self.recipe}, {self.kind}, {size}{weight}, seed {self.seed}"

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`x`, `w`, and the cotangent of their product."""
        random = np.random.RandomState(self.seed)
        shapes = self.shape, (self.shape[-1], self.columns)
        shapes = *shapes, (*self.shape[:-1], self.columns)
        if self.kind in ("whole numbers", "inf and nan"):
            found = [
                random.randint(-63, 64, shape).astype(np.float64) for shape in shapes
            ]
            with_small_rows(*found)
        else:
            found = [random.standard_normal(shape) for shape in shapes]
            found[1] /= math.sqrt(self.shape[-1])
        if self.kind == "outliers":
            for x in found:
                x[np.unravel_index(random.choice(x.size, 5), x.shape)] *= 300.0
        if self.kind == "inf and nan":
            found[0][..., 3, 5], found[2][..., 7, 2] = np.inf, np.nan
        dtypes = "bfloat16", self.weight, "bfloat16"
        x, w, ct = (a.astype(dtype) for a, dtype in zip(found, dtypes, strict=True))
        return x, w, ct


def with_small_rows(x: np.ndarray, w: np.ndarray, ct: np.ndarray) -> None:
    """Makes some rows of `x` and columns of `w` so small that E4M3 loses their digits
    unless they have their own scales.

    The cotangent is larger there by the same factor. Each sum of products then adds
    multiples of a power of two of similar size, which float32 adds exactly in any
    order.
    """
    ratio = 2.0**13
    x[::3] /= ratio
    ct[::3] *= ratio
    w[:, ::4] /= ratio
    ct[:, ::4] *= ratio


def _products(recipe: str) -> list[Product]:
    product = functools.partial(Product, recipe)
    return [
        *(product("normal", (64, 128), 96, seed) for seed in (0, 1)),
        *(product("normal", (128, 256), 64, seed) for seed in (2, 3)),
        *(product("outliers", (96, 192), 128, seed) for seed in (4, 5)),
        product("normal", (4, 16, 112), 80, 6),
        product("normal", (64, 128), 96, 7, "float32"),
        product("whole numbers", (32, 64), 48, 8),
        product("inf and nan", (32, 64), 48, 9),
        *(product("large", (512, 256), 512, seed) for seed in (10, 11)),
    ]


PRODUCTS = [product for recipe in RECIPES for product in _products(recipe)]
