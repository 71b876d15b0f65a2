"""The run on each release of JAX: which rows it has, and what counts as a failure."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts import versions
from scripts.versions import Failed, Release

ROOT = Path(__file__).parents[1]
KNOWN = versions.RELEASES["3.12"][-2]  # the newest of those that are named


@pytest.mark.parametrize("day", ["0.99.1", KNOWN])
def test_all_releases_run_and_the_newest_of_the_day_is_marked(day, monkeypatch):
    monkeypatch.setattr(versions, "newest", lambda python, flags: day)
    rows = versions.releases([], [])
    assert len({*rows}) == len(rows) and {KNOWN, day} <= {row.jax for row in rows}
    assert next(row.jax for row in rows if row.python == "3.11") == versions.LOWEST
    newest = [row for row in rows if row.is_newest]
    again = Release("3.13", day, is_newest=True, is_again=True)
    assert newest == [Release("3.12", day, is_newest=True), again]
    assert versions.releases(["0.11.1"], []) == [Release("3.12", "0.11.1")]
    assert versions.releases(["3.12-newest"], []) == newest[:1]
    some = versions.releases(["lowest", "newest"], [])
    assert some[0].jax == versions.LOWEST and some[1:] == newest
    with pytest.raises(SystemExit, match=r"no release 0\.9"):
        versions.releases(["0.9"], [])


def test_the_lowest_release_is_the_lower_bound():
    lowest = dict(pin.split("==") for pin in versions.lowest_bounds())
    assert f"{lowest['jax']}.0" == versions.LOWEST and {"flax", "optax"} <= {*lowest}
    with open(ROOT / "pyproject.toml", "rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    for python in versions.RELEASES:
        assert f"Programming Language :: Python :: {python}" in classifiers


def made_by(monkeypatch, tmp_path, status, report, text="1 failed"):
    """The result of a run of pytest that leaves a report, or none."""

    def run(command, *, stdout, **options):
        if report:
            (tmp_path / "report.xml").write_text(f"<testsuite>{report}</testsuite>")
        stdout.write(text)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(Release, "venv", tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", run)
    return versions.tested(Release("3.12", "0.99.1"), [])


PASSED, SKIPPED, FAILED, CRASHED = (
    f"<testcase>{inside}</testcase>"
    for inside in ("", "<skipped/>", "<failure/>", "<error/>")
)


@pytest.mark.parametrize(
    ("status", "report", "rows", "failures"),
    [
        (0, PASSED + SKIPPED, 1, 0),
        (1, PASSED + FAILED + CRASHED, 3, 2),
        (3, PASSED, 1, 1),
        (134, None, 0, 1),
    ],
)
def test_what_counts_as_a_failure(
    status, report, rows, failures, monkeypatch, tmp_path
):
    result = made_by(monkeypatch, tmp_path, status, report)
    assert (result.rows, result.failures) == (rows, failures)
    assert bool(result.said) == (failures > 0)


def test_a_test_that_does_not_end_is_a_failure(monkeypatch, tmp_path):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(Release, "venv", tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", run)
    result = versions.tested(Release("3.12", "0.99.1"), [], 900)
    assert result.failures == 1 and "do not end in 900 seconds" in result.said


def test_an_environment_that_cannot_be_made_is_a_failure(monkeypatch):
    def run(said):
        def install(*args):
            raise Failed(said)

        monkeypatch.setattr(versions, "install", install)
        return versions.run(Release("3.12", "0.99.1"), "python", [], [])

    result = run("No solution found: there is no version of jax==0.99.1")
    assert result.failures == 1 and result.has_network and "0.99.1" in result.said
    offline = "error sending request for url: dns error: failed to lookup address"
    assert not run(offline).has_network
