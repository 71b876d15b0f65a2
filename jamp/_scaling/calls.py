"""One call of a training step as a pure function of its state.

In the style of optax, the state is the first argument and the first result. In the
style of NNX (`nnx_call.py`), the arguments hold the state, and the step writes into
them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._checks import shown
from .._tree import PyTree, T, check_leaves
from .rule import LossScaleState
from .skip import check_same
from .state import (
    DynamicLossScaleState,
    check_not_stacked,
    describe,
    find_states,
    scalars_of,
)

ARRAYS_OF_THE_STATE = """ Keep arrays alone in the state; for an Equinox model, \
write params, static = eqx.partition(model, eqx.is_inexact_array), put params into the \
state, and call eqx.combine(params, static) in the step."""

NO_SCALE = """{}: the state holds no loss scale; found {}. The first argument of the \
step must hold the state of an optimizer in jamp.dynamic_loss_scale, or an argument \
must be a GradScaler."""


class Call:
    """One call in the style of optax: `step(state, *batch) -> (state, aux)`.

    Attributes:
      caller: the function of jamp that a user called, for messages.
      state: a pytree that holds the loss scales in `DynamicLossScaleState`s.
      inputs: a pytree of the other arguments.
      donating: how to write the wrapped step if it is to donate its state.

    Raises:
      TypeError: a leaf of the state is not an array.
      ValueError: there is not one loss scale per optimizer, which is one number.
    """

    donating = "jax.jit(jamp.retry(step), donate_argnums=0)"

    def __init__(
        self,
        caller: str,
        step: Callable[..., Any],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ):
        self.caller, self.step = caller, step
        self.state: PyTree = args[0] if args else None
        self.inputs: PyTree = (args[1:], kwargs)
        found = find_states(self.state)
        if not found:
            raise ValueError(NO_SCALE.format(caller, describe(self.state)))
        check_leaves(self.state, f"{caller}: the state", ARRAYS_OF_THE_STATE)
        for node in found.values():
            check_not_stacked(scalars_of(node)._asdict(), caller)

    def run(self, state: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        """The state after the step, and what else it returned."""
        batch, kwargs = inputs
        result: Any = self.step(state, *batch, **kwargs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"{self.caller}: step must return (state, aux), with None for aux if "
                f"there is nothing else; got {shown(result)}."
            )
        return result

    def returned(self, state: PyTree, *aux: PyTree) -> Any:
        """What the user's call returns: a state, and what else the step returned."""
        return (state, *aux) if aux else state


def scales_of(state: PyTree) -> list[LossScaleState]:
    """The loss scales in a state."""
    return [scalars_of(node) for node in find_states(state).values()]


def with_scales(state: T, scales: Sequence[LossScaleState]) -> T:
    """The state with other loss scales."""
    remaining = iter(scales)
    is_scale = lambda node: isinstance(node, DynamicLossScaleState)

    def replaced(node: PyTree) -> PyTree:
        return node._replace(**next(remaining)._asdict()) if is_scale(node) else node

    return jax.tree.map(replaced, state, is_leaf=is_scale)


def attempt(
    call: Call, state: T, inputs: PyTree
) -> tuple[T, PyTree, list[LossScaleState]]:
    """One run of a step: the state after it, its other results, the loss scales."""
    # New containers: changes that a step makes in place do not reach the next one.
    new, aux = call.run(*jax.tree.map(lambda leaf: leaf, (state, inputs)))
    check_same(new, state, f"{call.caller}: step")
    return new, aux, scales_of(new)
