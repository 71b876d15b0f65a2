"""Each error that is planted in a copy of jamp has its place in the code of today.

Whether the tests notice them takes hours (`make planted`) and torch (`make parity`).
"""

import importlib.util
from pathlib import Path

import pytest

from parity import faults

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("planted", ROOT / "scripts/planted.py")
planted = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(planted)

PLACES = {row.name: (row.file, row.old) for row in planted.rows() if row.old} | {
    fault.name: (fault.file, fault.before) for fault in faults.FAULTS
}


@pytest.mark.parametrize("name", PLACES)
def test_each_error_has_its_place(name):
    file, text = PLACES[name]
    source = (ROOT / "jamp" / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, (
        f"jamp/{file} has {text!r} {source.count(text)} times"
    )
