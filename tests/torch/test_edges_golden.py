"""Values and gradients over the range of half precision, with torch's in a golden file.

torch is not needed. A few functions are quick, and all of them run on each release of
JAX, in one program for each dtype.
"""

import pytest

from parity import edges, golden
from parity.ops_table import HALVES
from tests.marks import cover

FILE = golden.load()
FEW = ["x / y", "jax.nn.gelu", "x * jax.nn.sigmoid(y)", "jnp.exp"]
TABLES = {"a few, float16": [edges.CASES[f"{title}, float16"] for title in FEW]} | {
    half: [case for case in edges.CASES.values() if case.half == half]
    for half in HALVES
}


def test_the_file_is_of_these_cases():
    names = {name for name in FILE if name.startswith(edges.PREFIX)}
    assert names == {f"{edges.PREFIX}{half}" for half in HALVES}
    for half in HALVES:
        of_half = [case for case in edges.CASES.values() if case.half == half]
        sides = edges.unpack(FILE[f"{edges.PREFIX}{half}"])
        assert list(sides) == [case.title for case in of_half]
        for case, side in zip(of_half, sides.values(), strict=True):
            operands = case.edge.arrays(edges.INPUTS, half)
            assert [x.shape for x in operands] == [x.shape for x in side.grads]


@pytest.mark.cpu  # as torch's numbers
@pytest.mark.every_release
@pytest.mark.usefixtures("standard_promotion")
@cover(quick=1, ci=len(TABLES))
@pytest.mark.parametrize("table", TABLES)
def test_no_number_is_much_farther_away_than_torch_s(table):
    results = edges.compare_with(TABLES[table], FILE)
    assert all(r.compared for r in results)
    wrong = [f"{dict(r.mismatches)}: {r.where}" for r in results if not r.as_expected]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(results)} differ", *wrong])
