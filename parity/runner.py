"""Runs the cases of parts, several at a time."""

import concurrent.futures
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from . import devices, training
from .result import Result, grouped

# No threads, which split the work: sums must have one order on every machine.
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"


class Ran(NamedTuple):
    """A case that was run, and the CPU time that it took."""

    part: ModuleType
    result: Result
    seconds: float


# How many cases share a program on a GPU, where a program takes seconds to compile.
TOGETHER = 8


def run_cases(
    part: str, names: Sequence[str], device: str
) -> list[tuple[Result, float]]:
    """Runs cases. One that raises counts as a mismatch, and the others go on.

    Args:
      part: the module's name.
      names: of the cases; several run in one program.
      device: of `devices.NAMES`.
    """
    module = importlib.import_module(part)
    start = sum(os.times()[:4])  # with child processes
    try:
        if len(names) > 1:
            cases = [module.CASES[name] for name in names]
            found = module.run_together(cases, device)
        else:
            found = [module.run(module.CASES[names[0]], device)]
    except Exception as error:
        traceback.print_exc()
        if len(names) > 1:
            return [ran for name in names for ran in run_cases(part, [name], device)]
        where = f"{names[0]}: raised {type(error).__name__}: {error}"
        found = [Result(names[0], 1, {"raised": 1}, where)]
    seconds = sum(os.times()[:4]) - start
    return [(result, seconds / len(found)) for result in found]


def groups(part: ModuleType, names: Sequence[str], device: str) -> list[list[str]]:
    """The cases of a part, those that share a program in one list."""
    size = 1 if device == devices.CPU else TOGETHER
    size = getattr(part, "TOGETHER", size)
    if size == 1 or not hasattr(part, "program"):
        return [[name] for name in names]
    by_program = grouped(names, lambda name: part.program(part.CASES[name]))
    return [
        those[start : start + size]
        for those in by_program.values()
        for start in range(0, len(those), size)
    ]


def results(
    parts: Sequence[ModuleType], only: str, device: str, processes: int
) -> Iterator[Ran]:
    """The results of cases as they come.

    Args:
      parts: the parts to run. The cases of `training` start first; they take longest.
      only: runs the cases whose names contain this.
      device: of `devices.NAMES`.
      processes: how many cases run at a time; 1 means in this process.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    named = {part: [name for name in part.CASES if only in name] for part in parts}
    tasks = [
        (part, together)
        for part, names in named.items()
        for together in groups(part, names, device)
    ]
    tasks.sort(key=lambda task: task[0] is not training)
    if processes == 1:
        for part, names in tasks:
            for ran in run_cases(part.__name__, names, device):
                yield Ran(part, *ran)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        futures = {
            pool.submit(run_cases, part.__name__, names, device): part
            for part, names in tasks
        }
        for future in concurrent.futures.as_completed(futures):
            for ran in future.result():
                yield Ran(futures[future], *ran)
