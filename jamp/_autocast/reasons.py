"""What a region writes into the name stack of an op: its mark, and what decided."""

import re

# A region's mark in the name stack, with its depth if it is in another one.
MARK = re.compile(r"jamp\.autocast(?:\[(\d+)\])?\((\w+)\)")
RULE = "jamp.rule "  # before what `Action.why` says, in a region that is observed


def mark(name: str, depth: int) -> str:
    return f"jamp.autocast[{depth}]({name})" if depth else f"jamp.autocast({name})"
