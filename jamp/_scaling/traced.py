"""A function traced once, and which gradients it reads.

torch makes no gradient for a frozen parameter. JAX makes one, and an optimizer throws
it away (`optax.set_to_zero`). No value shows this; the program of its update does.
"""

import itertools
from collections.abc import Callable
from typing import Generic, ParamSpec

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from .._checks import is_traced
from .._tree import Flag, PyTree, T, is_inexact, partition

# What JAX raises where a function needs the values of its arguments.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

P = ParamSpec("P")


class Traced(Generic[P, T]):
    """A function of pytrees as a jaxpr. A call of it does not trace the function again.

    Attributes:
      shapes: those of its results.
    """

    shapes: T

    def __init__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs):
        # A new function: JAX would return the old trace of a function that it knows,
        # although the function may have changed.
        fresh = lambda *args, **kwargs: function(*args, **kwargs)
        trace = jax.make_jaxpr(fresh, return_shape=True)
        self.closed, self.shapes = trace(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def reads_and_run(
    function: Callable[[PyTree], T], tree: PyTree
) -> tuple[PyTree, Callable[[PyTree], T], T | None]:
    """For each leaf, whether a result of a pure function depends on it.

    And the function, which is not traced again when it is called, with the shapes of
    its results. A leaf that is not floating or complex counts as read, and keeps the
    value that it has here. All count as read, and no shapes are known, if the function
    needs values, as an optimizer with a Python `if` may.
    """
    inexact, rebuilt = partition(tree, is_inexact)
    try:
        once = Traced(lambda *inexact: function(rebuilt(inexact)), *inexact)
    except NEEDS_VALUES:
        return jax.tree.map(lambda _: True, tree), function, None
    jaxpr = once.closed.jaxpr
    used = iter(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])
    reads = jax.tree.map(lambda leaf: not is_inexact(leaf) or next(used), tree)
    run = lambda tree: once(*filter(is_inexact, jax.tree.leaves(tree)))
    return reads, run, once.shapes


def check_read(
    run: Callable[[PyTree], T], grads: PyTree, all_finite: Callable[[PyTree], Flag]
) -> tuple[Flag, Callable[[PyTree], T], T | None]:
    """Whether the gradients that a step reads are finite.

    And the step, a pure function of them, which is not traced again, with the shapes of
    its results, if it was traced.
    """
    if not any(map(is_traced, jax.tree.leaves(grads))):
        finite = all_finite(grads)
        if not is_traced(finite) and finite:
            return finite, run, None
    used, run, shapes = reads_and_run(run, grads)
    leaves = itertools.compress(jax.tree.leaves(grads), jax.tree.leaves(used))
    return all_finite(list(leaves)), run, shapes
