"""Every Python block of the documentation runs, in order, page by page."""

import re
from pathlib import Path

import pytest

from .marks import slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    ROOT / "benchmarks" / "README.md",
]
QUICK = ("README.md", "index.md", "checkpoints.md")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TORCH = re.compile(r"^\s*import torch|torch\.", re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page if page.name in QUICK else slow(page) for page in PAGES],
    ids=lambda page: page.name,
)
def test_code_blocks_run(page, standard_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = PYTHON.findall(page.read_text())
    assert blocks or page.name not in QUICK
    if page.name == "README.md":
        assert blocks
    if any(TORCH.search(block) for block in blocks):
        pytest.importorskip("torch")
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
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
