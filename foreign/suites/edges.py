"""Which sentence of docs/sharp-edges.md covers a crash in float16."""

import re

# What the error says, as a regular expression, and the words of the page.
EDGES: dict[str, str] = {
    "FutureWarning: scatter inputs have incompatible types": (
        "JAX warns when float32 is written into a half-precision buffer"
    ),
    "requires arguments to have the same dtypes": (
        "A half-precision array from outside of such a function (a cache, a state) "
        "meets float32 in it"
    ),
    r"(?s)carry.*float16|float16.*carry": (
        "A carry of `scan` and `while_loop` keeps the dtype that it starts with"
    ),
}


def edge(cause: str, message: str) -> str | None:
    """The words of the page that cover an exception, or None."""
    said = f"{cause}\n{message}"
    return next((words for test, words in EDGES.items() if re.search(test, said)), None)
