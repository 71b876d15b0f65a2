"""The pages: links lead somewhere, and the migration guide's pairs fit."""

import re
from pathlib import Path

from shared.guide import BLOCKS, BOTH, JAMP, OPTAX, TEXT, TORCH, blocks
from tests.marks import walk

ROOT = Path(__file__).parents[2]
LINKED = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]


@walk("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(\s*([^)#:]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"


def anchors(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {re.sub(r"[\s-]+", "-", word.strip()) for word in words}


UNITS = "ms|s|seconds|minutes|microseconds|kB|MB|GB|kernels|nats"
FIGURE = re.compile(
    rf"(?<!\w)[\d.,]+ (?:{UNITS})\b|\d\.\d+ times\b|\d ± \d"
    r"|\d times as (?:long|fast|much)"
)
BLOCK = re.compile(
    r"^```.*?^```|<!-- benchmarks\.tables.*?<!-- end -->", re.DOTALL | re.MULTILINE
)


@walk("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_measured_figures_are_in_blocks_that_a_command_writes(page):
    text = " ".join(BLOCK.sub("", page.read_text()).split())
    assert not [text[max(0, m.start() - 60) : m.end()] for m in FIGURE.finditer(text)]


def test_every_block_has_a_title_that_is_run():
    assert {block.title for block in BLOCKS} == {BOTH, TORCH, JAMP, OPTAX}
    assert len(BLOCKS) == TEXT.count("```python") == TEXT.count("```") / 2


def test_pairs_have_two_sides():
    pairs = re.findall(r'<div class="pair" markdown>\n(.*?)\n</div>', TEXT, re.DOTALL)
    assert len(pairs) == TEXT.count("<div") > 15
    for pair in pairs:
        titles = [block.title for block in blocks(pair)]
        assert titles == [TORCH, JAMP] * (len(titles) // 2)


@walk("block", BLOCKS, ids=lambda block: block.recipe)
def test_blocks_fit_side_by_side(block):
    assert max(map(len, block.code.splitlines())) <= 60
    assert len(block.code.splitlines()) <= 20
