"""Every Python block of the documentation runs, in order, page by page."""

import inspect
import re
from pathlib import Path

import pytest

import jamp

from .marks import cover

ROOT = Path(__file__).parent.parent
QUICK = ("how-it-works.md",)
NIGHTLY = ("debugging.md",)  # takes as long as the other pages together
PAGES = sorted(
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))],
    key=lambda page: (page.name not in QUICK) + (page.name in NIGHTLY),
)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TORCH = re.compile(r"^\s*import torch|torch\.", re.MULTILINE)


@pytest.mark.every_release
@cover(quick=len(QUICK), ci=len(PAGES) - len(NIGHTLY))
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, standard_promotion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = PYTHON.findall(page.read_text())
    assert blocks or page.name not in ("README.md", *QUICK)
    if any(TORCH.search(block) for block in blocks):
        pytest.importorskip("torch")
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def test_the_tables_of_defaults_are_those_of_the_signatures():
    text = (
        (ROOT / "docs" / "which.md").read_text().split("### Arguments and defaults")[1]
    )
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE)
    on_page = {name: as_number(default) for name, default in rows}
    pairs = [
        (jamp.dynamic_loss_scale, jamp.GradScaler.__init__),
        (jamp.metrics, jamp.debug.check),
    ]
    in_code = {}
    for first, second in pairs:
        assert defaults_of(first) == defaults_of(second)
        in_code |= defaults_of(first)
    assert on_page == in_code and list(on_page) == list(in_code)


def as_number(text):
    named = {"True": True, "None": None}
    return named[text] if text in named else float(text)


def defaults_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
