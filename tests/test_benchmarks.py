"""`make gpu` on toy parts, and each benchmark at its smallest size."""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import _harness, float8_compile, gpu, targets_page
from benchmarks.devices import GPUS
from benchmarks.targets import TARGETS
from benchmarks.train_rows import PRECISIONS

ROOT = Path(__file__).parents[1]
LIMIT = 60


def toy(name, limit=LIMIT, module="this", dry=None):
    return gpu.Part(name, limit, (module,), (dry or module,))


def run(out, parts, minutes=5, **how):
    runner = gpu.Runner(out, minutes, how.pop("dry", False))
    status = gpu.run_all(runner, parts, **how)
    entries = json.loads(runner.file.read_text()) if runner.file.exists() else {}
    return status, {name: entry["status"] for name, entry in entries.items()}


def lines_of(out, name):
    return (out / f"{name}.log").read_text().splitlines()


FAILING = toy("failing", module="nowhere_at_all")
PASSING = toy("passing")


def test_a_failed_part_does_not_stop_the_others(tmp_path, capsys):
    status, entries = run(tmp_path, [FAILING, PASSING])
    assert status == 1
    assert entries == {"failing": "exit 1", "passing": "passed"}
    assert "No module named nowhere_at_all" in lines_of(tmp_path, "failing")[-1]
    assert "| failing | exit 1 |" in capsys.readouterr().out


def test_what_has_passed_is_not_run_again(tmp_path):
    log = tmp_path / "passing.log"
    assert run(tmp_path, [PASSING])[0] == 0
    log.write_text("kept")
    assert run(tmp_path, [PASSING])[0] == 0
    assert log.read_text() == "kept"
    assert run(tmp_path, [PASSING], again=True)[0] == 0
    assert log.read_text() != "kept"
    log.write_text("kept")
    assert run(tmp_path, [PASSING], dry=True)[0] == 0, "the same command"
    assert log.read_text() == "kept"
    other = PASSING._replace(command=("this", "-h"))
    assert run(tmp_path, [other])[0] == 0
    assert log.read_text() != "kept", "its command has changed"


def test_what_has_failed_is_run_again(tmp_path):
    assert run(tmp_path, [FAILING, PASSING])[0] == 1
    mended = FAILING._replace(command=("this",))
    assert run(tmp_path, [mended, PASSING]) == (
        0,
        {"failing": "passed", "passing": "passed"},
    )


def test_what_does_not_fit_is_left_and_what_fits_is_run(tmp_path, capsys):
    long = toy("long", limit=600)
    status, entries = run(tmp_path, [long, PASSING])
    assert (status, entries) == (3, {"passing": "passed"})
    assert "| long | left for the next call (needs 600 s) |" in capsys.readouterr().out
    assert run(tmp_path, [long, FAILING])[0] == 1
    assert run(tmp_path, [long, PASSING], minutes=11)[0] == 0


SLEEPER = """
import pathlib, subprocess, sys, time
print("begun", flush=True)
tick = "import time\\nwhile True: open({!r}, 'a').write('.'); time.sleep(0.05)"
subprocess.Popen([sys.executable, "-c", tick.format({!r})])
time.sleep(600)
"""


def test_a_part_and_its_children_are_killed_at_the_limit(tmp_path, monkeypatch):
    ticks = tmp_path / "ticks"
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(str(ticks), str(ticks)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = [toy("sleeping", limit=2, module="sleeper"), PASSING]
    status, entries = run(tmp_path / "out", parts)
    assert status == 1
    assert entries == {"sleeping": "killed at its limit", "passing": "passed"}
    assert lines_of(tmp_path / "out", "sleeping") == ["begun"]
    size = ticks.stat().st_size
    assert size > 0, "the child had begun"
    time.sleep(0.5)
    assert ticks.stat().st_size == size, "and has ended"


def test_a_part_that_was_interrupted_has_not_passed(tmp_path, monkeypatch):
    assert run(tmp_path, [PASSING])[0] == 0

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_group", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [PASSING], again=True)
    monkeypatch.undo()
    assert not gpu.Runner(tmp_path, 1).has_passed(PASSING)
    assert run(tmp_path, [PASSING])[0] == 0


def test_tables_of_logs_are_shown(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("noise\n\ntitle\n\n| a | b |\n|---|---:|\n| x | 1 |\nend\n")
    gpu.print_tables("timing", log)
    shown = capsys.readouterr().out
    assert shown == "\n== timing\ntitle\n| a | b |\n|---|---:|\n| x | 1 |\n"
    gpu.print_tables("parity-ops", log)
    assert capsys.readouterr().out == "\n== parity-ops\nend\n"


def test_parts_are_chosen_by_name():
    assert gpu.chosen(None) == list(gpu.PARTS)
    assert [part.name for part in gpu.chosen("memory,tests")] == ["tests", "memory"]
    with pytest.raises(SystemExit, match="no nothing"):
        gpu.chosen("tests,nothing")


def test_every_part_fits_into_a_call():
    names = [part.name for part in gpu.PARTS]
    assert len(set(names)) == len(names)
    assert all(part.limit + gpu.GRACE <= 8.5 * 60 for part in gpu.PARTS)


def test_rows_take_turns_in_orders_that_are_drawn():
    order = []
    rows = {name: lambda name=name: order.append(name) for name in "abcd"}
    seconds = _harness.take_turns(rows, rounds=40, warmup=2)
    assert {name: len(row) for name, row in seconds.items()} == dict.fromkeys(rows, 40)
    rounds = [order[n : n + 4] for n in range(0, len(order), 4)]
    assert len(rounds) == 42
    assert all(sorted(turn) == list("abcd") for turn in rounds)
    pairs = {pair for turn in rounds for pair in itertools.pairwise(turn)}
    assert len(pairs) == 12, "each row follows each other one"
    first, order[:] = list(order), []
    _harness.take_turns(rows, rounds=40, warmup=2)
    assert order == first, "the same orders in the next run"


def test_rows_are_compiled_beside_each_other():
    meeting = threading.Barrier(2, timeout=20)
    tasks = {name: lambda name=name: (meeting.wait(), name)[1] for name in "ab"}
    assert _harness.together(tasks) == {"a": "a", "b": "b"}


def test_a_ratio_is_of_rounds():
    assert _harness.ratio([2, 30, 4], [1, 10, 4]).value == 2
    assert _harness.ratio([2, 30, 4], [2, 30, 4]) == (1, 0)
    error = _harness.median_error([1, 2, 3])
    assert _harness.ratio_of_medians([3, 1, 2], [4, 4, 4]) == (0.5, error / 4)
    assert _harness.ratio_of_medians([2, 2], [2, 2]) == (1, 0)
    both = _harness.ratio_of_medians([3, 1, 2], [1, 3, 2])
    assert error / 2 < both.error < error, "the root of the sum of squares"


def normal(numbers):
    return numbers.gauss(0, 1)


def with_outliers(numbers):
    return numbers.gauss(0, 1) + 20 * (numbers.random() < 0.1) * numbers.random()


@pytest.mark.parametrize("draw", [normal, with_outliers])
@pytest.mark.parametrize("rounds", [12, 60])
def test_the_error_is_that_of_the_median(draw, rounds):
    """Over 1,500 tables of numbers whose true error follows from the tables."""
    numbers, medians, errors = random.Random(0), [], []
    for _ in range(1500):
        values = [draw(numbers) for _ in range(rounds)]
        medians.append(statistics.median(values))
        errors.append(_harness.median_error(values))
    true = statistics.stdev(medians)
    assert statistics.median(errors) == pytest.approx(true, rel=0.15)
    middle = statistics.median(medians)
    far = [abs(m - middle) > 2 * e for m, e in zip(medians, errors, strict=True)]
    assert 0.02 < statistics.mean(far) < 0.08, "5 % in a normal distribution"


def test_level_rows_are_not_called_different():
    numbers = random.Random(1)
    base = [10 + numbers.gauss(0, 0.2) for _ in range(40)]
    again, slower = ([f * x + numbers.gauss(0, 0.2) for x in base] for f in (1, 1.1))
    assert _harness.ratio(again, base).is_level()
    assert not _harness.ratio(slower, base).is_level()
    assert _harness.ratio(again, base).text().startswith("level, ")
    assert _harness.ratio(slower, base).text().startswith("1.")
    assert _harness.ratio(slower, base).is_level(floor=0.2), "as the second row"
    assert _harness.Ratio(0.97, 0.01).text() == "0.970 ± 0.010"
    assert _harness.Ratio(0.97, 0.02).text() == "level, 0.970 ± 0.020"
    assert _harness.Ratio(0.97, None).text() == "0.97"
    assert _harness.Ratio(1.0, 0.0).text() == "1"


def test_what_does_not_compile_shows_where_it_stands(tmp_path):
    program = (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), "
    )
    program += "name='idle').start(); print('begun', flush=True); time.sleep(600)"
    commands = {
        "quick": [sys.executable, "-c", "print('done')"],
        "hanging": [sys.executable, "-c", program],
    }
    found = float8_compile.watch(commands, tmp_path, stack_after=2, limit=4)
    assert found["quick"] < 2 and found["hanging"] is None
    assert (tmp_path / "quick").read_text() == "done\n", "it had ended"
    said = (tmp_path / "hanging").read_text()
    assert said.startswith("begun\n\nafter 2 s:\n")
    assert said.count("\nthread ") == 2 and said.count("s of work") == 2
    for tool, *_ in float8_compile.TOOLS[:1]:
        assert f"{tool}, exit " in said or f"{tool} is not installed" in said


def test_tools_that_are_missing_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = float8_compile.stacks(os.getpid())
    assert "gdb is not installed\neu-stack is not installed\nthread " in said


def test_the_page_on_targets_has_the_committed_figures():
    assert targets_page.written() == targets_page.PAGE.read_text(), (
        "run `python -m benchmarks.targets_page`"
    )


RUNS, MODELS, MESHES = targets_page.load()
NEWER = targets_page.load("newest-*.json")[1]
# Of libtpu's compiler; a newer one compiles them.
CRASHES = {
    (f"tpu7x {model}", row)
    for model in ("llama", "moe")
    for row in PRECISIONS
    if ("16" in row and row != "bfloat16") or row.startswith("policy")
}


def instead(target, model, row):
    """The dtypes that products have in place of the one asked for, as the page says."""
    if target in GPUS:
        if row in ("bfloat16", "float8", "rowwise"):
            return {"t4": {"f32", "f16"}, "a100": {"bf16"}}.get(target, set())
        # cuDNN has no float16 convolution with a float32 result.
        has_convolutions = model in ("resnet50", "vit")
        return {"f32"} if row == "scaled float16" and has_convolutions else set()
    # A TPU's kernels cast operands themselves, such as a router's bool.
    fused = {"f16 x pred", "f16 x f32"} if model == "moe" else set()
    in_bfloat16 = {"bf16", "bf16 x f32", "f32 x pred", "bf16 x pred"}
    return in_bfloat16 if row == "float32" else fused


def test_the_committed_figures_are_of_all_targets_and_models():
    assert len({run["jax"] for run in RUNS}) == 1
    titles = {
        f"{target} {model}" for target in TARGETS for model in targets_page.TITLES
    }
    assert titles == set(MODELS)
    assert {len(found["rows"]) for found in MODELS.values()} == {len(PRECISIONS)}
    assert {f"{count} x v5p" for count in (8, 256, 4096)} <= set(MESHES)


@pytest.mark.parametrize("title", MODELS)
def test_the_committed_figures_of_a_model_are_as_the_page_says(title):
    target, model = title.split()
    for models in (models for models in (MODELS, NEWER) if title in models):
        found, rows = models[title], models[title]["rows"]
        for row, figures in rows.items():
            if "error" in figures:
                assert (title, row) in CRASHES and models is MODELS
                continue
            assert figures["conditionals"] == figures["host"] == 0, row
            others = set(targets_page.others(figures))
            assert others <= instead(target, model, row), row
        # With a loss scale, XLA groups the kernels of a ResNet differently, which
        # moves more than the gradients are.
        if model == "resnet50" and target in GPUS:
            scaled = rows[targets_page.SCALED]["bytes"]
            assert scaled <= 1.02 * rows["float16"]["bytes"]
        elif added := targets_page.added(found):
            assert float(added) <= 1.05


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_a_t4_gains_from_float16_what_it_cannot_from_bfloat16(model):
    rows = MODELS[f"t4 {model}"]["rows"]
    assert rows[targets_page.SCALED]["bytes"] <= 0.70 * rows["bfloat16"]["bytes"]
    assert rows["bfloat16"]["bytes"] >= rows["float32"]["bytes"]


@pytest.mark.parametrize("title", MESHES)
def test_the_committed_figures_of_a_mesh_are_as_the_page_says(title):
    for row, (plain, scaled) in ((r, p.values()) for r, p in MESHES[title].items()):
        is_2d = row.startswith("2-D")
        assert scaled["count"] <= plain["count"] + (4 if is_2d else 1), row
        assert scaled["bytes"] <= plain["bytes"] + (16 if is_2d else 4), row
        # The loss; and under jit the biases, whose gradients torch sums in float32 too.
        most = 4 if "shard_map" in row else 4 + 2 * 4 * (4096 + 256)
        assert plain["by_dtype"]["f32"] <= most, row


def test_programs_do_not_grow_with_the_number_of_chips():
    few, most = (MESHES[f"{count} x v5p"] for count in (8, 4096))
    for row, (plain, scaled) in ((r, p.values()) for r, p in most.items()):
        assert plain["bytes"] <= 1.01 * few[row]["plain"]["bytes"], row
        assert scaled["instructions"] <= 1.1 * [*few[row].values()][1]["instructions"]


def test_readme_has_the_committed_figures():
    assert targets_page.first_page(MODELS) in (ROOT / "README.md").read_text()


# The others share no code with these, and `make gpu DRY=1` runs them all.
BENCHMARKS = {
    "loss_scale_overhead": (),
    "eager_overhead": (),
    "train_step": ("--models", "gpt2", "--rows", "float16 by hand"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_small_and_writes_its_figures(name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", *BENCHMARKS[name]]
    file = tmp_path / "figures.json"
    options = ["--small", "--device", "cpu", "--json", str(file)]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    environment = os.environ | {"XLA_FLAGS": flags}
    ran = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "|---" in ran.stdout
    written = json.loads(file.read_text())
    assert written["run"]["device"] == "cpu"
    assert f"-m benchmarks.{name}" in written["run"]["command"]
    assert written["results"]
