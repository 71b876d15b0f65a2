"""The page: a table of the files, and all exceptions grouped by cause."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from . import edges, inside, result
from .records import FLOAT16, KEPT
from .result import File

BEGIN, END = "<!-- foreign: begin -->", "<!-- foreign: end -->"

NO_MARKS = """{path}: the page must have a line "{begin}" and then a line "{end}", \
between which the tables are written. Restore the page from git."""

HEAD = """| file | tests | pass plain | same in the region | listed | values | crashes |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


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


def write(path: Path, folder: Path) -> None:
    suites = [list(result.files(folder / name)) for name in inside.INSIDE]
    replace(path, "\n\n".join(section(files) for files in suites if files))


def replace(path: Path, sections: str) -> None:
    """Writes the sections between the two marks of the page."""
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(NO_MARKS.format(path=path, begin=BEGIN, end=END))
    path.write_text(f"{before}{BEGIN}\n\n{sections}\n\n{END}{after}", encoding="utf-8")


def section(files: Sequence[File]) -> str:
    """The section of one suite, without files of which nothing ran."""
    suite = files[0].suite
    counts = {f"`{file.name}`": numbers(file) for file in files if file.passed()}
    if len(counts) > 1:
        columns = zip(*counts.values(), strict=True)
        counts["**all**"] = tuple(map(sum, columns))
    parts = [f"## {suite} {version(suite)}"]
    parts.append("\n".join([HEAD, *(row(*item) for item in counts.items())]))
    if rows := exceptions(files):
        head = "| tests | exception | where | for instance | what covers it |"
        parts.append("\n".join([head, "| ---: | --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def numbers(file: File) -> tuple[int, ...]:
    """The numbers of the table's row, after the number of tests in the file."""
    ran, passed, failed = file.ran(), file.passed(), file.failed(KEPT)
    listed, crashes = len(failed) - len(file.differing()), len(file.crashes())
    values = len(file.failed(FLOAT16)) - crashes
    every = max(file.total, len(ran))
    same = len(passed) - len(failed)
    return every, len(ran), len(passed), same, listed, values, crashes


def row(name: str, counts: tuple[int, ...]) -> str:
    every, ran, *rest = counts
    tests = f"{ran:,} of {every:,}" if ran < every else f"{ran:,}"
    return "| " + " | ".join([name, tests, *(f"{n:,}" for n in rest)]) + " |"


def exceptions(files: Sequence[File]) -> list[str]:
    """A row for each cause, without failed comparisons in float16."""
    found = defaultdict(list)
    for file in files:
        for x in file.failed(KEPT):
            why = file.reason(x) or "**nothing**"
            found[x.cause, "decides nothing", why].append(f"{file.name}::{x.test}")
        for x in file.crashes():
            why = edges.edge(x.cause, x.message)
            why = f"sharp edge: “{why}”" if why else "**nothing**"
            found[x.cause, "float16", why].append(f"{file.name}::{x.test}")
    ordered = sorted(found.items(), key=lambda item: (item[0][1], -len(item[1])))
    return [
        f"| {len(tests)} | `{cell(cause)}` | {where} | `{tests[0]}` | {cell(why)} |"
        for (cause, where, why), tests in ordered
    ]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
