"""An optimizer's update in two parts: the new state, and the updates made from it.

`tx.update` returns updates that the caller adds to the parameters. A conditional that
returns them stores them, and they are read again, whereas XLA otherwise computes them
as they are added. Adam's updates follow from the new moments: if they are computed
after the conditional, which then returns only the state, they are never stored.
"""

import math
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .._checks import is_traced
from .._tree import PyTree
from .unread import used_inputs

Atoms = Sequence[Var | Literal]


class Apart:
    """`update(grads, state) -> (updates, new state)`, traced once, to be run in parts.

    Args:
      update: a pure function of pytrees.
      grads, state: the arguments that it is traced with.
    """

    def __init__(
        self,
        update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        grads: PyTree,
        state: PyTree,
    ):
        leaves, tree = jax.tree.flatten((grads, state))
        # Only leaves that a trace may replace become arguments. Others may be anything.
        self._traced = [i for i, leaf in enumerate(leaves) if is_traced(leaf)]
        count = len(jax.tree.leaves(grads))
        self._of_grads = sum(i < count for i in self._traced)
        self._grads, self._old = grads, state

        def on_traced(*args: jax.Array) -> tuple[PyTree, PyTree]:
            filled = dict(enumerate(leaves))
            filled.update(zip(self._traced, args, strict=True))
            return update(*tree.unflatten(filled.values()))

        make = jax.make_jaxpr(on_traced, return_shape=True)
        self._closed, out = make(*self._given(grads))
        self._tree, self._state_tree = map(jax.tree.structure, (out, out[1]))
        jaxpr, count = self._closed.jaxpr, len(jax.tree.leaves(out[0]))
        self._updates, self._state = jaxpr.outvars[:count], jaxpr.outvars[count:]
        self._known = [atom for atom in self._state if isinstance(atom, Var)]
        self._before, _ = _needed(jaxpr.eqns, self._state, set())
        self._after, self._read = _needed(jaxpr.eqns, self._updates, set(self._known))

    def is_free(self) -> bool:
        """Whether `updates` costs nothing beyond `state`.

        It must neither read arrays of the old state, which a conditional overwrites,
        nor recompute what the new state needs.
        """
        jaxpr = self._closed.jaxpr
        old = set(jaxpr.invars[self._of_grads :])
        again = _results(self._before) & _results(self._after)
        return not jaxpr.effects and not any(map(_is_array, old & self._read | again))

    def reads(self) -> PyTree:
        """For each gradient, whether the update depends on it."""
        count = len(jax.tree.leaves(self._grads))
        used = dict(zip(self._traced, used_inputs(self._closed.jaxpr), strict=True))
        of_grads = [used.get(i, True) for i in range(count)]
        return jax.tree.unflatten(jax.tree.structure(self._grads), of_grads)

    def both(self, grads: PyTree) -> tuple[PyTree, PyTree]:
        """The updates and the new state."""
        return self._tree.unflatten(jaxpr_as_fun(self._closed)(*self._given(grads)))

    def state(self, grads: PyTree) -> PyTree:
        """Only the new state."""
        jaxpr = self._closed.jaxpr.replace(eqns=self._before, outvars=self._state)
        return self._state_tree.unflatten(self._run(jaxpr, self._given(grads)))

    def updates(self, grads: PyTree, new: PyTree) -> PyTree:
        """Only the updates, from a new state."""
        leaves = zip(self._state, jax.tree.leaves(new), strict=True)
        known = [leaf for atom, leaf in leaves if isinstance(atom, Var)]
        jaxpr = self._closed.jaxpr
        jaxpr = jaxpr.replace(
            invars=[*jaxpr.invars, *self._known],
            outvars=self._updates,
            eqns=self._after,
        )
        found = self._run(jaxpr, [*self._given(grads), *known])
        return self._tree.unflatten([*found, *jax.tree.leaves(new)])[0]

    def _given(self, grads: PyTree) -> list[jax.Array]:
        leaves = jax.tree.leaves((grads, self._old))
        return [leaves[i] for i in self._traced]

    def _run(self, jaxpr: Jaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self._closed.consts))(*args)


def _needed(
    eqns: Sequence[JaxprEqn], wanted: Atoms, known: set[Var]
) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that compute the wanted values, and the variables they read."""
    needs, picked = _vars(wanted) - known, []
    for eqn in reversed(eqns):
        if not needs.isdisjoint(eqn.outvars):
            picked.append(eqn)
            needs |= _vars(eqn.invars) - known
    return picked[::-1], needs


def _vars(atoms: Atoms) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _results(eqns: Sequence[JaxprEqn]) -> set[Var]:
    return {var for eqn in eqns for var in eqn.outvars}


def _is_array(var: Var) -> bool:
    return math.prod(getattr(var.aval, "shape", ())) > 1
