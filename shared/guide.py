"""The migration guide, docs/coming-from-torch.md: its blocks of code and its tables."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-torch.md"
BOTH, TORCH, JAMP, OPTAX = "Both", "PyTorch", "jamp", "jamp with optax"
PARTS = re.compile(
    r"^#+ (?P<heading>[^\n]+)$"
    r"|^```python title=\"(?P<title>[^\"]+)\"\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    recipe: str  # the heading above it
    title: str
    code: str


def blocks(text: str) -> list[Block]:
    """The code blocks that have a title."""
    found, heading = [], ""
    for part in PARTS.finditer(text):
        heading = part["heading"] or heading
        if part["code"]:
            found.append(Block(heading, part["title"], part["code"]))
    return found


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table with this head, without the head."""
    table = text[text.index(head) :].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


TEXT = PAGE.read_text()
BLOCKS = blocks(TEXT)
