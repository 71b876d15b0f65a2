"""The ops that made the infs and nans of a result: back from it, by marks, on the host.

Only values that lead to a result count. A mask of -inf that a softmax turns into zeros
is not a fault, and neither is log(0) in the branch that `where` does not take. From
each bad result, the search goes to the bad inputs of the op that made it, and so on. An
inf is followed through infs, a nan through nans if there are any, unless it is a single
number. The search ends at an op that made the inf or nan from finite numbers, at an
argument, or at a constant.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .marks import (
    BAD,
    CARRIED,
    FRESH,
    INF,
    NAN,
    Inner,
    Loop,
    Marks,
    Node,
    Program,
    runs,
)
from .op_location import Location, Site
from .traits import CHOOSING, MOVES

BITCAST = "bitcast_convert_type"

Sought = Counter[int]  # values, or their places, and what to search for: INF, NAN


class Origin(NamedTuple):
    """An op that made an inf or nan."""

    at: Location | Site
    made: str  # "inf" or "nan"
    loops: tuple[tuple[str, int], ...]  # ("scan", 17): in its iteration 17
    fed_by: frozenset[int]  # the inputs of the Program that its inputs are made from
    from_inf: bool  # whether it made a nan from an inf, not from finite numbers


class Trail(NamedTuple):
    """Where bad values come from, in the order in which the ops ran."""

    origins: list[Origin]
    inputs: Sought  # places of inputs of the Program that were bad before
    constants: list[Location | Site]  # the ops that got a bad constant


def find_sources(
    program: Program, marks: Marks, wanted: Mapping[int, int], checked: bool = False
) -> Trail:
    """Follows bad values back.

    Args:
      marks: of this program, as NumPy arrays.
      wanted: the numbers of the values to explain, with INF, NAN or both.
      checked: whether to explain as well what a loss scaler found to be not finite.
    """
    sought, origins, constants = Counter(wanted), [], []
    mark = functools.partial(program.mark, marks)

    def seek(numbers, kind):
        for number in numbers:
            sought[number] |= kind

    for node in reversed(program.nodes):
        bad = {n: kind for n in node.outputs if (kind := sought[n] & mark(n))}
        if checked and node.is_check:
            seek(node.inputs, INF | NAN)
        if node.inner is not None and (bad or checked):
            places = Counter({node.outputs.index(n): k for n, k in bad.items()})
            trail = inside(node.inner, marks, places, checked)
            for place, kind in trail.inputs.items():
                seek([node.inputs[place]], kind)
            origins[:0] = [lifted(o, program, node) for o in trail.origins]
            constants[:0] = trail.constants
            if any(trail):
                continue
        if not bad:
            continue
        if node.primitive == BITCAST and (read := read_as(program, mark, node)):
            seek(read, INF | NAN)
            continue
        makes = {kind for kind in (INF, NAN) if any(k & kind for k in bad.values())}
        infs, nans = ([n for n in node.inputs if mark(n) & k] for k in (INF, NAN))
        # On a CPU XLA may drop a nan, and give the -inf that a maximum starts from.
        drops_nan = bool(nans) and node.primitive in CHOOSING
        made_inf = INF in makes and not infs and not drops_nan
        made_nan = NAN in makes and not nans
        fresh = made_inf or (made_nan and not infs)
        slots = {program.slots.get(n) for n in node.inputs}  # it may pass these on
        made_here = [n for n in bad if program.slots.get(n) not in slots]
        fresh = fresh or any(mark(n) & FRESH for n in made_here)
        if fresh or made_nan:
            made = "nan" if NAN in makes else "inf"
            fed_by = arguments(program, node.inputs)
            origins.insert(0, Origin(node.at, made, (), fed_by, not fresh))
        if INF in makes or made_nan or node.is_single:
            seek(infs, INF)
        if NAN in makes or drops_nan:
            seek(nans, NAN)
        if any(sought[n] & mark(n) for n in program.constants & {*node.inputs}):
            constants.insert(0, node.at)
    inputs = Counter({i: sought[n] & mark(n) for i, n in enumerate(program.inputs)})
    return Trail(origins, +inputs, constants)


def read_as(program: Program, mark: Callable[[int], int], node: Node) -> list[int]:
    """The bad values whose bits a value is made from, as a float8 scale is."""
    bad, seen, waiting = [], set(), [*node.inputs]
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        if mark(number) & (INF | NAN):
            bad.append(number)
        maker = program.made_by.get(number)
        if number not in program.slots and maker is not None:  # not a floating number
            waiting.extend(maker.inputs)
    return bad


def inside(inner: Inner, marks: Marks, outputs: Sought, checked: bool) -> Trail:
    """The same for the bodies of a scan, while or cond.

    Args:
      outputs: the places of its bad results.

    Returns:
      A Trail whose `inputs` are places of the op's own inputs.
    """
    kept = marks.inner[inner.place]
    if isinstance(kept, Loop):
        return through_while(inner, kept, outputs, checked)
    first, last = inner.n_consts, inner.n_consts + inner.n_carry
    carry = {i: kind for i, kind in outputs.items() if i < inner.n_carry}
    stacked = {i: kind for i, kind in outputs.items() if i >= inner.n_carry}
    origins, inputs, constants = [], Counter(), []
    for body, here, place in reversed(runs(inner, kept)):
        wanted = Counter()
        for i, kind in (stacked | carry).items():  # a result may be both
            wanted[body.outputs[i]] |= kind
        trail = find_sources(body, here, wanted, checked)
        origins[:0] = [in_iteration(o, inner, place) for o in trail.origins]
        constants[:0] = trail.constants
        carry = {i - first: k for i, k in trail.inputs.items() if first <= i < last}
        for i, kind in trail.inputs.items():
            if not first <= i < last:
                inputs[i + inner.skipped] |= kind
    inputs |= Counter({i + first: kind for i, kind in carry.items()})
    return Trail(origins, inputs, constants)


def through_while(inner: Inner, loop: Loop, outputs: Sought, checked: bool) -> Trail:
    """From carried values to the iteration from which on one of them was bad."""
    body, first = inner.programs[0], inner.n_consts
    mark = functools.partial(body.mark, loop.marks)
    carried = list(zip(body.inputs[first:], body.outputs, strict=True))
    became = {n: BAD for before, n in carried if BAD & mark(n) & ~mark(before)}
    wanted, inputs = {}, Counter()
    for place, kind in outputs.items():
        before, number = carried[place]
        if loop.level < CARRIED or mark(before) & kind:  # bad before the loop began
            inputs[first + place] |= kind
        else:  # or bad after the others
            wanted |= {number: BAD} if number in became else became
    trail = find_sources(body, loop.marks, wanted, checked)
    origins = [in_iteration(o, inner, int(loop.iteration)) for o in trail.origins]
    inputs = {i + inner.skipped: kind for i, kind in (inputs | trail.inputs).items()}
    return Trail(origins, Counter(inputs), trail.constants)


def in_iteration(origin: Origin, inner: Inner, place: int | None) -> Origin:
    """An origin in one iteration of a loop, as an origin in the loop."""
    loops = () if place is None else ((inner.kind, place),)
    return origin._replace(loops=(*loops, *origin.loops))


def lifted(origin: Origin, program: Program, node: Node) -> Origin:
    """An origin in a body of an op, as seen from the Program around it."""
    skipped = node.inner.skipped if node.inner else 0
    inputs = [node.inputs[i + skipped] for i in origin.fed_by]
    return origin._replace(fed_by=arguments(program, inputs))


def arguments(program: Program, numbers: Iterable[int]) -> frozenset[int]:
    """The places of the nearest inputs that values are made from.

    These are the inputs that the values are, moved or cast. If there are none, they are
    the inputs of the ops before, and so on.
    """
    places, seen, waiting, later = set(), set(), list(numbers), []
    while waiting or (later and not places):
        if not waiting:
            waiting, later = later, []
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in program.inputs:
            places.add(program.inputs.index(number))
        node = program.made_by.get(number)
        if node is not None:
            moved = node.primitive in MOVES
            (waiting if moved else later).extend(node.inputs)
    return frozenset(places)
