"""Runs everything that needs a GPU: its tests, parity with torch, and the benchmarks.

    python -m benchmarks.gpu --minutes 9       # or `make gpu`
    python -m benchmarks.gpu --minutes 9       # again: resumes where it stopped
    python -m benchmarks.gpu --plan            # what two calls would run, and when
    python -m benchmarks.gpu --dry-run         # the same parts on the CPU, small

A call takes the parts that have not passed yet, those of most worth first, as far as
their expected seconds fit into `--minutes` and their memory into the card's. Checks
(tests, parity) run first, beside each other, each with a share of the memory. Then each
timed part runs alone: what checks have not ended by then are killed, and left for the
next call. If there is time in the end, further parts get it.

`--out` gets each part's log and figures, `parts.json` with the outcome of each, and
`tables.md` with what pages show of the figures. A part is killed with all its children
after twice its expected time. A part that has passed runs again only with `--again`, or
if its command has changed. Nothing is downloaded or installed.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _harness, tables
from benchmarks.gpu_parts import (
    CALLS,
    CARD,
    CORES,
    GRACE,
    PARTS,
    PLAN,
    Part,
    choose,
    print_plan,
    row_of,
    small,
    together,
)
from shared.processes import end_group, start_group

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# XLA's part of a check's memory; CUDA and torch have the rest.
SHARE = 0.75
STOPPED, UNFINISHED = "killed, since its time was up", "not finished"
NEW = ("", STOPPED, UNFINISHED)  # statuses of parts that have not failed
NO_GPU = """JAX sees no GPU here, but {}.
To try the parts on the CPU: python -m benchmarks.gpu --dry-run"""


class Runner:
    """Runs parts within a time limit, and records their outcomes in a folder."""

    def __init__(
        self, out: Path, minutes: float, card: float = CARD, cores: int = CORES
    ):
        self.out, self.card, self.cores = out, card, cores
        self.end = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "parts.json"
        self.entries: dict[str, Any] = {}
        if self.file.exists():
            self.entries = json.loads(self.file.read_text())
        self.started: set[str] = set()  # in this call

    def log(self, part: Part) -> Path:
        return self.out / f"{part.name}.log"

    def status(self, part: Part) -> str:
        """How the part ended when it last ran; "" if its command was another one."""
        entry = self.entries.get(part.name, {})
        same = entry.get("command") == list(part.command) and self.log(part).exists()
        return entry["status"] if same else ""

    def is_left(self, part: Part) -> bool:
        """Whether the next call should run it, and not because it has failed."""
        status = self.status(part)
        return status == STOPPED or (
            status != "passed" and part.name not in self.started
        )

    def choose(self, parts: Sequence[Part]) -> list[tuple[float, Part]]:
        """What fits into the rest of the call. What has failed before comes last."""
        new = [part for part in parts if self.status(part) in NEW]
        left = self.end - time.monotonic()
        chosen = choose(new, left, self.card, self.cores)
        return chosen or choose(parts, left, self.card, self.cores)

    def run(self, parts: Iterable[Part], at_once: int, end: float) -> None:
        """Runs parts, so many beside each other, as far as they may end in time.

        None of them runs any more when this returns.
        """
        waiting, running = list(parts), []
        try:
            while waiting or running:
                now = time.monotonic()
                if waiting and len(running) < at_once:
                    part = waiting.pop(0)
                    if now + part.seconds <= end:
                        running.append((part, self.start(part), now))
                for item in list(running):
                    part, process, start = item
                    code = process.poll()
                    if code is None and now < min(start + part.limit, end):
                        continue
                    running.remove(item)
                    end_group(process)
                    status = "passed" if code == 0 else f"exit {code}"
                    if code is None:
                        status = STOPPED if now >= end else "killed at its limit"
                    self.enter(part, status, now - start)
                    print(f"{part.name}: {status}, {now - start:.1f} s", flush=True)
                time.sleep(0.05)
        finally:  # also when this program is interrupted
            for _, process, _ in running:
                end_group(process)

    def start(self, part: Part) -> subprocess.Popen[bytes]:
        self.started.add(part.name)
        self.enter(part, UNFINISHED, 0.0)
        argv = [sys.executable, "-m", *part.command]
        if part.command[0].startswith("benchmarks."):
            argv += ["--json", str(self.out / f"{part.name}.json")]
        environment = {"PYTHONUNBUFFERED": "1", **part.environment}
        if not part.timed:
            share = SHARE * part.memory / part.processes / self.card
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
    while planned := runner.choose(todo):
        _harness.print_table(PLAN, [row_of(*item) for item in planned])
        chosen = [part for _, part in planned]
        todo = [part for part in todo if part not in chosen]
        checks = [part for part in chosen if not part.timed]
        timed = [part for part in chosen if part.timed]
        at_once = together(checks, runner.card, runner.cores)
        runner.run(checks, at_once, runner.end - sum(part.seconds for part in timed))
        runner.run(timed, 1, runner.end)
    for part in parts:
        if runner.status(part) == "passed":
            print_tables(part.name, runner.log(part))
    (runner.out / "tables.md").write_text(tables.every(runner.out) + "\n")
    print_summary(runner, parts)
    left = [runner.is_left(part) for part in parts]
    passed = [runner.status(part) == "passed" for part in parts]
    if not all(a or b for a, b in zip(left, passed, strict=True)):
        return 1
    return 3 if any(left) else 0


def print_tables(name: str, log: Path) -> None:
    """Prints a log's tables, each with the line before it, or else the last line."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    pairs = zip(["", *lines], [*lines, ""], strict=True)
    shown = [line for line, after in pairs if line and "|" in (line[0], after[:1])]
    if name.startswith("parity") or not shown:  # parity's are long
        shown = lines[-1:]
    print(f"\n== {name}", *shown, sep="\n")


def print_summary(runner: Runner, parts: Sequence[Part]) -> None:
    rows = []
    for part in parts:
        entry = runner.entries.get(part.name, {})
        status = entry.get("status", "")
        if runner.is_left(part):
            needs = f"{part.seconds:.0f} s and {part.memory:g} of {runner.card:.0f} GB"
            status = f"{status or 'left'}; for the next call (needs {needs})"
        rows.append((part.name, status, str(entry.get("seconds", ""))))
    print(f"\n{runner.out}")
    _harness.print_table(("part", "status", "seconds"), rows)


def device() -> tuple[str, float]:
    """The GPU's name and its GB, from a separate process, which frees its memory."""
    program = (
        "import jax; d = jax.devices()[0]; is_gpu = d.platform == 'gpu';"
        "memory = d.memory_stats()['bytes_limit'] if is_gpu else 0;"
        "print(d.platform, memory, d.device_kind)"
    )
    most = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    most["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | most,
    )
    platform, memory, kind = found.stdout.splitlines()[-1].split(" ", 2)
    if platform != "gpu":
        sys.exit(NO_GPU.format(f"{platform} {kind}"))
    return kind, int(memory) / 1e9


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder for results; default: benchmarks/results/GPU"
    )
    parser.add_argument(
        "--minutes", type=float, default=CALLS[0], help="time limit of this call"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what two calls would run"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run small parts on the CPU"
    )
    parser.add_argument("--parts", help="some of " + ",".join(p.name for p in PARTS))
    parser.add_argument(
        "--again", action="store_true", help="also run parts that have passed"
    )
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
    if args.plan:
        print_plan(parts)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the parts
    cores = os.cpu_count() or 1
    if args.dry_run:
        # Parts whose sizes are the same in a dry run count once, as the first of them.
        parts = list({part.dry: part for part in reversed(parts)}.values())[::-1]
        out = args.out or Path(tempfile.mkdtemp(prefix="jamp-gpu-dry-"))
        runner = Runner(out.resolve(), minutes, cores=cores)
        return run_all(runner, [small(part) for part in parts], args.again)
    kind, card = device()
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    runner = Runner((args.out or RESULTS / slug).resolve(), minutes, card, cores)
    return run_all(runner, parts, args.again)


if __name__ == "__main__":
    sys.exit(main())
