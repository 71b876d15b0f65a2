"""The ops of a traced function in the order in which they run, with lines and FLOPs."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from .._autocast.attention import ATTENTION, products_in
from .._autocast.decision import Reason
from .._autocast.traits import LEFT_ALONE, PRODUCTS
from .._jaxprs import Atom, branches, held, param, read, variables
from .op_location import OUTERMOST, Around, Site, is_backward, reason_of, site_of
from .traits import MOVES

CAST = "convert_element_type"
NO_VALUE = -1  # the number of a literal


@dataclasses.dataclass(frozen=True, eq=False)
class WalkedOp:
    """An equation, and where it is."""

    eqn: JaxprEqn
    around: Around
    times: int  # how often it runs; a while loop counts as one iteration
    made_by: dict[Var, JaxprEqn]  # the equations beside it, by their results
    used_by: dict[Var, list[JaxprEqn]]
    given: tuple[str, ...]  # the names of the arguments that are its inputs
    reads: tuple[int, ...]  # its inputs by number, also across calls
    writes: tuple[int, ...]  # its results

    @functools.cached_property
    def site(self) -> Site:
        return site_of(self.eqn, self.around)

    @functools.cached_property
    def reason(self) -> Reason:
        return reason_of(self.eqn, self.around)

    @property
    def is_backward(self) -> bool:
        return is_backward(self.around.entries_of(self.eqn))

    @property
    def is_cast(self) -> bool:
        return self.eqn.primitive.name == CAST

    @property
    def results(self) -> list[ShapedArray]:
        return [array(v) for v in self.eqn.outvars if hasattr(v.aval, "dtype")]

    @property
    def path(self) -> str:
        """The modules around it, or in parentheses the owner of its parameters.

        NNX and your own Equinox modules do not write paths.
        """
        if self.site.path:
            return starred(self.site.path)
        owners = [name.rpartition("/")[0] for name in self.given]
        deepest = max(owners, key=lambda owner: owner.count("/"), default="")
        return f"({starred(deepest)})" if deepest else ""


class Place(NamedTuple):
    """Where a value of a jaxpr comes from."""

    number: int  # the same across calls; `NO_VALUE` for a literal
    name: str = ""  # of the argument that it is


LITERAL = Place(NO_VALUE)


def walk(
    jaxpr: ClosedJaxpr,
    names: Iterable[str],
) -> tuple[list[WalkedOp], list[int]]:
    """The ops of a jaxpr, depth first, in the order in which they run.

    And the numbers of its outputs. A value has one number across calls, and into a scan
    and out of it; what a `cond` returns has that of its last branch.

    Args:
      names: of the arguments.
    """
    count = itertools.count()
    ops: list[WalkedOp] = []

    def inside(
        jaxpr: ClosedJaxpr, given: Iterable[Place], around: Around, times: int
    ) -> list[Place]:
        eqns = jaxpr.jaxpr.eqns
        made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
        used_by: dict[Var, list[JaxprEqn]] = {}
        for eqn in eqns:
            for v in variables(eqn.invars):
                used_by.setdefault(v, []).append(eqn)

        def results(eqn: JaxprEqn, given: list[Place]) -> list[Place]:
            named = [place.name for place in dict.fromkeys(given) if place.name]
            made = [LITERAL] * len(eqn.outvars)
            several = inner_jaxprs(eqn)
            for inner in several:
                n = times * int(param(eqn, "length") or 1)
                below = given[1:] if branches(eqn) else given
                if len(below) != len(inner.in_avals):
                    below = [Place(next(count)) for _ in inner.in_avals]
                outs = inside(inner, below, around.inside(eqn, inner.jaxpr), n)
                if len(outs) == len(made):
                    pairs = zip(outs, made, strict=True)
                    made = [old if new == LITERAL else new for new, old in pairs]
            numbers = [next(count) if p == LITERAL else p.number for p in made]
            if not several:
                reads = tuple(place.number for place in given)
                here = eqn, around, times, made_by, used_by, tuple(named)
                ops.append(WalkedOp(*here, reads, tuple(numbers)))
            name = named[0] if named and eqn.primitive.name in MOVES else ""
            return [Place(number, name) for number in numbers]

        new = lambda value: Place(next(count))
        return read(jaxpr, given, results, new, lambda value: LITERAL)

    arguments = [Place(next(count), name) for name in names]
    outs = inside(jaxpr, arguments, OUTERMOST, 1)
    return ops, [place.number for place in outs]


def array(atom: Atom) -> ShapedArray:
    """The shape and dtype of an atom that is an array."""
    return cast(ShapedArray, atom.aval)


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The jaxprs that an equation runs, except kernels and how it adds two."""
    name = eqn.primitive.name
    if name in LEFT_ALONE or name.startswith(("reduce_", "scatter", "select_and_")):
        return []
    return [jaxpr for _, jaxpr in held(eqn)]


def flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of matrix products and convolutions, 0 for others."""
    if eqn.primitive.name == ATTENTION:
        size, keys = math.prod(array(eqn.outvars[0]).shape), array(eqn.invars[2]).shape
        return round(2 * products_in(**eqn.params) * size * keys[-3])
    if eqn.primitive.name not in PRODUCTS:
        return 0
    left, right = (array(v).shape for v in eqn.invars[:2])
    size = math.prod(array(eqn.outvars[0]).shape)
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = param(eqn, "dimension_numbers")
        return 2 * size * math.prod(left[d] for d in contracting)
    if eqn.primitive.name == "ragged_dot_general":
        return 2 * size * left[-1]
    spec = param(eqn, "dimension_numbers").rhs_spec
    return 2 * size * math.prod(right) // right[spec[0]]


def reduced(eqn: JaxprEqn) -> int:
    """How many elements a sum or product reduces to one, or 0 for other ops."""
    match eqn.primitive.name:
        case "reduce_sum" | "reduce_prod":
            axes = param(eqn, "axes")
        case "cumsum" | "cumprod":
            axes = [param(eqn, "axis")]
        case _:
            return 0
    return math.prod(array(eqn.invars[0]).shape[axis] for axis in axes)


def nbytes(aval: ShapedArray) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


@functools.cache
def starred(path: str) -> str:
    """A module path with stars for the modules' numbers.

    >>> starred("GPT/block_12/mlp"), starred("layers/3/w")
    ('GPT/block_*/mlp', 'layers/*/w')
    """
    parts = []
    for part in path.split("/"):
        stem = part.rstrip("0123456789")
        numbered = stem != part and (not stem or stem.endswith("_"))
        parts.append(f"{stem}*" if numbered else part)
    return "/".join(parts)
