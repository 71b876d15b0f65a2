"""jamp's float8 against casts and products of torchao in parity/golden.npz."""

import numpy as np
import pytest

from parity import golden
from tests.marks import mostly_nightly

PRODUCTS = [case for case in golden.FLOAT8_PRODUCTS if case.is_in_golden_file]
QUICK = [case for case in golden.FLOAT8_CASTS if case.source == "float32"]


@pytest.fixture(scope="module")
def recorded():
    file = golden.load().items()
    return {n.removeprefix("float8/"): a for n, a in file if n.startswith("float8/")}


@pytest.mark.parametrize(
    "case", mostly_nightly(golden.FLOAT8_CASTS, *QUICK), ids=lambda case: case.name
)
def test_casts_equal_torchao(case, recorded):
    found = golden.float8_casts(case)
    digests = recorded[f"{case.name}/digests"]
    assert len(found) == len(digests)
    wrong = [
        name
        for (name, cast), digest in zip(found.items(), digests, strict=True)
        if not np.array_equal(golden.digest(*cast), digest)
    ]
    assert not wrong


@pytest.mark.parametrize("path", golden.FLOAT8_PATHS)
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.recipe)
def test_products_and_gradients_equal_torchao(case, path, recorded):
    arrays = golden.float8_product(case, path)
    for name, x in zip(golden.FLOAT8_RESULTS, arrays, strict=True):
        expected = recorded[f"{case.name}/{name}"]
        np.testing.assert_array_equal(x.view(np.uint16), expected, name)


def test_the_file_is_of_these_cases(recorded):
    names = {f"{case.name}/digests" for case in golden.FLOAT8_CASTS}
    for case in PRODUCTS:
        names |= {f"{case.name}/{name}" for name in golden.FLOAT8_RESULTS}
    assert recorded.keys() == names
    assert {case.recipe for case in PRODUCTS} == {
        "tensorwise",
        "rowwise",
        "rowwise_with_gw_hp",
    }


def test_another_cast_would_be_seen(recorded):
    # Control: digests notice one bit in one number or in one scale.
    case = golden.FLOAT8_CASTS[0]
    (values, inverse), *_ = golden.float8_casts(case).values()
    (digest, *_) = recorded[f"{case.name}/digests"]
    assert np.array_equal(golden.digest(values, inverse), digest)
    other = values.copy()
    other.flat[-1] ^= 1
    assert not np.array_equal(golden.digest(other, inverse), digest)
    assert not np.array_equal(golden.digest(values, 2 * inverse), digest)


def test_recipes_give_other_results(recorded):
    # Control: a product with the wrong recipe, or in bfloat16, differs.
    case = PRODUCTS[0]
    results = [recorded[f"{case.name}/result"] for case in PRODUCTS]
    assert not np.array_equal(results[0], results[1])
    grads = [recorded[f"{case.name}/gradient of w"] for case in PRODUCTS]
    assert not np.array_equal(grads[1], grads[2])
    (half, *_) = golden.float8_product(case, "in jit", "bfloat16")
    assert np.count_nonzero(half.view(np.uint16) != results[0]) > half.size / 2
