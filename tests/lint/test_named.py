"""What pages and workflows name is there: files, tests, modules that run, targets."""

import re
from pathlib import Path

from tests.marks import walk

ROOT = Path(__file__).parents[2]
# The changelog names what was there.
FILES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(ROOT / "docs").glob("**/*.md"),
    *(ROOT / "benchmarks").glob("**/*.md"),
    *(ROOT / "parity").glob("*.md"),
    *(ROOT / ".github").glob("**/*.yml"),
    *(ROOT / ".ci").iterdir(),
    *(ROOT / "tests").glob("*.txt"),
    ROOT / "Makefile",
]
FOLDERS = "tests|benchmarks|scripts|examples|parity|foreign|shared|docs|jamp"
FILE = rf"(?<![\w./{{-])((?:{FOLDERS}|_\w+)/[\w./-]*\.(?:py|txt|md|npz|ipynb))"
FILE = re.compile(rf"{FILE}(?:::(\w+))?|(scripts/[\w-]+)\b(?![./])")
MODULE = re.compile(rf"python -m ((?:{FOLDERS})(?:\.\w+)*)")
MAKE = re.compile(
    r"(?:`|run: |&& |\) )make ([a-z-]+(?: [a-z-]+)*)"
    r"|^\s*make ([a-z-]+)(?: [A-Z]+=\S+)*\s*(?:#|$)",
    re.MULTILINE,
)
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def lacks(text, folder):
    """What a text names that is neither in the repository nor beside it."""
    for file, test, script in FILE.findall(text):
        file = file or script
        path = ROOT / ("jamp" if file[0] == "_" else "") / file
        if not path.exists() and not (folder / file).exists():
            yield file
        elif test and f"def {test}(" not in path.read_text():
            yield f"{file}::{test}"
    for module in MODULE.findall(text):
        path = ROOT.joinpath(*module.split("."))
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            yield module
    for among, alone in MAKE.findall(text):
        yield from {*(among or alone).split()} - TARGETS


@walk("file", FILES, ids=lambda file: file.name)
def test_what_a_file_names_is_there(file):
    assert not [*lacks(file.read_text(), file.parent)]


def test_what_is_not_there_is_found():
    here = "tests/lint/test_named.py"
    text = f"""
`tests/nowhere.py`, {here}::test_nothing and {here}::test_what_is_not_there_is_found,
which `python -m benchmarks.nothing` runs, as `make lint nothing` and scripts/nothing,
`_scaling/nothing.py` and scripts/install. That will
make sense.
    make nowhere DRY=1  # a comment
    """
    assert [*lacks(text, ROOT)] == [
        "tests/nowhere.py",
        f"{here}::test_nothing",
        "scripts/nothing",
        "_scaling/nothing.py",
        "benchmarks.nothing",
        "nothing",
        "nowhere",
    ]
