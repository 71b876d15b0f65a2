"""What `explain` finds in a function: kinds of ops, and what is wrong with some."""

from typing import NamedTuple


class OpRow(NamedTuple):
    """Ops of one kind."""

    op: str  # a primitive, or a function that counts as one op
    times: int
    dtypes: str  # what it is given and gives back: "float16, float32 -> float16"
    runs_in: str  # the dtype that the region has cast its first input to
    rule: str  # "lower", "left_alone", ...; "rules['head']"; "no region", "off"
    torch: tuple[str, ...]  # the ops of torch's lists that the rule mirrors
    line: str
    path: str
    backward: bool
    flops: int  # of matrix products
    bytes: int  # of results
    since: str = ""  # of a product in float32: where its input became float32
    note: str = ""  # of a product where float8 is asked for: its recipe, or why not


class Promotion(NamedTuple):
    """Half precision that became float32 because of another operand."""

    op: str
    line: str
    path: str
    times: int
    bytes: int  # that it takes more


class Reduction(NamedTuple):
    """A float16 sum that may overflow."""

    op: str
    line: str
    path: str
    times: int
    elements: int
