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

from benchmarks import (
    _harness,
    float8_compile,
    gpu,
    gpu_parts,
    master_weights,
    tables,
    targets_page,
    train_rows,
)
from benchmarks.devices import GPUS
from benchmarks.model_sizes import COMPILED
from benchmarks.targets import TARGETS
from benchmarks.train_rows import PRECISIONS, rows_for

from .marks import cover

ROOT = Path(__file__).parents[1]


def toy(name, *command, seconds=1, worth=0, memory=1, **other):
    command = command or ("this",)
    return gpu_parts.Part(name, worth, seconds, memory, command, command, **other)


def run(out, parts, minutes=5, again=False, **how):
    runner = gpu.Runner(out, minutes, **how)
    status = gpu.run_all(runner, parts, again)
    return status, {name: entry["status"] for name, entry in runner.entries.items()}


def lines_of(out, name):
    return (out / f"{name}.log").read_text().splitlines()


FAILING = toy("failing", "nowhere_at_all")
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
    assert run(tmp_path, [gpu_parts.small(PASSING)])[0] == 0, "the same command"
    assert log.read_text() == "kept"
    other = PASSING._replace(command=("this", "-h"))
    assert run(tmp_path, [other])[0] == 0
    assert log.read_text() != "kept", "its command has changed"


def test_what_has_failed_is_run_again_after_what_has_not(tmp_path, capsys):
    assert run(tmp_path, [FAILING, PASSING])[0] == 1
    mended, new = FAILING._replace(worth=1), toy("new")
    capsys.readouterr()
    assert run(tmp_path, [mended, new])[0] == 1
    said = capsys.readouterr().out
    assert said.index("new: this") < said.index("failing: nowhere_at_all")
    mended = FAILING._replace(command=("this",))
    assert run(tmp_path, [mended, PASSING, new]) == (
        0,
        {"failing": "passed", "passing": "passed", "new": "passed"},
    )


def test_what_does_not_fit_is_left_and_what_fits_is_run(tmp_path, capsys):
    long, large = toy("long", seconds=600, worth=1), toy("large", memory=90, worth=1)
    status, entries = run(tmp_path, [long, large, PASSING], card=80)
    assert (status, entries) == (3, {"passing": "passed"})
    said = capsys.readouterr().out
    assert "| long | left; for the next call (needs 600 s and 1 of 80 GB) |" in said
    assert "| large | left; for the next call (needs 1 s and 90 of 80 GB) |" in said
    assert run(tmp_path, [long, FAILING])[0] == 1
    assert run(tmp_path, [long, large, PASSING], minutes=11, card=90)[0] == 0


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


def test_a_part_and_its_children_are_killed_at_the_limit(
    tmp_path, ticking, monkeypatch
):
    monkeypatch.setattr(gpu_parts, "LEAST_LIMIT", 2)
    status, entries = run(tmp_path / "out", [ticking("slow", 600), PASSING])
    assert status == 1
    assert entries == {"slow": "killed at its limit", "passing": "passed"}
    assert lines_of(tmp_path / "out", "slow") == ["begun"]
    before = ticking.ticks()["slow"]
    time.sleep(0.5)
    assert ticking.ticks()["slow"] == before, "the child has ended"


def test_no_check_runs_while_a_timed_part_runs(tmp_path, ticking):
    checks = [ticking("check", 2), ticking("hanging", 600)]
    timed = [ticking(f"timed-{n}", 1, timed=True, seconds=3) for n in "ab"]
    # The checks get the five seconds that are left of eleven.
    status, entries = run(tmp_path / "out", [*timed, *checks], minutes=11 / 60)
    assert entries == {
        "check": "passed",
        "hanging": gpu.STOPPED,
        "timed-a": "passed",
        "timed-b": "passed",
    }
    assert status == 3, "the check is left for the next call"
    found = ticking.ticks()
    first, last = ({n: f(when) for n, when in found.items()} for f in (min, max))
    assert max(first["check"], first["hanging"]) < last["check"], "beside each other"
    order = [*sorted(("check", "hanging"), key=last.get), "timed-a", "timed-b"]
    for one, other in itertools.pairwise(order[1:]):
        assert last[one] < first[other], f"{other} began after {one} had ended"


def test_a_check_has_its_share_of_the_memory(tmp_path, monkeypatch):
    (tmp_path / "shares.py").write_text(
        "import os\nprint({k[18:]: v for k, v in os.environ.items() if 'CLIENT' in k})"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = toy("check", "shares", memory=20, processes=2)
    timed = toy("timed", "shares", memory=20, timed=True)
    assert run(tmp_path, [check, timed], card=100, cores=2)[0] == 0
    said = "{'PREALLOCATE': 'false', 'MEM_FRACTION': '0.075'}"
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
    runner = gpu.Runner(tmp_path / "out", 1)
    assert runner.status(part) == gpu.UNFINISHED
    assert [p for _, p in runner.choose([part])] == [part]


def names_of(planned):
    return [(part.name, start) for start, part in planned]


def test_a_call_gets_what_is_most_worth():
    parts = [
        toy("least", worth=1, seconds=30, timed=True),
        toy("most", worth=9, seconds=60, timed=True),
        toy("too long", worth=8, seconds=50, timed=True),
        toy("too large", worth=7, seconds=1, memory=81, timed=True),
        toy("check", worth=5, seconds=10),
    ]
    planned = gpu_parts.choose(parts, 100, 80, 4)
    assert names_of(planned) == [("check", 0), ("most", 10), ("least", 70)]


def test_checks_are_beside_each_other_as_memory_and_cores_allow():
    checks = [toy(f"{n}", seconds=10 + n, memory=30, processes=2) for n in range(4)]
    starts = lambda card, cores: [
        start for start, _ in gpu_parts.schedule(checks, card, cores)
    ]
    assert starts(120, 8) == [0, 0, 0, 0]
    assert starts(80, 8) == [0, 0, 12, 13]
    assert starts(120, 5) == [0, 0, 12, 13]
    assert starts(80, 1) == [0, 13, 25, 36], "one at a time always fits"
    assert gpu_parts.together([*checks, toy("", memory=70)], 100, 8) == 2, "the largest"


def test_tables_of_logs_are_shown(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("noise\n\ntitle\n\n| a | b |\n|---|---:|\n| x | 1 |\nend\n")
    gpu.print_tables("timing", log)
    shown = capsys.readouterr().out
    assert shown == "\n== timing\ntitle\n| a | b |\n|---|---:|\n| x | 1 |\n"
    gpu.print_tables("parity-ops", log)
    assert capsys.readouterr().out == "\n== parity-ops\nend\n"


def test_parts_are_chosen_by_name():
    assert gpu.named(None) == list(gpu_parts.PARTS)
    assert [part.name for part in gpu.named("memory,tests")] == ["tests", "memory"]
    with pytest.raises(SystemExit, match="no nothing"):
        gpu.named("tests,nothing")


def test_every_part_fits_into_a_call():
    names = [part.name for part in gpu_parts.PARTS]
    assert len(set(names)) == len(names)
    most = 60 * gpu_parts.CALLS[0] - gpu_parts.GRACE
    assert all(part.limit <= most for part in gpu_parts.PARTS)
    worths = [part.worth for part in gpu_parts.PARTS]
    assert worths == sorted(worths, reverse=True), "the table shows what matters most"


def test_the_plan_is_on_the_page(capsys):
    gpu_parts.print_plan(gpu_parts.PARTS)
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert capsys.readouterr().out in page, "run `python -m benchmarks.gpu --plan`"


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
        "G, D, Python 3, JAX 1, Flax 2, optax 4. 6 rounds. The baseline has one row",
        "torch 5 ran in a process of its own.",
    ):
        assert line in made
    monkeypatch.setattr(tables, "RESULTS", tmp_path.parent)
    start = f"<!-- benchmarks.tables {tmp_path.name} first -->\n"
    page = f"a\n{start}old\n<!-- end -->\nb\n"
    filled = tables.written(page)
    assert "old" not in filled and "| jmp | 4.00 |" in filled
    assert filled.startswith(f"a\n{start}") and filled.endswith("<!-- end -->\nb\n")
    assert tables.written(filled) == filled


def test_tables_name_the_rows_that_are_measured():
    assert (tables.BY_HAND, tables.AGAIN) == (train_rows.BASE, train_rows.AGAIN)
    forms = master_weights.PLAIN, master_weights.AGAIN
    assert (tables.FORM, tables.FORM_AGAIN) == forms
    torch_rows = {name for name in tables.SHORT if name.startswith("torch")}
    assert {*tables.SHORT} - torch_rows <= train_rows.ROWS.keys()


@pytest.mark.slow
def test_the_gpu_and_its_memory_are_found(monkeypatch):
    run = subprocess.run

    def answer(argv, **how):
        return subprocess.CompletedProcess(argv, 0, "noise\ngpu 75000000000 NVIDIA H\n")

    monkeypatch.setattr(gpu.subprocess, "run", answer)
    assert gpu.device() == ("NVIDIA H", 75)
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


PAGES_OF_TEXT = ["README.md", "benchmarks/README.md"]
PAGES_OF_TEXT += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES_OF_TEXT)
def test_a_page_has_the_figures_that_were_measured(page):
    text = (ROOT / page).read_text()
    assert tables.written(text) == text, "run `python -m benchmarks.tables`"
    starts = text.count("<!-- benchmarks.")
    assert (starts > 0) == (page in tables.PAGES)
    matches = [match.group() for match in tables.MARK.finditer(text)]
    assert starts == len(matches), "a comment is misspelt, or its end is missing"
    assert all(match.count("<!--") == 2 for match in matches)


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
    for title, found in MODELS.items():
        size = COMPILED["gpu"][title.split()[1]]
        assert found["rows"].keys() == rows_for(size, PRECISIONS).keys(), title
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
    kept = rows["float32"]["bytes"] * (0.87 if model == "gpt2" else 1)  # a mask's
    assert rows["bfloat16"]["bytes"] >= kept


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


def test_the_example_has_the_committed_figures():
    assert targets_page.small_gpt2(MODELS) in targets_page.PAGE.read_text()


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
