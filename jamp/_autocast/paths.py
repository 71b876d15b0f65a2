"""Regular expressions that are searched for in the paths of modules."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A regular expression that begins and ends between whole numbers.

    "block_1" is found in "Model/block_1/Dense_0" and not in "Model/block_10", and
    "1/mlp" not in "blocks/11/mlp". Write `block_[0-9]+` for all blocks.

    Raises:
      re.error: the text is not a regular expression.

    >>> [PathPattern("block_1").search(path) for path in ("a/block_1/b", "block_10")]
    [True, False]
    >>> [PathPattern("1/mlp").search(path) for path in ("blocks/1/mlp", "11/mlp")]
    [True, False]
    """

    text: str
    whole: re.Pattern[str] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        flags = re.compile(self.text).flags
        body = re.sub(r"^(\(\?[a-zA-Z]+\))+", "", self.text)  # flags must come first
        end = "\n" if flags & re.VERBOSE else ""  # of a comment
        bound = "(?!(?<=[0-9])[0-9])"  # not between two digits
        whole = re.compile(f"{bound}(?:{body}{end}){bound}", flags)
        object.__setattr__(self, "whole", whole)

    def search(self, path: str) -> bool:
        return self.whole.search(path) is not None
