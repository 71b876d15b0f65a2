"""The section of the report on autocast's ops."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jamp._autocast.ops import DIFFERENCES, NO_COUNTERPART

from .ops_table import HALVES, Found, Op
from .result import Result

_TEXT = """\
The lists of torch's `autocast_mode.h` have {listed} ops; {compared} have a counterpart
in JAX. Each runs in a region of float16 and in one of bfloat16, in jit, jitted inside
the region, and in float16 outside jit. Its inputs are of float32; of the region's dtype
(`half`); and if it has several and JAX takes them, the first of float32 and the rest of
the region's dtype, and the other way round. Where the results' dtypes differ they stand
in this order. Gradients are taken in jit, outside the region, with respect to every
input.

**{agree} of the {compared} ops agree with torch on CUDA** in the dtypes of results and
gradients, and in their values to {most} units in the last place (ULPs);
{disagree}. Of {unlisted} ops in none of the lists, {unlisted_agree} agree.

A gradient has the dtype of its input, in torch as in jamp. Without a GPU, torch's
dtypes are those of fake tensors under CUDA's autocast, and its values and gradients
come from the CPU, whose autocast was given CUDA's lists. ULPs are the largest distance,
in the narrower dtype of the two results; those of gradients are in the narrower dtype
of result and gradient, because the backward pass of a half-precision result is in half
precision. Where torch's is rounded to half precision, so must jamp's be; XLA was told
to round wherever it is asked to (`xla_allow_excess_precision=false`).

{table}

{notes}

\\* Counted in ULPs of the array's largest element, as small ones are what is left where
large terms cancel:

{cancels}

Without a counterpart:

{missing}
"""
_CLASSES = (1, 2, 4, 8)


def section(results: Sequence[Result]) -> str:
    """The section, the two cases of an op in one row."""
    by_title: dict[str, list[Result]] = {}
    for result in results:
        by_title.setdefault(result.data.case.title, []).append(result)
    rows = list(by_title.values())
    listed: dict[str, bool] = {}
    unlisted: dict[str, bool] = {}
    for row in rows:
        ops = listed if row[0].data.kind else unlisted
        base = row[0].data.case.op.base
        ops[base] = ops.get(base, True) and not any(r.differs for r in row)
    differing = [name for name, agrees in listed.items() if not agrees]
    wrong = [name for name in differing if name not in DIFFERENCES]
    ops = [row[0].data.case.op for row in rows]
    notes = [f"- `{n}`, as jamp has it: {why}." for n, why in DIFFERENCES.items()]
    notes += [
        f"- `{op.name}` as `{op.written}`, values not compared: {op.dtypes_only}."
        for op in ops
        if op.dtypes_only
    ]
    notes += [
        f"- `{op.name}` as `{op.written}`: its bound is {_CLASSES[-1]} ULPs times the "
        "condition number of its input, since LAPACK rounds as the processor likes."
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
    """The ops whose distances are counted otherwise, by reason."""
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
    lines = [head, ["---"] * len(head)]
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
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    """Coarse, since the last bit depends on the processor."""
    if not distances:
        return "-"
    largest = max(distances)
    bound = next((n for n in _CLASSES if largest <= n), None)
    text = f"> {_CLASSES[-1]}" if bound is None else f"<= {bound}"
    return text + " \\*" * bool(star)
