"""One product of a `Calibration`, with its errors and what was chosen for it."""

from typing import NamedTuple


class ProductRow(NamedTuple):
    """One product of a `Calibration`, with all runs of a loop and all equal ones."""

    path: str  # the modules around it, or ""
    line: str
    primitive: str
    sizes: str  # "rows x contracted x columns", or the shapes of both inputs
    spread: dict[str, float]  # "x", "w", "g" -> powers of two between row maxima
    # By dtype or recipe and direction: the errors of the whole and of the worst row.
    errors: dict[str, dict[str, tuple[float, float]]]
    problem: str  # why it cannot run in float8, or ""
    choice: str  # "float8", "rowwise", "bfloat16", "float16" or "float32"
    why: str  # why it is not what was asked for

    def worst(self, name: str) -> float | None:
        """The largest error in a dtype or recipe, None if it was not measured."""
        found = self.errors.get(name, {}).values()
        return max((max(pair) for pair in found), default=None)
