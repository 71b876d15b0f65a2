"""Which cases of a parametrized test `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases, marked slow except for the quick ones.

    Raises:
      ValueError: a quick one is not a case.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"{unknown} are not among the cases {cases}.")
    return [case if case in quick else slow(case) for case in cases]


def slow(case: Any) -> Any:
    """A case that is marked slow."""
    values = case if type(case) is tuple else (case,)  # a NamedTuple is one value
    return pytest.param(*values, marks=SLOW)
