"""A test that takes too long, and is not marked slow, fails."""

import pytest

from . import time_limit

pytest_plugins = ["pytester"]

TESTS = """
import subprocess, sys, time
import pytest

CODE = "import time\\nwhile time.process_time() < 0.4: pass"

def test_quick(): pass
def test_that_waits(): time.sleep(0.4)
def test_long(): exec(CODE.replace("0.4", str(time.process_time() + 0.4)))
def test_of_a_process(): subprocess.run([sys.executable, "-c", CODE], check=True)
def test_wrong(): test_long(); assert False
@pytest.mark.slow
def test_marked(): exec(CODE.replace("0.4", str(time.process_time() + 0.4)))
"""


@pytest.fixture
def outcomes(pytester, monkeypatch):
    """What a run of these tests said, with a limit of 0.2 s."""
    monkeypatch.setattr(time_limit, "LIMIT", 0.2)
    monkeypatch.setattr(time_limit, "slowdown", lambda: 1.0)
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  slow")
    return pytester.runpytest_inprocess(plugins=[time_limit])


def test_what_takes_too_long_fails(outcomes):
    outcomes.assert_outcomes(passed=3, failed=3)
    said = outcomes.stdout.str()
    for name, text in {
        "test_long": "test_long took 0.",
        "test_of_a_process": "test_of_a_process took 0.",
        "test_wrong": "assert False",
    }.items():
        assert f"FAILED test_what_takes_too_long_fails.py::{name}" in said
        assert text in said
    assert "Make it quicker" in said and "mark it slow" in said


def test_on_a_slow_processor_the_limit_is_longer(monkeypatch):
    monkeypatch.setattr(time_limit, "CALIBRATION", 1e-4)
    assert time_limit.slowdown() > 10
    monkeypatch.setattr(time_limit, "CALIBRATION", 100)
    assert time_limit.slowdown() == 1
