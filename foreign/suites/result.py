"""Reads from the records of a suite what differs and what crashes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import edges, inside, records
from .records import FLOAT16, KEPT, PASSED, PLAIN, WAYS, Outcome


class File(NamedTuple):
    """The outcomes of one file, by way and test. `total` also counts tests left out.

    A test that passed plain counts once it has run in both regions too, or in the one
    that the suite has run in.
    """

    suite: str
    name: str
    ways: dict[str, dict[str, Outcome]]
    total: int

    def ran(self) -> list[Outcome]:
        """The outcomes of the plain runs."""
        regions = [run for way in (KEPT, FLOAT16) if (run := self.ways[way])]
        return [
            x
            for x in self.ways[PLAIN].values()
            if x.outcome != PASSED or all(x.test in region for region in regions)
        ]

    def passed(self) -> list[str]:
        return [x.test for x in self.ran() if x.outcome == PASSED]

    def failed(self, way: str) -> list[Outcome]:
        """Tests that passed plain and do not pass this way."""
        run = self.ways[way]
        found = (run[test] for test in self.passed() if test in run)
        return [x for x in found if x.outcome != PASSED]

    def differing(self) -> list[Outcome]:
        """Tests that fail in the region that decides nothing, and are not listed."""
        return [x for x in self.failed(KEPT) if self.reason(x) is None]

    def reason(self, outcome: Outcome) -> str | None:
        return inside.reason(self.suite, f"{self.name}::{outcome.test}")

    def crashes(self) -> list[Outcome]:
        """Tests that raise in float16, except where values are compared."""
        return [
            x for x in self.failed(FLOAT16) if not x.compared and self.reason(x) is None
        ]


def uncovered(file: File) -> list[Outcome]:
    """The crashes that no sentence of docs/sharp-edges.md covers."""
    return [x for x in file.crashes() if edges.edge(x.cause, x.message) is None]


def file(folder: Path, name: str) -> File:
    path = folder / name.removesuffix(".py")
    ways = {way: records.read(path / f"{way}.jsonl") for way in WAYS}
    return File(folder.name, name, ways, records.total(path))


def files(folder: Path) -> Iterator[File]:
    for path in sorted(folder.rglob(f"{PLAIN}.jsonl")):
        yield file(folder, f"{path.parent.relative_to(folder)}.py")
