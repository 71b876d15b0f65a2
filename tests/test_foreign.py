"""The runner of other projects' tests, on a project of a few lines, and of calls."""

import os
import re
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from foreign import __main__ as command
from foreign import compare, parts, programs
from foreign.suites import edges, inside, projects, records, report, result, running
from foreign.suites.records import (
    DIED,
    FAILED,
    FLOAT16,
    KEPT,
    PASSED,
    PLAIN,
    SKIPPED,
    SLOW,
    Outcome,
)

from .marks import cover

HERE = Path(__file__).parent


class Project:
    """A checkout of a project named "made", and a function that runs the command."""

    def __init__(self, folder):
        self.source = folder / "source"
        self.kept = folder / "kept"
        (self.source / "tests").mkdir(parents=True)
        (self.source / "version.py").write_text('version = "1.2"\n')
        (self.source / "pyproject.toml").write_text("")
        shutil.copy(HERE / "foreign_project.py", self.source / "tests" / "a_test.py")

    def __call__(self, *arguments):
        fixed = ["--suite", "made", "--source", self.source, "--folder", self.kept]
        return command.main([*map(str, fixed), *arguments])

    @property
    def file(self):
        return result.file(self.kept / "made", "a_test.py")

    def outcomes(self, way):
        return {x.test: x.outcome for x in self.file.ways[way].values()}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project, after all its tests ran all three ways."""
    patch = pytest.MonkeyPatch()
    made = projects.Suite("tests", ("version.py", "version"), {"*_test.py": None})
    patch.setitem(projects.SUITES, "made", made)
    patch.setitem(inside.INSIDE, "made", {})
    patch.setattr(projects, "version", lambda name: "1.2")
    made = Project(tmp_path_factory.mktemp("project"))
    made.status = made()
    yield made
    patch.undo()


@pytest.mark.slow
def test_each_test_runs_three_ways(project):
    plain, kept = project.outcomes(PLAIN), project.outcomes(KEPT)
    assert plain.pop("test_fails_plain") == FAILED
    assert plain.pop("test_skips") == SKIPPED
    assert set(plain.values()) == {PASSED}
    assert kept.pop("test_looks_inside") == FAILED
    assert kept.keys() | {"test_looks_inside"} == plain.keys()  # not what fails plain
    assert set(kept.values()) == {PASSED}
    assert project.file.total == 11


@pytest.mark.nightly
def test_a_process_that_dies_is_survived_and_recorded(project):
    half = project.outcomes(FLOAT16)
    assert half["test_dies"] == DIED
    assert half["test_after_it"] == PASSED


@pytest.mark.nightly
def test_crashes_are_told_from_comparisons(project):
    failed = {x.test: x for x in project.file.failed(FLOAT16)}
    assert failed.pop("Case::test_compares").compared
    crashes = {x.test: x.cause for x in project.file.crashes()}
    assert crashes.keys() == failed.keys()
    assert crashes["Case::test_crashes"] == "TypeError: got array at 0x"
    assert crashes["Case::test_of_parts"].startswith("KeyError")
    assert crashes["test_dies"] == "the process died"


@pytest.mark.nightly
def test_a_difference_makes_the_command_fail(project, monkeypatch):
    assert project.status == 1
    assert [x.test for x in project.file.differing()] == ["test_looks_inside"]
    listed = {"a_test.py::test_look*": "it looks at the trace"}
    monkeypatch.setitem(inside.INSIDE, "made", listed)
    assert project.file.differing() == []
    assert project() == 1  # crashes in float16, which no sharp edge covers
    covered = {r"got float16|one|looks": "words", "process died": "more words"}
    monkeypatch.setattr(edges, "EDGES", covered | {"JAX does not have": "words"})
    assert project() == 0


@pytest.mark.nightly
def test_it_goes_on_where_it_stopped(project):
    ran = project.source / "tests" / "ran"
    assert ran.read_text() == "xxx"
    path = running.output(project.kept / "made", projects.Task("a_test.py"), KEPT)
    records.append(path, Outcome("test_passes", records.BEGUN))  # stopped by force
    assert project("--way", "kept") == 1
    assert ran.read_text() == "xxx"
    records.forget(path, ["test_passes"])
    project("--way", "kept")
    assert ran.read_text() == "xxxx"
    project("--way", "kept", "--rerun", "failed", "--select", "a_test.py::looks")
    assert ran.read_text() == "xxxx"
    assert list(project.outcomes(KEPT))[-1] == "test_looks_inside"


@pytest.mark.nightly
def test_a_file_that_cannot_be_run_makes_the_command_fail(project, tmp_path, capsys):
    broken = Project(tmp_path)
    (broken.source / "tests" / "a_test.py").write_text("import no_such_module")
    assert broken() == 1
    assert "a_test.py cannot be run plain" in capsys.readouterr().out


@pytest.mark.nightly
def test_another_release_is_refused(project):
    with pytest.raises(ValueError, match=r"made 1\.2, and 1\.3 is installed"):
        projects.check_release("made", project.source, "1.3")
    with pytest.raises(ValueError, match=r"no version\.py with a version"):
        projects.check_release("made", project.source / "tests", "1.2")


@pytest.mark.nightly
def test_what_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--suite", "jax", "--source", "/no/such/folder"])
    assert "no such folder; give a checkout" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(("limit", "deadline"), [(1.0, 60), (60, 3.0)])
def test_a_test_that_hangs_is_ended(tmp_path, limit, deadline):
    text = "import time\ndef test_hangs(): time.sleep(60)\ndef test_after_it(): pass\n"
    (tmp_path / "a_test.py").write_text(text)
    task, start = projects.Task("a_test.py"), time.time()
    limits = running.Limits(limit, start + deadline)
    environment = os.environ | {"PYTHONPATH": str(running.ROOT)}
    running.run(tmp_path, tmp_path / "kept", task, PLAIN, limits, environment, None)
    found = records.read(running.output(tmp_path / "kept", task, PLAIN)).values()
    hung = [(x.test, x.outcome) for x in found]
    assert hung == ([("test_hangs", SLOW), ("test_after_it", PASSED)] * (limit < 60))
    assert time.time() - start < 50


@pytest.mark.nightly
def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "plain.jsonl"
    records.append(path, Outcome("test_a", PASSED))
    with path.open("a") as file:
        file.write('{"test": "test_b", "outc')
    assert records.read(path).keys() == {"test_a"}


def test_the_committed_list_is_short_and_says_why():
    reasons = [why for listed in inside.INSIDE.values() for why in listed.values()]
    assert len(reasons) <= 40
    assert all(len(why.split()) > 3 for why in reasons)


def test_the_sharp_edges_stand_in_the_page():
    page = (HERE.parent / "docs" / "sharp-edges.md").read_text()
    for words in edges.EDGES.values():
        assert words in re.sub(r"\s+", " ", page)


def faults_of(function, *options):
    """The faults of a call of 64 by 8 values."""
    call = compare.Call("made", "function", "64x8", options)
    return compare.compare(call, {"function": function})


def test_a_right_call_has_no_faults(standard_promotion):
    assert faults_of(jnp.sum, "counts") == {}


@cover(quick=4)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("function", "fault", "said"),
    [
        (
            lambda h: h * (1 + (h.dtype == jnp.float16)),
            "error",
            "float16, half: ",
        ),
        (
            lambda h: h / (h.dtype != jnp.bfloat16),
            "error",
            "half: inf",
        ),
        (
            lambda h: h + (h.dtype == jnp.float16) * (h - jax.lax.stop_gradient(h)),
            "gradient",
            "float16, half: 1.0e+00",
        ),
        (lambda h: h * jnp.ones(8, h.dtype), "dtype", "['float16'] and ['float32']"),
        (
            lambda h: jnp.exp(h) * (1 + (h.dtype == jnp.float16) / 50),
            "apart",
            "float16, 2.0e-02",
        ),
        (lambda h: jnp.linalg.matrix_rank(h), "raises", "half: TypeError"),
        (lambda h: 1 / int(h.dtype == jnp.float32), "unadvised", "Zero"),
    ],
)
def test_a_wrong_call_is_reported(function, fault, said):
    options = ["counts"] if fault in ("dtype", "apart") else []
    options += [] if fault == "gradient" else ["no-gradient"]
    found = faults_of(function, *options)
    assert found.keys() == {fault}
    assert said in found[fault]


def test_a_log_density_is_not_half_precision(standard_promotion):
    function = lambda h: jnp.sin(h)
    call = compare.Call("made", "log_prob", "64x8")
    found = compare.compare(call, {"log_prob": function})
    assert found.keys() == {"halved"}
    assert compare.Call("made", "f", "8", ("halved", "counts")).faults == {"halved"}


def test_each_option_of_a_call_is_known():
    flags = {"positive", "no-gradient", "counts", *compare.RANGES, *compare.FAULTS}
    calls = [*compare.calls()]
    assert {call.section for call in calls} == parts.PARTS.keys()
    for call in calls:
        words = {re.sub("=.*", "=", option) for option in call.options}
        assert words <= flags | {"scale=", "shift=", "bound="}, call


@pytest.mark.parametrize(("apart", "wrong"), [(0.2, set()), (0.3, {"float16"})])
def test_a_program_far_from_float32_is_wrong(apart, wrong):
    def run(region):
        inside = isinstance(region, jamp.autocast)
        return np.array([[0.0], [0.1], [0.2]]) + inside * apart

    assert programs.measure(run, ["float16"]).keys() == wrong


@pytest.mark.parametrize("ran", [(), (KEPT,), (FLOAT16,), (KEPT, FLOAT16)])
def test_what_fails_in_a_way_that_ran_is_counted_without_the_others(ran):
    ways = {way: {} for way in records.WAYS}
    ways[PLAIN] = {test: Outcome(test, PASSED) for test in ("test_a", "test_b")}
    for way in ran:
        failed = Outcome("test_b", FAILED, "TypeError", "made")
        ways[way] = {"test_a": Outcome("test_a", PASSED), "test_b": failed}
    file = result.File("jax", "nn_test.py", ways, 2)
    assert len(file.passed()) == 2
    for way in (KEPT, FLOAT16):
        assert [x.test for x in file.failed(way)] == ["test_b"] * (way in ran)
        assert (f"not run in {way}" in report.line(file)) == (way not in ran)
