"""The harness that plants faults, and the comparison of training runs."""

import numpy as np
import pytest

from . import faults, spread, training, training_data

torch = pytest.importorskip("torch")


def test_there_are_ten_faults_or_more_and_each_is_another():
    assert len(faults.FAULTS) >= 10
    assert (
        len(faults.CASES) == len({f[1:4] for f in faults.FAULTS}) == len(faults.FAULTS)
    )


def test_a_fault_whose_place_is_gone_is_an_error(tmp_path):
    fault = faults.FAULTS[0]._replace(before="no such text")
    with pytest.raises(ValueError, match="does not have 'no such text' once"):
        faults.plant(fault, tmp_path)


def test_a_copy_without_a_fault_stays_green(tmp_path):
    fault = faults.FAULTS[0]
    faults.plant(fault._replace(after=fault.before), tmp_path)
    assert faults.suite(tmp_path, "scale", "interval: growth_interval=3") == (0, "")


@pytest.mark.parametrize(
    ("after", "case", "said"),
    [
        ("successes = = _int32", "interval: growth_interval=3", "SyntaxError"),
        (faults.FAULTS[0].before, "no such case", "0 cases"),
    ],
)
def test_a_copy_that_runs_no_case_is_an_error(tmp_path, after, case, said):
    faults.plant(faults.FAULTS[0]._replace(after=after), tmp_path)
    with pytest.raises(RuntimeError, match=said):
        faults.suite(tmp_path, "scale", case)


def test_a_fault_is_caught():
    result = faults.run(faults.FAULTS[0], "cpu")
    assert result.as_expected and result.data, result.where


def test_an_error_does_not_count():
    fault = faults.FAULTS[0]
    assert fault.explains("interval: step 17: scale is 1, torch has 2")
    assert not fault.explains("interval: raised NameError: no_such_name")
    assert not fault.explains("")


def run(loss: float, skips: int = 0) -> training_data.Run:
    steps = training_data.STEPS
    return training_data.Run(
        np.full(steps, loss, np.float32),
        np.full(steps, 2.0**16, np.float32),
        np.zeros(steps, np.int32),
        np.arange(steps)[:, None] < skips,
    )


TASK = next(iter(training.CASES.values()))


@pytest.mark.parametrize(
    "jamp, replayed, field",
    [
        (run(1.0), 0, None),
        (run(1.19, skips=2), 0, None),
        (run(1.21), 0, "final loss"),
        (run(np.nan), 0, "final loss"),
        (run(1.0, skips=3), 0, "number of skips"),
        (run(1.0), 1, "replayed steps"),
    ],
)
def test_what_a_training_run_is_held_against(jamp, replayed, field):
    trained = training.Trained(run(1.0), jamp, replayed)
    result = training.compare(TASK, [trained] * 3, noise=0.1)
    assert {name for name, n in result.mismatches.items() if n} == {field} - {None}
    assert bool(result.where) == (field is not None)


def test_a_replay_sees_a_wrong_scale():
    flags = np.random.RandomState(0).random_sample((training_data.STEPS, 1)) < 0.05
    recorded = run(1.0)._replace(skipped=flags)
    assert training.replay(recorded) > 0


def test_variants_differ_in_rounding_alone():
    from . import training_torch

    task = training.CASES["mlp, SGD"]
    first, *others = (
        training_torch.run(task, 0, variant, "cpu", steps=40)
        for variant in spread.VARIANTS
    )
    assert len(first.loss) == 40
    for other in others:
        np.testing.assert_allclose(other.loss, first.loss, rtol=1e-3)
        assert not np.array_equal(other.loss, first.loss)
