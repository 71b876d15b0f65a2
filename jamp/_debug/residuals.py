"""What a function keeps of its forward pass for the backward one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _compat
from .sites import Around, site_of
from .walk import OUTERMOST, held_by, nbytes


class Saved(NamedTuple):
    """An array that `jax.vjp` keeps."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    site: Any  # the op that made it


def saved_for_backward(
    run: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], n_params: int
) -> list[Saved] | None:
    """What is kept for the derivative by the first arrays, without what is given.

    The arguments themselves are not counted, nor is what is one number all over. None
    if there is nothing to differentiate.
    """
    is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays[:n_params]]
    wrt = [i for i, floats in enumerate(is_float) if floats]
    if not wrt:
        return None

    def residuals(arrays):
        def results(params):
            values = list(arrays)
            for i, value in zip(wrt, params, strict=True):
                values[i] = value
            leaves = jax.tree.leaves(run(values))
            leaves = [x for x in leaves if isinstance(x, jax.Array)]
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

        return jax.tree.leaves(jax.vjp(results, [arrays[i] for i in wrt])[1])

    jaxpr = jax.make_jaxpr(residuals)(list(arrays)).jaxpr
    found = {}
    for variable in jaxpr.outvars:
        if isinstance(variable, _compat.Literal):
            continue
        origin = origin_of(jaxpr, variable)
        if origin is not None and jnp.issubdtype(variable.aval.dtype, jnp.floating):
            aval = variable.aval
            found[variable] = Saved(
                str(aval.dtype), tuple(aval.shape), nbytes(aval), origin
            )
    return list(found.values())


def origin_of(jaxpr: Any, variable: Any, around: Around = OUTERMOST) -> Any:
    """The site of the op that made a value; None for an argument or a constant."""
    if isinstance(variable, _compat.Literal):
        return None
    eqn = next((e for e in reversed(jaxpr.eqns) if variable in e.outvars), None)
    if eqn is None:
        return None
    inside = list(held_by(eqn))
    if len(inside) == 1 and len(inside[0].outvars) == len(eqn.outvars):
        (body,) = inside
        inner = body.outvars[eqn.outvars.index(variable)]
        if inner not in body.invars:
            return origin_of(body, inner, around.inside(eqn, body))
        if eqn.primitive.name != "scan" and len(body.invars) == len(eqn.invars):
            return origin_of(jaxpr, eqn.invars[body.invars.index(inner)], around)
    filled = eqn.primitive.name == "broadcast_in_dim"
    if filled and isinstance(eqn.invars[0], _compat.Literal):
        return None
    return site_of(eqn, around)
