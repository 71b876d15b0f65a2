"""The tables of docs/parity/ecosystem.md."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..suites.report import cell, replace
from .compare import DTYPES, WAYS, Result, Row
from .programs import Outcome
from .reasons import NO_REASON, REASONS, unexplained

HEAD = """| calls | float16 half | inner jit | bfloat16 half | inner jit | gradient | \
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
            found.append("\n\n".join([title, *blocks(each.rows)]))
    replace(path, "\n\n".join(found))


def summary(sections: Sequence[Section]) -> str:
    rows = [row for each in sections for row in each.rows]
    right = sum(not row.faults for row in rows)
    named = sum(bool(row.faults) and not unexplained(row) for row in rows)
    return (
        f"Of {len(rows)} calls, {right} pass, {named} have a named reason, and "
        f"{len(rows) - right - named} are wrong."
    )


def blocks(rows: Sequence[Row]) -> Iterator[str]:
    """The names of calls that pass, by dtype, and a table of the others, by reason."""
    passed, others = defaultdict(list), defaultdict(list)
    for row in rows:
        if row.faults:
            others[reason(row), dtypes([row])].append(row)
        else:
            passed[dtypes([row])].append(row)
    if passed:
        yield "\n".join(f"- {x or 'nothing'}: {names(passed[x])}" for x in passed)
    if others:
        yield "\n".join([HEAD, *map(line, others.values())])


def line(rows: Sequence[Row]) -> str:
    """The largest errors of calls, the dtypes that come out, and the first's reason."""
    cells = [names(rows)]
    for dtype in DTYPES:
        cells += [number([row.results[dtype][way] for row in rows]) for way in WAYS]
    every = [x[way] for row in rows for x in row.results.values() for way in WAYS]
    known = [x.gradient for x in every if not math.isnan(x.gradient)]
    cells += [figure(max(known)) if known else "", dtypes(rows), plain(reason(rows[0]))]
    return "| " + " | ".join(cells) + " |"


def names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{cell(row.name)}`" for row in rows)


def reason(row: Row) -> str:
    """Why a call may differ, after what is wrong with it; empty if it passes."""
    if not row.faults:
        return ""
    left = [f"**{k}**: {v}" for k, v in unexplained(row).items()]
    return "; ".join(filter(None, [*left, REASONS.get(row.name, NO_REASON)[1]]))


def plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def number(results: Sequence[Result]) -> str:
    if any(x.raised for x in results):
        return "raises"
    errors = [x.error for x in results]
    return figure(math.nan if any(map(math.isnan, errors)) else max(errors))


def figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def dtypes(rows: Iterable[Row]) -> str:
    """In float16's region, of the way that did not raise; of both if they differ."""
    found = [short(row.results[DTYPES[0]][way].dtypes) for row in rows for way in WAYS]
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
