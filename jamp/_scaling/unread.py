"""Which gradients an optimizer reads, and which parameters it never moves.

torch makes no gradient for a frozen parameter. JAX makes one, and an optimizer throws
it away (`optax.set_to_zero`). No value shows this; the program of its update does.
"""

import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var
from jax.typing import ArrayLike

from .._tree import PyTree, T, is_inexact
from .check_gradients import is_hole
from .program import Program

# What JAX raises where a function needs the values of its arguments.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

CALLS = ("jit", "pjit", "shard_map", "checkpoint")  # each runs its jaxpr once

# Primitives whose result is zero if their operands are.
KEEP_ZERO = "add broadcast_in_dim convert_element_type name neg reshape sub".split()


def reads(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """For each leaf of a tree, whether a result of a pure function depends on it."""
    return traced(function, tree)[0]


def traced(
    function: Callable[[PyTree], T], tree: PyTree
) -> tuple[PyTree, Callable[[PyTree], T]]:
    """`reads`, and the function, which is not traced again when it is called.

    A leaf that is not floating or complex counts as read, and keeps the value that it
    has here. All count as read if the function needs values, as an optimizer with a
    Python `if` may.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def of_inexact(*inexact: jax.Array) -> T:
        filled = dict(enumerate(leaves)) | dict(zip(places, inexact, strict=True))
        return function(structure.unflatten(filled.values()))

    try:
        program = Program(of_inexact, *(leaves[i] for i in places))
    except NEEDS_VALUES:
        return structure.unflatten([True] * len(leaves)), function

    def again(tree: PyTree) -> T:
        given = jax.tree.leaves(tree)
        return program(*(given[i] for i in places))

    used = dict(zip(places, program.used_inputs(), strict=True))
    return structure.unflatten(used.get(i, True) for i in range(len(leaves))), again


def only(used: PyTree, grads: T) -> T:
    """The gradients that are read, and zeros for the others, which XLA then drops."""
    keep = lambda used, grad: grad if used else lax.full_like(grad, 0)
    return jax.tree.map(keep, used, grads)


def chosen(used: PyTree, grads: PyTree) -> list[ArrayLike]:
    """The gradients that are read, without the others."""
    return list(itertools.compress(jax.tree.leaves(grads), jax.tree.leaves(used)))


def never_moved(
    update: Callable[..., tuple[PyTree, PyTree]], *arguments: PyTree
) -> PyTree:
    """For each gradient, whether its update is zero, whatever the arguments are."""
    program = Program(lambda *args: update(*args)[0], *arguments)
    jaxpr = program.closed.jaxpr
    zeros = iter(_zeros(jaxpr, [False] * len(jaxpr.invars)))
    is_zero = lambda node: is_hole(node) or next(zeros)
    return jax.tree.map(is_zero, program.shapes, is_leaf=is_hole)


def _zeros(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Whether each output is known to be zero, if these inputs are."""
    zero: dict[Var, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def is_zero(atom: Var | Literal) -> bool:
        if isinstance(atom, Literal):
            return bool(atom.val == 0)
        return zero.get(atom, False)

    def is_finite(atom: Var | Literal) -> bool:
        return isinstance(atom, Literal) and bool(np.all(np.isfinite(atom.val)))

    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, list(map(is_zero, eqn.invars))
        found = [False] * len(eqn.outvars)
        if name in KEEP_ZERO:
            found = [all(given)]
        elif name == "select_n":
            found = [all(given[1:])]
        elif name == "mul":
            finite = map(is_finite, eqn.invars)
            found = [any(given) and all(map(operator.or_, given, finite))]
        elif name in CALLS:
            inner = eqn.params["jaxpr"]
            found = _zeros(getattr(inner, "jaxpr", inner), given)
        elif name == "cond":
            inner = [_zeros(b.jaxpr, given[1:]) for b in eqn.params["branches"]]
            found = list(map(all, zip(*inner, strict=True)))
        zero.update(zip(eqn.outvars, found, strict=True))
    return list(map(is_zero, jaxpr.outvars))
