"""What the records of a suite say: what differs, and what crashes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import edges, inside, records
from .records import FLOAT16, KEPT, PASSED, PLAIN, WAYS, Outcome


class File(NamedTuple):
    """The outcomes of one file, by way and test; `total` has those left out.

    A test that passed plain counts once it has run in both regions too.
    """

    suite: str
    name: str
    ways: dict[str, dict[str, Outcome]]
    total: int

    def ran(self) -> list[Outcome]:
        """How the tests went plain."""
        regions = [self.ways[way].keys() for way in (KEPT, FLOAT16)]
        return [
            x
            for x in self.ways[PLAIN].values()
            if x.outcome != PASSED or all(x.test in region for region in regions)
        ]

    def passed(self) -> list[str]:
        return [x.test for x in self.ran() if x.outcome == PASSED]

    def failed(self, way: str) -> list[Outcome]:
        """What passed plain and does not pass this way."""
        found = (self.ways[way][test] for test in self.passed())
        return [x for x in found if x.outcome != PASSED]

    def differing(self) -> list[Outcome]:
        """What fails in the region that decides nothing, and is not on the list."""
        return [x for x in self.failed(KEPT) if self.reason(x) is None]

    def reason(self, outcome: Outcome) -> str | None:
        return inside.reason(self.suite, f"{self.name}::{outcome.test}")

    def crashes(self) -> list[Outcome]:
        """What raises in float16, other than where values are compared."""
        return [
            x for x in self.failed(FLOAT16) if not x.compared and self.reason(x) is None
        ]


def uncovered(file: File) -> list[Outcome]:
    """The crashes that no sentence of docs/sharp-edges.md covers."""
    return [x for x in file.crashes() if edges.edge(x.cause, x.message) is None]


def file(folder: Path, name: str) -> File:
    """What is kept of one file of a suite."""
    path = folder / name.removesuffix(".py")
    ways = {way: records.read(path / f"{way}.jsonl") for way in WAYS}
    return File(folder.name, name, ways, records.total(path))


def files(folder: Path) -> Iterator[File]:
    """What is kept of a suite, file by file."""
    for path in sorted(folder.rglob(f"{PLAIN}.jsonl")):
        yield file(folder, f"{path.parent.relative_to(folder)}.py")
