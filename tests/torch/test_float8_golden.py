"""jamp's float8 against casts and products of torchao in parity/golden.npz."""

import numpy as np
import pytest

from parity import float8_jamp, golden
from parity.float8 import RESULTS
from parity.float8_cases import (
    CASTS,
    FORMATS,
    PRODUCTS,
    RECIPES,
    SHARING,
    SOURCES,
    Casts,
)
from parity.trajectory import digest as digest_of
from tests.marks import cover

WHOLE = [case for case in PRODUCTS if case.is_in_golden_file]


@pytest.fixture(scope="module")
def recorded():
    file = golden.load().items()
    return {n.removeprefix("float8/"): a for n, a in file if n.startswith("float8/")}


@pytest.mark.every_release
@cover(quick=4, ci=4)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("format", FORMATS)
def test_casts_equal_torchao(format, sharing, source, recorded):
    case = Casts(format, source, sharing)
    found = float8_jamp.casts(case)
    digests = recorded[f"{case.name}/digests"]
    assert len(found) == len(digests)
    wrong = [
        name
        for (name, cast), digest in zip(found.items(), digests, strict=True)
        if not np.array_equal(digest_of(*cast), digest)
    ]
    assert not wrong


@pytest.mark.cpu  # whose products are exact sums
@pytest.mark.every_release
@cover(ci=3)
@pytest.mark.parametrize("path", float8_jamp.PATHS)
@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.recipe)
def test_products_and_gradients_equal_torchao(case, path, recorded):
    arrays = float8_jamp.product(case, path)
    for name, x in zip(RESULTS, arrays, strict=True):
        expected = recorded[f"{case.name}/{name}"]
        np.testing.assert_array_equal(x.view(np.uint16), expected, name)


def test_the_file_is_of_these_cases(recorded):
    names = {f"{case.name}/digests" for case in CASTS}
    for case in WHOLE:
        names |= {f"{case.name}/{name}" for name in RESULTS}
    assert recorded.keys() == names
    assert {case.recipe for case in WHOLE} == {*RECIPES}


def test_another_cast_would_be_seen(recorded):
    # Control: digests notice one bit in one number or in one scale.
    case = CASTS[0]
    (values, inverse), *_ = float8_jamp.casts(case).values()
    (digest, *_) = recorded[f"{case.name}/digests"]
    assert np.array_equal(digest_of(values, inverse), digest)
    other = values.copy()
    other.flat[-1] ^= 1
    assert not np.array_equal(digest_of(other, inverse), digest)
    assert not np.array_equal(digest_of(values, 2 * inverse), digest)


def test_recipes_give_other_results(recorded):
    # Control: a product with the wrong recipe, or in bfloat16, differs.
    case = WHOLE[0]
    results = [recorded[f"{case.name}/result"] for case in WHOLE]
    assert not np.array_equal(results[0], results[1])
    grads = [recorded[f"{case.name}/gradient of w"] for case in WHOLE]
    assert not np.array_equal(grads[1], grads[2])
    (half, *_) = float8_jamp.product(case, "in jit", "bfloat16")
    assert np.count_nonzero(half.view(np.uint16) != results[0]) > half.size / 2
