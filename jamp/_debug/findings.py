"""What `explain` finds in a function: kinds of ops, and problems of some."""

from typing import NamedTuple


class OpRow(NamedTuple):
    """Ops of one kind."""

    op: str  # a primitive, or a function that counts as one op
    times: int
    dtypes: str  # of inputs and outputs: "float16, float32 -> float16"
    runs_in: str  # the dtype that the region has cast its first input to
    rule: str  # such as "lower", "left_alone", "rules['head']", "no region", "off"
    torch: tuple[str, ...]  # the ops of torch's lists that the rule mirrors
    line: str
    path: str
    backward: bool
    flops: int  # of matrix products
    bytes: int  # of results
    since: str = ""  # for a product in float32: where its input became float32
    note: str = ""  # for a product, if float8 is asked for: its recipe, or why not


class Promotion(NamedTuple):
    """Half precision that became float32 because of another operand."""

    op: str
    line: str
    path: str
    times: int
    bytes: int  # additional ones


class Reduction(NamedTuple):
    """A float16 sum that may overflow."""

    op: str
    line: str
    path: str
    times: int
    elements: int
