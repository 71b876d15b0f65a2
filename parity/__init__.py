"""jamp against live torch: the same numbers through both, compared bit by bit."""

import importlib
from types import ModuleType

# The parts' names, in the order of the report and of the one that is made each night.
NAMES = ("training", "scale", "behaviors", "ops", "edges", "float8")
NIGHTLY = ("faults", "spread")


def part_named(name: str) -> ModuleType:
    """A part of the suite; `result` documents what a part has."""
    return importlib.import_module(f"{__name__}.{name}")
