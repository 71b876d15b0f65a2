"""jamp against live torch: the same numbers through both, compared bit by bit."""

import importlib
from types import ModuleType

# Of the parts, in the report's order.
NAMES = ("training", "scale", "behaviors", "ops", "float8", "faults", "peers")


def part_named(name: str) -> ModuleType:
    """A part of the suite; `result` says what a part offers."""
    return importlib.import_module(f"{__name__}.{name}")
