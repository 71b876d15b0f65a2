"""What `explain` returns: everything that it found, as data and as text."""

import dataclasses
from collections import Counter
from typing import Any

from .._autocast.decision import Reason, Source
from .._autocast.float8 import FORMATS
from . import explanation_text as text
from .findings import OpRow, Promotion, Reduction
from .report import Report
from .residuals import Saved
from .table import Table
from .walk import starred


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

    @property
    def found(self) -> list[str]:
        """Ops that may be slow or overflow: promotions, float16 sums, and matrix
        products in float32 beside others in half precision, as lines of text."""
        return [
            *(
                f"float32 operand widens {p.op} {text.place(p)}"
                for p in self.promotions
            ),
            *(
                f"float16 {r.op} of {r.elements} elements {text.place(r)}"
                for r in self.reductions
            ),
            *(f"float32 {text.wide_product(row)}" for row in self.wide_products),
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
        precision and float8, of all), `casts`, `saved_bytes` by dtype and `saved` (both
        None if there was nothing to differentiate, or if JAX could not: `refusal`),
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
        low = ("float16", "bfloat16", *map(str, FORMATS))
        return sum(self.matmul_flops.get(d, 0) for d in low) / total if total else None

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
            reason = Reason.read(site.rule)
            is_function = reason.source is Source.FUNCTION
            op = reason.name if is_function else site.primitive
            key = array.dtype, array.shape, op, site.line, starred(site.path)
            groups.setdefault(key, []).append(array)
        names = ("dtype", "shape", "op", "line", "path")
        rows = [
            dict(zip(names, key, strict=True))
            | {"times": len(arrays), "bytes": sum(a.bytes for a in arrays)}
            for key, arrays in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])

    def _parts(self, table: Table) -> list[str]:
        parts = [
            text.summary(self.function, self.matmul_flops, self.casts),
            text.ops_table(self.rows, table),
        ]
        if self.saved:
            parts.append(text.saved_summary(self._saved_bytes()))
            parts.append(text.saved_table(self._largest(), table))
        if self.refusal:
            parts.append(f"not differentiated, {self.refusal}")
        found = self.promotions, self.reductions, self.wide_products
        return [*parts, *text.faults(*found)]
