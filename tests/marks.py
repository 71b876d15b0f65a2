"""Which cases of a parametrized test run where, and tests that walk a table.

`make test` runs the quick cases, CI the quick and the slow ones, the night all.
"""

import heapq
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow
NIGHTLY = pytest.mark.nightly


def cover(quick: int = 1, ci: int | None = None) -> pytest.MarkDecorator:
    """Spreads the rows of a parametrized test over `make test`, CI and the night.

    The rows of all its tables crossed are put in an order: next comes the row that has
    the most values that none before it had, or with three tables or more the most pairs
    of values; among equals the first. So the first row of each table is quick, and what
    is cheap and typical stands first.

    Args:
      quick: how many rows are quick.
      ci: how many rows run in CI, those that are quick among them. By default as many
        as bring a new value (a new pair) each. The night runs all.
    """
    return pytest.mark.cover(quick=quick, ci=ci)


def in_order(rows: Sequence[Sequence[Any]]) -> tuple[list[int], int]:
    """The places of the rows in their order, and how many bring a new value."""
    size = 2 if len(rows[0]) > 2 else 1
    new = [set(itertools.combinations(enumerate(row), size)) for row in rows]
    seen: set[Any] = set()
    queue = [(-len(parts), place) for place, parts in enumerate(new)]
    heapq.heapify(queue)
    order, rest = [], []
    while queue:
        _, place = heapq.heappop(queue)
        parts = new[place] - seen
        if not parts:
            rest.append(place)
        elif queue and (-len(parts), place) > queue[0]:
            heapq.heappush(queue, (-len(parts), place))
        else:
            order.append(place)
            seen |= parts
    return order + sorted(rest), len(order)


def mark_covers(items: Iterable[pytest.Item]) -> None:
    """Marks the rows of tests that have `cover` slow or nightly."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("cover"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tests.values():
        few = rows[0].get_closest_marker("cover").kwargs
        values = [[_key(v) for v in row.callspec.params.values()] for row in rows]
        order, needed = in_order(values)
        ci = needed if few["ci"] is None else few["ci"]
        for rank, place in enumerate(order):
            if rank >= max(ci, few["quick"]):
                rows[place].add_marker(NIGHTLY)
            elif rank >= few["quick"]:
                rows[place].add_marker(SLOW)


def _key(value: Any) -> Any:
    """Equal for equal values of a table, which need not be hashable."""
    return value if isinstance(value, str | int | float | None) else id(value)


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
