"""Runs everything that needs a GPU: its tests, parity with torch, and the benchmarks.

    python -m benchmarks.gpu --minutes 9       # or `make gpu`
    python -m benchmarks.gpu --minutes 9       # again: resumes where it stopped
    python -m benchmarks.gpu --dry-run         # the same parts on the CPU, small

`PARTS` is in the order of worth, and each part has a limit in seconds, after which it
is killed with all its children. A call runs the parts that have not passed yet, in this
order, as far as their limits fit into `--minutes`. Parts that are not timed run beside
each other, one process for each core and each with a share of the GPU's memory. A part
that is timed runs alone. A part that has failed runs again after the others, and one
that has passed with `--again` alone, or if its command has changed.

`--out` gets each part's log and figures, `parts.json` with the outcome of each, and
`tables.md` with what pages show of the figures. Nothing is downloaded or installed.

The exit status is 0 if all parts have passed, 1 if a part failed, and 3 if none failed
but parts are left for the next call.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _harness, tables
from shared.processes import end_group, start_group

ROOT = Path(__file__).parents[1]
MINUTES = 9.0
GRACE = 15  # seconds of a call that no part gets: for start, end and printing
DRY_LIMIT = 300
SHARE = 0.75  # XLA's part of the memory of checks; CUDA and torch have the rest
KILLED, UNFINISHED = "killed at its limit", "not finished"
NO_GPU = """JAX sees no GPU here, but {}.
To try the parts on the CPU: python -m benchmarks.gpu --dry-run"""


class Part(NamedTuple):
    """One command: the arguments of `python -m`, on a GPU and in a dry run."""

    name: str
    limit: float  # seconds, of which a part is expected to take two thirds
    command: Sequence[str]
    dry: Sequence[str]
    timed: bool = False  # so nothing else may run on the GPU
    processes: int = 1  # that compute
    environment: Mapping[str, str] = {}  # on a GPU


def benchmark(
    name: str,
    limit: float,
    module: str,
    *options: str,
    full: Sequence[str] = (),
    small: Sequence[str] = (),
    **other: Any,
) -> Part:
    """A benchmark with options for both runs, for the GPU run, and for the dry run."""
    command, small = (f"benchmarks.{module}", *options), (*small, "--small")
    gpu, cpu = (*command, *full, "--device", "gpu"), (*command, *small)
    return Part(name, limit, gpu, cpu, **{"timed": True, **other})


def parity(name: str, limit: float, processes: int, quick_case: str) -> Part:
    """A part of the parity suite, and its cases for a dry run."""
    command = ("parity", "--only", name, "--processes")
    gpu = (*command, str(processes), "--device", "cuda")
    dry = (*command, "1", "--device", "rehearsal", "--case", quick_case)
    return Part(f"parity-{name}", limit, gpu, dry, processes=processes)


def float8_compile(name: str, flags: str) -> Part:
    """How float8 compiles with XLA's flags, of which a dry run has all at once."""
    own = (f"--xla={flags}",) if flags else ()
    both = (f"--xla={NO_TRITON} {NO_TUNING}",)
    return benchmark(name, 130, "float8_compile", full=own, small=both)


train = lambda model: ("train_step", "--models", model)
torch = lambda model: ("torch_train_step", "--models", model)
sizes = lambda parameters: ("--parameters", parameters)
LOSS_SCALE = ("loss_scale_overhead", "--donated")
PYTEST = ("pytest", "-p", "no:cacheprovider", "-q")
ON_GPU = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests").rglob("test_*.py")
    if "mark.gpu" in path.read_text()
)
TESTS = (*PYTEST, "--optimized", *ON_GPU, "-m")
# A run that is killed has printed what failed until then.
KEPT = ("--instafail", "--continue-on-collection-errors")
QUICK = (*PYTEST, *KEPT, "-n", "10", "-m", "not slow", "tests", "--ignore=tests/lint")
DRY_QUICK = (*PYTEST, "-n", "2", "-m", "not slow", "tests/test_hlo.py")
MEASURE = ("benchmarks.measure",)
DRY_MEASURE = (*PYTEST, "tests/test_measure.py", "-k", "a_cpu_is_measured")
FEW = ("--rows", "clipped,autocast + dynamic")
AMP = ("--rows", "AMP")
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
NO_TUNING = "--xla_gpu_autotune_level=0"
WITH_CPU = {"JAX_PLATFORMS": "cuda,cpu"}
# Timed with the flag that is tried first.
FLOAT8 = {"full": ("--widths", "4096"), "environment": {"XLA_FLAGS": NO_TRITON}}
# Those of most worth first. The limits are from an H200, or estimated. Parity's planted
# faults and other libraries say nothing about a GPU.
PARTS = (
    Part("tests", 200, (*TESTS, "gpu"), (*TESTS, "gpu and not slow")),
    parity("behaviors", 240, 2, "bfloat16 after unscale_"),
    parity("training", 240, 2, "mlp, SGD"),
    parity("ops", 240, 5, "matmul"),
    parity("scale", 240, 4, "default: seed=0"),
    benchmark("master-weights", 120, "master_weights", timed=False),
    benchmark("memory", 60, "memory", timed=False),
    benchmark("train-gpt2", 160, *train("gpt2")),
    benchmark("torch-gpt2", 110, *torch("gpt2")),
    float8_compile("float8-compile-cublas", NO_TRITON),
    float8_compile("float8-compile-untuned", NO_TUNING),
    float8_compile("float8-compile", ""),
    benchmark("train-vit", 180, *train("vit"), small=FEW),
    benchmark("train-resnet50", 190, *train("resnet50"), small=FEW),
    benchmark("float8", 150, "float8_step", **FLOAT8),
    Part("measure", 160, MEASURE, DRY_MEASURE, timed=True),
    Part("quick-tests", 480, QUICK, DRY_QUICK, processes=10, environment=WITH_CPU),
    benchmark("masters", 60, "master_weights", "--update"),
    benchmark("loss-scale", 90, *LOSS_SCALE, full=sizes("1e8,1e7")),
    benchmark("torch-vit", 120, *torch("vit"), small=AMP),
    benchmark("torch-resnet50", 120, *torch("resnet50"), small=AMP),
    benchmark("logging", 90, "logging_overhead"),
    benchmark("eager", 90, "eager_overhead"),
    benchmark("compile-time", 300, "compile_time"),
    benchmark("loss-scale-1b", 180, *LOSS_SCALE, full=sizes("1e6,1e9")),
)


def dry_run(parts: Sequence[Part]) -> list[Part]:
    """The parts at a small size on the CPU, whose times say nothing: none runs alone.

    Parts that are the same at that size count once, as the first of them.
    """
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    first = {part.dry: part for part in reversed(parts)}
    return [
        Part(part.name, DRY_LIMIT, part.dry, part.dry, environment=flags)
        for part in reversed(first.values())
    ]


class Runner:
    """Runs parts within a time limit, and records their outcomes in a folder."""

    def __init__(self, out: Path, minutes: float, cores: int | None = None):
        self.out, self.cores = out, cores or os.cpu_count() or 1
        self.end = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "parts.json"
        self.entries: dict[str, Any] = {}
        if self.file.exists():
            self.entries = json.loads(self.file.read_text())

    def log(self, part: Part) -> Path:
        return self.out / f"{part.name}.log"

    def status(self, part: Part) -> str:
        """How the part ended when it last ran; "" if its command was another one."""
        entry = self.entries.get(part.name, {})
        same = entry.get("command") == list(part.command) and self.log(part).exists()
        return entry["status"] if same else ""

    def run(self, parts: Sequence[Part]) -> None:
        """Runs parts beside each other, as far as the cores and the time allow.

        None of them runs any more when this returns.
        """
        most = min(self.cores, sum(part.processes for part in parts))
        waiting, running = list(parts), []
        try:
            while waiting or running:
                now = time.monotonic()
                busy = sum(part.processes for part, *_ in running)
                for part in waiting[:1]:
                    if now + part.limit > self.end:
                        waiting.remove(part)
                    elif not running or busy + part.processes <= most:
                        waiting.remove(part)
                        running.append((part, self.start(part, most), now))
                for item in list(running):
                    part, process, start = item
                    code = process.poll()
                    if code is None and now < start + part.limit:
                        continue
                    running.remove(item)
                    end_group(process)
                    status = "passed" if code == 0 else f"exit {code}"
                    status = KILLED if code is None else status
                    print(f"{part.name}: {status}, {now - start:.1f} s", flush=True)
                    self.enter(part, status, now - start)
                time.sleep(0.05)
        finally:  # also when this program is interrupted
            for _, process, _ in running:
                end_group(process)

    def start(self, part: Part, most: int) -> subprocess.Popen[bytes]:
        self.enter(part, UNFINISHED, 0.0)
        argv = [sys.executable, "-m", *part.command]
        if part.command[0].startswith("benchmarks."):
            argv += ["--json", str(self.out / f"{part.name}.json")]
        environment = {"PYTHONUNBUFFERED": "1", **part.environment}
        if not part.timed:
            share = SHARE / max(most, part.processes)
            environment |= {
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
            }
        print(f"{part.name}: {' '.join(part.command)}", flush=True)
        with self.log(part).open("w") as log:
            return start_group(argv, log, ROOT, os.environ | environment)

    def enter(self, part: Part, status: str, seconds: float) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self.entries[part.name] = {
            "status": status,
            "seconds": round(seconds, 1),
            "command": list(part.command),
            "date": now.isoformat(timespec="seconds"),
            "versions": _harness.versions(),
        }
        self.file.write_text(json.dumps(self.entries, indent=2) + "\n")


def run_all(runner: Runner, parts: Sequence[Part], again: bool = False) -> int:
    """Runs the parts that have not passed yet. Returns the exit status."""
    todo = [part for part in parts if again or runner.status(part) != "passed"]
    todo.sort(key=lambda part: runner.status(part) not in ("", UNFINISHED))
    for timed, group in itertools.groupby(todo, lambda part: part.timed):
        for together in [[part] for part in group] if timed else [list(group)]:
            runner.run(together)
    for part in parts:
        if runner.status(part) == "passed":
            print_tables(part.name, runner.log(part))
    (runner.out / "tables.md").write_text(tables.every(runner.out) + "\n")
    said = [runner.status(part) for part in parts]
    print(f"\n{runner.out}")
    rows = []
    for part, status in zip(parts, said, strict=True):
        seconds = str(runner.entries[part.name]["seconds"]) if status else ""
        left = f"left, needs {part.limit:.0f} s"
        rows.append((part.name, status or left, seconds))
    _harness.print_table(("part", "status", "seconds"), rows)
    if {*said} - {"passed", ""}:
        return 1
    return 3 if "" in said else 0


def print_tables(name: str, log: Path) -> None:
    """Prints a log's tables, each with the line before it, or else the last line."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    pairs = zip(["", *lines], [*lines, ""], strict=True)
    shown = [line for line, after in pairs if line and "|" in (line[0], after[:1])]
    if name.startswith("parity") or not shown:  # parity's are long
        shown = lines[-1:]
    print(f"\n== {name}", *shown, sep="\n")


def device() -> str:
    """The GPU's name, from a separate process, which frees its memory."""
    program = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    platform, kind = found.stdout.splitlines()[-1].split(" ", 1)
    if platform != "gpu":
        sys.exit(NO_GPU.format(f"{platform} {kind}"))
    return kind


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, help="folder for results; default: benchmarks/results/GPU")
    add("--minutes", type=float, default=MINUTES, help="time limit of this call")
    add("--dry-run", action="store_true", help="run small parts on the CPU")
    add("--parts", help="some of " + ",".join(part.name for part in PARTS))
    add("--again", action="store_true", help="also run parts that have passed")
    return parser.parse_args()


def named(names: str | None) -> list[Part]:
    if names is None:
        return list(PARTS)
    wanted = names.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        sys.exit(f"--parts: there is no {', '.join(sorted(unknown))}")
    return [part for part in PARTS if part.name in wanted]


def main() -> int:
    args = parse_args()
    parts, minutes = named(args.parts), args.minutes - GRACE / 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the parts
    if args.dry_run:
        parts = dry_run(parts)
        out = args.out or Path(tempfile.mkdtemp(prefix="jamp-gpu-dry-"))
    else:
        slug = re.sub(r"[^a-z0-9]+", "-", device().lower()).strip("-")
        out = args.out or tables.RESULTS / slug
    return run_all(Runner(out.resolve(), minutes), parts, args.again)


if __name__ == "__main__":
    sys.exit(main())
