"""The loss scale against live torch, in random configurations from Hypothesis."""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from . import jamp_side
from .cases import CASES, FIRST_OF_KIND, FLOAT32_MAX, Case
from .trajectory import SMALLEST_NORMAL, Mismatch, bits, compare

POISONS = CASES[0].poisons

torch = pytest.importorskip("torch")
torch_side = pytest.importorskip("parity.torch_side")

repeatable = functools.partial(hypothesis.settings, derandomize=True, deadline=None)


def check(case: Case, path: str, expected, found):
    comparison = compare(case, path, expected, found)
    assert not comparison.where, comparison


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("case", FIRST_OF_KIND, ids=lambda case: case.kind)
def test_torch_on_cuda(case: Case):
    expected = torch_side.run(case, "cuda")
    check(case, "cpu", expected, torch_side.run(case))
    check(case, "nnx.scan", expected, jamp_side.run_nnx(case))


def test_a_stream_that_leaves_the_range_is_refused():
    case = Case("low", "low", init_scale=2.0**-120, overflow=1.0, steps=10)
    with pytest.raises(Mismatch, match="falls below 2\\*\\*-126 at step 6"):
        torch_side.run(case)


growth_factors = st.floats(1.0, 16.0, exclude_min=True) | st.floats(1.0, 1.01).filter(
    lambda factor: factor > 1
)
backoff_factors = st.floats(0.01, 1.0, exclude_max=True)
intervals = st.integers(1, 12) | st.just(2000)
scales = (
    st.floats(2.0**-60, FLOAT32_MAX)
    | st.floats(1e-3, 1e6)
    | st.sampled_from([2.0**16, 2.0**126, 2.0**127, FLOAT32_MAX])
)
configs = {
    "init_scale": scales,
    "growth_factor": growth_factors,
    "backoff_factor": backoff_factors,
    "growth_interval": intervals,
}


@repeatable(max_examples=60)
@hypothesis.given(
    case=st.builds(Case, st.just("drawn"), st.just("drawn"), **configs),
    found_inf=st.lists(st.sampled_from([False, False, False, True]), min_size=50),
)
def test_drawn_scales(case: Case, found_inf: list[bool]):
    flags = np.array(found_inf)
    expected = torch_side.run_scale(case, flags)
    hypothesis.assume(expected[0].min() >= SMALLEST_NORMAL)
    found = jamp_side.run_scale(case, flags)
    np.testing.assert_array_equal(bits(found[0]), bits(expected[0]))
    np.testing.assert_array_equal(found[1], expected[1])


STEPS = 48


def at_some_step(method: str, values: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(st.integers(0, STEPS - 1), st.just(method), values)


events = st.lists(
    at_some_step("set_growth_factor", growth_factors)
    | at_some_step("set_backoff_factor", backoff_factors)
    | at_some_step("set_growth_interval", intervals)
    | at_some_step("update", scales),
    max_size=3,
).map(tuple)


@repeatable(max_examples=40)
@hypothesis.given(
    st.builds(
        Case,
        st.just("drawn"),
        st.just("drawn"),
        **configs,
        enabled=st.sampled_from([True, True, True, False]),
        overflow=st.floats(0.0, 0.5),
        poisons=st.sampled_from([POISONS, POISONS, (2.0**40, -(2.0**40))]),
        seed=st.integers(0, 2**32 - 1),
        steps=st.just(STEPS),
        n_optimizers=st.integers(1, 3),
        unscale_first=st.booleans(),
        events=st.just(()) | events,
    )
)
def test_drawn_cases(case: Case):
    try:
        expected = torch_side.run(case)
    except Mismatch:
        hypothesis.reject()
    check(case, "nnx.scan", expected, jamp_side.run_nnx(case))
    if jamp_side.fits_optax(case):
        check(case, "optax", expected, jamp_side.run_optax(case))
