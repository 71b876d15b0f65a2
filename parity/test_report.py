"""The report: what stands in a part's table, and what counts as wrong."""

import types

from . import report
from .result import Result

PART = types.ModuleType("part", "What the part does.\n\nAnd how.")
setattr(PART, "TITLE", "A part")  # noqa: B010 - the type of a module has none
RESULTS = [
    Result("a, 1", 1000, {"value": 0}, row="a", figures={"error": 0.25, "in": "x"}),
    Result("a, 2", 1000, {"value": 2}, "a: 1 is 2", row="a", figures={"error": 0.5}),
    Result("b", 10, {"value": 1}, "b: 3 is 4", "b | c", figures={"in": "y"}),
    Result("c", 1, {"raised": 1}, "c: raised ValueError"),
    Result("d", 1, {"value": 0}, reason="it should differ"),
]
FACTS = ("title", "arguments", "device", "versions", "seconds", "by_part")


def test_cases_of_a_row_are_together():
    text = report.section(PART, RESULTS)
    assert text.startswith("## A part\n\nWhat the part does.\n\nAnd how.\n\n")
    assert text.splitlines()[-5:-1] == [
        "| case | cases | values compared | mismatches | error | in |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        "| `a` | 2 | 2,000 | 2 | 0.5 | x |",
        "| `b` | 1 | 10 | 1 |  | y |",
    ]


def test_what_is_wrong_is_listed_and_counted():
    text = report.text({PART: RESULTS}, **dict.fromkeys(FACTS, "-"))
    assert "| A part | 5 | 2,012 | 4 | 2 |" in text
    assert "- b: b | c.\n" in text  # differs for a reason
    failures = text.partition("Mismatches:\n\n")[2].partition("\n\n")[0]
    assert failures.splitlines() == [
        "- a, 2: a: 1 is 2",
        "- c: c: raised ValueError",
        "- d: agrees, though a reason says that it does not",
    ]
