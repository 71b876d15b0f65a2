"""Which cases of a parametrized test run where, and tests that walk a table."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow
NIGHTLY = pytest.mark.nightly


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases, marked slow except for the quick ones.

    Raises:
      ValueError: a quick one is not a case.
    """
    return _except(cases, quick, SLOW)


def mostly_nightly(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases, marked nightly except for those that CI keeps.

    Raises:
      ValueError: one that is kept is not a case.
    """
    return _except(cases, kept, NIGHTLY)


def _except(cases: Iterable[Any], few: tuple, mark: pytest.MarkDecorator) -> list[Any]:
    cases = list(cases)
    if unknown := [case for case in few if case not in cases]:
        raise ValueError(f"{unknown} are not among the cases {cases}.")
    return [case if case in few else marked(case, mark) for case in cases]


def slow(case: Any) -> Any:
    """A case that is marked slow."""
    return marked(case, SLOW)


def marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    values = case if type(case) is tuple else (case,)  # a NamedTuple is one value
    return pytest.param(*values, marks=mark)


def walk(
    names: str, rows: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Callable], Callable]:
    """`pytest.mark.parametrize` as one test, for rows that cost next to nothing.

    The test goes through all rows and names those that failed, with the first one's
    traceback. The rows share the test's fixtures, and a row must not skip.
    """
    rows = list(rows)
    keys = [name.strip() for name in names.split(",")]

    def decorate(test: Callable) -> Callable:
        def walks(**fixtures: Any) -> None:
            failed = {}
            for row in rows:
                values = row if len(keys) > 1 else (row,)
                try:
                    test(**dict(zip(keys, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as e:
                    failed[ids(row)] = e
            if failed:
                said = f"{len(failed)} of {len(rows)} rows failed: {', '.join(failed)}"
                raise AssertionError(said) from next(iter(failed.values()))
            assert rows, "the table is empty"

        parameters = inspect.signature(test).parameters
        own = [
            p.replace(kind=p.KEYWORD_ONLY)
            for n, p in parameters.items()
            if n not in keys
        ]
        walks.__signature__ = inspect.Signature(own)
        walks.__name__, walks.__doc__ = test.__name__, test.__doc__
        walks.__module__, walks.pytestmark = (
            test.__module__,
            getattr(test, "pytestmark", []),
        )
        return walks

    return decorate
