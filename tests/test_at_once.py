"""Failures of a run that is cut off are in its log."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, time

def test_wrong(): assert 1 + 1 == 3

def test_that_is_cut_off():
    time.sleep(1)  # until a worker's report has arrived
    os.killpg(0, 9)
"""
CONFTEST = """
from tests.at_once import AtOnce

def pytest_configure(config):
    config.pluginmanager.register(AtOnce(config))
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_failure_is_printed_when_it_comes(workers, tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, start_new_session=True
    )
    assert run.returncode == -9
    assert "_ test_it.py::test_wrong _" in run.stdout
    assert "assert (1 + 1) == 3" in run.stdout


def test_it_is_printed_once_and_what_cannot_be_imported_too(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(TESTS.partition("def test_that")[0])
    (tmp_path / "test_other.py").write_text("import nowhere_at_all")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv += ["--continue-on-collection-errors"]
    said = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True).stdout
    assert said.count("E   assert (1 + 1) == 3") == 1
    assert said.count("E   ModuleNotFoundError: No module named 'nowhere_at_all'") == 1
    assert "FAILED test_it.py::test_wrong" in said
    assert "1 failed, 1 error" in said
