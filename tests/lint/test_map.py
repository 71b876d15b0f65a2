"""The file map in docs/how-it-works.md matches the folder.

`python -m tests.lint.test_map` rewrites its tables from the first line of each file.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jamp"
PAGE = ROOT / "docs" / "how-it-works.md"
PICTURE = ROOT / "docs" / "images" / "house.svg"
START, END = "<!-- made by tests/lint/test_map.py -->\n", "<!-- end -->\n"
WINGS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def first_line(path):
    return ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]


def table(paths):
    rows = [f"| `{path.name}` | {first_line(path).rstrip('.')} |" for path in paths]
    return "| file | what it holds |\n|---|---|\n" + "\n".join(rows) + "\n"


def tables():
    """The part of the page that is made."""
    parts = [
        f"**`jamp/`**: {first_line(PACKAGE / '__init__.py')}\n",
        table(p for p in sorted(PACKAGE.glob("*.py")) if p.stem != "__init__"),
    ]
    for wing in WINGS:
        parts.append(
            f"**`jamp/{wing}/`**: {first_line(PACKAGE / wing / '__init__.py')}\n"
        )
        files = sorted((PACKAGE / wing).glob("*.py"))
        parts.append(table(path for path in files if path.stem != "__init__"))
    return "\n".join(parts)


def test_the_tables_are_of_this_folder():
    made = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert made == tables(), "run `python -m tests.lint.test_map`"


def in_picture(title):
    """The files that the picture has in a wing, from its title to the next one."""
    text = PICTURE.read_text()
    part = text[text.index(f">{title}<") :]
    end = re.search(r"</text>\s*<(?!text)", part)
    assert end
    lines = re.findall(r'class="code">([^<]*)<', part[: end.start() + 7])
    return [name for line in lines for name in line.replace(",", " ").split()]


@pytest.mark.parametrize("wing", WINGS)
def test_the_picture_shows_files_that_are_there(wing):
    names = in_picture(wing)
    assert len(names) >= 6
    assert {*names} <= {path.stem for path in (PACKAGE / wing).glob("*.py")}


def test_the_picture_shows_the_faces():
    faces = {name.removeprefix(".") for name in in_picture("Faces: what users import")}
    assert faces == {"jamp"} | {
        path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")
    }


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + tables() + END + rest.partition(END)[2])
