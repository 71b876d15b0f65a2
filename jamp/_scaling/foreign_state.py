"""Errors for a state that belongs to another optimizer, or to other parameters."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

from .._tree import NUMBERS, PyTree
from .state import classes_of_states, describe, is_master, is_scale
from .state_types import difference

CONTINUE = """ To continue with the state of the optimizer inside it, pass \
init(params)._replace(inner_state=state)."""


def check_state(state: object, cls: type, caller: str) -> None:
    """Raises ValueError unless a state is of the class that `init` makes."""
    if not isinstance(state, cls):
        is_own = lambda node: is_scale(node) or isinstance(node, cls)
        has_own = any(map(is_own, jax.tree.leaves(state, is_leaf=is_own)))
        advice = CONTINUE if classes_of_states(state) and not has_own else ""
        raise ValueError(
            f"{caller}: the state must be a {cls.__name__}, as made by this "
            f"transformation's init; got {describe(state)}.{advice}"
        )


@dataclasses.dataclass(frozen=True)
class Owner:
    """The optimizer that a state should belong to."""

    caller: str
    init: Callable[..., PyTree]
    params: PyTree
    at: str = ""  # where the state is in the one that the user passed

    @contextlib.contextmanager
    def explained(self, state: PyTree) -> Generator[None]:
        """Raises ValueError if it fails because the state is another one's."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            problem = self._problem(state)
            if problem is None:
                raise
            raise problem from error

    def check_moved(self, new: PyTree, old: PyTree) -> None:
        """Raises ValueError if it drops or hands on a state that is not its own.

        A stateless optimizer takes any state, and may return it as it is.
        """
        is_own = lambda node: is_scale(node) or is_master(node)
        nodes_of = lambda tree: filter(is_own, jax.tree.leaves(tree, is_leaf=is_own))
        given, got = list(nodes_of(old)), list(nodes_of(new))
        moved = len(got) == len(given) and all(map(operator.is_not, got, given))
        leaves, kept = jax.tree.leaves(old), jax.tree.leaves(new)
        if leaves and len(leaves) == len(kept):
            moved &= not all(map(operator.is_, leaves, kept))
        if not moved and (problem := self._problem(old)):
            raise problem

    def _problem(self, state: PyTree) -> ValueError | None:
        if self.params is None:
            return None
        made = jax.eval_shape(self.init, self.params)
        if not (found := difference(state, made, shape)):
            return None
        path, has, wants = found
        return ValueError(
            f"{self.caller}: the state belongs to another optimizer or to other "
            f"parameters: at {f'{self.at}{path}' or 'the root'} it has {has}, but init "
            f"makes {wants}. Pass the state that this transformation's init made."
        )


def shape(leaf: Any) -> str:
    is_array = hasattr(leaf, "shape") or isinstance(leaf, NUMBERS)
    return f"shape {jnp.shape(leaf)}" if is_array else f"a {type(leaf).__name__}"
