"""jamp against torch's results in parity/golden.npz; torch is not needed."""

import jax
import numpy as np
import pytest

from parity import golden, jamp_side, scale
from parity.cases import CASES, FIRST_OF_KIND, LONG_RUN, Case, overflows
from parity.trajectory import digest
from tests.marks import cover

OPTAX_CASES = [case for case in CASES if jamp_side.fits_optax(case)]
# One of each kind; `make parity` compares all of them with live torch.
KINDS = [*{case.kind: case for case in reversed(OPTAX_CASES)}.values()]
# Those without events compile one program each.
OTHER_CASES = sorted(
    (case for case in CASES if case not in (*OPTAX_CASES, *FIRST_OF_KIND)),
    key=lambda case: (len(case.events), case.n_optimizers),
)


@pytest.fixture(scope="module")
def torch_results():
    return scale.expected(golden.load())


@pytest.mark.every_release
@cover(quick=len(KINDS), ci=len(KINDS))
@pytest.mark.parametrize(
    "case", dict.fromkeys(KINDS + OPTAX_CASES), ids=lambda case: case.name
)
def test_dynamic_loss_scale_equals_torch(case: Case, torch_results):
    scale.assert_equal(case, jamp_side.run_optax(case), torch_results[case.name])


@pytest.mark.every_release
@cover(quick=0, ci=1)
@pytest.mark.parametrize("case", FIRST_OF_KIND, ids=lambda case: case.kind)
def test_grad_scaler_equals_torch(case: Case, torch_results):
    run = jamp_side.run_nnx(case, step_by_step=True)
    scale.assert_equal(case, run, torch_results[case.name])


@pytest.mark.every_release
@cover(ci=1)
@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda case: case.name)
def test_grad_scaler_in_a_scan_equals_torch(case: Case, torch_results):
    scale.assert_equal(case, jamp_side.run_nnx(case), torch_results[case.name])


@pytest.mark.skipif(
    jax.__version__ == "0.11.1", reason="a scan copies all its results in each step"
)
def test_a_million_steps_equal_torch():
    scales, trackers = jamp_side.run_scale(LONG_RUN, overflows(LONG_RUN))
    np.testing.assert_array_equal(digest(scales, trackers), golden.load()["long_run"])


def test_there_are_enough_cases():
    # The claim of the report: 200 configurations of 1,000 steps, and a million.
    assert len({case.configuration for case in CASES}) >= 200
    assert min(case.steps for case in CASES) >= 1000
    assert LONG_RUN.steps == 1_000_000


def test_a_wrong_rounding_would_be_seen(torch_results):
    # Control: the golden file distinguishes a float32 product from torch's float64 one.
    case = next(case for case in OPTAX_CASES if case.growth_factor == 1.1)
    scales, tracker, skipped, _ = torch_results[case.name].values()
    values = scales.view(np.float32)
    grew = np.flatnonzero((tracker[1:] == 0) & ~skipped[1:, 0])
    assert np.any(values[grew] * np.float32(1.1) != values[grew + 1])
