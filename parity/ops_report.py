"""The report's section on autocast's ops."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jamp._autocast.ops import DIFFERENCES, NO_COUNTERPART

from .ops_table import HALVES, Found, Op
from .result import Result, grouped, table

_TEXT = """\
The lists in torch's `autocast_mode.h` have {listed} ops, of which {compared} have a
counterpart in JAX. Each op runs in a float16 region and in a bfloat16 region, in jit
and jitted inside the region, and in float16 also outside jit. Its inputs are all
float32, or all of the region's dtype (`half`). If it has several inputs and JAX accepts
mixed dtypes, it also runs with a float32 first input and the rest in the region's
dtype, and the other way round. Where the dtypes of these results differ, the table
lists them in this order. Gradients are taken in jit, outside the region, with respect
to every input.

**{agree} of the {compared} ops agree with torch on CUDA** in the dtypes of results and
gradients, and in their values to {most} units in the last place (ULPs);
{disagree}. Of {unlisted} ops on none of the lists, {unlisted_agree} agree.

A gradient has the dtype of its input, both in torch and in jamp. Without a GPU, torch's
dtypes are those of fake tensors under CUDA's autocast, and its values and gradients
come from the CPU, whose autocast was given CUDA's lists. The ULPs columns show the
largest distance, counted in the narrower dtype of the two results. For gradients it is
counted in the narrower dtype of result and gradient, because the backward pass of a
half-precision result is in half precision. Where torch's values are rounded to half
precision, jamp's must be too. XLA was told to round wherever a cast says so
(`xla_allow_excess_precision=false`).

{table}

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
        table=_table(rows),
        notes="\n".join(notes),
        cancels="\n".join(_cancelling(ops)),
        missing="\n".join(f"- `{n}`: {why}." for n, why in NO_COUNTERPART.items()),
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


def _table(rows: Iterable[Sequence[Result]]) -> str:
    """A row for each op."""
    dtypes = (*HALVES, "float32")
    head = ["op", "torch's list", "in JAX", "torch, CUDA", "jamp"]
    head += [*(f"ULPs, {dtype}" for dtype in dtypes), "ULPs, gradient", "agrees"]
    lines = []
    for row in rows:
        found: list[Found] = [result.data for result in row]
        op, kind = found[0].case.op, found[0].kind
        star, grad_star = op.cancels, op.cancels or op.grad_cancels
        values = [f.ulps["value"] for f in found]
        grads = [n for f in found for n in f.ulps["gradient value"].values()]
        lines.append(
            [
                f"`{op.name}`",
                kind.value if kind else "none",
                f"`{op.written}`",
                _dtypes(found, lambda f, name: [f.torch[name]]),
                _dtypes(found, lambda f, name: f.jamp[name]),
                *(_class([v[d] for v in values if d in v], star) for d in dtypes),
                _class(grads, grad_star),
                "no" if any(result.differs for result in row) else "yes",
            ]
        )
    return table(head, lines)


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
    text = f"> {_CLASSES[-1]}" if bound is None else f"<= {bound}"
    return text + " \\*" * bool(star)
