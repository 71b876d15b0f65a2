"""Regular expressions that are searched for in the paths of modules."""

import re

BOUND = "(?!(?<=[0-9])[0-9])"  # not between two digits


def path_pattern(text: str) -> re.Pattern[str]:
    """A regular expression that begins and ends between whole numbers.

    "block_1" is found in "Model/block_1/Dense_0" and not in "Model/block_10", and
    "1/mlp" not in "blocks/11/mlp". Write `block_[0-9]+` for all blocks, and `(?i:...)`
    for flags.

    Raises:
      re.error: the text is not a regular expression.

    >>> [bool(path_pattern("block_1").search(p)) for p in ("a/block_1/b", "block_10")]
    [True, False]
    >>> [bool(path_pattern("1/mlp").search(p)) for p in ("blocks/1/mlp", "11/mlp")]
    [True, False]
    """
    re.compile(text)  # or "a)|(b" would be one
    return re.compile(f"{BOUND}(?:{text}){BOUND}")
