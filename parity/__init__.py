"""jamp against live torch: the same numbers through both, compared bit by bit."""

import importlib
from types import ModuleType

# The parts' names, in the report's order, and those that only run when they are named.
NAMES = ("training", "scale", "behaviors", "ops", "float8", "faults", "peers")
ON_DEMAND = ("spread",)


def part_named(name: str) -> ModuleType:
    """A part of the suite; `result` documents what a part has."""
    return importlib.import_module(f"{__name__}.{name}")
