"""The run on each release of JAX: which rows it has, and what counts as a failure."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts import versions
from scripts.versions import Failed, Release, Result

ROOT = Path(__file__).parents[1]
LISTS = [ROOT / "tests" / name for name in ("versions.txt", "inside.txt")]


@pytest.fixture
def newest(monkeypatch):
    """The newest JAX is newer than those of the table."""
    monkeypatch.setattr(versions, "newest", lambda python, flags: "0.99.1")


def test_all_releases_run_and_the_newest_is_marked(newest):
    rows = versions.releases([], [])
    assert next(row.jax for row in rows if row.python == "3.11") == versions.LOWEST
    newest = [(row.python, row.jax) for row in rows if row.is_newest]
    assert newest == [("3.12", "0.99.1"), ("3.13", "0.99.1")]
    assert rows[-1] == Release("3.13", "0.99.1", is_newest=True, is_again=True)


def test_nothing_is_newer(monkeypatch):
    known = versions.RELEASES["3.12"][-2]
    monkeypatch.setattr(versions, "newest", lambda python, flags: known)
    rows = [row for row in versions.releases([], []) if row.jax == known]
    again = Release("3.13", known, is_newest=True, is_again=True)
    assert rows == [Release("3.12", known, is_newest=True), again]


def test_some_releases_are_named(newest):
    assert versions.releases(["0.11.1"], []) == [Release("3.12", "0.11.1")]
    rows = versions.releases(["lowest", "newest"], [])
    assert [row.jax for row in rows] == [versions.LOWEST, "0.99.1", "0.99.1"]
    assert versions.releases(["3.12-newest"], []) == [rows[1]]
    rows = versions.releases(["newest", "3.11"], [])
    assert [row.python for row in rows] == ["3.11"] * 3 + ["3.12", "3.13"]
    with pytest.raises(SystemExit, match=r"no release 0\.9"):
        versions.releases(["0.9"], [])


def test_the_lowest_release_is_the_lower_bound():
    lowest = {
        pin.split("==")[0]: pin.split("==")[1] for pin in versions.lowest_bounds()
    }
    assert f"{lowest['jax']}.0" == versions.LOWEST and lowest.keys() >= {
        "flax",
        "optax",
    }
    with open(ROOT / "pyproject.toml", "rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    for python in versions.RELEASES:
        assert f"Programming Language :: Python :: {python}" in classifiers


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_lists_name_files(path):
    for line in path.read_text().split():
        assert (ROOT / line.partition("::")[0]).is_file(), line


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


def test_the_page_has_the_table_without_seconds(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{versions.START}{versions.END}b\n")
    monkeypatch.setattr(versions, "PAGE", page)
    results = [Result(Release("3.12", "0.99.1"), 7, 0, 61.2)]
    assert "| 61 |" in versions.table(results)
    for _ in range(2):
        versions.write(results)
    table = "| JAX | Python | tests | failures |\n| --- | --- | --- | --- |\n"
    row = "| 0.99.1 | 3.12 | 7 | 0 |\n"
    assert page.read_text() == f"a\n{versions.START}{table}{row}{versions.END}b\n"
    real = (ROOT / "docs" / "libraries.md").read_text()
    assert versions.START in real and versions.END in real
