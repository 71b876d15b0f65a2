"""Masters in two halves: each float32 pattern splits and joins as stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jamp._scaling.master_form import joined, keep, master_of, remainder_of, rounded
from tests.marks import cover

HIGHS = np.arange(2**16, dtype=np.uint32) << 16
EDGES = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF]
INF, SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)
WAYS = {"jit": jax.jit, "eager": lambda f: f}


def split(x):
    return rounded(jnp.asarray(x), jnp.dtype(jnp.bfloat16)), remainder_of(x)


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def float32(patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


def is_nan(patterns):
    return (patterns & ~SIGN) > INF


@cover()
@pytest.mark.parametrize("way", WAYS)
def test_every_number_comes_back(way):
    """All 2**16 high halves, each with the edges and a few low halves at random."""
    rng = np.random.default_rng(0)
    for low in [*EDGES, *rng.integers(0, 2**16, 8)]:
        patterns = HIGHS | np.uint32(low)
        param, rest = WAYS[way](split)(float32(patterns))
        assert (param.dtype, rest.dtype) == (jnp.bfloat16, jnp.int16)
        again = bits(WAYS[way](joined)(param, rest))
        nan = is_nan(patterns)
        np.testing.assert_array_equal(again[~nan], patterns[~nan])
        # A nan stays one, in the parameter too, with its sign in the parameter.
        assert is_nan(again[nan]).all()
        assert is_nan(bits(param)[nan].astype(np.uint32) << 16).all()
        np.testing.assert_array_equal(bits(param)[nan] >> 15, patterns[nan] >> 31)


def test_parameters_are_rounded_to_nearest_with_ties_away_from_zero():
    for low in EDGES:
        patterns = HIGHS | np.uint32(low)
        patterns = patterns[~is_nan(patterns)]
        x = patterns.view(np.float32)
        param = np.asarray(jax.jit(split)(x)[0])
        even = x.astype(jnp.bfloat16)
        if low != 0x8000:
            np.testing.assert_array_equal(bits(param), bits(even))
            continue
        away = abs(param.astype(np.float64)) >= abs(x.astype(np.float64))
        assert away.all()
        ties = bits(param) != bits(even)
        assert 0.49 < ties.mean() < 0.51, "the control: half of them differ"


CLASSES = {
    "0": (0x00000000, 0x0000, 0),
    "-0": (0x80000000, 0x8000, 0),
    "the smallest subnormal": (0x00000001, 0x0000, 1),
    "the smallest negative subnormal": (0x80000001, 0x8000, 1),
    "the largest subnormal": (0x007FFFFF, 0x0080, -1),
    "the smallest normal": (0x00800000, 0x0080, 0),
    "1": (0x3F800000, 0x3F80, 0),
    "below a tie": (0x3F807FFF, 0x3F80, 0x7FFF),
    "a tie": (0x3F808000, 0x3F81, -0x8000),
    "above a tie": (0x3F808001, 0x3F81, -0x7FFF),
    "a negative tie": (0xBF808000, 0xBF81, -0x8000),
    "the largest that is finite in bfloat16": (0x7F7F7FFF, 0x7F7F, 0x7FFF),
    "the smallest that is not": (0x7F7F8000, 0x7F80, -0x8000),
    "the largest": (0x7F7FFFFF, 0x7F80, -1),
    "inf": (0x7F800000, 0x7F80, 0),
    "-inf": (0xFF800000, 0xFF80, 0),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    pattern, high, low = CLASSES[name]
    param, rest = split(float32([pattern]))
    assert (bits(param).item(), rest.item()) == (high, low)
    assert bits(joined(param, rest)).item() == pattern


@given(old=st.integers(0, 2**32 - 1), new=st.integers(0, 2**16 - 1))
def test_a_parameter_changed_from_outside_is_kept(old, new):
    """The master then rounds to it, and is no nan unless the parameter is."""
    param = jnp.asarray(np.array([new], np.uint16).view(jnp.bfloat16))
    _, rest = split(float32([old]))
    master = joined(param, rest)
    assert np.isnan(master) == np.isnan(np.asarray(param, np.float32))
    if not np.isnan(master):
        assert bits(split(master)[0]).item() == new


def test_a_copy_goes_with_its_parameter_and_with_a_neighbor_alone():
    copy = jnp.full(2, 1.0001, jnp.float32)
    param = jnp.asarray([1 + 2**-10, 1 + 3 * 2**-10], jnp.float16)
    np.testing.assert_array_equal(master_of(copy, param), [copy[0], param[1]])


@given(pattern=st.integers(0, 2**32 - 1))
def test_one_form_becomes_the_other(pattern):
    x = float32([pattern])
    param, rest = split(x)
    copy = master_of(rest, param)
    assert copy.dtype == jnp.float32
    if np.isfinite(np.asarray(x)):
        np.testing.assert_array_equal(bits(copy), bits(x))
        again = keep(master_of(copy, param), jnp.dtype(jnp.int16))
        assert again == rest


@pytest.mark.parametrize(
    "dtype, kept, message",
    [
        (jnp.float16, jnp.int16, "with a remainder is float16, not bfloat16"),
        (jnp.float32, jnp.int16, "with a remainder is float32, not bfloat16"),
        (jnp.bfloat16, jnp.float16, "a copy in the state is float16"),
        (jnp.int32, jnp.float32, "with a float32 copy is int32"),
    ],
)
def test_what_cannot_belong_together_is_refused(dtype, kept, message):
    with pytest.raises(ValueError, match=message):
        master_of(jnp.ones(2, kept), jnp.ones(2, dtype))


def test_what_float16_lacks_of_a_float32_takes_more_than_sixteen_bits():
    """Why there is no remainder for it."""
    below = np.float32(2.0**-25).view(np.uint32)
    assert int(below) > 2**29  # positive numbers that round to 0
    for exponent, lacks in ((15, 13), (-14, 13), (-15, 14), (-17, 16), (-18, 17)):
        x = np.float32(2.0**exponent)
        step = np.float64(np.spacing(np.float16(x)))
        assert step / np.spacing(x) == 2**lacks, exponent
