"""Which rows of a table run where (`tests/marks.py`)."""

import itertools

import pytest

from .marks import in_order

THREE = list(itertools.product("abc", "xyz", range(4)))


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("count", [1, 5])
def test_one_table_keeps_its_order_and_all_of_its_rows(count):
    assert in_order([[x] for x in range(count)]) == (list(range(count)), count)


def test_of_two_tables_each_value_comes_once_before_any_comes_again():
    rows = list(itertools.product("abc", "wxyz"))
    order, needed = in_order(rows)
    assert needed == 4 and sorted(order) == list(range(12))
    first = [rows[place] for place in order[:3]]
    assert first == [("a", "w"), ("b", "x"), ("c", "y")]


def test_of_three_tables_each_pair_comes_once():
    order, needed = in_order(THREE)
    assert order[0] == 0 and sorted(order) == list(range(len(THREE)))
    assert pairs(THREE[place] for place in order[:needed]) == pairs(THREE)
    assert needed < len(THREE) / 2
