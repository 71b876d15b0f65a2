"""What is kept of each library: a file of JSON, which the page is made from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .compare import Result, Row
from .libraries import Library
from .programs import Outcome


class Section(NamedTuple):
    """What is known of one library: `missing` says why it was skipped."""

    name: str
    release: str
    missing: str
    rows: Sequence[Row]
    outcomes: Sequence[Outcome]


def path(folder: Path, library: Library) -> Path:
    return folder / "ecosystem" / f"{library.name}.json"


def save(file: Path, section: Section) -> None:
    """Writes it so that `load` gives it back."""
    fields = section._asdict()
    fields["rows"] = [as_fields(row) for row in section.rows]
    fields["outcomes"] = [outcome._asdict() for outcome in section.outcomes]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(fields, indent=1), encoding="utf-8")


def as_fields(row: Row) -> dict[str, Any]:
    results = {
        dtype: {way: result._asdict() for way, result in ways.items()}
        for dtype, ways in row.results.items()
    }
    return row._asdict() | {"results": results}


def load(file: Path) -> Section | None:
    """None if the library has not run."""
    if not file.exists():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    for row in fields["rows"]:
        row["results"] = {
            dtype: {way: Result(**result) for way, result in ways.items()}
            for dtype, ways in row["results"].items()
        }
    fields["rows"] = [Row(**row) for row in fields["rows"]]
    fields["outcomes"] = [Outcome(**outcome) for outcome in fields["outcomes"]]
    return Section(**fields)
