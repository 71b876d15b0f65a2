"""One call of a training step as a pure function of its state: in the style of optax.

The state is the first argument and the first result. `nnx_call.py` is for steps in the
style of NNX, which write into objects among their arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._tree import PyTree, T, check_leaves, cloned, partition
from .rule import SWITCHED_OFF, LossScaleState
from .state import describe, find_states, is_scale, scalars_of
from .state_types import check_same

ARRAYS_OF_THE_STATE = """ Keep arrays alone in the state; for an Equinox model, \
write params, static = eqx.partition(model, eqx.is_inexact_array), put params into the \
state, and call eqx.combine(params, static) in the step."""

NO_SCALE = """{}: the state holds no loss scale; found {}. An argument of the step \
must hold the state of an optimizer in jamp.dynamic_loss_scale, or be a GradScaler."""

NOT_RETURNED = """{}: step must return the state that it got, and perhaps something \
else: step(state, *batch) -> (state, aux). Of several arguments (params, opt_state) or \
(actor, critic), it returns each, in their order, and at one place: first, or where \
nothing else looks like them. It got {}, and returned {}."""

NOT_TOLD = """{}: step returned several things that look like the state it got. Return \
the new state first: step(state, *batch) -> (state, aux)."""


Step = Callable[..., Any]
Args = Sequence[PyTree]
Kwargs = dict[str, PyTree]


class Form(NamedTuple):
    """Where a step has its state: in which arguments, and where in its result."""

    places: tuple[int, ...]  # of the arguments: that of a single one is the state
    key: Any = None  # of the state, or its first part, in the result, or None for all
    parts: int = 0  # if not 0, that many items of the result are the state
    make: Callable[[list[Any]], Any] = tuple  # the result, from its items

    def state_of(self, args: Sequence[PyTree]) -> PyTree:
        if len(self.places) == 1:
            return args[self.places[0]]
        return tuple(args[place] for place in self.places)

    def split(self, result: Any) -> tuple[PyTree, PyTree]:
        """The state, and the other items of the result by their keys."""
        if self.key is None:
            return result, None
        items = items_of(result)
        if not self.parts:
            return items.pop(self.key), items
        return tuple(items.pop(self.key + i) for i in range(self.parts)), items

    def joined(self, state: PyTree, aux: Any) -> Any:
        if self.key is None:
            return state
        own = dict(enumerate(state, self.key)) if self.parts else {self.key: state}
        items = own | aux
        return self.make([items[key] for key in sorted(items)])


def items_of(result: Any) -> dict[Any, PyTree]:
    if isinstance(result, dict):
        return dict(result)
    return dict(enumerate(result)) if isinstance(result, tuple | list) else {}


def makes(result: Any) -> Callable[[list[Any]], Any]:
    if isinstance(result, dict):
        return lambda items: dict(zip(sorted(result), items, strict=True))
    return getattr(type(result), "_make", type(result))


def form_of(
    caller: str, result: Any, args: Sequence[PyTree], places: tuple[int, ...]
) -> Form | None:
    """Where a result has the state: all of it, its first items, or one other place.

    The state has the structure of these arguments. Where several other places have it,
    shapes decide.
    """
    kinds = [jax.tree.structure(args[place]) for place in places]

    def is_state(items: Any) -> bool:
        if len(kinds) == 1:
            return jax.tree.structure(items) == kinds[0]
        is_row = isinstance(items, tuple | list) and len(items) == len(kinds)
        return is_row and [*map(jax.tree.structure, items)] == kinds

    def has_shapes(form: Form) -> bool:
        found = jax.tree.leaves(form.split(result)[0])
        return [*map(jnp.shape, found)] == [*map(jnp.shape, wanted)]

    wanted = jax.tree.leaves([args[place] for place in places])
    if is_state(result):
        return Form(places)
    items, make, several = items_of(result), makes(result), len(kinds) > 1
    found = [
        Form(places, key, 0, make) for key, item in items.items() if is_state(item)
    ]
    if several and not isinstance(result, dict):
        rows = ((i, list(items.values())[i : i + len(kinds)]) for i in items)
        found += [Form(places, i, len(kinds), make) for i, row in rows if is_state(row)]
    found = [form for form in found if form.key == 0] or found
    if len(found) > 1:
        found = [form for form in found if has_shapes(form)]
    if len(found) > 1:
        raise TypeError(NOT_TOLD.format(caller))
    return found[0] if found else None


class Call:
    """One call of `step(state, *batch) -> (state, aux)`.

    The state may be several arguments, which the step returns in their order. It may
    return them alone, or anything before or after them.

    Attributes:
      caller: the function of jamp that a user called, for messages.
      state: a pytree that holds the loss scales in `DynamicLossScaleState`s.
      inputs: a pytree of the other arguments.
    """

    # How to write the wrapped step if it is to donate its state.
    donating = "jax.jit(jamp.retry(step), donate_argnums=0)"

    def __init__(self, caller: str, step: Step, args: Args, kwargs: Kwargs):
        self.caller, self.step = caller, step
        holders = tuple(place for place, arg in enumerate(args) if find_states(arg))
        if not holders:
            found = ", ".join(map(describe, args)) or "nothing"
            raise ValueError(NO_SCALE.format(caller, found))
        self.form = Form((0,), 0)
        if holders != (0,):
            result = self._result(args, kwargs)
            leading = tuple(range(holders[-1] + 1))
            forms = (form_of(caller, result, args, at) for at in (leading, holders))
            if not (form := next(filter(None, forms), None)):
                got = ", ".join(type(arg).__name__ for arg in args)
                raise TypeError(NOT_RETURNED.format(caller, got, named(result)))
            self.form = form
        self.state: PyTree = self.form.state_of(args)
        places = self.form.places
        batch = {i: arg for i, arg in enumerate(args) if i not in places}
        self.inputs: PyTree = (batch, kwargs)
        check_leaves(self.state, f"{caller}: the state", ARRAYS_OF_THE_STATE)

    def _result(self, args: Args, kwargs: Kwargs) -> Any:
        is_array = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
        arrays, rebuilt = partition((args, kwargs), is_array)

        def run(arrays: list[Any]) -> Any:
            args, kwargs = rebuilt(arrays)
            result = self.step(*args, **kwargs)
            check_leaves(result, f"{self.caller}: the result", ARRAYS_OF_THE_STATE)
            return result

        return jax.eval_shape(run, arrays)

    def run(self, state: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        batch, kwargs = inputs
        places = self.form.places
        given = dict(zip(places, (state,) if len(places) == 1 else state, strict=True))
        args = given | batch
        result: Any = self.step(*(args[place] for place in sorted(args)), **kwargs)
        if places == (0,):
            form = form_of(self.caller, result, [state], places)
            if form is None and not (isinstance(result, tuple) and len(result) > 1):
                raise TypeError(
                    f"{self.caller}: step must return (state, aux), or the state "
                    f"alone; got {shown(result)}."
                )
            self.form = form or Form(places, 0, 0, makes(result))
        return self.form.split(result)

    def is_off(self) -> bool:
        """Whether a loss scale of the state is disabled."""
        trackers = [s.hysteresis_tracker for s in scales_of(self.state)]
        return any(np.any(tracker == SWITCHED_OFF) for tracker in trackers)

    def returned(self, state: PyTree, *aux: PyTree) -> Any:
        """What the user's call returns."""
        return self.form.joined(state, *aux) if aux else state


def named(result: Any) -> str:
    if type(result) is tuple:
        return f"({', '.join(type(item).__name__ for item in result)})"
    return f"a {type(result).__name__}"


def scales_of(state: PyTree) -> list[LossScaleState]:
    return [scalars_of(node) for node in find_states(state).values()]


def with_scales(state: T, scales: Sequence[LossScaleState]) -> T:
    remaining = iter(scales)

    def replaced(node: PyTree) -> PyTree:
        return node._replace(**next(remaining)._asdict()) if is_scale(node) else node

    return jax.tree.map(replaced, state, is_leaf=is_scale)


def attempt(call: Call, state: T, inputs: PyTree) -> tuple[T, PyTree]:
    # New containers: changes that a step makes in place do not reach the next one.
    new, aux = call.run(*cloned((state, inputs)))
    check_same(new, state, f"{call.caller}: step")
    return new, aux
