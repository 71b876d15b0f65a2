"""Runs everything that needs a GPU: its tests, parity with torch, and the benchmarks.

    python -m benchmarks.gpu                   # or `make gpu`
    python -m benchmarks.gpu                   # again: resumes where it stopped
    python -m benchmarks.gpu --dry-run         # the same parts on the CPU, small

Each part runs in a separate process, one after the other, so that each has all of the
GPU's memory. A part starts if its limit fits into the rest of `--minutes`, and is
killed with all its children at its limit. `--out` gets each part's log and figures, and
`parts.json` with the outcome of each. A part that has passed runs again only with
`--again`, or if its command has changed. Nothing is downloaded or installed.

The exit status is 0 if all parts have passed, 1 if a part failed, and 3 if none failed
but parts are left for the next call.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _harness
from shared.processes import run_group

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DRY_LIMIT = 120
GRACE = 15  # seconds of a call that no part gets: for start, end and printing

NO_GPU = """JAX sees no GPU here, but {}.
To try the parts on the CPU: python -m benchmarks.gpu --dry-run"""


class Part(NamedTuple):
    """One process: the arguments of `python -m`, on a GPU and in a dry run."""

    name: str
    limit: float  # seconds
    command: Sequence[str]
    dry: Sequence[str]


def benchmark(
    name: str,
    limit: float,
    module: str,
    *options: str,
    full: Sequence[str] = (),
    small: Sequence[str] = (),
) -> Part:
    """A benchmark with options for both runs, for the GPU run, and for the dry run."""
    command = (f"benchmarks.{module}", *options)
    return Part(
        name,
        limit,
        (*command, *full, "--device", "gpu"),
        (*command, *small, "--device", "cpu", "--small"),
    )


def parity(name: str, limit: float, quick_case: str) -> Part:
    """A part of the parity suite, and its case for a dry run."""
    command = ("parity", "--only", name)
    dry = (*command, "--case", quick_case, "--processes", "1")
    return Part(f"parity-{name}", limit, (*command, "--device", "cuda"), dry)


sizes = lambda parameters: ("--donated", "--parameters", parameters)
TESTS = ("pytest", "-p", "no:cacheprovider", "-q", "--optimized", "tests/test_gpu.py")
FEW_ROWS = ("--rows", "float16 by hand,autocast + dynamic")
# What matters most comes first, since time may run out. Parity's planted faults and
# other libraries say nothing about a GPU.
PARTS = (
    Part("tests", 180, TESTS, TESTS),
    benchmark("train-gpt2", 420, "train_step", "--models", "gpt2"),
    benchmark("torch-train", 420, "torch_train_step"),
    benchmark("float8", 480, "float8_step"),
    benchmark("loss-scale", 240, "loss_scale_overhead", full=sizes("1e8,1e7")),
    benchmark("loss-scale-1b", 240, "loss_scale_overhead", full=sizes("1e6,1e9")),
    benchmark("eager", 120, "eager_overhead"),
    benchmark("compile-time", 300, "compile_time"),
    benchmark(
        "train-resnet50", 420, "train_step", "--models", "resnet50", small=FEW_ROWS
    ),
    benchmark("train-vit", 420, "train_step", "--models", "vit", small=FEW_ROWS),
    benchmark("logging", 180, "logging_overhead"),
    benchmark("memory", 120, "memory"),
    benchmark("master-weights", 120, "master_weights"),
    parity("ops", 300, "matmul"),
    parity("behaviors", 300, "plain, SGD: GradScaler in nnx.jit"),
    parity("scale", 420, "default: seed=0"),
    parity("training", 420, "mlp, SGD"),
)


class Runner:
    """Runs parts within a time limit, and records their outcomes in a folder."""

    def __init__(self, out: Path, minutes: float, dry: bool = False):
        self.out, self.dry = out, dry
        self.end = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "parts.json"
        self.entries: dict[str, Any] = {}
        if self.file.exists():
            self.entries = json.loads(self.file.read_text())

    def command(self, part: Part) -> list[str]:
        return list(part.dry if self.dry else part.command)

    def log(self, part: Part) -> Path:
        return self.out / f"{part.name}.log"

    def limit(self, part: Part) -> float:
        return min(part.limit, DRY_LIMIT) if self.dry else part.limit

    def has_passed(self, part: Part) -> bool:
        entry = self.entries.get(part.name, {})
        same = entry.get("command") == self.command(part)
        return same and entry["status"] == "passed" and self.log(part).exists()

    def fits(self, part: Part) -> bool:
        return time.monotonic() + self.limit(part) <= self.end

    def run(self, part: Part) -> None:
        """Runs a part, and records its outcome."""
        self.enter(part, "not finished", 0.0)
        argv, start = [sys.executable, "-m", *self.command(part)], time.monotonic()
        if argv[2].startswith("benchmarks."):
            argv += ["--json", str(self.out / f"{part.name}.json")]
        with self.log(part).open("w") as log:
            limit, unbuffered = self.limit(part), {"PYTHONUNBUFFERED": "1"}
            code = run_group(argv, log, limit, ROOT, os.environ | unbuffered)
        status = {None: "killed at its limit", 0: "passed"}.get(code, f"exit {code}")
        self.enter(part, status, time.monotonic() - start)

    def enter(self, part: Part, status: str, seconds: float) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self.entries[part.name] = {
            "status": status,
            "seconds": round(seconds, 1),
            "command": self.command(part),
            "date": now.isoformat(timespec="seconds"),
            "versions": _harness.versions(),
        }
        self.file.write_text(json.dumps(self.entries, indent=2) + "\n")


def run_all(runner: Runner, parts: Sequence[Part], again: bool = False) -> int:
    """Runs the parts that have not passed yet. Returns the exit status."""
    left = []
    for part in parts:
        if runner.has_passed(part) and not again:
            continue
        if not runner.fits(part):
            left.append(part.name)
            continue
        print(f"{part.name}: {' '.join(runner.command(part))}", flush=True)
        runner.run(part)
        entry = runner.entries[part.name]
        print(f"{part.name}: {entry['status']}, {entry['seconds']} s", flush=True)
    for part in parts:
        if runner.has_passed(part):
            print_tables(part.name, runner.log(part))
    print_summary(runner, parts, left)
    done = [part for part in parts if part.name not in left]
    if not all(map(runner.has_passed, done)):
        return 1
    return 3 if left else 0


def print_tables(name: str, log: Path) -> None:
    """Prints a log's tables, each with the line before it, or else the last line."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    pairs = zip(["", *lines], [*lines, ""], strict=True)
    shown = [line for line, after in pairs if line and "|" in (line[0], after[:1])]
    if name.startswith("parity") or not shown:  # parity's are long
        shown = lines[-1:]
    print(f"\n== {name}", *shown, sep="\n")


def print_summary(runner: Runner, parts: Sequence[Part], left: Sequence[str]) -> None:
    rows = []
    for part in parts:
        entry = runner.entries.get(part.name, {})
        status = entry.get("status", "")
        if part.name in left:
            status = f"left for the next call (needs {runner.limit(part):.0f} s)"
        rows.append((part.name, status, str(entry.get("seconds", ""))))
    print(f"\n{runner.out}")
    _harness.print_table(("part", "status", "seconds"), rows)


def device_kind() -> str:
    """The GPU's name, from a separate process, which then frees its memory."""
    program = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    platform, _, kind = found.stdout.splitlines()[-1].partition(" ")
    if platform != "gpu":
        sys.exit(NO_GPU.format(found.stdout.strip()))
    return kind


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder for results; default: benchmarks/results/GPU"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="time limit of this call"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run small parts on the CPU"
    )
    parser.add_argument("--parts", help="some of " + ",".join(p.name for p in PARTS))
    parser.add_argument(
        "--again", action="store_true", help="also run parts that have passed"
    )
    return parser.parse_args()


def chosen(names: str | None) -> list[Part]:
    if names is None:
        return list(PARTS)
    wanted = names.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        sys.exit(f"--parts: there is no {', '.join(sorted(unknown))}")
    return [part for part in PARTS if part.name in wanted]


def main() -> int:
    args = parse_args()
    parts, minutes = chosen(args.parts), args.minutes - GRACE / 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the part
    if args.dry_run:
        # Parts whose sizes are the same in a dry run count once, as the first of them.
        parts = list({part.dry: part for part in reversed(parts)}.values())[::-1]
        out = args.out or Path(tempfile.mkdtemp(prefix="jamp-gpu-dry-"))
    else:
        slug = re.sub(r"[^a-z0-9]+", "-", device_kind().lower()).strip("-")
        out = args.out or RESULTS / slug
    runner = Runner(out.resolve(), minutes, args.dry_run)
    return run_all(runner, parts, args.again)


if __name__ == "__main__":
    sys.exit(main())
