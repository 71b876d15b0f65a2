"""Regular expressions that are searched for in the paths of modules."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A regular expression whose number at the end matches whole numbers only.

    "block_1" is found in "Model/block_1/Dense_0" and not in "Model/block_10". An
    expression that takes any digit there ("block_.", "block_[0-9]") names no number,
    and matches as usual.

    Raises:
      re.error: the text is not a regular expression.

    >>> [PathPattern("block_1").search(path) for path in ("a/block_1/b", "block_10")]
    [True, False]
    >>> [PathPattern("block_.").search(path) for path in ("a/block_1/b", "block_10")]
    [True, True]
    """

    text: str
    plain: re.Pattern[str] = dataclasses.field(init=False, repr=False)
    whole: re.Pattern[str] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        plain = re.compile(self.text)
        body = re.sub(r"^(\(\?[a-zA-Z]+\))+", "", self.text)  # flags must come first
        end = "\n" if plain.flags & re.VERBOSE else ""  # of a comment
        whole = re.compile(f"(?:{body}{end})(?!(?<=[0-9])[0-9])", plain.flags)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "whole", whole)

    def search(self, path: str) -> bool:
        """Whether the expression is found in a path."""
        found = self.plain.finditer(path)
        whole = self.whole.search(path) is not None
        return whole or any(map(self._takes_any_digit, found))

    def _takes_any_digit(self, found: re.Match[str]) -> bool:
        """Whether a match that ends within a number would end there for any digit."""
        path, last = found.string, found.end() - 1
        others = (f"{path[:last]}{digit}{path[last + 1 :]}" for digit in range(10))
        matches = (self.plain.match(other, found.start()) for other in others)
        return all(match and match.end() == found.end() for match in matches)
