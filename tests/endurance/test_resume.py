"""A run that is killed with SIGKILL and resumed equals an undisturbed run."""

import pytest

from . import kill_and_resume

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", kill_and_resume.ENGINES)
def test_training_does_not_notice_kills(engine, tmp_path):
    report = kill_and_resume.kill_and_resume(engine, 2, tmp_path)
    assert report.kills == 2
    assert report.resumes > 0 and report.repeated > 0
    assert report.mismatches == 0


def test_a_process_that_fails_by_itself_is_not_taken_for_killed(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"failed with 1: (.|\n)*KeyError: 'neither'"
    ):
        kill_and_resume.kill_and_resume("neither", 1, tmp_path)
