"""jamp's dtypes under autocast against torch's on CUDA; torch is not needed."""

import re

import jax
import pytest

from jamp._autocast.ops import DIFFERENCES, UNLISTED_DIFFERENCES
from parity import golden, ops, ops_jamp
from tests.marks import mostly_nightly

FILE = golden.load()
QUICK = [case for case in ops.CASES.values() if case.half == "float16"]


def test_the_file_is_of_these_cases():
    assert {n for n in FILE if n.startswith("ops/")} == {f"ops/{n}" for n in ops.CASES}


REFUSAL = "does not accept dtype b?float16"


def refuses_half(op) -> bool:
    """Whether JAX itself refuses to trace an op, as newer ones do the nuclear norm."""
    try:
        jax.eval_shape(op.jax, *op.arrays("half", "float16"))
    except TypeError as error:
        return re.search(REFUSAL, str(error)) is not None
    return False


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "case", mostly_nightly(ops.CASES.values(), *QUICK), ids=lambda case: case.name
)
def test_dtypes_equal_torch(case):
    if refuses_half(case.op):  # a jitted function is traced before the casts
        assert case.op.base == "nuclear_norm"
        with pytest.raises(TypeError, match=REFUSAL):
            ops_jamp.dtypes(case.op, case.half)
        return
    found = ops_jamp.dtypes(case.op, case.half)
    torch = ops.recorded(FILE, case)
    assert found.keys() == torch.keys()
    agree = [
        path == torch[inputs]
        for inputs, paths in found.items()
        for path in paths.values()
    ]
    assert len(agree) == 2 * len(found)
    assert all(agree) == (case.op.base not in DIFFERENCES | UNLISTED_DIFFERENCES), (
        found,
        torch,
    )
