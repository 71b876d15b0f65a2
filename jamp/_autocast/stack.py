"""What a region writes into the name stack of an op, and reads there again.

Each region leaves its mark, so that an outer one knows what an inner one has decided. A
region that is observed adds the reason why each op runs as it does.
"""

import re
from collections.abc import Iterable, Iterator

# A region's mark, with its depth if it is in another one.
MARK = re.compile(r"jamp\.autocast(?:\[(\d+)\])?\((\w+)\)")
REASON = "jamp.rule "


def mark(dtype: str, depth: int) -> str:
    """The mark of a region: its depth, and a dtype's name or "off"."""
    return f"jamp.autocast[{depth}]({dtype})" if depth else f"jamp.autocast({dtype})"


def marks_in(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Depth and dtype of the regions in a name stack, the outermost first."""
    for found in filter(None, map(MARK.fullmatch, names)):
        yield int(found[1] or 0), found[2]


def written(reason: object) -> str:
    """A `Reason` as an entry of a name stack."""
    return f"{REASON}{reason}"


def reason_in(names: Iterable[str]) -> str:
    """The innermost reason in a name stack, as text, or ""."""
    found = [name for name in names if name.startswith(REASON)]
    return found[-1].removeprefix(REASON) if found else ""


def is_jamps(name: str) -> bool:
    """Whether a region wrote an entry of a name stack."""
    return MARK.fullmatch(name) is not None or name.startswith(REASON)
