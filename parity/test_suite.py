"""What `python -m parity` runs, as tests: each case of each part."""

import pytest

torch = pytest.importorskip("torch")

from . import NAMES, part_named  # noqa: E402

CASES = [
    pytest.param(part_named(part), name, id=f"{part}: {name}")
    for part in NAMES
    for name in part_named(part).CASES
]


@pytest.mark.suite
@pytest.mark.parametrize("part, name", CASES)
def test_case(part, name: str):
    result = part.run(part.CASES[name], "cpu")
    assert result.compared or not result.mismatches
    assert result.as_expected, result.where
