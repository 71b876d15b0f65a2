"""Runs the cases of parts, several at a time."""

import concurrent.futures
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from . import training
from .result import Result

# No threads, which split the work: sums must have one order on every machine.
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"


class Ran(NamedTuple):
    """A case that was run, and the CPU time that it took."""

    part: ModuleType
    result: Result
    seconds: float


def run_case(part: str, name: str, device: str) -> tuple[Result, float]:
    """Runs a case. One that raises counts as a mismatch, and the others go on.

    Args:
      part: the module's name.
      name: of the case.
      device: "cpu" or "cuda".
    """
    module = importlib.import_module(part)
    start = sum(os.times()[:4])  # with child processes
    try:
        result = module.run(module.CASES[name], device)
    except Exception as error:
        traceback.print_exc()
        where = f"{name}: raised {type(error).__name__}: {error}"
        result = Result(name, 1, {"raised": 1}, where)
    return result, sum(os.times()[:4]) - start


def results(
    parts: Sequence[ModuleType], only: str, device: str, processes: int
) -> Iterator[Ran]:
    """The results of cases as they come.

    Args:
      parts: the parts to run. The cases of `training` start first; they take longest.
      only: runs the cases whose names contain this.
      device: "cpu" or "cuda".
      processes: how many cases run at a time; 1 means in this process.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    tasks = [(part, name) for part in parts for name in part.CASES if only in name]
    tasks.sort(key=lambda task: task[0] is not training)
    if processes == 1:
        for part, name in tasks:
            yield Ran(part, *run_case(part.__name__, name, device))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        futures = {
            pool.submit(run_case, part.__name__, name, device): part
            for part, name in tasks
        }
        for future in concurrent.futures.as_completed(futures):
            yield Ran(futures[future], *future.result())
