"""Numbers of two programs: where their bounds come from, and where CI runs them.

Two programs that compute the same may round differently, as the processor suggests. So
a bound follows from the arithmetic or is measured (`tests/bits.py`), and the tests that
ask for one run with several sets of instructions (`make processors`).
"""

import ast
from pathlib import Path

from tests.marks import walk

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for glob in ("tests/**/*.py", "parity/test_*.py", "foreign/test_*.py")
    for path in ROOT.glob(glob)
)
LISTED = (ROOT / "tests/two_programs.txt").read_text().split()
CHECKS = {"check_near", "check_rounded"}
# Comparisons, and where a tolerance stands that has no name.
TOLERANT = {"allclose": 2, "assert_allclose": 2, "approx": 1, "isclose": 2}
TOLERANT |= {"assert_trees_all_close": 2}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def comparing(tree):
    """The tests of a file that ask for a bound of two programs."""
    used = {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    found = set(CHECKS)
    while more := {name for name, names in used.items() if names & found} - found:
        found |= more
    return {name for name in found if name.startswith("test_")}


def tolerances(call):
    """The tolerances of a call that are numbers, or None if one of them is not."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in TOLERANT:
        return None
    named = [k.value for k in call.keywords if k.arg in ("rtol", "atol", "rel", "abs")]
    try:
        return [ast.literal_eval(x) for x in (*call.args[TOLERANT[name] :], *named)]
    except ValueError:
        return None  # computed


@walk("path", FILES, ids=name_of)
def test_a_tolerance_below_a_hundred_thousandth_has_an_origin(path):
    for node in ast.walk(ast.parse(path.read_text())):
        given = tolerances(node) if isinstance(node, ast.Call) else None
        if given is not None and max(given, default=0) < 1e-5:
            said = "compare bits, or with check_rounded or check_near of tests/bits.py"
            raise AssertionError(f"{name_of(path)}:{node.lineno}: {said}")


def test_the_tests_of_two_programs_are_listed():
    expected = {
        f"{name_of(path)}::{name}"
        for path in FILES
        for name in comparing(ast.parse(path.read_text()))
        if path.name.startswith("test_")
    }
    assert set(LISTED) == expected and LISTED == sorted(LISTED)
