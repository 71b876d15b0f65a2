"""The report: one table of all parts, the pictures, and the section of each part."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from .result import Result, grouped, table

TITLE = "Parity with torch.amp"
NIGHTLY = "What the parity suite is worth"

_TEXT = """# {title}

`python -m parity{arguments}` runs torch {device} beside jamp and writes this page.

{table}

{known}{failures}{pictures}{sections}

Made with {versions}, in {seconds} seconds. CPU seconds by part: {by_part}.
"""


def text(results: Mapping[ModuleType, Sequence[Result]], **facts: object) -> str:
    """The report in Markdown; equal results give equal text except for its last line.

    Args:
      results: of the parts, in the order of their cases. A part that compares nothing
        with jamp has a section but no row in the table.
      **facts: the fields of the text that the caller knows.
    """
    compared = {part: found for part, found in results.items() if _counts(found)}
    every = [result for found in compared.values() for result in found]
    rows = [_row(part.TITLE, found) for part, found in compared.items()]
    rows.append(_row("**all**", every))
    head = ["area", "cases:", "values compared:", "mismatches:", "known differences:"]
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
        sections="\n\n".join(
            f"## {part.TITLE}\n\n{section(part, found)}"
            for part, found in results.items()
        ),
        **facts,
    )


def section(part: ModuleType, found: Sequence[Result]) -> str:
    """A part's section on the cases that ran to the end."""
    ran = [result for result in found if not result.raised]
    return part.section(ran) if ran else "No case ran to the end."


def _counts(found: Sequence[Result]) -> bool:
    return any(result.mismatches for result in found)


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
