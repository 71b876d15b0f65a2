"""A run that is killed with SIGKILL and resumed equals an undisturbed run."""

import pytest

from ..marks import cover
from . import kill_and_resume

SHORT = "optax", 1
RUNS = [SHORT, *((engine, 2) for engine in kill_and_resume.ENGINES)]


@cover(quick=0, ci=1)
@pytest.mark.parametrize("engine, kills", RUNS)
def test_training_does_not_notice_kills(engine, kills, tmp_path):
    report = kill_and_resume.kill_and_resume(engine, kills, tmp_path)
    assert report.kills == kills
    assert report.resumes > 0 and report.repeated > 0
    assert report.mismatches == 0


@pytest.mark.slow
def test_a_process_that_fails_by_itself_is_not_taken_for_killed(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"failed with 1: (.|\n)*KeyError: 'neither'"
    ):
        kill_and_resume.kill_and_resume("neither", 1, tmp_path)
