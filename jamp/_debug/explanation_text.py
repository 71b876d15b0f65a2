"""How an `Explanation` is printed."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._autocast.traits import UNPRINTED
from .findings import OpRow, Promotion, Reduction
from .table import Table, percent, shortened

ROWS, LARGEST, FEW = 20, 10, 4


def summary(function: str, matmul_flops: Mapping[str, int], casts: int) -> str:
    total = sum(matmul_flops.values())
    share = "no matrix products"
    if total:
        parts = matmul_flops.items()
        shares = ", ".join(f"{percent(n / total)} in {dtype}" for dtype, n in parts)
        share = f"matrix products ({total:.3g} FLOPs): {shares}"
    return f"{function}: {share}; {casts} casts"


def ops_table(rows: Sequence[OpRow], table: Table) -> str:
    if not rows:
        return ""
    shown = [row for row in rows if row.op not in UNPRINTED][:ROWS]
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
    hidden = len(rows) - len(shown)
    more = f"\n... and {hidden} more kinds of ops, see to_dict()" if hidden else ""
    return table(header, cells) + more


def saved_summary(by_dtype: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{size(n)} {dtype}" for dtype, n in by_dtype.items())
    return f"kept for the backward pass: {sizes}"


def saved_table(rows: Sequence[Mapping[str, Any]], table: Table) -> str:
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
        for row in rows[:LARGEST]
    ]
    return table(header, cells)


def faults(
    promotions: Sequence[Promotion],
    reductions: Sequence[Reduction],
    products: Sequence[OpRow],
) -> list[str]:
    """The ops that may be slow or overflow: a paragraph for each kind."""
    widened = [
        f"  {p.op} {place(p)}: {p.times} times, {size(p.bytes)} more"
        for p in promotions
    ]
    sums = [
        f"  {r.op} of {r.elements} elements {place(r)}: overflows if "
        f"their mean passes {65504 / r.elements:.3g}"
        for r in reductions
    ]
    parts = []
    for title, lines in (
        ("float32 operands that widen half precision:", widened),
        ("float16 sums that may overflow:", sums),
        ("matrix products in float32:", [f"  {wide_product(row)}" for row in products]),
    ):
        if lines:
            more = [f"  and {len(lines) - FEW} more"] if len(lines) > FEW else []
            parts.append("\n".join([title, *lines[:FEW], *more]))
    return parts


def wide_product(row: OpRow) -> str:
    since = f", float32 since {row.since}" if row.since else ""
    since = ", cast in that line" if row.since == row.line else since
    return f"{row.op} {place(row)}: {row.rule}{since}"


def place(found: OpRow | Promotion | Reduction) -> str:
    return f"at {found.line}" + (f" in {found.path}" if found.path else "")


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
