"""Commands in process groups of their own, which end with all their children."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def start_group(
    argv: Sequence[str], log: Any, cwd: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a command in a process group; `log` is the file for what it prints."""
    return subprocess.Popen(
        argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
        env=environment,
    )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a command and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left
    process.wait()


def run_group(
    argv: Sequence[str],
    log: Any,
    limit: float,
    cwd: Path,
    environment: Mapping[str, str],
) -> int | None:
    """A command's exit status, or None if it was killed after `limit` seconds."""
    process = start_group(argv, log, cwd, environment)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when this program is interrupted
        end_group(process)
