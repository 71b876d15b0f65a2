"""From a nan in a result back to the op that made the first inf: on the host, by marks.

Only what leads to a result counts. A mask of -inf that a softmax turns into zeros is no
fault, nor is log(0) in the branch that `where` does not take. From each bad result the
search goes to the inputs of the op that made it which are bad too, and on from there;
a nan is followed through nans where there are any. It ends at an op all of whose inputs
are finite, at an argument, or at a constant.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ._marks import FINE, NAN, Inner, Marks, Program
from ._sources import Site

# A value is its input, moved about or in another dtype.
MOVES = frozenset(
    """
    broadcast_in_dim convert_element_type copy expand_dims gather reshape
    sharding_constraint slice dynamic_slice squeeze stop_gradient transpose
    """.split()
)


class Origin(NamedTuple):
    """An op that made an inf or nan."""

    site: Site
    made: str  # "inf" or "nan"
    loops: tuple[tuple[str, int], ...]  # ("scan", 17): in its iteration 17
    fed_by: frozenset[int]  # the inputs of the Program that its inputs are made of
    from_inf: bool  # whether it made a nan of an inf, rather than of finite numbers


class Trail(NamedTuple):
    """Where bad values come from, in the order in which it ran."""

    origins: list[Origin]
    inputs: set[int]  # places of inputs of the Program that were bad before
    constant: bool  # whether a constant was


def trace_back(
    program: Program, marks: Marks, wanted: Iterable[int], checked: bool = False
) -> Trail:
    """Follows bad values back.

    Args:
      marks: of this program, as NumPy arrays.
      wanted: the numbers of the values to explain; those that are finite pass.
      checked: whether to explain too what a loss scaler found not to be finite.
    """
    wanted, origins = set(wanted), []

    def mark(number):
        slot = program.slots.get(number)
        return program.known.get(number, FINE) if slot is None else marks.values[slot]

    for node in reversed(program.nodes):
        bad = [n for n in node.outputs if n in wanted and mark(n)]
        sources = [n for n in node.inputs if mark(n)]
        if checked and node.is_check:
            wanted.update(sources)
        if not (bad or (checked and node.inner)):
            continue
        if node.inner is not None:
            places = [node.outputs.index(n) for n in bad]
            trail = inside(node.inner, marks, places, checked)
            if trail.origins or trail.inputs:
                wanted.update(node.inputs[i] for i in trail.inputs)
                origins[:0] = [lifted(o, program, node) for o in trail.origins]
                continue
        if not bad:
            continue
        makes_nan = any(mark(n) == NAN for n in bad)
        nans = [n for n in sources if mark(n) == NAN]
        if not sources or (makes_nan and not nans):
            made = "nan" if makes_nan else "inf"
            fed_by = arguments(program, node.inputs)
            origins.insert(0, Origin(node.site, made, (), fed_by, bool(sources)))
        wanted.update(nans if makes_nan and nans else sources)
    inputs = {i for i, n in enumerate(program.inputs) if n in wanted and mark(n)}
    constant = any(mark(n) for n in wanted & program.constants)
    return Trail(origins, inputs, constant)


def inside(inner: Inner, marks: Marks, outputs: list[int], checked: bool) -> Trail:
    """The same for the bodies of a scan, while or cond.

    Args:
      outputs: the places of its bad results.

    Returns:
      A Trail whose `inputs` are places of the op's own inputs.
    """
    kept = marks.inner[inner.place]
    if inner.kind == "cond":
        chosen = int(kept.chosen)
        body, marks = inner.programs[chosen], kept.marks[chosen]
        trail = trace_back(body, marks, [body.outputs[i] for i in outputs], checked)
        return trail._replace(inputs={i + inner.skipped for i in trail.inputs})
    body = inner.programs[0]
    if inner.kind == "while":
        if kept.iteration < 0:  # bad before it began
            start = inner.skipped + inner.n_consts
            return Trail([], {start + i for i in outputs}, False)
        trail = trace_back(body, kept.marks, body.outputs, checked)
        loops = (("while", int(kept.iteration)),)
        origins = [o._replace(loops=loops + o.loops) for o in trail.origins]
        inputs = {i + inner.skipped for i in trail.inputs}
        return Trail(origins, inputs, trail.constant)
    return through_scan(inner, kept, outputs, checked)


def through_scan(
    inner: Inner, marks: Marks, outputs: list[int], checked: bool
) -> Trail:
    body, first, last = (
        inner.programs[0],
        inner.n_consts,
        inner.n_consts + inner.n_carry,
    )
    carry = {i for i in outputs if i < inner.n_carry}
    stacked = {body.outputs[i] for i in outputs if i >= inner.n_carry}
    origins, inputs, constant = [], set(), False
    length = len(marks.values)
    for step in reversed(range(length)):
        place = length - 1 - step if inner.reverse else step
        here = at(marks, place)
        if not here.values.any():
            carry = set()
            continue
        wanted = stacked | {body.outputs[i] for i in carry}
        trail = trace_back(body, here, wanted, checked)
        loops = (("scan", place),)
        origins[:0] = [o._replace(loops=loops + o.loops) for o in trail.origins]
        constant |= trail.constant
        carry = {i - first for i in trail.inputs if first <= i < last}
        inputs |= trail.inputs - {i + first for i in carry}
    return Trail(origins, inputs | {i + first for i in carry}, constant)


def at(marks: Any, place: int) -> Any:
    """The marks of one iteration."""
    if isinstance(marks, np.ndarray):
        return marks[place]
    parts = [at(part, place) for part in marks]
    return type(marks)(*parts) if hasattr(marks, "_fields") else tuple(parts)


def lifted(origin: Origin, program: Program, node: Any) -> Origin:
    """An origin in a body, as seen from the Program around it."""
    inner = node.inner
    inputs = [node.inputs[i + inner.skipped] for i in origin.fed_by]
    return origin._replace(fed_by=arguments(program, inputs))


def arguments(program: Program, numbers: Iterable[int]) -> frozenset[int]:
    """The places of the nearest inputs that values are made of.

    Those that they are, moved about or cast; if there are none, those that the ops
    before were given, and so on.
    """
    found, seen, waiting, later = set(), set(), list(numbers), []
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in program.inputs:
            found.add(program.inputs.index(number))
        node = program.made_by.get(number)
        if node is not None:
            moved = node.site.primitive in MOVES
            (waiting if moved else later).extend(node.inputs)
        if not waiting and not found:
            waiting, later = later, []
    return frozenset(found)
