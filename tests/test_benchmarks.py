"""`make gpu` on toy parts, the tables, and each benchmark at its smallest size."""

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

from benchmarks import (
    _harness,
    compiled_tables,
    float8_compile,
    gpu,
    master_weights,
    tables,
    train_rows,
)
from benchmarks.devices import GPUS
from benchmarks.model_sizes import COMPILED
from benchmarks.targets import TARGETS
from benchmarks.train_rows import PRECISIONS, rows_for

from .marks import cover, walk

ROOT = Path(__file__).parents[1]


def toy(name, *command, limit=60, **other):
    command = command or ("this",)
    return gpu.Part(name, limit, command, command, **other)


def run(out, parts, minutes=5, again=False, cores=2):
    runner = gpu.Runner(out, minutes, cores)
    status = gpu.run_all(runner, parts, again)
    return status, {name: entry["status"] for name, entry in runner.entries.items()}


def lines_of(out, name):
    return (out / f"{name}.log").read_text().splitlines()


FAILING = toy("failing", "nowhere_at_all")
PASSING = toy("passing")


def test_a_failed_part_stops_no_other_and_runs_again_after_what_is_new(
    tmp_path, capsys
):
    status, entries = run(tmp_path, [FAILING, PASSING])
    assert status == 1
    assert entries == {"failing": "exit 1", "passing": "passed"}
    assert "No module named nowhere_at_all" in lines_of(tmp_path, "failing")[-1]
    assert "| failing | exit 1 |" in capsys.readouterr().out
    assert run(tmp_path, [FAILING, PASSING, toy("new")], cores=1)[0] == 1
    said = capsys.readouterr().out
    assert said.index("new: passed") < said.index("failing: exit 1")
    mended = FAILING._replace(command=("this",))
    assert run(tmp_path, [mended, PASSING]) == (
        0,
        {"failing": "passed", "passing": "passed", "new": "passed"},
    )


def test_what_has_passed_is_not_run_again(tmp_path):
    log = tmp_path / "passing.log"
    assert run(tmp_path, [PASSING])[0] == 0
    log.write_text("kept")
    assert run(tmp_path, [PASSING])[0] == 0
    assert log.read_text() == "kept"
    assert run(tmp_path, [PASSING], again=True)[0] == 0
    assert log.read_text() != "kept"
    log.write_text("kept")
    assert run(tmp_path, gpu.dry_run([PASSING]))[0] == 0, "the same command"
    assert log.read_text() == "kept"
    other = PASSING._replace(command=("this", "-h"))
    assert run(tmp_path, [other])[0] == 0
    assert log.read_text() != "kept", "its command has changed"


def test_what_does_not_fit_is_left_and_what_fits_is_run(tmp_path, capsys):
    long = toy("long", limit=600)
    assert run(tmp_path, [long, PASSING]) == (3, {"passing": "passed"})
    assert "| long | left, needs 600 s |" in capsys.readouterr().out
    assert run(tmp_path, [long, FAILING])[0] == 1
    assert run(tmp_path, [long, PASSING], minutes=11)[0] == 0


TICKER = """
import pathlib, subprocess, sys, time
name, seconds, file = sys.argv[1:]
tick = "import sys, time\\nwhile True: open(sys.argv[2], 'a').write("
tick += "f'{sys.argv[1]} {time.monotonic()}\\\\n'); time.sleep(0.02)"
print("begun", flush=True)
subprocess.Popen([sys.executable, "-c", tick, name, file])
time.sleep(float(seconds))
"""


@pytest.fixture
def ticking(tmp_path, monkeypatch):
    """Makes a part that runs for some seconds while its child writes ticks."""
    (tmp_path / "ticker.py").write_text(TICKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "ticks"

    def make(name, runs_for, **how):
        return toy(name, "ticker", name, str(runs_for), str(file), **how)

    def ticks():
        found = {}
        for line in file.read_text().splitlines():
            name, when = line.split()
            found.setdefault(name, []).append(float(when))
        return found

    make.ticks = ticks
    return make


def test_a_part_and_its_children_are_killed_at_the_limit(tmp_path, ticking):
    status, entries = run(tmp_path / "out", [ticking("slow", 600, limit=2), PASSING])
    assert status == 1
    assert entries == {"slow": gpu.KILLED, "passing": "passed"}
    assert lines_of(tmp_path / "out", "slow") == ["begun"]
    before = ticking.ticks()["slow"]
    time.sleep(0.5)
    assert ticking.ticks()["slow"] == before, "the child has ended"


def test_parts_run_beside_each_other_but_for_those_that_are_timed(tmp_path, ticking):
    checks = [ticking("a", 2), ticking("b", 2), ticking("c", 1)]
    timed = [ticking(f"timed-{n}", 1, timed=True) for n in "de"]
    assert run(tmp_path / "out", [*checks, *timed, toy("last")])[0] == 0
    found = ticking.ticks()
    first, last = ({n: f(when) for n, when in found.items()} for f in (min, max))
    assert max(first["a"], first["b"]) < min(last["a"], last["b"]), "on two cores"
    assert first["c"] > min(last["a"], last["b"]), "and not three"
    order = [max(("a", "b", "c"), key=last.get), "timed-d", "timed-e"]
    for one, other in itertools.pairwise(order):
        assert last[one] < first[other], f"{other} began after {one} had ended"


def test_a_check_has_its_share_of_the_memory(tmp_path, monkeypatch):
    (tmp_path / "shares.py").write_text(
        "import os\nprint({k[18:]: v for k, v in os.environ.items() if 'CLIENT' in k})"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = toy("check", "shares", processes=2)
    timed = toy("timed", "shares", timed=True)
    assert run(tmp_path, [check, PASSING, timed], cores=8)[0] == 0
    said = "{'PREALLOCATE': 'false', 'MEM_FRACTION': '0.250'}"
    assert sorted(lines_of(tmp_path, "check")[0]) == sorted(said)
    assert lines_of(tmp_path, "timed") == ["{}"], "all of the card"


def test_a_call_that_is_interrupted_ends_its_parts(tmp_path, ticking, monkeypatch):
    part, sleep = ticking("part", 600), time.sleep

    def interrupt(seconds):
        sleep(seconds)
        if (tmp_path / "ticks").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", [part])
    monkeypatch.undo()
    before = ticking.ticks()["part"]
    time.sleep(0.5)
    assert ticking.ticks()["part"] == before
    assert gpu.Runner(tmp_path / "out", 1).status(part) == gpu.UNFINISHED


def test_every_part_fits_into_a_call_and_is_chosen_by_name():
    assert all(part.limit <= 60 * gpu.MINUTES - gpu.GRACE for part in gpu.PARTS)
    names = [part.name for part in gpu.PARTS]
    assert len({*names}) == len(names)
    assert gpu.named(None) == list(gpu.PARTS)
    assert [part.name for part in gpu.named("memory,tests")] == ["tests", "memory"]
    with pytest.raises(SystemExit, match="no nothing"):
        gpu.named("tests,nothing")


def test_tables_of_logs_are_shown(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("noise\n\ntitle\n\n| a | b |\n|---|---:|\n| x | 1 |\nend\n")
    gpu.print_tables("timing", log)
    shown = capsys.readouterr().out
    assert shown == "\n== timing\ntitle\n| a | b |\n|---|---:|\n| x | 1 |\n"
    gpu.print_tables("parity-ops", log)
    assert capsys.readouterr().out == "\n== parity-ops\nend\n"


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


def rows_of(**seconds):
    base = seconds["base"]
    return {
        name.replace("_", " "): _harness.figures(row, base)
        for name, row in seconds.items()
    }


def test_a_table_has_ratios_and_the_fastest_row():
    rows = rows_of(base=[1.0, 1.01, 1.0], faster=[0.5, 0.51, 0.5], slow=[2.0, 2.0, 2.0])
    made = tables.table("title", rows, {}, "base", shown=["base"]).splitlines()
    assert made[2] == "| base | 1000.0 | 1 |"
    assert made[3].startswith("| faster | 500.0 | 0.500 ± ")
    assert len(made) == 4, "slow is left out"
    again = rows_of(base=[1.0] * 5, base_again=[1.2] * 5, other=[0.9] * 5)
    made = tables.table("title", again, {}, "base", "base again").splitlines()
    assert made[4].startswith("| other | 900.0 | level, 0.900 ±"), "of its second row"


def test_tables_are_made_from_a_folder(tmp_path, monkeypatch):
    run = {"device": "G", "date": "D", "python": "3", "jax": "1", "flax": "2"}
    run |= {"optax": "4", "torch": "5"}
    base = [0.01] * 6
    rows = rows_of(base=base, faster=[0.004] * 6)
    rows = {tables.BY_HAND: rows["base"], "jmp": rows["faster"]}
    torch_rows = {"torch AMP": _harness.figures([0.02] * 6)}
    for part, found in ("train-gpt2", rows), ("torch-gpt2", torch_rows):
        document = {"run": run, "results": {"gpt2": found}}
        (tmp_path / f"{part}.json").write_text(json.dumps(document))
    (tmp_path / "parts.json").write_text("{}")
    made = tables.every(tmp_path)
    assert made.count("## ") == 2, "first and gpt2"
    for line in (
        "| jmp | 4.00 | 0.400 ± 0.000 |  |  |",
        "| torch AMP | 20.0 | 2.000 ± 0.000 |  |  |",
        "G, D, Python 3, JAX 1, Flax 2, optax 4. 6 rounds. torch 5 ran in a process",
        "6 rounds. The baseline has one row, so how far",
        "torch 5 ran in a process of its own.",
    ):
        assert line in made
    monkeypatch.setattr(tables, "RESULTS", tmp_path.parent)
    start = f"<!-- benchmarks.tables {tmp_path.name} first -->\n"
    page = f"a\n{start}old\n<!-- end -->\nb\n"
    filled, stale = tables.written(page)
    assert stale == [f"{tmp_path.name} first"]
    assert "old" not in filled and "| jmp | 4.00 |" in filled
    assert filled.startswith(f"a\n{start}") and filled.endswith("<!-- end -->\nb\n")
    assert tables.written(filled) == (filled, [])
    for wrong in (page.replace("<!-- end -->", ""), page.replace("first", "first x")):
        with pytest.raises(ValueError, match="misspelt, or its end is missing"):
            tables.written(wrong)
    with pytest.raises(ValueError, match="no figures for the table masters"):
        tables.written(page.replace("first", "masters"))


def test_the_pages_have_the_tables_of_the_committed_figures(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    status, said = tables.main(), capsys.readouterr().out
    assert (status, said) == (0, ""), "run `python -m benchmarks.tables`"


def test_a_stale_page_is_named_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    old = "a\n<!-- benchmarks.tables cpu memory -->\n<!-- end -->\nb\n"
    page.write_text(old)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for options, status in ((["--check"], 1), ([], 0)):
        assert page.read_text() == old
        monkeypatch.setattr(sys, "argv", ["tables", *options])
        assert tables.main() == status
        assert capsys.readouterr().out == "README.md: cpu memory\n"
    assert page.read_text() == tables.written(old)[0] != old


def test_tables_name_the_rows_that_are_measured():
    assert (tables.BY_HAND, tables.AGAIN) == (train_rows.BASE, train_rows.AGAIN)
    assert compiled_tables.SCALED == train_rows.SCALED
    forms = master_weights.PLAIN, master_weights.AGAIN
    assert (tables.FORM, tables.FORM_AGAIN) == forms
    torch_rows = {name for name in tables.SHORT if name.startswith("torch")}
    assert {*tables.SHORT} - torch_rows <= train_rows.ROWS.keys()


@pytest.mark.slow
def test_the_gpu_is_found(monkeypatch):
    run, said = subprocess.run, "noise\ngpu NVIDIA H\n"
    answer = lambda argv, **how: subprocess.CompletedProcess(argv, 0, said)
    monkeypatch.setattr(gpu.subprocess, "run", answer)
    assert gpu.device() == "NVIDIA H"
    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="no GPU here, but cpu cpu"):
        gpu.device()


def test_what_starts_the_parts_does_not_take_the_gpu():
    """JAX would reserve most of the memory."""
    program = "import benchmarks.gpu, sys; print('jax' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == "False\n", ran.stderr


@pytest.mark.slow
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


RUNS, STEPS, MESHES = compiled_tables.load()
NEWER = compiled_tables.load("newest-")[1]
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


def test_all_targets_and_models_are_compiled_by_one_jax():
    assert len({run["jax"] for run in RUNS}) == 1
    titles = itertools.product(TARGETS, compiled_tables.SMALLER)
    assert {f"{target} {model}" for target, model in titles} == {*STEPS}
    for title, found in STEPS.items():
        size = COMPILED["gpu"][title.split()[1]]
        assert found["rows"].keys() == rows_for(size, PRECISIONS).keys(), title


@walk("title", STEPS)
def test_steps_are_compiled_as_the_page_says(title):
    target, model = title.split()
    for steps in (steps for steps in (STEPS, NEWER) if title in steps):
        found, rows = steps[title], steps[title]["rows"]
        for row, figures in rows.items():
            if "error" in figures:
                assert (title, row) in CRASHES and steps is STEPS
                continue
            assert figures["conditionals"] == figures["host"] == 0, row
            assert {*compiled_tables.others(figures)} <= instead(target, model, row)
        # With a loss scale, XLA groups the kernels of a ResNet differently, which
        # moves more than the gradients are.
        if model == "resnet50" and target in GPUS:
            scaled = rows[compiled_tables.SCALED]["bytes"]
            assert scaled <= 1.02 * rows["float16"]["bytes"]
        elif added := compiled_tables.added(found):
            assert float(added) <= 1.05


def test_a_t4_gains_from_float16_what_it_cannot_from_bfloat16():
    for model, kept in {"mlp": 1, "gpt2": 0.87}.items():  # GPT-2's masks are smaller
        rows = STEPS[f"t4 {model}"]["rows"]
        scaled = rows[compiled_tables.SCALED]["bytes"]
        assert scaled <= 0.70 * rows["bfloat16"]["bytes"]
        assert rows["bfloat16"]["bytes"] >= kept * rows["float32"]["bytes"]


@walk("title", MESHES)
def test_loss_scaling_exchanges_one_flag(title):
    for row, (plain, scaled) in ((r, p.values()) for r, p in MESHES[title].items()):
        is_2d = row.startswith("2-D")
        assert scaled["count"] <= plain["count"] + (4 if is_2d else 1), row
        assert scaled["bytes"] <= plain["bytes"] + (16 if is_2d else 4), row
        # The loss; and under jit the biases, whose gradients torch sums in float32 too.
        most = 4 if "shard_map" in row else 4 + 2 * 4 * (4096 + 256)
        assert plain["by_dtype"]["f32"] <= most, row


def test_programs_do_not_grow_with_the_number_of_chips():
    few, _, most = (MESHES[f"{count} x v5p"] for count in (8, 256, 4096))
    for row, (plain, scaled) in ((r, p.values()) for r, p in most.items()):
        assert plain["bytes"] <= 1.01 * few[row]["plain"]["bytes"], row
        assert scaled["instructions"] <= 1.1 * [*few[row].values()][1]["instructions"]


# `make gpu DRY=1` runs the others, which share no code with these.
BENCHMARKS = {
    "proof_cost": (),
    "eager_overhead": (),
    "loss_scale_overhead": (),
    "train_step": ("--models", "gpt2", "--rows", "float16 by hand"),
}


@cover(quick=0, ci=2)
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
