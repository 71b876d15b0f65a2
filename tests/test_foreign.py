"""The runner of other projects' tests, on a project of a few lines."""

import math
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
from foreign.ecosystem import (
    compare,
    jax_numpy,
    libraries,
    page,
    programs,
    reasons,
)
from foreign.ecosystem import run as ecosystem
from foreign.ecosystem.call import Table
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
EMPTY = f"Before.\n\n{report.BEGIN}\n{report.END}\n\nAfter.\n"


class Project:
    """A checkout of a project named "made", and a function that runs the command."""

    def __init__(self, folder):
        self.source = folder / "source"
        self.kept, self.page = folder / "kept", folder / "page.md"
        (self.source / "tests").mkdir(parents=True)
        (self.source / "version.py").write_text('version = "1.2"\n')
        (self.source / "pyproject.toml").write_text("")
        shutil.copy(HERE / "foreign_project.py", self.source / "tests" / "a_test.py")
        self.page.write_text(EMPTY)

    def __call__(self, *arguments):
        fixed = ["--suite", "made", "--source", self.source, "--folder", self.kept]
        fixed += ["--page", self.page, *arguments]
        return command.main(list(map(str, fixed)))

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
    patch.setattr(report, "version", lambda name: "1.2")
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
    assert "it looks at the trace" in project.page.read_text()
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
def test_the_page(project):
    report.write(project.page, project.kept)
    text = project.page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n")
    assert "## made 1.2" in text
    row = next(x for x in text.splitlines() if "`a_test.py` |" in x)
    assert row == "| `a_test.py` | 11 | 9 | 8 | 0 | 1 | 4 |"
    row = next(x for x in text.splitlines() if "got array at" in x)
    assert row.startswith("| 1 | `TypeError: got array at 0x` | float16 |")
    before = text
    report.write(project.page, project.kept)
    assert project.page.read_text() == before


@pytest.mark.nightly
def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"foreign: begin.*Restore"):
        report.write(page, tmp_path)


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
def test_what_is_not_there_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        command.main(["--suite", "jax", "--source", "/no/such/folder"])
    assert "no such folder; give a checkout" in capsys.readouterr().err
    page = ["--page", str(tmp_path / "page.md")]  # hours later it would be too late
    with pytest.raises(SystemExit):
        command.main(["--suite", "jax", "--source", str(tmp_path), *page])
    assert "no such file; give a page" in capsys.readouterr().err


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
    page = re.sub(r"\s+", " ", (command.PAGE.parents[1] / "sharp-edges.md").read_text())
    for words in edges.EDGES.values():
        assert words in page


def compared(function, name="made.call", **options):
    """A row of the calls of libraries, for a function of 64 by 8 values."""
    table = Table("made")
    table(name.removeprefix("made."), function, (64, 8), **options)
    return compare.compare(table.calls[0])


@pytest.mark.usefixtures("standard_promotion")
@cover(quick=0)
@pytest.mark.parametrize("name", ["jnp.sum", "jnp.cumsum", "jnp.exp"])
def test_calls_of_jax_numpy_pass(name):
    call = next(x for x in jax_numpy.calls() if x.name == name)
    row = compare.compare(call)
    assert row.faults == {}
    for results in row.results.values():
        for each in results.values():
            assert 0 <= each.error < 1e-2 and 0 <= each.gradient < 1e-2
            assert each.dtypes == "float32"


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
        (lambda h: h * jnp.ones(8, h.dtype), "dtype", "float16 and float32"),
        (
            lambda h: jnp.exp(h) * (1 + (h.dtype == jnp.float16) / 50),
            "apart",
            "float16: 2.0e-02",
        ),
        (lambda h: jnp.linalg.matrix_rank(h), "raises", "half: TypeError"),
        (lambda h: 1 / int(h.dtype == jnp.float32), "raises without a note", "Zero"),
    ],
)
def test_a_wrong_call_is_reported(function, fault, said):
    counts = fault in ("dtype", "apart")
    row = compared(function, counts=counts, gradient=fault == "gradient")
    assert row.faults.keys() == {fault}
    assert said in row.faults[fault]
    assert reasons.unexplained(row, {}) == row.faults
    assert reasons.unexplained(row, {row.name: ((fault,), "a reason")}) == {}
    other = next(x for x in compare.FAULTS if x != fault)
    assert reasons.unexplained(row, {row.name: ((other,), "a reason")}) == row.faults


@pytest.mark.nightly
@pytest.mark.usefixtures("standard_promotion")
def test_a_stale_reason_is_reported():
    row = compared(jnp.tanh)
    listed = {row.name: (("error",), "it was wrong once")}
    assert reasons.stale([row], {}) == []
    assert reasons.stale([row], listed) == [
        "made.call passes, and has a reason for 'error'."
    ]
    assert reasons.unknown([row.name], listed) == []
    assert "made.call, which is not a call" in reasons.unknown(["other"], listed)[0]
    odd = {row.name: (("colour",), "no such fault")}
    assert "another fault" in reasons.unknown([row.name], odd)[0]


@pytest.mark.nightly
def test_a_library_that_is_not_installed_is_skipped(tmp_path, capsys):
    library = libraries.Library("no-such-library", "no_such_library", "graphs")
    section = ecosystem.section(library)
    assert section.missing == "it is not installed" and section.rows == []
    assert "no-such-library : skipped, it is not installed" in capsys.readouterr().out
    path = tmp_path / "page.md"
    path.write_text(EMPTY)
    page.write(path, [section])
    assert "Skipped: it is not installed." in path.read_text()


def test_calls_that_pass_are_names_and_calls_with_one_reason_share_a_row():
    def row(name, wrong, dtype="float32", raised="", **faults):
        result = compare.Result(wrong, 0.5, dtype, raised)
        results = {x: dict.fromkeys(compare.WAYS, result) for x in compare.DTYPES}
        return compare.Row(name, results, faults)

    first, second = "jnp.fft.rfft", "jnp.fft.rfft2"  # two with one reason
    rows = [
        row("a", 0.0),
        row(first, 0.1, raises=""),
        row("b", 0.1, "float16"),
        row("c", 0.2),
        row(second, math.nan, raised="TypeError", raises=""),
        row("d", math.nan, error="nan"),
    ]
    passed, table = page.blocks(rows)
    assert passed == "- f32: `a`, `c`\n- f16: `b`"
    one, other = table.splitlines()[2:]
    assert one.startswith(f"| `{first}`, `{second}` | raises | raises |")
    assert reasons.REFUSED in one
    assert other == "| `d` | nan | nan | nan | nan | 5e-1 | f32 | **error**: nan |"
    assert page.line(rows[:3:2]).startswith("| `a`, `b` | 1e-1 | 1e-1 |")


@pytest.mark.nightly
def test_a_library_that_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match=r"--select jaxx: .* jax, jax\.scipy, optax"):
        command.main(["--suite", "ecosystem", "--select", "jaxx"])


@pytest.mark.parametrize(("apart", "wrong"), [(0.2, False), (0.3, True)])
def test_a_program_far_from_float32_is_wrong(apart, wrong):
    figures = iter([[0.0], [0.1], [0.2]] for _ in range(2))

    def run(region):
        return np.array(next(figures)) + isinstance(region, jamp.autocast) * apart

    outcome = programs.measure(programs.Program("made", "a loss", run), ("float16",))
    assert outcome.wrong == wrong
    assert outcome.noise == pytest.approx(0.1 * (2 / 3) ** 0.5, rel=1e-3)


@pytest.mark.nightly
def test_a_program_that_raises_is_wrong():
    def run(region):
        if isinstance(region, jamp.autocast):
            raise NotImplementedError
        return np.zeros((3, 1))

    program = programs.Program("made", "a loss", run)
    outcome = programs.measure(program, ("float16",))
    assert outcome.wrong and outcome.raised == "float16: NotImplementedError: "


@pytest.mark.nightly
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        (jnp.tanh, 0, "1 calls, 0 problems"),
        (lambda h: 1 / int(h.dtype == jnp.float32), 1, "made.call: raises without"),
    ],
)
def test_the_status_says_whether_calls_pass(
    function, status, said, tmp_path, monkeypatch, capsys
):
    table = Table("made")
    table("call", function, (64, 8), gradient=False)
    library = libraries.Library("jax", "jax", "jax_numpy")
    monkeypatch.setattr(libraries, "ALL", (library,))
    monkeypatch.setattr(libraries, "calls", lambda library: table.calls)
    monkeypatch.setattr(reasons, "unknown", lambda names: [])
    for name in ("XLA_FLAGS", "KERAS_BACKEND"):  # the command sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    path = tmp_path / "page.md"
    path.write_text(EMPTY)
    folders = ["--folder", str(tmp_path), "--page", str(path)]
    assert command.main(["--suite", "ecosystem", *folders]) == status
    assert said in capsys.readouterr().out
    assert f"and {status} are wrong" in path.read_text()


def test_the_reasons_say_why():
    assert all(len(why.split()) > 3 for _, why in reasons.REASONS.values())


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
