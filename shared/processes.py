"""A command in a process group of its own, which can be ended with all its children."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_group(
    argv: Sequence[str],
    log: Any,
    limit: float,
    cwd: Path,
    environment: Mapping[str, str],
) -> int | None:
    """A command's exit status, or None if it was killed with all its children.

    Args:
      log: the file for what it prints.
      limit: seconds.
    """
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
        env=environment,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when this program is interrupted
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left
        process.wait()
