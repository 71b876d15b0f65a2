"""What the records of a suite say: what differs, and what crashes."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import edges, inside, records
from .records import FLOAT16, KEPT, PASSED, PLAIN, SKIPPED, WAYS, Outcome


class File(NamedTuple):
    """The outcomes of one file, by way and test; `total` has those left out."""

    suite: str
    name: str
    ways: dict[str, dict[str, Outcome]]
    total: int

    def passed(self, way: str) -> list[str]:
        return [x.test for x in self.ways[way].values() if x.outcome == PASSED]

    def failed(self, way: str) -> list[Outcome]:
        """What passed plain and does not pass this way."""
        passed = set(self.passed(PLAIN))
        good = (PASSED, SKIPPED)
        found = self.ways[way].values()
        return [x for x in found if x.test in passed and x.outcome not in good]

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

    def left(self, way: str) -> int:
        """How many tests that passed plain have not run this way yet."""
        return len(set(self.passed(PLAIN)) - self.ways[way].keys())


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
