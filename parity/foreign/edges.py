"""Which sentence of docs/sharp-edges.md covers a crash in float16."""

import re

# What the error says, as a regular expression, and words that stand in the page.
EDGES: dict[str, str] = {
    "FutureWarning: scatter inputs have incompatible types": (
        "JAX warns when float32 is written into a half-precision buffer"
    ),
}


def edge(cause: str, message: str) -> str | None:
    """The words of the page that cover an exception, or None."""
    said = f"{cause}\n{message}"
    return next((words for test, words in EDGES.items() if re.search(test, said)), None)
