"""The report's section on autocast's ops."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .ops_table import DIFFERENCES, HALVES, NO_COUNTERPART, Found, Op
from .result import Result, grouped, table

_TEXT = """\
The lists in torch's `autocast_mode.h` have {listed} ops, of which {compared} have a
counterpart in JAX. Each op runs in a float16 region and in a bfloat16 region, in jit
and jitted inside the region, and in float16 also outside jit. Its inputs are all
float32, or all of the region's dtype (`half`). If it has several inputs and JAX accepts
mixed dtypes, it also runs with a float32 first input and the rest in the region's
dtype, and the other way round. Where the dtypes of these results differ, they are
listed in this order. Gradients are taken in jit, outside the region, with respect to
every input.

**{agree} of the {compared} ops agree with torch on CUDA** in the dtypes of results and
gradients, and in their values to {most} units in the last place (ULPs);
{disagree}. Of {unlisted} ops on none of the lists, {unlisted_agree} agree.

A gradient has the dtype of its input, both in torch and in jamp. Without a GPU, torch's
results come from the CPU, whose autocast was given CUDA's lists; the tests show that
they have the dtypes of fake tensors under CUDA's autocast. The columns show the largest
distance in ULPs, rounded up to 1, 2, 4 or 8. It is counted in the narrower dtype of the
two results, and for gradients in the narrower one of result and gradient, because the
backward pass of a half-precision result is in half precision. Where torch's values are
rounded to half precision, jamp's must be too. XLA was told to round wherever a cast
says so (`xla_allow_excess_precision=false`).

{tables}

{notes}

\\* Counted in ULPs of the array's largest element, since small elements remain where
large terms cancel:

{cancels}

These ops have no counterpart:

{missing}
"""
_CLASSES = (1, 2, 4, 8)


def section(results: Sequence[Result]) -> str:
    """The section, with the two cases of an op in one row."""
    rows = [*grouped(results, lambda result: result.data.case.title).values()]
    listed: dict[str, bool] = {}
    unlisted: dict[str, bool] = {}
    for row in rows:
        ops = listed if row[0].data.kind else unlisted
        base = row[0].data.case.op.base
        ops[base] = ops.get(base, True) and not any(r.differs for r in row)
    differing = [name for name, agrees in listed.items() if not agrees]
    wrong = [name for name in differing if name not in DIFFERENCES]
    ops = [row[0].data.case.op for row in rows]
    notes = [f"- `{n}` in jamp: {why}." for n, why in DIFFERENCES.items()]
    notes += [
        f"- `{op.name}` as `{op.written}`, values not compared: {op.dtypes_only}."
        for op in ops
        if op.dtypes_only
    ]
    notes += [
        f"- `{op.name}` as `{op.written}`: its bound is {_CLASSES[-1]} ULPs times the "
        "condition number of its input, since LAPACK's rounding depends on the CPU."
        for op in ops
        if op.condition is not None
    ]
    return _TEXT.format(
        listed=len(listed) + len(NO_COUNTERPART),
        compared=len(listed),
        agree=len(listed) - len(differing),
        most=_CLASSES[-1],
        disagree=f"{len(differing)} do not"
        + (f", and jamp is wrong in {', '.join(wrong)}" if wrong else ""),
        unlisted=len(unlisted),
        unlisted_agree=sum(unlisted.values()),
        tables="\n\n".join(_tables(rows)),
        notes="\n".join(notes),
        cancels="\n".join(_cancelling(ops)),
        missing="\n".join(_missing()),
    )


def _cancelling(ops: Iterable[Op]) -> list[str]:
    """The ops whose distances are counted in another unit, by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for op in ops:
        if op.cancels:
            reasons.setdefault(op.cancels, {})[f"`{op.name}`"] = None
        if op.grad_cancels:
            name = f"`{op.name}` (gradient)"
            reasons.setdefault(op.grad_cancels, {})[name] = None
    return [f"- {why}: {', '.join(names)}." for why, names in reasons.items()]


def _missing() -> Iterable[str]:
    for why, names in grouped(
        NO_COUNTERPART, lambda name: NO_COUNTERPART[name]
    ).items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {why}."


def _tables(rows: Sequence[Sequence[Result]]) -> Iterable[str]:
    """A table for the ops of a list that have the same dtypes in torch."""
    for (kind, dtypes), ops in grouped(rows, _key).items():
        on = f'On torch\'s list "{kind.value}"' if kind else "On none of the lists"
        head = ["op", "in JAX", *(f"{x}:" for x in (*HALVES, "float32")), "gradient:"]
        yield f"{on}, torch on CUDA gives {dtypes}:"
        yield table(head, map(_row, ops))


def _key(row: Sequence[Result]) -> tuple[Any, str]:
    found = [result.data for result in row]
    dtypes = lambda f, name: [[x.dtype.name for x in f.torch[name].results]]
    return found[0].kind, _dtypes(found, dtypes)


def _row(row: Sequence[Result]) -> list[str]:
    found: list[Found] = [result.data for result in row]
    op = found[0].case.op
    values = [f.ulps["value"] for f in found]
    grads = [n for f in found for n in f.ulps["gradient value"].values()]
    differs = f" (differs, jamp gives {_dtypes(found, lambda f, name: f.jamp[name])})"
    return [
        f"`{op.name}`" + differs * any(result.differs for result in row),
        f"`{op.written}`",
        *(
            _class([v[dtype] for v in values if dtype in v], op.cancels)
            for dtype in (*HALVES, "float32")
        ),
        _class(grads, op.cancels or op.grad_cancels),
    ]


def _dtypes(found: Iterable[Found], of: Callable[[Found, str], Any]) -> str:
    """The dtypes by inputs, once if all are the same; the region's is "half"."""
    regions: dict[str, None] = {}
    for f in found:
        by_inputs = []
        for name in f.torch:
            names = {dtype for path in of(f, name) for dtype in path}
            by_inputs.append("/".join(sorted(names)).replace(f.case.half, "half"))
        same = len(set(by_inputs)) == 1
        regions[by_inputs[0] if same else ", ".join(by_inputs)] = None
    return "; ".join(regions)


def _class(distances: Sequence[float], star: str) -> str:
    """A coarse bound, since the last bit depends on the processor."""
    if not distances:
        return "-"
    largest = max(distances)
    bound = next((n for n in _CLASSES if largest <= n), None)
    text = f"> {_CLASSES[-1]}" if bound is None else f"{bound}"
    return text + "\\*" * bool(star)
