"""What a function keeps from its forward pass for the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from .._tree import PyTree
from .call import replaced
from .op_location import OUTERMOST, Around, Site, site_of
from .walk import Atom, array, held_by, nbytes, variables


class Saved(NamedTuple):
    """An array that `jax.vjp` keeps."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    site: Site  # the op that made it


def saved_for_backward(
    run: Callable[[Sequence[jax.Array]], PyTree],
    arrays: Sequence[jax.Array],
    params: Mapping[int, jax.Array],
) -> list[Saved] | None:
    """The arrays that are kept for the derivative with respect to some of the arrays.

    Neither the arguments themselves count, nor arrays that are filled with one number.
    It is None if there is nothing to differentiate.
    """
    if not params:
        return None

    def residuals(arrays):
        def results(params):
            leaves = jax.tree.leaves(run(replaced(arrays, params)))
            leaves = [x for x in leaves if isinstance(x, jax.Array)]
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

        return jax.tree.leaves(jax.vjp(results, {i: arrays[i] for i in params})[1])

    jaxpr = jax.make_jaxpr(residuals)(list(arrays)).jaxpr
    found = {}
    for variable in variables(jaxpr.outvars):
        origin, aval = origin_of(jaxpr, variable), array(variable)
        if origin is not None and jnp.issubdtype(aval.dtype, jnp.floating):
            found[variable] = Saved(
                str(aval.dtype), tuple(aval.shape), nbytes(aval), origin
            )
    return list(found.values())


def origin_of(jaxpr: Jaxpr, variable: Atom, around: Around = OUTERMOST) -> Site | None:
    """The site of the op that made a value; None for an argument or a constant."""
    if isinstance(variable, Literal):
        return None
    eqn = next((e for e in reversed(jaxpr.eqns) if variable in e.outvars), None)
    if eqn is None:
        return None
    inside = held_by(eqn)
    if len(inside) == 1 and len(inside[0].outvars) == len(eqn.outvars):
        (body,) = inside
        inner = body.outvars[eqn.outvars.index(variable)]
        if inner not in body.invars:
            return origin_of(body, inner, around.inside(eqn, body))
        if eqn.primitive.name != "scan" and len(body.invars) == len(eqn.invars):
            return origin_of(jaxpr, eqn.invars[body.invars.index(inner)], around)
    filled = eqn.primitive.name == "broadcast_in_dim"
    if filled and isinstance(eqn.invars[0], Literal):
        return None
    return site_of(eqn, around)
