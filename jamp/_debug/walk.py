"""Every op of a traced function, through all functions that it holds."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import _compat
from .._autocast.left_alone import LEFT_ALONE
from .._autocast.sources import holds_jaxpr
from .sites import MOVES, Around, site_of

OUTERMOST = Around()
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


class Op(NamedTuple):
    """An equation, and where it stands."""

    eqn: Any
    site: Any
    times: int  # how often it runs; a while loop counts as one iteration
    made_by: dict[Any, Any]  # the equations beside it, by what they make
    used_by: dict[Any, list[Any]]
    given: tuple[str, ...]  # the names of the arguments that are its inputs

    @property
    def path(self) -> str:
        """The modules around it, or those of its parameters: NNX names no ops."""
        owners = [name.rpartition("/")[0] for name in self.given]
        deepest = max(owners, key=lambda owner: owner.count("/"), default="")
        return starred(self.site.path or deepest)


def walk(
    jaxpr: Any, names: dict[Any, str], around: Around = OUTERMOST, times: int = 1
) -> Iterator[Op]:
    """The ops of an open jaxpr, depth first, in the order in which they run.

    Args:
      names: of arguments, by variable.
      times: how often it runs.
    """
    names = dict(names)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    used_by: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not _is_literal(v):
                used_by.setdefault(v, []).append(eqn)
    for eqn in jaxpr.eqns:
        given = {v: names[v] for v in eqn.invars if not _is_literal(v) and v in names}
        if eqn.primitive.name in MOVES and given:
            names[eqn.outvars[0]] = next(iter(given.values()))
        inside = list(held_by(eqn))
        for inner in inside:
            n = times * int(eqn.params.get("length", 1) or 1)
            inputs = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
            known = {}
            if len(inputs) == len(inner.invars):
                pairs = zip(inner.invars, inputs, strict=True)
                known = {
                    i: given[v] for i, v in pairs if not _is_literal(v) and v in given
                }
            yield from walk(inner, known, around.inside(eqn, inner), n)
        if not inside:
            arguments = tuple(given.values())
            yield Op(eqn, site_of(eqn, around), times, made_by, used_by, arguments)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _compat.Literal)


def held_by(eqn: Any) -> Iterator[Any]:
    """The open jaxprs that an equation runs, but for kernels and how it adds two."""
    name = eqn.primitive.name
    if name in LEFT_ALONE or name.startswith(("reduce_", "scatter", "select_and_")):
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if holds_jaxpr(item):
                yield item.jaxpr if hasattr(item, "jaxpr") else item


def flops(eqn: Any) -> int:
    """Floating-point operations of a matrix product or convolution, 0 for others."""
    if eqn.primitive.name not in PRODUCTS:
        return 0
    left, right = (v.aval.shape for v in eqn.invars[:2])
    size = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(left[d] for d in contracting)
    if eqn.primitive.name == "ragged_dot_general":
        return 2 * size * left[-1]
    spec = eqn.params["dimension_numbers"].rhs_spec
    return 2 * size * math.prod(right) // right[spec[0]]


def reduced(eqn: Any) -> int:
    """How many elements a sum or product adds up for each result, else 0."""
    if not eqn.primitive.name.startswith(("reduce_sum", "reduce_prod", "cum")):
        return 0
    shape, params = eqn.invars[0].aval.shape, eqn.params
    if "axes" in params:
        return math.prod(shape[axis] for axis in params["axes"])
    is_sum = eqn.primitive.name in ("cumsum", "cumprod")
    return shape[params["axis"]] if is_sum else 0


def nbytes(aval: Any) -> int:
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
