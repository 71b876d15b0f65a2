"""`python -m benchmarks.measure`."""

import gc
import json

import jax
import pytest

from benchmarks import measure
from jamp import _targets

from .marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measure, "WIDTHS", (64,))
    monkeypatch.setattr(measure, "BATCHES", (1,))
    monkeypatch.setattr(measure, "SEQUENCE", 16)
    monkeypatch.setattr(measure, "flops_per_second", lambda device: 1e9)
    monkeypatch.setattr(measure, "ROW_SECONDS", 0.0)
    return monkeypatch


@pytest.fixture
def faked(small):
    """For tests whose rows are not measured: nothing is cleared between them."""
    small.setattr(jax, "clear_caches", lambda: None)
    small.setattr(gc, "collect", lambda: 0)
    return small


def rows_of(text):
    lines = [line.split(" | ") for line in text.splitlines() if line[:1] == "|"]
    assert lines[0][0] == "| model"
    return [(line[0].removeprefix("| "), line[1]) for line in lines[2:]]


def interrupt_at(monkeypatch, precision):
    measure_row = measure.measure_row

    def interrupted(model, name, *size):
        if name == precision:
            raise KeyboardInterrupt
        return measure_row(model, name, *size)

    monkeypatch.setattr(measure, "measure_row", interrupted)


@pytest.mark.cpu
@pytest.mark.nightly
def test_a_cpu_is_measured_and_says_that_it_tells_nothing(small, capsys):
    gc.collect()
    before = len(jax.live_arrays())
    assert measure.main() == 0
    text = capsys.readouterr().out
    expected = [(m, p) for m in measure.MODELS for p in measure.PRECISIONS]
    assert rows_of(text) == expected
    assert text.splitlines()[-1] == measure.CPU
    assert len(jax.live_arrays()) <= before


@pytest.mark.slow
def test_only_what_the_units_have_is_measured(small, capsys):
    small.setattr(_targets, "units", lambda device: frozenset({"float16"}))
    assert measure.main() == 0
    text = capsys.readouterr().out
    measured = {precision for _, precision in rows_of(text)}
    assert measured == {"float32", "float16", "scaled float16"}
    assert text.splitlines()[-1].startswith("Choose ")


def test_a_ratio_is_to_float32_of_the_same_model(faked):
    def measured(model, precision, *size):
        seconds = len(model) * (1.0 if precision == "float32" else 0.5)
        return measure.Row(model, precision, seconds, 1.0, 0, 0, 4)

    faked.setattr(measure, "measure_row", measured)
    rows = list(measure.measure(jax.devices()[0]))
    assert {row.model for row in rows} == {*measure.MODELS}
    for row in rows:
        assert row.ratio == (1.0 if row.precision == "float32" else 0.5)


@pytest.mark.cpu
def test_the_fastest_of_all_models_is_chosen():
    device = jax.devices()[0]
    times = {"float32": (1, 1), "float16": (0.2, 0.9), "bfloat16": (0.4, 0.4)}
    rows = [
        measure.Row(model, name, 1.0, ratios[index])
        for index, model in enumerate(measure.MODELS)
        for name, ratios in times.items()
    ]
    assert measure.advise(device, rows) == measure.CPU
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_targets, "units", lambda device: frozenset({"float16"}))
        advice = measure.advise(device, rows)
        assert advice.startswith("Choose bfloat16 here: 2.5 times")
        assert "jamp.autocast(jnp.bfloat16)" in advice
        assert measure.advise(device, rows[:1]) == measure.TOO_LITTLE
        slow = [row._replace(ratio=2 - (row.precision == "float32")) for row in rows]
        assert measure.advise(device, slow) == measure.CHOOSE_FLOAT32


@cover(quick=0)
@pytest.mark.parametrize("at", ["bfloat16", "float16"])
def test_an_interrupted_run_leaves_what_it_had(at, small, tmp_path, capsys):
    interrupt_at(small, at)
    path = tmp_path / "measured.json"
    assert measure.main(["--json", str(path)]) == 130
    found = json.loads(path.read_text())["results"]
    names = [(row["model"], row["precision"]) for row in found["rows"]]
    assert found["advice"] == "Interrupted."
    assert names == rows_of(capsys.readouterr().out)
    done = ["float32", "bfloat16"][: 1 + (at == "float16")]
    assert names == [("MLP", precision) for precision in done]


FULL = "RESOURCE_EXHAUSTED: Out of memory | 8 GiB\nallocator statistics"


@pytest.mark.parametrize("fails", ["float32", "float16"])
def test_a_row_that_fails_says_so_and_the_others_stay(fails, faked, tmp_path, capsys):
    def measure_row(model, precision, *size):
        if precision == fails:
            raise jax.errors.JaxRuntimeError(FULL)
        return measure.Row(model, precision, 2.0 if precision == "float32" else 1.0)

    faked.setattr(measure, "measure_row", measure_row)
    faked.setattr(_targets, "units", lambda device: frozenset({"float16"}))
    path = tmp_path / "measured.json"
    assert measure.main(["--json", str(path)]) == 1
    for row in json.loads(path.read_text())["results"]["rows"]:
        failed = row["precision"] == fails
        assert (row["seconds"] is None) == bool(row["error"]) == failed
        # Without float32's time there are no ratios.
        assert (row["ratio"] is None) == (failed or fails == "float32")
    text = capsys.readouterr().out
    names = "float32", "float16", "scaled float16"
    assert rows_of(text) == [(m, p) for m in measure.MODELS for p in names]
    said = "failed: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory / 8 GiB"
    failed = [line.split(" | ")[2] for line in text.splitlines() if "failed" in line]
    assert failed == [said] * len(measure.MODELS)
    advice = text.splitlines()[-1]
    if fails == "float32":
        assert advice == measure.TOO_LITTLE
    else:
        assert advice.startswith("Choose scaled float16 here: 2.0 times")


def test_no_row_starts_after_the_time_limit(small, capsys):
    small.setattr(measure, "TIME_LIMIT", -1.0)
    assert measure.main() == 0
    assert rows_of(capsys.readouterr().out) == []


def test_sizes_fit_the_device():
    model = measure.MODELS["transformer block"]
    slow, fast = (measure.fitting(model, rate, 80e9) for rate in (1e11, 60e12))
    assert model.flops(*slow) <= 0.2e11 < model.flops(*fast) <= 12e12
    tight = measure.fitting(model, 60e12, 4e9)
    assert model.memory(*tight) <= 1.6e9 < model.memory(*fast)
    assert measure.fitting(model, 1.0, 1.0) == (128, 1)
