"""The equations of a traced function, and what each of them holds."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
)

from .._autocast.traits import LEFT_ALONE, MOVES, PRODUCTS
from .op_location import OUTERMOST, Around, Site, is_backward, site_of

CAST = "convert_element_type"
NO_VALUE = -1  # the number of a literal
Atom = Var | Literal


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


def walk(
    jaxpr: Jaxpr,
    names: dict[Var, str],
    values: dict[Var, int],
    around: Around = OUTERMOST,
    times: int = 1,
    count: Iterator[int] | None = None,
) -> Iterator[WalkedOp]:
    """The ops of an open jaxpr, depth first, in the order in which they run.

    Args:
      names: of arguments, by variable.
      values: the numbers of inputs that are values of the jaxpr around this one. It
        gets those of all variables. A value has one number across calls, and into a
        scan and out of it; what a `cond` returns has that of its last branch.
      times: how often it runs.
      count: the numbers that are free.
    """
    names, count = dict(names), count or itertools.count()
    for v in (*jaxpr.invars, *jaxpr.constvars):
        if v not in values:
            values[v] = next(count)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    used_by: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for v in variables(eqn.invars):
            used_by.setdefault(v, []).append(eqn)
    for eqn in jaxpr.eqns:
        given = {v: names[v] for v in variables(eqn.invars) if v in names}
        if eqn.primitive.name in MOVES and given:
            names[eqn.outvars[0]] = next(iter(given.values()))
        inside = inner_jaxprs(eqn)
        for inner in inside:
            n = times * int(eqn.params.get("length", 1) or 1)
            inputs = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
            known, below = {}, {}
            if len(inputs) == len(inner.invars):
                pairs = zip(inner.invars, inputs, strict=True)
                pairs = [(i, v) for i, v in pairs if not isinstance(v, Literal)]
                known = {i: given[v] for i, v in pairs if v in given}
                below = {i: values[v] for i, v in pairs}
            yield from walk(inner, known, below, around.inside(eqn, inner), n, count)
            if len(inner.outvars) == len(eqn.outvars):
                pairs = zip(eqn.outvars, inner.outvars, strict=True)
                values |= {v: below[o] for v, o in pairs if not isinstance(o, Literal)}
        for v in eqn.outvars:
            if not inside or v not in values:
                values[v] = next(count)
        if not inside:
            reads = tuple(
                NO_VALUE if isinstance(v, Literal) else values[v] for v in eqn.invars
            )
            writes = tuple(values[v] for v in eqn.outvars)
            arguments = tuple(given.values())
            yield WalkedOp(
                eqn, around, times, made_by, used_by, arguments, reads, writes
            )


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms without the literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def array(atom: Atom) -> ShapedArray:
    """The shape and dtype of an atom that is an array."""
    return cast(ShapedArray, atom.aval)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The open jaxprs that an equation runs, except kernels and how it adds two."""
    name = eqn.primitive.name
    if name in LEFT_ALONE or name.startswith(("reduce_", "scatter", "select_and_")):
        return []
    return list(jaxprs_in_params(eqn.params))


def called_by(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The only jaxpr of an equation, if it calls the jaxpr with its own inputs."""
    held = [p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr)]
    if not held or len(list(jaxprs_in_params(eqn.params))) > 1:
        return None
    inside = held[0] if isinstance(held[0], ClosedJaxpr) else ClosedJaxpr(held[0], ())
    return inside if len(inside.jaxpr.invars) == len(eqn.invars) else None


def flops(eqn: JaxprEqn) -> int:
    """Floating-point operations of a matrix product or convolution, 0 for others."""
    if eqn.primitive.name not in PRODUCTS:
        return 0
    left, right = (array(v).shape for v in eqn.invars[:2])
    size = math.prod(array(eqn.outvars[0]).shape)
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(left[d] for d in contracting)
    if eqn.primitive.name == "ragged_dot_general":
        return 2 * size * left[-1]
    spec = eqn.params["dimension_numbers"].rhs_spec
    return 2 * size * math.prod(right) // right[spec[0]]


def reduced(eqn: JaxprEqn) -> int:
    """How many elements a sum or product reduces to one, or 0 for other ops."""
    if not eqn.primitive.name.startswith(("reduce_sum", "reduce_prod", "cum")):
        return 0
    shape, params = array(eqn.invars[0]).shape, eqn.params
    if "axes" in params:
        return math.prod(shape[axis] for axis in params["axes"])
    is_sum = eqn.primitive.name in ("cumsum", "cumprod")
    return shape[params["axis"]] if is_sum else 0


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
