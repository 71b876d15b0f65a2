"""The comparison of float8 with torchao: its inputs, verdicts and messages."""

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jamp._autocast.float8 import RECIPES

from . import float8, float8_cases, float8_jamp, golden
from .float8_cases import CASTS, PRODUCTS, Product

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
float8_torch = pytest.importorskip("parity.float8_torch")

NORMAL = Product("tensorwise", "normal", (64, 128), 96, 0)
OUTLIERS = Product("tensorwise", "outliers", (96, 192), 128, 4)


# The cases.


def test_there_are_enough_cases():
    # What the report claims.
    arrays = {case: case.arrays() for case in CASTS}
    assert sum(map(len, arrays.values())) >= 400
    for source, low, high in (
        ("float32", 2.0**-60, 3e38),
        ("bfloat16", 2.0**-60, 2.9e38),
        ("float16", 2.0**-12, 65504.0),
    ):
        of = [
            x for c, all in arrays.items() if c.source == source for x in all.values()
        ]
        assert {x.dtype.name for x in of} == {source}
        largest = [np.abs(x.astype(np.float64)).max() for x in of]
        assert max(largest) >= high and sum(0 < m < low for m in largest) > 2
        assert largest.count(0) >= 3
        smallest = float(jnp.finfo(source).smallest_normal)
        assert any(0 < m < smallest for m in largest)
    for recipe in RECIPES:
        of = [case for case in PRODUCTS if case.recipe == recipe]
        sizes = [x.size for case in of if not case.is_large for x in case.inputs()[:2]]
        assert sum(sizes) >= 50_000 and sum(case.is_large for case in of) == 2
    assert len(float8.CASES) == len(CASTS) + 1 + len(PRODUCTS)


@pytest.mark.parametrize("case", CASTS, ids=lambda case: case.name)
def test_halfway_is_halfway(case):
    for name, x in case.arrays().items():
        if "halfway" not in name:
            continue
        wide = x.astype(np.float64)
        mantissa, _ = np.frexp(wide)
        digits = mantissa * 2 ** (float8_cases.DIGITS[case.format] + 1)
        odd = digits % 2 == 1
        if name.startswith("halfway"):
            assert odd.all()
        else:
            assert 0.2 < odd.mean() < 0.8  # float16 has few numbers in between


@pytest.mark.parametrize("recipe", RECIPES)
def test_sums_of_whole_numbers_are_exact(recipe):
    # After casts too, no sum depends on its order.
    (case,) = (c for c in PRODUCTS if c.is_in_golden_file and c.recipe == recipe)
    found = float8_torch.product(case)
    reverse = case.shape[-1] - 1 - np.arange(case.shape[-1])
    x, w, ct = case.inputs()
    for order in (reverse, np.random.RandomState(0).permutation(case.shape[-1])):
        other = float8_torch.product_of(recipe, x[:, order], w[order], ct)
        np.testing.assert_array_equal(other[0], found[0])
        np.testing.assert_array_equal(other[1], found[1][:, order])
        np.testing.assert_array_equal(other[2], found[2][order])
    for number in (x, w, ct):
        assert len(np.unique(np.frexp(number.astype(np.float64))[1])) > 12


# torchao.


def test_recipes_are_those_of_torchao():
    from torchao.float8.config import Float8LinearConfig, Float8LinearRecipeName

    assert {name.value for name in Float8LinearRecipeName} == {*RECIPES}
    for recipe in RECIPES:
        ours = dataclasses.asdict(float8_torch.config(recipe))
        theirs = dataclasses.asdict(Float8LinearConfig.from_recipe_name(recipe))
        changed = {name for name in ours if ours[name] != theirs[name]}
        rounds = {"round_scales_to_power_of_2"} if recipe == "tensorwise" else set()
        assert changed == {"emulate"} | rounds


@pytest.mark.parametrize("n", range(-39, 119))
def test_scales_beside_the_edge(n: int):
    # jamp's scale is the largest power of two that keeps a number in range; torchao's
    # is twice that for a few float32 numbers above 1.75 * 2**n, and only for those.
    # (The next one of float16 is 2**13 numbers of float32 above, that of bfloat16
    # 2**16.)
    edge = np.float32(1.75 * 2.0**n)
    bits = edge.view(np.int32) + np.arange(-64, 128, dtype=np.int32)
    row = bits.view(np.float32)[:, None]
    _, theirs = float8_torch.cast(row, "E4M3", -1)
    _, ours = float8_jamp.cast(row, "E4M3", (1,))
    for x, inverse in zip(row.flat, ours.flat, strict=True):
        scaled = Fraction(float(x)) / Fraction(float(inverse))
        assert 224 < scaled <= 448
    apart = np.flatnonzero(theirs != ours)
    assert np.all((apart > 64) & (apart < 64 + 64))
    np.testing.assert_array_equal(2 * theirs.ravel()[apart], ours.ravel()[apart])


def test_an_inf_makes_another_scale_in_torchao():
    x = np.array([[1.0, np.inf], [1.0, 2.0]], np.float32)
    _, theirs = float8_torch.cast(x, "E4M3", -1)
    _, ours = float8_jamp.cast(x, "E4M3", (1,))
    assert np.isinf(theirs[0, 0]) and np.isnan(ours[0, 0])  # from the scale 0
    assert theirs[1, 0] == ours[1, 0]


def test_what_differs_is_a_sum_close_to_halfway():
    case = next(case for case in PRODUCTS if case.is_large)
    assert case.recipe == "tensorwise"
    x, w, _ = case.inputs()
    theirs = float8_torch.product(case)[0].astype(np.float64)
    ours = float8_jamp.product(case, "in jit")[0].astype(np.float64)
    numbers = []
    for array in (x, w):
        values, inverse = float8.stands_for(float8_torch.cast(array, "E4M3", None))
        numbers.append(values.astype(np.float64) * inverse)
    exact, size = numbers[0] @ numbers[1], np.abs(numbers[0]) @ np.abs(numbers[1])
    halfway = (theirs + ours) / 2
    differ = theirs != ours
    assert differ.sum() < 10
    # What float32 may lose in any order: half a unit of the size per term.
    lost = size * 2.0**-24 * case.shape[-1]
    assert np.all(np.abs(exact - halfway)[differ] <= lost[differ])
    assert np.all(lost < 0.02 * np.abs(exact).max())


# The comparison.


def bfloat16(*numbers: float) -> np.ndarray:
    return np.array(numbers, jnp.bfloat16)


@pytest.mark.parametrize(
    "torch, jamp, most, wrong, differ",
    [
        (bfloat16(1, -2), bfloat16(1, -2), 0, 0, 0),
        (bfloat16(0.0), bfloat16(-0.0), 0, 0, 0),
        (bfloat16(1, 1), bfloat16(1, 1 + 2**-7), 0, 1, 1),
        (bfloat16(1, 1), bfloat16(1, 1 + 2**-7), 1, 0, 1),
        (bfloat16(1, 1), bfloat16(1, 1 + 2**-6), 1, 1, 1),
        (bfloat16(1, np.nan), bfloat16(1, np.nan), 0, 0, 0),
        (bfloat16(1, np.nan), bfloat16(np.nan, np.nan), 1, 1, 1),
        (bfloat16(np.inf, np.inf), bfloat16(np.inf, -np.inf), 1, 1, 1),
        (bfloat16(np.nan, 1), bfloat16(np.nan, 3e38), 1, 1, 1),
        (bfloat16(1), bfloat16(1, 1), 1, 1, 1),
        (bfloat16(1), np.ones(1, np.float32), 1, 1, 1),
        (np.ones(1, np.float32), np.full(1, 1 + 2**-20, np.float32), 1, 1, 1),
    ],
)
def test_what_the_comparison_tells(torch, jamp, most, wrong, differ):
    found = float8.compare(torch, jamp, most)
    assert (found.wrong, found.differ) == (wrong, differ)
    assert bool(found.where) == bool(wrong)


def test_units_of_the_largest_number():
    torch, jamp = bfloat16(64, 2**-7), bfloat16(64, 2**-6)
    assert float8.compare(torch, jamp, 1).wrong
    assert not float8.compare(torch, jamp, 1, cancels=True).wrong
    assert float8.compare(torch, bfloat16(65, 2**-7), 1, cancels=True).wrong


def test_errors_that_are_too_large():
    good = {"jamp": (28.1, 24.6, 24.6), "torchao": (28.0, 24.5, 24.5)}
    assert float8.too_far(good | {"bfloat16": (0, 0, 0)}) == []
    (text,) = float8.too_far(good | {"jamp": (28.1, 24.4, 24.6)})
    assert text == "jamp's gradient of x is 24.40 dB from exact, less than 24.5"
    assert len(float8.too_far(good | {"torchao": (27.9, 24.4, np.nan)})) == 3


def test_a_wrong_scale_is_not_as_expected(monkeypatch):
    right = float8_jamp.cast

    def wrong(x, format, axes):
        values, inverse = right(x, format, axes)
        return values, inverse * 2

    monkeypatch.setattr(float8_jamp, "cast", wrong)
    result = float8.run(CASTS[0], "cpu")
    assert result.mismatches == {"values": 0, "scales": 27}
    assert not result.as_expected and "of 1 scales differ" in result.where


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_another_recipe_is_not_as_expected(monkeypatch, recipe):
    right = float8_jamp.product

    def wrong(case, path, dtype=None):
        return right(case._replace(recipe=recipe), path, dtype)

    monkeypatch.setattr(float8_jamp, "product", wrong)
    result = float8.run(OUTLIERS, "cpu")
    assert all(result.mismatches[name] for name in float8.RESULTS)
    assert not result.as_expected and "the result differs in" in result.where


# The golden file.


def test_the_golden_file_tells_a_difference():
    result = float8.run(CASTS[0], "cpu")
    name, file = f"float8/{result.case}/digests", golden.load()
    others = {n for n in file if n.startswith("float8/")} - {name}
    assert set(golden.differences(file, float8.golden([result]))) == others
    result.data["digests"][3, 0] ^= 1
    assert name in golden.differences(file, float8.golden([result]))
