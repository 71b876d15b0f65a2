"""One call of a training step over NNX objects as a pure function of their state."""

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx

from .._checks import imported
from .._tree import PyTree
from .calls import Args, Call, Kwargs, Step
from .state import DynamicLossScaleState

NO_OBJECT = """{}: no argument of the step holds a loss scale; got {}. Pass the \
GradScaler as an argument."""

STATIC = """{}: step must change nothing in its objects but the values of Variables. \
It changed an attribute, or added or removed Variables: call model.train(), \
model.eval() and the setters of a scaler outside of the step. If the first step of an \
optimizer adds Variables, take that step on its own before this one."""


class NNXCall(Call):
    """One call of a step that writes into objects among its arguments.

    The state is that of the objects, with a `DynamicLossScaleState` in each place where
    a `GradScaler` or an optimizer's state has a loss scale.
    """

    def __init__(self, caller: str, step: Step, args: Args, kwargs: Kwargs):
        self.caller, self.step, self.count = caller, step, len(args)
        given: dict[str, object] = {str(i): arg for i, arg in enumerate(args)} | kwargs
        is_object = lambda node: isinstance(node, nnx.Variable | nnx.Pytree)
        holds = lambda arg: any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))
        self.names = [name for name, arg in given.items() if holds(arg)]
        self.objects = [given[name] for name in self.names]
        self.inputs = {n: arg for n, arg in given.items() if n not in self.names}
        places = ", ".join(map(str, range(len(self.objects))))
        self.donating = f"nnx.jit(jamp.retry(step), donate_argnums=({places}))"
        holders = (DynamicLossScaleState, *imported("jamp", "GradScaler"))
        nodes = nnx.iter_graph(self.objects)
        found = {path: node for path, node in nodes if isinstance(node, holders)}
        self.places = [*found]
        self.scalers = [x for x in found.values() if hasattr(x, "is_enabled")]
        if not self.places:
            got = ", ".join(type(arg).__name__ for arg in given.values())
            raise ValueError(NO_OBJECT.format(caller, got))
        self.graph, state = nnx.split(self.objects)
        self.state = self.pure(state)

    def run(self, state: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        objects = nnx.merge(self.graph, self.of_nnx(state))
        given = inputs | dict(zip(self.names, objects, strict=True))
        args = [given.pop(str(i)) for i in range(self.count)]
        aux = self.step(*args, **given)
        graph, new = nnx.split(objects)
        if graph != self.graph:
            raise TypeError(STATIC.format(self.caller))
        return self.pure(new), aux

    def is_off(self) -> bool:
        return super().is_off() or not all(x.is_enabled() for x in self.scalers)

    def returned(self, state: PyTree, *aux: PyTree) -> Any:
        nnx.update(self.objects, self.of_nnx(state))
        return aux[0] if aux else None

    def pure(self, state: nnx.State[Hashable, PyTree]) -> PyTree:
        """A state of NNX as a pytree, with the loss scales as in optax."""

        def as_in_optax(node: Any) -> DynamicLossScaleState:
            fields: dict[str, Any] = {"inner_state": None}  # of a `GradScaler`
            return DynamicLossScaleState(**(fields | dict(node)))

        return self._in_places(as_in_optax, nnx.as_pure(state))

    def of_nnx(self, state: PyTree) -> PyTree:

        def as_in_nnx(node: DynamicLossScaleState) -> nnx.State[str, PyTree]:
            fields = node._asdict()
            if node.inner_state is None:
                del fields["inner_state"]
            return nnx.State(fields)

        return self._in_places(as_in_nnx, state)

    def _in_places(self, change: Callable[[Any], Any], state: PyTree) -> PyTree:
        new = [jax.tree.map(lambda leaf: leaf, state)]
        for path in self.places:
            *above, name = (0, *path)
            holder: Any = functools.reduce(operator.getitem, above, new)
            holder[name] = change(holder[name])
        return new[0]
