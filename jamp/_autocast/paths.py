"""Regular expressions that are searched for in the paths of modules."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A regular expression whose numbers at its ends match whole numbers only.

    "block_1" is found in "Model/block_1/Dense_0" and not in "Model/block_10", and
    "1/mlp" not in "blocks/11/mlp". An expression that takes any digit there ("block_.",
    "[0-9]/mlp") names no number, and matches as usual.

    Raises:
      re.error: the text is not a regular expression.

    >>> [PathPattern("block_1").search(path) for path in ("a/block_1/b", "block_10")]
    [True, False]
    >>> [PathPattern("1/mlp").search(path) for path in ("blocks/1/mlp", "11/mlp")]
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
        bound = "(?!(?<=[0-9])[0-9])"  # not between two digits
        whole = re.compile(f"{bound}(?:{body}{end}){bound}", plain.flags)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "whole", whole)

    def search(self, path: str) -> bool:
        matches = self.plain.finditer(path)
        whole = self.whole.search(path) is not None
        return whole or any(map(self._takes_any_digit, matches))

    def _takes_any_digit(self, match: re.Match[str]) -> bool:
        """Whether a match that cuts a number in two would do so for any digit."""
        path, (start, end) = match.string, match.span()
        cuts = [at for at in (start, end) if is_in_number(path, at)]
        places = [at if at == start else at - 1 for at in cuts]
        others = [
            f"{path[:place]}{digit}{path[place + 1 :]}"
            for place in places
            for digit in range(10)
        ]
        matches = (self.plain.match(other, start) for other in others)
        return all(match and match.end() == end for match in matches)


def is_in_number(path: str, at: int) -> bool:
    return path[:at][-1:].isdigit() and path[at:][:1].isdigit()
