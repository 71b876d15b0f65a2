"""The prose of pages, docstrings, comments and messages, held to plain English.

`python -m tests.lint.test_words FILE ...` prints what it finds.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("**/*.md"),
    *(ROOT / "benchmarks").glob("**/*.md"),
    ROOT / "parity" / "report.md",
]
MODULES = [
    file
    for folder in ("jamp", "examples", "parity", "foreign", "benchmarks", "shared")
    for file in (ROOT / folder).glob("**/*.py")
]

# Each is a mannerism, with what to write in its place.
MANNERISMS = {
    r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! (?:longer|more|less)\b)": "is not",
    r"\bthose who\b": "name the reader, or write `you`",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bby (?:it|them)sel(?:f|ves) all\b": "all by itself",
    r"\b(?:has|have|had) not(?=[.,;:)|]|$)": "does not have, or lacks",
    r"\btells? of\b": "describes",
    r"\b(?:and|or) the like\b": "name them",
    r"\bwithout a word\b": "silently",
    r"(?:^|[.!?]\s+)Else\b": "otherwise",
    r"\bNor\b": "a sentence in the usual order",
    r"\bgo(?:es)? on with\b": "use, or continue with",
    r"\w aside\b": "except",
    r"\bfrom there to\b": "and then",
    r";[^;.!?]*;": "two sentences",
}


def prose(file):
    """Yields (line, text) of what a file says in words."""
    text = file.read_text()
    if file.suffix == ".md":
        blank = lambda found: re.sub(r"[^\n]", " ", found.group())
        text = re.sub(r"```.*?```", blank, text, flags=re.DOTALL)
        text = re.sub(r"`[^`\n]+`", "`code`", text)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        yield from blocks(text, 1)
        return
    comment, first, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, " ".join(comment)
                comment, first = [], token.start[0]
            comment.append(token.string.lstrip("# "))
            last = token.start[0]
    yield first, " ".join(comment)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = re.sub(r"```.*?```|`[^`]+`", "`code`", node.value, flags=re.DOTALL)
            yield from blocks(
                re.sub(r"(?m)^\s*(>>>|\.\.\.) .*$", "", words), node.lineno
            )


def blocks(text, line):
    """Paragraphs, points of lists and cells of tables, each on one line."""
    for part in re.split(r"(\n\s*\n|\n\s*[-*] |\n\s*\d+\. |\||\n#+ )", text):
        yield (
            line + part[: len(part) - len(part.lstrip())].count("\n"),
            " ".join(part.split()),
        )
        line += part.count("\n")


def mannerisms(file):
    return [
        f"{file.name}:{line}: {found.group()!r} ({instead}): ...{text[start:][:90]}..."
        for line, text in prose(file)
        for pattern, instead in MANNERISMS.items()
        for found in re.finditer(pattern, text)
        for start in [max(found.start() - 30, 0)]
    ]


@pytest.mark.parametrize("files", [PAGES, MODULES], ids=["pages", "modules"])
def test_prose_has_no_mannerisms(files):
    assert not [line for file in files for line in mannerisms(file)]


@pytest.mark.parametrize(
    "text",
    [
        "The norm is no sign of a broken run.",
        "A page for those who know.",
        "One thing; another; a third.",
        "What torch has not, jamp has.",
        "Else it is open.",
    ],
)
def test_a_mannerism_is_found(tmp_path, text):
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "module.py").write_text(f'"""{text}"""\n')
    assert len(mannerisms(tmp_path / "page.md")) == 1
    assert len(mannerisms(tmp_path / "module.py")) == 1


def test_plain_prose_passes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "There is no device argument; `a; b; c` is code. It is no longer so."
    )
    assert not mannerisms(page)


if __name__ == "__main__":
    print(*(line for name in sys.argv[1:] for line in mannerisms(Path(name))), sep="\n")
