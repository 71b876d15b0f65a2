"""The tables of docs/parity/ecosystem.md."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..report import cell, replace
from .compare import DTYPES, WAYS, Result, Row
from .programs import Outcome
from .reasons import NO_REASON, REASONS, unexplained

HEAD = """| call | float16 half | inner jit | bfloat16 half | inner jit | gradient | \
comes out as | |
| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |"""
PROGRAMS = """| program | what is compared | float32 | float16 | bfloat16 | noise | |
| --- | --- | ---: | ---: | ---: | ---: | --- |"""
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "complex64": "c64"}


class Section(NamedTuple):
    """What is known of one library: `missing` says why it was skipped."""

    name: str
    release: str
    missing: str
    rows: Sequence[Row]
    outcomes: Sequence[Outcome]


def write(path: Path, sections: Sequence[Section]) -> None:
    """Replaces what is between the two marks of the page."""
    found = [summary(sections)]
    outcomes = [x for each in sections for x in each.outcomes]
    if outcomes:
        rows = "\n".join(map(program, outcomes))
        found.append(f"## Programs\n\n{PROGRAMS}\n{rows}")
    for each in sections:
        title = f"## {each.name} {each.release}".rstrip()
        if each.missing:
            found.append(f"{title}\n\nSkipped: {cell(each.missing)}.")
        else:
            found.append("\n".join([f"{title}\n", HEAD, *map(line, each.rows)]))
    replace(path, "\n\n".join(found))


def summary(sections: Sequence[Section]) -> str:
    rows = [row for each in sections for row in each.rows]
    right = sum(not row.faults for row in rows)
    named = sum(bool(row.faults) and not unexplained(row) for row in rows)
    return (
        f"Of {len(rows)} calls, {right} pass, {named} have a named reason, and "
        f"{len(rows) - right - named} are wrong."
    )


def line(row: Row) -> str:
    """One call: errors, the dtype that comes out, and the reason if there is one."""
    errors = [number(row.results[dtype][way]) for dtype in DTYPES for way in WAYS]
    gradients = [row.results[dtype][way].gradient for dtype in DTYPES for way in WAYS]
    known = [x for x in gradients if not math.isnan(x)]
    gradient = figure(max(known)) if known else ""
    said = ""
    if row.faults:
        left = [f"**{k}**: {v}" for k, v in unexplained(row).items()]
        reason = REASONS.get(row.name, NO_REASON)[1]
        said = "; ".join(filter(None, [*left, reason]))
    cells = [f"`{cell(row.name)}`", *errors, gradient, dtypes(row), plain(said)]
    return "| " + " | ".join(cells) + " |"


def plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def number(result: Result) -> str:
    return "raises" if result.raised else figure(result.error)


def figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def dtypes(row: Row) -> str:
    """In float16's region, of the way that did not raise; of both if they differ."""
    results = row.results[DTYPES[0]]
    found = [short(results[way].dtypes) for way in WAYS]
    return "; ".join(dict.fromkeys(filter(None, found)))


def short(names: str) -> str:
    return " ".join(SHORT.get(x, x) for x in names.split())


def program(outcome: Outcome) -> str:
    means = [f"{outcome.mean:.4f}"]
    for dtype in DTYPES:
        apart = outcome.apart.get(dtype)
        means.append("raises" if apart is None else f"{apart:.1e} apart")
    said = f"**wrong** {outcome.raised}".strip() if outcome.wrong else ""
    noise = f"{outcome.noise:.1e}"
    cells = [outcome.name, outcome.what, *means, noise, plain(said)]
    return "| " + " | ".join(cells) + " |"
