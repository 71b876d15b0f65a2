"""A function that is traced once: to see what its results depend on, and to run it."""

from collections.abc import Callable
from typing import Generic, ParamSpec

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from .._tree import T

P = ParamSpec("P")


class Program(Generic[P, T]):
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

    def used_inputs(self, output: int | None = None) -> list[bool]:
        """Whether an output, or any of them, or an effect needs each input.

        Inputs and outputs are leaves, in order.
        """
        jaxpr = self.closed.jaxpr
        wanted = [output in (None, i) for i in range(len(jaxpr.outvars))]
        return partial_eval.dce_jaxpr(jaxpr, wanted)[1]
