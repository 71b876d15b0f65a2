"""What `explain` warns of: float16 sums and squares that may overflow, half results."""

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._jaxprs import param
from .._tree import HALF_NAMES
from .explanation import HalfResult, Reduction, Square
from .op_location import name_of
from .traits import MOVES
from .walk import CAST, NO_VALUE, WalkedOp, array, reduced

MANY = 1024
# The largest absolute value of the result is that of the input.
SAME_SIZE = MOVES - {"slice"} | {"abs", "name", "neg", "optimization_barrier"}
ADDED = frozenset({"add", "add_any", "div", "mul", "select_n", "sub"})


def reductions(ops: Iterable[WalkedOp]) -> list[Reduction]:
    """Sums in float16 that have so many elements that they may overflow."""
    rows: dict[tuple[str, str, str], Reduction] = {}
    for op in ops:
        n = reduced(op.eqn)
        if n < MANY or op.is_backward:
            continue
        given, made = op.site.dtypes_in[0], op.site.dtypes_out[0]
        users = op.used_by.get(op.eqn.outvars[0], ())
        narrowed = given == "float32" and any(
            user.primitive.name == CAST
            and str(array(user.outvars[0]).dtype) == "float16"
            for user in users
        )
        if (given, made) == ("float16", "float16") or narrowed:
            key = op.eqn.primitive.name, op.site.line, op.path
            before = rows.get(key, Reduction(*key, 0, n))
            rows[key] = before._replace(
                times=before.times + op.times, elements=max(before.elements, n)
            )
    return sorted(rows.values(), key=lambda r: -r.elements)


def squares(ops: Iterable[WalkedOp], made_by: Mapping[int, WalkedOp]) -> list[Square]:
    """Squares in float16 that a sum or a mean takes.

    They overflow from 256 on, where what is made of the sum (a norm, a loss) is far
    from it. bfloat16 has the range of float32.
    """
    rows: dict[tuple[str, str, str], Square] = {}
    for op in ops:
        if op.is_backward:
            continue
        if reduced(op.eqn):
            made = squares_in(op.reads[:1], made_by)
        else:
            made = [op] if is_product_with_itself(op, made_by) else []
        for square in made:
            key = square.eqn.primitive.name, square.site.line, square.path
            power = square_power(square, made_by) or 2
            limit = float(jnp.finfo(jnp.float16).max) ** (1 / power)
            before = rows.get(key, Square(*key, 0, limit))
            rows[key] = before._replace(times=before.times + square.times)
    return list(rows.values())


def squares_in(
    values: Iterable[int], made_by: Mapping[int, WalkedOp]
) -> list[WalkedOp]:
    """The float16 squares among what a sum adds, maybe scaled, masked or cast."""
    waiting, seen, several = list(values), set(), []
    while waiting:
        value = waiting.pop()
        if value in seen or value not in made_by:
            continue
        seen.add(value)
        op = made_by[value]
        if op.site.dtypes_out == ("float16",) and square_power(op, made_by):
            several.append(op)
        elif op.eqn.primitive.name in MOVES | ADDED:
            waiting.extend(op.reads)
    return several


def square_power(op: WalkedOp, made_by: Mapping[int, WalkedOp]) -> float:
    """2 for a square, 3 for a cube, 0 for other ops."""
    name = op.eqn.primitive.name
    if name == "square":
        return 2
    if name == "integer_pow":
        exponent = param(op.eqn, "y")
        return exponent if exponent > 1 else 0
    if name == "pow":
        exponent = op.eqn.invars[1]
        if not isinstance(exponent, Literal) or np.ndim(exponent.val):
            return 0
        return float(exponent.val) if exponent.val > 1 else 0
    is_itself = name == "mul" and are_same(op.reads, made_by)
    return 2 if is_itself else 0


def is_product_with_itself(op: WalkedOp, made_by: Mapping[int, WalkedOp]) -> bool:
    """Whether an op is the float16 product of a vector, or of several, with itself."""
    if op.eqn.primitive.name != "dot_general" or op.site.dtypes_out != ("float16",):
        return False
    contracted, batch = param(op.eqn, "dimension_numbers")
    is_inner = len(contracted[0]) + len(batch[0]) == len(array(op.eqn.invars[0]).shape)
    return (
        is_inner
        and array(op.eqn.outvars[0]).ndim == len(batch[0])
        and are_same(op.reads, made_by)
    )


def are_same(values: Sequence[int], made_by: Mapping[int, WalkedOp]) -> bool:
    """Whether two values are one, maybe cast or reshaped, or equal slices of one."""

    def root(value):
        slices = []
        while value in made_by:
            eqn = made_by[value].eqn
            if eqn.primitive.name == "slice":
                slices.append(str(eqn.params))
            elif eqn.primitive.name not in SAME_SIZE:
                break
            value = made_by[value].reads[0]
        return value, slices

    left, right = map(root, values)
    return left == right and left[0] != NO_VALUE


def half_results(
    returned: Iterable[tuple[str, WalkedOp | None]], made_by: Mapping[int, WalkedOp]
) -> list[HalfResult]:
    """The results in half precision that an op made, and not an argument."""
    rows = []
    for name, op in returned:
        if op is None or set(HALF_NAMES).isdisjoint(op.site.dtypes_out):
            continue
        dtype = op.site.dtypes_out[-1]
        while op.eqn.primitive.name in MOVES and op.reads[0] in made_by:
            op = made_by[op.reads[0]]
        made = name_of(op.eqn, op.around)
        rows.append(HalfResult(made, op.site.line, op.path, name, dtype))
    return rows
