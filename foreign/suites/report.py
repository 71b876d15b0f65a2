"""What a run of a suite prints: a line for each file, and what must be fixed."""

from collections.abc import Iterable

from . import result
from .records import FLOAT16, KEPT
from .result import File


def line(file: File) -> str:
    found = [f"{file.suite} {file.name}: {len(file.passed())} pass plain"]
    if file.ways[KEPT]:
        found.append(
            f"{len(file.failed(KEPT))} of them fail in a region that decides nothing "
            f"({len(file.differing())} not on the list)"
        )
    if file.ways[FLOAT16]:
        found.append(
            f"{len(file.failed(FLOAT16))} in float16 ({len(file.crashes())} crashes, "
            f"{len(result.uncovered(file))} not covered)"
        )
    not_run = [way for way in (KEPT, FLOAT16) if not file.ways[way]]
    return ", ".join([*found, *(f"not run in {way}" for way in not_run)])


def details(files: Iterable[File]) -> list[str]:
    """What must be fixed, with a line for each test."""
    found = []
    for file in files:
        for way, outcomes in (
            ("decides nothing", file.differing()),
            ("float16", result.uncovered(file)),
        ):
            found += [f"{way}: {file.name}::{x.test}: {x.cause}" for x in outcomes]
    return found
