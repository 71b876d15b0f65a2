"""The overflows that end in finite numbers: forward from each, by marks, on the host.

An inf is a fault if it stands for a number that is too large for its dtype, and an op
makes another finite number of it than of that number: `rsqrt` gives 0, and a norm's
output vanishes. So what the inf stands for is followed:

- made by an op of `OVERFLOWING`, it is at least the largest number of its dtype. Of
  such a number `exp`, `tanh`, `min` and `max` give the same as of an inf. An inf that
  is given (a mask) or made at a pole (`log`, `div`) stands for itself.
- A root or a logarithm of it may be a moderate number. `x / sqrt(inf)` is a fault even
  for a small x, and `exp(x - log(inf))` too, and `min(sqrt(inf), 1000)` of float16.
- Of two of them, none is known to be the larger: `argmax` may give the wrong place.
- An inf of `exp` is mostly far beyond the limit, so that to divide by it is right, as
  in a hand-written sigmoid, and a root or a logarithm of it is as above.

Nothing is a fault that a select does not take, or that does not lead to a result.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .marks import (
    BAD,
    FRESH,
    INF,
    MATTERS,
    ROOT_MATTERS,
    SWALLOWED,
    TAKEN,
    Inner,
    Loop,
    Marks,
    Node,
    Program,
    runs,
)
from .op_location import Site
from .sources import Origin, arguments, in_iteration, lifted
from .traits import SWALLOWING

LARGE, ROOT, LOGARITHM = range(3)  # what an inf stands for, the largest first
SHRINKING = {
    **dict.fromkeys(("sqrt", "cbrt", "pow"), ROOT),
    **dict.fromkeys(("log", "log1p", "asinh", "acosh"), LOGARITHM),
}
EXPONENTIALS = frozenset({"cosh", "exp", "exp2", "expm1", "sinh"})

Stands = dict[Site, int]  # the op that made an inf of finite numbers -> what it is


class Swallowed(NamedTuple):
    """Overflows of one line, and the first op that made finite numbers of them."""

    origins: list[Origin]
    by: Site


@dataclasses.dataclass
class Forward:
    """What became of the overflows of a Program."""

    outputs: list[Stands]
    origins: dict[Site, list[Origin]] = dataclasses.field(default_factory=dict)
    by: dict[Site, Site] = dataclasses.field(default_factory=dict)
    reached: set[Site] = dataclasses.field(default_factory=set)  # a check

    def add(self, inside: "Forward", seen: Callable[[Origin], Origin]) -> None:
        """Adds what became of those in a body: `seen` takes an origin out of it."""
        for key, origins in inside.origins.items():
            self.origins.setdefault(key, []).extend(map(seen, origins))
        self.by = inside.by | self.by
        self.reached |= inside.reached


def swallowed(program: Program, marks: Marks) -> list[Swallowed]:
    """The overflows that lead to finite results, in the order in which they ran.

    Args:
      marks: of this program, as NumPy arrays.
    """
    flow = follow_infs(program, marks, {})
    reached = flow.reached.union(*flow.outputs)
    return [
        Swallowed(origins, flow.by[key])
        for key, origins in flow.origins.items()
        if key in flow.by and key not in reached
    ]


def follow_infs(program: Program, marks: Marks, given: Mapping[int, Stands]) -> Forward:
    """Follows each overflow.

    Args:
      given: what bad inputs stand for, by their places.
    """
    stands: dict[int, Stands] = {}
    for place, number in enumerate(program.inputs):
        if program.mark(marks, number) & BAD and (known := given.get(place)):
            stands[number] = dict(known)
    flow, useful = Forward([]), leading(program, marks)
    for node in program.nodes:
        into = merged(stands.get(n, {}) for n in node.inputs)
        if node.is_check:
            flow.reached |= into.keys()
        is_useful = node.is_check or not useful.isdisjoint(node.outputs)
        if node.inner is not None:
            inputs = enumerate(node.inputs[node.inner.skipped :])
            known = {i: stands[n] for i, n in inputs if n in stands}
            inside = through(node.inner, marks, known)
            inside.by = inside.by if is_useful else {}
            flow.add(inside, functools.partial(lifted, program=program, node=node))
            for number, out in zip(node.outputs, inside.outputs, strict=True):
                if out and program.mark(marks, number) & BAD:
                    stands[number] = out
            continue
        made = [program.mark(marks, n) for n in node.outputs]
        if is_useful and into and any(mark & SWALLOWED for mark in made):
            bits = functools.reduce(operator.or_, made)
            large = stands.get(node.inputs[-1], {}) if node.primitive == "div" else into
            for key, what in large.items():
                if is_fault(node.primitive, key, what, bits):
                    flow.by.setdefault(key, node.at.site)
        if not any(mark & BAD for mark in made):
            continue
        shrunk = SHRINKING.get(node.primitive, LARGE)
        out = {key: max(what, shrunk) for key, what in into.items()}
        if is_useful and node.overflows and is_fresh(program, marks, node):
            fed_by = arguments(program, node.inputs)
            if fed_by:  # not of constants, which are as the user wants them
                key = node.at.site
                origin = Origin(node.at, "inf", (), fed_by, False)
                flow.origins.setdefault(key, []).append(origin)
                out[key] = LARGE
        for number, mark in zip(node.outputs, made, strict=True):
            if mark & BAD and out:
                stands[number] = out
    flow.outputs = [stands.get(n, {}) for n in program.outputs]
    return flow


def is_fresh(program: Program, marks: Marks, node: Node) -> bool:
    """Whether an op made an inf of finite numbers."""
    slots = set(map(program.slots.get, node.outputs))
    if not slots.isdisjoint(map(program.slots.get, node.inputs)):
        return False  # it passes its input on
    made = [program.mark(marks, n) for n in node.outputs]
    given = [program.mark(marks, n) for n in node.inputs]
    is_inf = any(mark & INF for mark in made)
    return is_inf and (
        any(mark & FRESH for mark in made) or not any(mark & BAD for mark in given)
    )


def is_fault(primitive: str, key: Site, what: int, bits: int) -> bool:
    """Whether an op that makes a finite number of an inf makes a wrong one.

    Args:
      bits: the marks of what it makes.
    """
    if primitive in EXPONENTIALS:
        return what == LOGARITHM
    if what != LARGE and primitive in SWALLOWING:
        return True
    matters = bits & (MATTERS, ROOT_MATTERS, SWALLOWED)[what] > 0
    is_inverse = primitive in ("div", "integer_pow")
    return matters and not (is_inverse and key.primitive in EXPONENTIALS)


def merged(several: Iterable[Stands]) -> Stands:
    into: Stands = {}
    for stands in several:
        for key, what in stands.items():
            into[key] = max(what, into.get(key, LARGE))
    return into


def leading(program: Program, marks: Marks) -> set[int]:
    """The values that lead to a result or to a loss scaler's check."""
    useful = set(program.outputs)
    for node in reversed(program.nodes):
        taken = True
        if node.primitive == "select_n" and len(node.inputs) == 1:  # one of its cases
            (case,) = node.outputs
            taken = case not in program.slots or program.mark(marks, case) & TAKEN
        if node.is_check or (taken and not useful.isdisjoint(node.outputs)):
            useful.update(node.inputs)
    return useful


def through(inner: Inner, marks: Marks, given: Mapping[int, Stands]) -> Forward:
    """The same for the bodies of a scan, while or cond.

    Args:
      given: what bad inputs of the bodies stand for.
    """
    kept, first, n_carry = marks.inner[inner.place], inner.n_consts, inner.n_carry
    flow, given = Forward([{} for _ in inner.programs[0].outputs]), dict(given)
    flow.outputs[:n_carry] = [given.get(first + i, {}) for i in range(n_carry)]
    for body, here, place in runs(inner, kept):
        inside = follow_infs(body, here, given)
        flow.add(inside, functools.partial(in_iteration, inner=inner, place=place))
        pairs = [*map(merged, zip(flow.outputs, inside.outputs, strict=True))]
        # Of a while loop other iterations ran too, whose marks are not kept.
        carried = (pairs if isinstance(kept, Loop) else inside.outputs)[:n_carry]
        given.update({first + i: carried[i] for i in range(n_carry)})
        flow.outputs = [*carried, *pairs[n_carry:]]
    return flow
