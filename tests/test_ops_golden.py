"""jamp's dtypes under autocast against torch's on CUDA; torch is not needed."""

import pytest

from jamp._op_rules import DIFFERENCES
from parity import ops, ops_golden, ops_jamp

GOLDEN = ops_golden.load()


def test_the_file_is_of_these_cases():
    assert GOLDEN.keys() == ops.CASES.keys()


@pytest.mark.parametrize("case", ops.CASES.values(), ids=lambda case: case.name)
def test_dtypes_equal_torch(case: ops.Case):
    found = ops_jamp.dtypes(case.op, case.half)
    assert found.keys() == GOLDEN[case.name].keys()
    agree = [
        path == GOLDEN[case.name][inputs]
        for inputs, paths in found.items()
        for path in paths.values()
    ]
    assert len(agree) == 2 * len(found)
    assert all(agree) == (case.op.base not in DIFFERENCES), (found, GOLDEN[case.name])
