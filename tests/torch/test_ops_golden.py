"""jamp under autocast against torch's dtypes, values and gradients in the golden file.

torch is not needed.
"""

import re

import jax
import pytest

from parity import golden, ops
from tests.marks import mostly_slow

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
    "case", mostly_slow(ops.CASES.values(), *QUICK), ids=lambda case: case.name
)
def test_equals_torch(case):
    if refuses_half(case.op):  # a jitted function is traced before the casts
        assert case.op.base == "nuclear_norm"
        with pytest.raises(TypeError, match=REFUSAL):
            ops.compare_with(case, FILE)
        return
    result = ops.compare_with(case, FILE)
    assert list(result.data.torch) == case.op.inputs
    assert result.compared and result.as_expected, result.where
