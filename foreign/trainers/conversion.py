"""Edits of a copy of another project's source, and how many lines they change."""

import difflib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """A line of a file, and the lines that take its place.

    Attributes:
      file: the file's path in the project.
      old: the line without its indentation. It stands in the file exactly once.
      new: the lines for it, indented from where the old one began. Empty deletes it.
      above: if the old line stands in several places, the nearest lines above the
        right one, without indentation, as far as they are needed.
    """

    file: str
    old: str
    new: Sequence[str]
    above: Sequence[str] = ()


# Lines of an edit. DTYPE stands for the region's dtype.
RECORDED = "from foreign.trainers.record import recorded"
AUTOCAST = "@jamp.autocast(DTYPE)"


def above(file: str, line: str, *new: str) -> Edit:
    """An edit that keeps the line and puts others above it."""
    return Edit(file, line, [*new, line])


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after the edits. The line of each is looked for in the original text.

    Raises:
      ValueError: a line is not in the text, stands there more than once, or is the line
        of an earlier edit too.
    """
    lines = text.splitlines()
    bare = [line.strip() for line in lines]
    new: dict[int, list[str]] = {}
    for edit in edits:
        context = [*edit.above, edit.old]
        ends = range(len(context), len(lines) + 1)
        found = [n - 1 for n in ends if bare[n - len(context) : n] == context]
        if len(found) != 1:
            raise ValueError(
                f"{edit.file}: the line {edit.old!r} must stand there exactly once. It "
                f"was found {len(found)} times, at {[n + 1 for n in found]}. Is this "
                "another version of the project?"
            )
        (at,) = found
        if at in new:
            raise ValueError(f"{edit.file}: two edits of line {at + 1}, {edit.old!r}")
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        new[at] = [indent + line if line else "" for line in edit.new]
    result = [part for n, line in enumerate(lines) for part in new.get(n, [line])]
    return "\n".join(result) + "\n"


def count(old: str, new: str) -> tuple[int, int]:
    """The lines that a change adds and removes, as `git diff --stat` counts them."""
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))[2:]
    marks = [line[0] for line in diff if not line.startswith("@@")]
    return marks.count("+"), marks.count("-")


def convert(
    source: Path, target: Path, harness: Sequence[Edit], conversion: Sequence[Edit]
) -> tuple[int, int]:
    """Copies a project, edits the copy, and counts the lines of the conversion.

    Args:
      source: the project.
      target: the folder for the copy. It must not exist yet.
      harness: edits that feed made-up data and let losses out. They do not count.
      conversion: those that count.

    Returns:
      How many lines the conversion adds and how many it removes.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git"))
    added = removed = 0
    for file in dict.fromkeys(edit.file for edit in [*harness, *conversion]):
        text = (source / file).read_text()
        mine = [edit for edit in conversion if edit.file == file]
        theirs = [edit for edit in harness if edit.file == file]
        more, fewer = count(text, edited(text, mine))
        added, removed = added + more, removed + fewer
        (target / file).write_text(edited(edited(text, theirs), mine))
    return added, removed
