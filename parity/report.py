"""The report: a table of all parts, and of each part what it does and its results."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .result import Result, grouped

TITLE = "Parity with torch.amp"
NIGHTLY = "What the parity suite is worth"

_TEXT = """# {title}

`python -m parity{arguments}` runs torch {device} beside jamp and writes this page.

{table}

{known}{failures}{sections}

Made with {versions}, in {seconds} seconds. CPU seconds by part: {by_part}.
"""


def text(results: Mapping[ModuleType, Sequence[Result]], **facts: object) -> str:
    """The report in Markdown; equal results give equal text except for its last line.

    Args:
      results: of the parts, in the order of their cases.
      **facts: the fields of the text that the caller knows.
    """
    every = [result for found in results.values() for result in found]
    rows = [_row(part.TITLE, found) for part, found in results.items()]
    rows.append(_row("**all**", every))
    head = ["area", "cases", "values compared", "mismatches", "known differences"]
    reasons = [
        f"- {' and '.join(cases)}: {reason}.\n"
        for reason, cases in _reasons(every).items()
    ]
    failures = [
        f"- {r.case}: {r.where or 'agrees, though a reason says that it does not'}\n"
        for r in every
        if not r.as_expected
    ]
    return _TEXT.format(
        table=table(head, rows),
        known="".join(["Known differences:\n\n", *reasons, "\n"] if reasons else []),
        failures="".join(["Mismatches:\n\n", *failures, "\n"] if failures else []),
        sections="\n\n".join(section(*of_part) for of_part in results.items()),
        **facts,
    )


def section(part: ModuleType, found: Sequence[Result]) -> str:
    """What a part does, and a table of its cases that ran to the end."""
    rows = grouped((r for r in found if not r.raised), lambda r: r.row or r.case)
    columns = dict.fromkeys(x for of in rows.values() for r in of for x in r.figures)
    lines = []
    for name, of_row in rows.items():
        wrong = sum(sum(r.mismatches.values()) for r in of_row)
        figures = [
            _figure([r.figures[x] for r in of_row if x in r.figures]) for x in columns
        ]
        compared = sum(r.compared for r in of_row)
        lines.append([f"`{name}`", len(of_row), compared, wrong, *figures])
    head = ["case", "cases", "values compared", "mismatches", *columns]
    said = inspect.getdoc(part) or ""
    return f"## {part.TITLE}\n\n{said}\n\n{table(head, lines)}"


def _figure(values: Sequence[Any]) -> Any:
    """The largest number, or each text once."""
    if all(isinstance(x, str) for x in values):
        return ", ".join(dict.fromkeys(filter(None, values)))
    return max(values)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; a column of numbers is aligned to the right."""
    numbers = [
        any(not isinstance(row[i], str) for row in rows) for i in range(len(head))
    ]
    rule = ["---:" if of_numbers else "---" for of_numbers in numbers]
    return "\n".join(_line(row) for row in (head, rule, *rows))


def _line(row: Iterable[Any]) -> str:
    cells = [
        x if isinstance(x, str) else f"{x:,}" if isinstance(x, int) else f"{x:.2g}"
        for x in row
    ]
    return f"| {' | '.join(x.replace('|', '&#124;') for x in cells)} |"


def _reasons(found: Sequence[Result]) -> dict[str, list[str]]:
    """The cases that differ on purpose, by reason."""
    groups = grouped((r for r in found if r.reason), lambda result: result.reason)
    return {reason: [r.case for r in of] for reason, of in groups.items()}


def _row(name: str, found: Sequence[Result]) -> list[Any]:
    """Cases, values and mismatches; values that differ on purpose count separately."""
    known = len(_reasons(found))
    wrong = sum(sum(r.mismatches.values()) for r in found if not r.reason)
    wrong += sum(bool(r.reason) and not r.differs for r in found)
    compared = sum(r.compared for r in found)
    return [name, len(found), compared, wrong, known]
