"""One call of a training step as a pure function of its state: in the style of optax.

The state is the first argument and the first result. `nnx_call.py` is for steps in the
style of NNX, which write into objects among their arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._checks import shown
from .._tree import PyTree, T, check_leaves, partition
from .rule import LossScaleState
from .state import describe, find_states, is_scale, scalars_of
from .state_types import check_same

ARRAYS_OF_THE_STATE = """ Keep arrays alone in the state; for an Equinox model, \
write params, static = eqx.partition(model, eqx.is_inexact_array), put params into the \
state, and call eqx.combine(params, static) in the step."""

NO_SCALE = """{}: the state holds no loss scale; found {}. An argument of the step \
must hold the state of an optimizer in jamp.dynamic_loss_scale, or be a GradScaler."""

NOT_RETURNED = """{}: step must return the state that it got, and perhaps something \
else: step(state, *batch) -> (state, aux). Of several arguments (params, opt_state) or \
(actor, critic), it returns each, in their order. It got {}, and returned {}."""


Step = Callable[..., Any]
Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]


class Form(NamedTuple):
    """Where a step has its state: in which arguments, and where in its result."""

    places: tuple[int, ...]  # of the arguments; if one, the state is that argument
    is_nested: bool = True  # the state is one item of the result, and not one for each
    is_alone: bool = False  # the state is the whole result

    def state_of(self, args: Sequence[PyTree]) -> PyTree:
        if len(self.places) == 1:
            return args[self.places[0]]
        return tuple(args[place] for place in self.places)

    def split(self, result: Any) -> tuple[PyTree, PyTree]:
        if self.is_alone:
            return result, None
        if self.is_nested:
            state, *aux = result
            return state, aux
        count = len(self.places)
        return tuple(result[:count]), list(result[count:])

    def joined(self, state: PyTree, aux: Any) -> Any:
        if self.is_alone:
            return state
        return (state, *aux) if self.is_nested else (*state, *aux)


class Call:
    """One call of `step(state, *batch) -> (state, aux)`.

    The state may be several arguments, which the step returns in their order, and the
    step may return nothing else.

    Attributes:
      caller: the function of jamp that a user called, for messages.
      state: a pytree that holds the loss scales in `DynamicLossScaleState`s.
      inputs: a pytree of the other arguments.
    """

    # How to write the wrapped step if it is to donate its state.
    donating = "jax.jit(jamp.retry(step), donate_argnums=0)"

    def __init__(self, caller: str, step: Step, args: Args, kwargs: Kwargs):
        self.caller, self.step = caller, step
        holders = [place for place, arg in enumerate(args) if find_states(arg)]
        if not holders:
            found = ", ".join(map(describe, args)) or "nothing"
            raise ValueError(NO_SCALE.format(caller, found))
        self.form = Form((0,))
        if holders != [0]:
            self.form = self._form_of(args, kwargs, holders)
        self.state: PyTree = self.form.state_of(args)
        places = self.form.places
        batch = {i: arg for i, arg in enumerate(args) if i not in places}
        self.inputs: PyTree = (batch, kwargs)
        check_leaves(self.state, f"{caller}: the state", ARRAYS_OF_THE_STATE)

    def _form_of(self, args: Args, kwargs: Kwargs, holders: list[int]) -> Form:
        """Of the arguments that a step returns: up to the last scale, or `holders`."""
        is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
        arrays, rebuilt = partition((args, kwargs), is_array)

        def run(arrays: list[Any]) -> Any:
            args, kwargs = rebuilt(arrays)
            return self.step(*args, **kwargs)

        result: Any = jax.eval_shape(run, arrays)
        structures = [*map(jax.tree.structure, args)]
        begins = lambda items, kinds: (
            isinstance(items, tuple)
            and [*map(jax.tree.structure, items[: len(kinds)])] == kinds
        )
        for places in (tuple(range(holders[-1] + 1)), tuple(holders)):
            kinds = [structures[place] for place in places]
            if len(kinds) == 1 and jax.tree.structure(result) == kinds[0]:
                return Form(places, is_alone=True)
            if begins(result, kinds):
                return Form(places, is_nested=len(kinds) == 1)
            if len(kinds) > 1 and isinstance(result, tuple) and result:
                if len(result[0]) == len(kinds) and begins(tuple(result[0]), kinds):
                    return Form(places)
        got = ", ".join(type(arg).__name__ for arg in args)
        returned = f"a {type(result).__name__}"
        if type(result) is tuple:
            returned = f"({', '.join(type(item).__name__ for item in result)})"
        raise TypeError(NOT_RETURNED.format(self.caller, got, returned))

    def run(self, state: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        batch, kwargs = inputs
        places = self.form.places
        given = dict(zip(places, (state,) if len(places) == 1 else state, strict=True))
        args = given | batch
        result: Any = self.step(*(args[place] for place in sorted(args)), **kwargs)
        if places == (0,):
            is_state = jax.tree.structure(result) == jax.tree.structure(state)
            self.form = Form((0,), is_alone=is_state)
            if not (is_state or (isinstance(result, tuple) and len(result) > 1)):
                raise TypeError(
                    f"{self.caller}: step must return (state, aux), or the state "
                    f"alone; got {shown(result)}."
                )
        return self.form.split(result)

    def returned(self, state: PyTree, *aux: PyTree) -> Any:
        """What the user's call returns."""
        return self.form.joined(state, *aux) if aux else state


def scales_of(state: PyTree) -> list[LossScaleState]:
    return [scalars_of(node) for node in find_states(state).values()]


def with_scales(state: T, scales: Sequence[LossScaleState]) -> T:
    remaining = iter(scales)

    def replaced(node: PyTree) -> PyTree:
        return node._replace(**next(remaining)._asdict()) if is_scale(node) else node

    return jax.tree.map(replaced, state, is_leaf=is_scale)


def attempt(
    call: Call, state: T, inputs: PyTree
) -> tuple[T, PyTree, list[LossScaleState]]:
    # New containers: changes that a step makes in place do not reach the next one.
    new, aux = call.run(*jax.tree.map(lambda leaf: leaf, (state, inputs)))
    check_same(new, state, f"{call.caller}: step")
    return new, aux, scales_of(new)
