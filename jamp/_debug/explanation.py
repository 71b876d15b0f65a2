"""What `explain` returns: everything that it found, as data and as text."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._autocast.decision import Kind
from .._autocast.low_precision import FLOAT8
from .._autocast.products import OUTER
from .op_location import Site
from .report import Report, Table, percent, shortened
from .traits import UNPRINTED
from .walk import starred

ROWS, LARGEST, FEW = 20, 10, 4
SQUARES = """float16 squares that are summed; square in float32, as in \
jnp.mean(x.astype(jnp.float32) ** 2):"""
NO_REGION = """no matrix product is in half precision: no autocast region is around \
any op. Call the loss function inside of one: around its definition, that of a jitted \
function or of value_and_grad(...), a region casts nothing."""
NO_PRODUCT = """no matrix product is in half precision: all are outside of the \
regions, or kept in float32."""
RESULTS = """results in half precision; where a region ends, cast with \
.astype(jnp.float32) what float32 code computes with:"""


class OpRow(NamedTuple):
    """Ops of one kind: the same op, dtypes, rule and line."""

    op: str  # a primitive, or a function that counts as one op
    times: int
    dtypes: str  # "float16, float32 -> float16", between them what it runs in
    runs_in: str  # the dtype that the region has cast its first input to
    rule: str  # such as "lower", "left_alone", "rules['head']", "no region", "off"
    torch: tuple[str, ...]  # the ops of torch's lists that the rule mirrors
    line: str
    path: str
    backward: bool
    flops: int  # of matrix products
    bytes: int  # of results
    since: str = ""  # for a product in float32: where its input became float32
    note: str = ""  # for a product, if a recipe is asked for: that, or why not


class Promotion(NamedTuple):
    """Half precision that became float32 because of another operand."""

    op: str
    line: str
    path: str
    times: int
    bytes: int  # additional ones


class Reduction(NamedTuple):
    """A float16 sum that may overflow."""

    op: str
    line: str
    path: str
    times: int
    elements: int


class Square(NamedTuple):
    """A float16 square that a sum or a mean takes."""

    op: str
    line: str
    path: str
    times: int
    limit: float  # it overflows for larger numbers


class HalfResult(NamedTuple):
    """A result in half precision."""

    op: str  # that made it
    line: str
    path: str
    name: str  # the path of the result
    dtype: str


class Saved(NamedTuple):
    """An array that `jax.vjp` keeps."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    site: Site  # of what made it
    op: str = ""  # what made it: a primitive, or a function that counts as one op


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """Which op runs in which dtype, and what that costs. From `explain`.

    Attributes:
      function: its name.
      rows: kinds of ops, those with the most work first.
      matmul_flops: dtype -> floating-point operations of matrix products.
      casts: the number of casts.
      saved: arrays saved for the backward pass, or None if there is no derivative.
      refusal: the error that JAX raised when differentiating, or "".
      promotions: half-precision values that a float32 operand widened.
      reductions: long sums in float16.
      squares: float16 squares that are summed.
      half_results: results in half precision that an op made.

    Raises:
      TypeError: it was read as a bool; ask for `found`.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> explained = jamp.debug.explain(jnp.matmul, jnp.float16)
      >>> explained(jnp.ones((2, 4)), jnp.ones((4, 3))).matmul_flops
      {'float16': 48}
    """

    function: str
    rows: list[OpRow]
    matmul_flops: dict[str, int]
    casts: int
    saved: list[Saved] | None
    refusal: str
    promotions: list[Promotion]
    reductions: list[Reduction]
    squares: Sequence[Square] = ()  # a pickle of version 0.2 does not have them
    half_results: Sequence[HalfResult] = ()

    @property
    def found(self) -> list[str]:
        """Ops that may be slow or overflow: promotions, float16 sums, float16 squares
        that are summed, and matrix products in float32 beside others in half precision,
        as lines of text. And that no product at all is in half precision."""
        return [
            *(f"float32 operand widens {p.op} {place(p)}" for p in self.promotions),
            *(
                f"float16 {r.op} of {r.elements} elements {place(r)}"
                for r in self.reductions
            ),
            *(f"float16 {described_square(s)}" for s in self.squares),
            *(f"float32 {described_product(row)}" for row in self.wide_products),
            *self._uncast(),
        ]

    def _uncast(self) -> list[str]:
        """That no matrix product is in half precision, if there are any."""
        if self._share() != 0:
            return []
        is_open = any(row.rule not in ("no region", "off") for row in self.rows)
        return [NO_PRODUCT if is_open else NO_REGION]

    @property
    def wide_products(self) -> list[OpRow]:
        """The matrix products that run in float32 where others run in half precision,
        or in a region. Not those of a function that runs in float32 as a whole, nor the
        outer products of what was float32 before."""
        mixed = len(self.matmul_flops) > 1
        unlisted = {Kind.FLOAT32.value} | ({"no region"} if not mixed else set())
        return [
            row
            for row in self.rows
            if row.flops and row.runs_in == "float32" and row.rule not in unlisted
            if row.rule != OUTER.why.kind or row.since
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists.

        Keys: `function`, `rows`, `matmul_flops` by dtype, `matmul_share` (in half
        precision and float8, of all), `casts`, `saved_bytes` by dtype and `saved` (both
        None if there was nothing to differentiate, or if JAX could not: `refusal`),
        `promotions`, `reductions`, `squares`, `half_results`, `found`.
        """
        saved = None if self.saved is None else self._largest()
        return {
            "function": self.function,
            "rows": [row._asdict() for row in self.rows],
            "matmul_flops": self.matmul_flops,
            "matmul_share": self._share(),
            "casts": self.casts,
            "saved_bytes": None if self.saved is None else self._saved_bytes(),
            "saved": saved,
            "refusal": self.refusal,
            "promotions": [p._asdict() for p in self.promotions],
            "reductions": [r._asdict() for r in self.reductions],
            "squares": [s._asdict() for s in self.squares],
            "half_results": [r._asdict() for r in self.half_results],
            "found": self.found,
        }

    def _share(self) -> float | None:
        return low_share(self.matmul_flops)

    def _saved_bytes(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for array in self.saved or ():
            total[array.dtype] += array.bytes
        return dict(total.most_common())

    def _largest(self) -> list[dict[str, Any]]:
        """The kept arrays, grouped by kind and line, the largest first."""
        groups: dict[tuple, list[Saved]] = {}
        for array in self.saved or ():
            site = array.site
            made_by = array.op or site.primitive, site.line, starred(site.path)
            key = array.dtype, array.shape, *made_by
            groups.setdefault(key, []).append(array)
        names = ("dtype", "shape", "op", "line", "path")
        rows = [
            dict(zip(names, key, strict=True))
            | {"times": len(arrays), "bytes": sum(a.bytes for a in arrays)}
            for key, arrays in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])

    def _parts(self, table: Table) -> list[str]:
        parts = [self._summary(), self._ops(table)]
        if self.saved:
            sizes = ", ".join(f"{size(n)} {d}" for d, n in self._saved_bytes().items())
            parts.append(f"kept for the backward pass: {sizes}")
            parts.append(self._kept(table))
        if self.refusal:
            parts.append(f"not differentiated, {self.refusal}")
        return [*parts, *self._faults()]

    def _summary(self) -> str:
        total = sum(self.matmul_flops.values())
        share = "no matrix products"
        if total:
            parts = self.matmul_flops.items()
            shares = ", ".join(f"{percent(n / total)} in {dtype}" for dtype, n in parts)
            share = f"matrix products ({total:.3g} FLOPs): {shares}"
        return f"{self.function}: {share}; {self.casts} casts"

    def _ops(self, table: Table) -> str:
        if not self.rows:
            return ""
        shown = [row for row in self.rows if row.op not in UNPRINTED][:ROWS]
        cells = [
            (
                short_name(row.op),
                row.times,
                short_dtypes(row.dtypes),
                row.rule + (f"; {row.note}" if row.note else ""),
                shortened_list(row.torch),
                row.line.partition(" ")[0],
                shortened(row.path, 28) + (" (backward)" if row.backward else ""),
            )
            for row in shown
        ]
        header = ("op", "count", "dtypes", "rule", "torch", "line", "module")
        hidden = len(self.rows) - len(shown)
        more = f"\n... and {hidden} more kinds of ops, see to_dict()" if hidden else ""
        return table(header, cells) + more

    def _kept(self, table: Table) -> str:
        header = ("bytes", "count", "dtype", "shape", "op", "line", "module")
        cells = [
            (
                size(row["bytes"]),
                row["times"],
                short_dtypes(row["dtype"]),
                "x".join(map(str, row["shape"])),
                short_name(row["op"]),
                row["line"].partition(" ")[0],
                shortened(row["path"], 28),
            )
            for row in self._largest()[:LARGEST]
        ]
        return table(header, cells)

    def _faults(self) -> list[str]:
        """The ops that may be slow or overflow: a paragraph for each kind."""
        widened = [
            f"{p.op} {place(p)}: {p.times} times, {size(p.bytes)} more"
            for p in self.promotions
        ]
        sums = [
            f"{r.op} of {r.elements} elements {place(r)}: overflows if "
            f"their mean passes {65504 / r.elements:.3g}"
            for r in self.reductions
        ]
        kinds = {
            "float32 operands that widen half precision:": widened,
            "float16 sums that may overflow:": sums,
            SQUARES: [*map(described_square, self.squares)],
            "matrix products in float32:": [
                *map(described_product, self.wide_products)
            ],
            RESULTS: [
                f"{r.name}: {r.dtype}, made by {r.op} {place(r)}"
                for r in self.half_results
            ],
        }
        more = lambda lines: [f"and {len(lines) - FEW} more"] * (len(lines) > FEW)
        return self._uncast() + [
            "\n  ".join([title, *lines[:FEW], *more(lines)])
            for title, lines in kinds.items()
            if lines
        ]


def described_square(square: Square) -> str:
    return f"{square.op} {place(square)}: overflows from {square.limit:.3g} on"


def low_share(matmul_flops: Mapping[str, int]) -> float | None:
    """How much of them is in half precision or float8; None if there are none."""
    total = sum(matmul_flops.values())
    low = ("float16", "bfloat16", *map(str, FLOAT8))
    return sum(matmul_flops.get(d, 0) for d in low) / total if total else None


def described_product(row: OpRow) -> str:
    since = f", float32 since {row.since}" if row.since else ""
    since = ", cast in that line" if row.since == row.line else since
    return f"{row.op} {place(row)}: {row.rule}{since}"


def place(row: OpRow | Promotion | Reduction | Square | HalfResult) -> str:
    return f"at {row.line}" + (f" in {row.path}" if row.path else "")


def size(n: int) -> str:
    """
    >>> size(512), size(3_000_000)
    ('512 B', '3 MB')
    """
    value, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def short_name(op: str) -> str:
    """
    >>> short_name("flax.linen.LayerNorm.__call__"), short_name("dot_general")
    ('LayerNorm', 'dot_general')
    """
    name = op.removesuffix(".__call__").rpartition(".")[2]
    return name if len(name) <= 28 else name[:25] + "..."


def short_dtypes(text: str) -> str:
    """Dtypes as JAX prints them.

    >>> short_dtypes("bfloat16, float32 -> bfloat16")
    'bf16, f32 -> bf16'
    """
    return text.replace("bfloat", "bf").replace("float", "f").replace("complex", "c")


def shortened_list(names: tuple[str, ...]) -> str:
    """
    >>> shortened_list(("matmul", "mm", "bmm"))
    'matmul, mm, ...'
    """
    shown = names[:2] if len(", ".join(names[:2])) <= 22 else names[:1]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
