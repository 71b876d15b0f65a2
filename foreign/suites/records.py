"""The record of each test: a line of JSON, written as soon as the outcome is known."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# The three ways of running a test, in their order.
PLAIN, KEPT, FLOAT16 = WAYS = ("plain", "kept", "float16")
BEGUN = "begun"  # an outcome follows, unless the process died
PASSED, SKIPPED, FAILED, DIED, SLOW = "passed", "skipped", "failed", "died", "slow"
WITHOUT_ERROR = {DIED: "the process died", SLOW: "took too long", SKIPPED: "skipped"}

# What differs between two runs, or between two tests with one cause.
VARIABLE = (
    (r"0x[0-9a-f]+", "0x"),
    (r"\b(bool|u?int\d+|u?i\d+|bfloat16|bf16|float\w*|f\d+|complex\d+|c\d+)\[[^\]]*\]",
     "array"),
    (r"/[^\s'\":]*/", ""),
    (r"\b\d+(\.\d+)?(e[-+]?\d+)?\b", "N"),
    (r"\s+", " "),
)  # fmt: skip


class Outcome(NamedTuple):
    """How one test went.

    Attributes:
      test: its name in its file, such as "APITest::test_jit".
      outcome: one of the words above.
      error: the exception's type.
      message: what it said.
      compared: whether a comparison failed, or an exception was not raised.
      trace: the end of the traceback.
    """

    test: str
    outcome: str
    error: str = ""
    message: str = ""
    compared: bool = False
    seconds: float = 0.0
    trace: str = ""

    @property
    def cause(self) -> str:
        """The type and the first line, without the parts that vary between tests."""
        if not self.error:
            return WITHOUT_ERROR[self.outcome]
        lines = self.message.strip().splitlines()
        line = lines[0] if lines else ""
        for pattern, word in VARIABLE:
            line = re.sub(pattern, word, line)
        return f"{self.error}: {line[:110]}".strip(": ")


def total(folder: Path) -> int:
    """How many tests the file in this folder has."""
    path = folder / "total"
    return int(path.read_text()) if path.exists() else 0


def append(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome._asdict()) + "\n")


def lines(path: Path) -> list[Outcome]:
    """Everything that was written, except for a last line that was cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        found.append(Outcome(**json.loads(line)))
    return found


def read(path: Path) -> dict[str, Outcome]:
    """The newest outcome of each test."""
    return {x.test: x for x in lines(path) if x.outcome != BEGUN}


def unfinished(path: Path) -> str | None:
    """The test that was running when the last line was written."""
    found = lines(path)
    return found[-1].test if found and found[-1].outcome == BEGUN else None


def forget(path: Path, tests: Iterable[str]) -> None:
    """Removes these tests, so that they run again."""
    tests = set(tests)
    kept = [x for x in lines(path) if x.test not in tests]
    path.write_text("".join(json.dumps(x._asdict()) + "\n" for x in kept))


def sample(tests: Iterable[str], size: int | None) -> set[str]:
    """The same tests each time. A larger sample contains the smaller ones."""
    ranked = sorted(tests, key=lambda t: hashlib.sha256(t.encode()).hexdigest())
    return set(ranked[:size])
