"""What `explain` found: the rows, and how they are printed."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

from .report import Report
from .residuals import Saved
from .table import percent, shortened
from .walk import starred

ROWS, LARGEST, FEW = 20, 10, 4  # lines that are printed
UNPRINTED = frozenset(  # ops that need no line
    """
    broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice expand_dims
    gather pad reduce_precision reshape rev slice split squeeze stop_gradient transpose
    """.split()
)


class OpRow(NamedTuple):
    """Ops of one kind."""

    op: str  # a primitive, or a function that counts as one op
    times: int
    dtypes: str  # what it is given and gives back: "float16, float32 -> float16"
    runs_in: str  # the dtype that the region has cast its first input to
    rule: str  # "lower", "left_alone", ...; "rules['head']"; "no region", "off"
    torch: tuple[str, ...]  # the ops of torch's lists that the rule mirrors
    line: str
    path: str
    backward: bool
    flops: int  # of matrix products
    bytes: int  # of results
    since: str = ""  # of a product in float32: where its input became float32


class Promotion(NamedTuple):
    """Half precision that became float32 because of another operand."""

    op: str
    line: str
    path: str
    times: int
    bytes: int  # that it takes more


class Reduction(NamedTuple):
    """A float16 sum that may overflow."""

    op: str
    line: str
    path: str
    times: int
    elements: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """Which op runs in which dtype, and what that costs. From `explain`.

    Attributes:
      function: its name.
      rows: the ops, in the order in which they run, equal ones together.
      matmul_flops: dtype -> floating-point operations of matrix products.
      casts: how many there are.
      saved: arrays saved for the backward pass; None if it cannot be differentiated.
      refusal: why there is nothing saved: what JAX said when differentiating.
      promotions: products that a float32 operand has widened.
      reductions: long sums in float16.

    Raises:
      TypeError: read as a bool; ask for `found`.

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

    def _stacked_shape(self):
        return ()

    @property
    def found(self) -> list[str]:
        """What may be slow or overflow: promotions, float16 sums, and matrix products
        in float32 beside others in half precision, as lines of text."""
        return [
            *(
                f"float32 operand widens {p.op} at {p.line}{_in(p.path)}"
                for p in self.promotions
            ),
            *(
                f"float16 {r.op} of {r.elements} elements at {r.line}{_in(r.path)}"
                for r in self.reductions
            ),
            *(f"float32 {product}" for product in self._products()),
        ]

    @property
    def wide_products(self) -> list[OpRow]:
        """The matrix products that run in float32 where others run in half precision,
        or in a region."""
        products = [row for row in self.rows if row.flops]
        mixed = len(self.matmul_flops) > 1
        return [
            row
            for row in products
            if row.runs_in == "float32" and (mixed or row.rule != "no region")
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists.

        Keys: `function`, `rows`, `matmul_flops` by dtype, `matmul_share` (in half
        precision, of all), `casts`, `saved_bytes` by dtype and `saved` (both None if
        there was nothing to differentiate, or if JAX refused: `refusal`),
        `promotions`, `reductions`, `found`.
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
            "found": self.found,
        }

    def _share(self) -> float | None:
        total = sum(self.matmul_flops.values())
        half = sum(self.matmul_flops.get(d, 0) for d in ("float16", "bfloat16"))
        return half / total if total else None

    def _saved_bytes(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for array in self.saved or ():
            total[array.dtype] += array.bytes
        return dict(total.most_common())

    def _largest(self) -> list[dict[str, Any]]:
        """What is kept, of one kind and line together, the largest first."""
        groups: dict[Any, list[Saved]] = {}
        for array in self.saved or ():
            site = array.site
            op = site.rule.rpartition(" ")[2] if "." in site.rule else site.primitive
            key = array.dtype, array.shape, op, site.line, starred(site.path)
            groups.setdefault(key, []).append(array)
        names = ("dtype", "shape", "op", "line", "path")
        rows = [
            dict(zip(names, key, strict=True))
            | {"times": len(arrays), "bytes": sum(a.bytes for a in arrays)}
            for key, arrays in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])

    def _parts(self, table):
        parts = [self._summary(), self._ops_table(table) if self.rows else ""]
        if self.saved:
            by_dtype = ", ".join(
                f"{size(n)} {dtype}" for dtype, n in self._saved_bytes().items()
            )
            parts += [
                f"kept for the backward pass: {by_dtype}",
                self._saved_table(table),
            ]
        if self.refusal:
            parts.append(f"not differentiated, {self.refusal}")
        for title, lines in (
            ("float32 operands that widen half precision:", self._promoted()),
            ("float16 sums that may overflow:", self._sums()),
            ("matrix products in float32:", [f"  {p}" for p in self._products()]),
        ):
            if lines:
                more = [f"  and {len(lines) - FEW} more"] if len(lines) > FEW else []
                parts.append("\n".join([title, *lines[:FEW], *more]))
        return parts

    def _summary(self) -> str:
        total = sum(self.matmul_flops.values())
        share = "no matrix products"
        if total:
            parts = self.matmul_flops.items()
            shares = ", ".join(f"{percent(n / total)} in {dtype}" for dtype, n in parts)
            share = f"matrix products ({total:.3g} FLOPs): {shares}"
        return f"{self.function}: {share}; {self.casts} casts"

    def _ops_table(self, table) -> str:
        shown = [row for row in self.rows if row.op not in UNPRINTED][:ROWS]
        cells = [
            (
                short_name(row.op),
                row.times,
                short_dtypes(row.dtypes),
                row.rule,
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

    def _saved_table(self, table) -> str:
        header = ("bytes", "count", "dtype", "shape", "op", "line", "module")
        return table(
            header,
            [
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
            ],
        )

    def _promoted(self) -> list[str]:
        return [
            f"  {p.op} at {p.line}{_in(p.path)}: {p.times} times, {size(p.bytes)} more"
            for p in self.promotions
        ]

    def _sums(self) -> list[str]:
        return [
            f"  {r.op} of {r.elements} elements at {r.line}{_in(r.path)}: overflows if "
            f"their mean passes {65504 / r.elements:.3g}"
            for r in self.reductions
        ]

    def _products(self) -> list[str]:
        return [
            f"{row.op} at {row.line}{_in(row.path)}: {row.rule}{_since(row)}"
            for row in self.wide_products
        ]


def _since(row: OpRow) -> str:
    if row.since == row.line:
        return ", cast in that line"
    return f", float32 since {row.since}" if row.since else ""


def _in(path: str) -> str:
    return f" in {path}" if path else ""


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
