"""Runs the tests of one file one way, in processes that may die or hang."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from shared.processes import run_group

from . import plugin, records
from .projects import Task
from .records import PLAIN, Outcome

ROOT = Path(__file__).parents[2]
FINISHED = (0, 1, 5)  # pytest's exit statuses: passed, failed, no tests
FACTOR = 4  # how much longer a test may take in a region, which compiles more


class Limits(NamedTuple):
    """Seconds: of one plain test, and the time at which to stop."""

    test: float = 120.0
    deadline: float = float("inf")


def output(folder: Path, task: Task, way: str) -> Path:
    return folder / task.file.removesuffix(".py") / f"{way}.jsonl"


def run(
    tests: Path,
    folder: Path,
    task: Task,
    way: str,
    limits: Limits,
    environment: dict[str, str],
    configuration: Path | None,
) -> str | None:
    """Runs tests without an outcome, and continues in a new process when one dies.

    Returns:
      None, or pytest's output if the file cannot be run.
    """
    path = output(folder, task, way)
    if finished(folder, task, way):
        return None
    plain = None if way == PLAIN else str(output(folder, task, PLAIN))
    wanted = {"way": way, "output": str(path), "pattern": task.pattern}
    seconds = limits.test * (1 if way == PLAIN else FACTOR)
    wanted |= {"size": task.size, "plain": plain, "seconds": seconds}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header"]
    command += ["-p", "foreign.suites.plugin", "-p", "no:cacheprovider"]
    if configuration is not None:
        command += ["-c", str(configuration)]
    command += ["--rootdir", str(tests.parent), str(tests / task.file)]
    environment = environment | {plugin.VARIABLE: json.dumps(wanted)}
    log = path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    while time.time() < limits.deadline:
        before = len(records.lines(path))
        with log.open("w") as said:
            rest = limits.deadline - time.time()
            status = run_group(command, said, rest, folder, environment)
        if status is None or status in FINISHED:
            return None
        tail = log.read_text(errors="replace")[-3000:]
        if len(records.lines(path)) == before:
            return tail
        if (test := records.unfinished(path)) is not None:
            slow = status == -signal.SIGALRM
            outcome = records.SLOW if slow else records.DIED
            records.append(path, Outcome(test, outcome, trace=tail))
    return None


def finished(folder: Path, task: Task, way: str) -> bool:
    """Whether nothing is left to run, as far as the records show."""
    done = records.read(output(folder, task, way))
    plain = records.read(output(folder, task, PLAIN))
    total = records.total(output(folder, task, way).parent)
    if way == PLAIN:
        every = total if task.size is None else min(task.size, total)
        return not task.pattern and 0 < every <= len(done)
    passed = [x.test for x in plain.values() if x.outcome == records.PASSED]
    return bool(plain) and all(x in done for x in passed if task.pattern in x)
