"""The result that every part of the suite gives for each of its cases.

A part is a module with these names, which `__main__` uses:

- `TITLE`: its name in the report.
- `CASES`: what is compared, by name.
- `run(case, device) -> Result`: runs a case in torch and in jamp. It is called in a
  separate process, so cases and results must be picklable.
- `program(case)` and `run_together(cases, device)`, which a part may lack: cases for
  which `program` returns the same may run in one program of XLA. They do on a GPU, and
  `TOGETHER` says how many do on any device.

The report says of a part what its docstring says, and has its results in a table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
K = TypeVar("K")


class Result(NamedTuple):
    """The result of comparing one case.

    Attributes:
      case: its name.
      compared: how many values were compared.
      mismatches: how many of them differ, by kind of value.
      where: the first difference in words; empty if there is none.
      reason: why jamp differs on purpose; empty if it should not.
      data: what the golden file and tests need from it.
      row: of the report's table; cases of one name share a row. Empty for the case's.
      figures: what else stands in the row, by column. Of those of several cases, the
        table has the largest number, and each text once.
    """

    case: str
    compared: int
    mismatches: Mapping[str, int]
    where: str = ""
    reason: str = ""
    data: Any = None
    row: str = ""
    figures: Mapping[str, Any] = {}

    @property
    def raised(self) -> bool:
        """Whether the case raised an exception, and so has no `data`."""
        return "raised" in self.mismatches

    @property
    def differs(self) -> bool:
        """Whether any value differs."""
        return any(self.mismatches.values())

    @property
    def as_expected(self) -> bool:
        """Whether it agrees, or differs and has a reason to."""
        return self.differs == bool(self.reason)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by a key, in the order in which the keys come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
