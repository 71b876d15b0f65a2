"""The contents of a jaxpr's equation: variables, arrays, and jaxprs that it runs."""

from collections.abc import Iterable
from typing import cast

from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
)

from .._autocast.traits import LEFT_ALONE

Atom = Var | Literal


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms without the literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def array(atom: Atom) -> ShapedArray:
    """The shape and dtype of an atom that is an array."""
    return cast(ShapedArray, atom.aval)


def held_by(eqn: JaxprEqn) -> list[Jaxpr]:
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
