"""jamp under autocast against torch's dtypes, values and gradients in the golden file.

torch is not needed.
"""

import pytest

from parity import golden, ops
from tests.marks import mostly_slow

FILE = golden.load()
QUICK = [case for case in ops.CASES.values() if case.half == "float16"]


def test_the_file_is_of_these_cases():
    assert {n for n in FILE if n.startswith("ops/")} == {f"ops/{n}" for n in ops.CASES}


@pytest.mark.cpu  # as torch's numbers; `python -m parity --device cuda` has others
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "case", mostly_slow(ops.CASES.values(), *QUICK), ids=lambda case: case.name
)
def test_equals_torch(case):
    result = ops.compare_with(case, FILE)
    assert list(result.data.torch) == case.op.inputs
    assert result.compared and result.as_expected, result.where
