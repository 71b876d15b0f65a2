"""Runs the tests of one file one way, in processes that may die or hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from . import plugin, records
from .records import PLAIN, Outcome
from .suites import Task

ROOT = Path(__file__).parents[2]
FINISHED = (0, 1, 5)  # pytest's exit statuses: passed, failed, no tests
FACTOR = 4  # how much longer a test may take in a region, which compiles more


class Limits(NamedTuple):
    """Seconds: of one plain test, and the time at which to stop."""

    test: float = 120.0
    deadline: float = float("inf")


def output(folder: Path, task: Task, way: str) -> Path:
    """The file with the outcomes of a task."""
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
    wanted |= {"size": task.size, "plain": plain}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header"]
    command += ["-p", "parity.foreign.plugin", "-p", "no:cacheprovider"]
    if configuration is not None:
        command += ["-c", str(configuration)]
    command += ["--rootdir", str(tests.parent), str(tests / task.file)]
    environment = environment | {plugin.VARIABLE: json.dumps(wanted)}
    limit = limits.test * (1 if way == PLAIN else FACTOR)
    log = path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    while time.time() < limits.deadline:
        before = len(records.lines(path))
        with log.open("w") as said:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = watch(process, path, limit, limits.deadline)
        if ended == "deadline" or process.returncode in FINISHED:
            return None
        tail = log.read_text(errors="replace")[-3000:]
        if len(records.lines(path)) == before:
            return tail
        if (test := records.unfinished(path)) is not None:
            outcome = records.SLOW if ended == "slow" else records.DIED
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


def watch(
    process: subprocess.Popen, path: Path, limit: float, deadline: float
) -> str | None:
    """Waits, and ends the process when a test takes too long or the time is over.

    Returns:
      None if the process ended without help, otherwise "slow" or "deadline".
    """
    changed, size = time.time(), -1
    while process.poll() is None:
        time.sleep(0.2)
        new = path.stat().st_size if path.exists() else 0
        if new != size:
            changed, size = time.time(), new
        why = "deadline" if time.time() > deadline else None
        if time.time() - changed > limit:
            why = "slow"
        if why is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return why
    return None
