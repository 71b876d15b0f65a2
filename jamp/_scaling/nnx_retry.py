"""`jamp.nnx.retry` and `jamp.nnx.find_loss_scale`: for functions over NNX objects."""

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
from flax import nnx

from .._checks import positive, shown
from .._tree import PyTree
from .attempts import Attempts
from .find_scale import search
from .rule import LossScaleState
from .scaler_state import ScalerState
from .state import DynamicLossScaleState, scalars_of

Aux = TypeVar("Aux")

DONATING = "nnx.jit(jamp.nnx.retry(step), donate_argnums=({}))"

STATIC = """{caller}: step must change nothing in its objects but the values of \
Variables. It changed an attribute, or added or removed Variables: call model.train(), \
model.eval() and the setters of a scaler outside of the step."""


def retry(step: Callable[..., Aux], attempts: int = 8) -> Callable[..., Aux]:
    """`jamp.retry` for a function over a model, an optimizer and a `GradScaler`.

    The wrapped step has the same signature and changes the same objects. When the
    gradients overflow, it runs again on the same batch with the scale that `update`
    left, inside the same jitted program. Everything in the objects except the scale is
    held between attempts: batch statistics, dropout counters, averages.

    The objects, including the scaler, must be arguments of the step: objects that it
    closes over cannot be held. An iteration of the scaler must end in the step, with
    `update`.

    Args:
      step: takes NNX objects and a batch, in any order and by name too, and returns
        any pytree of arrays. The loss scale is a `GradScaler` or an `nnx.Optimizer` of
        `dynamic_loss_scale`.
      attempts: the most attempts for one batch, >= 1.

    Returns:
      The step with retries, for `nnx.jit`. It returns what the last attempt did.

    Raises:
      TypeError: `step` is not a function, gives an object other Variables, or changes
        a static attribute, as `model.eval()` does.
      ValueError: `attempts` is below 1, no argument holds a loss scale, or an `nnx.jit`
        inside `step` donated the objects.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scaler = jamp.GradScaler(init_scale=2.0**18)
      >>> @nnx.jit
      ... @jamp.nnx.retry
      ... def train_step(model, optimizer, scaler, x):
      ...     def loss_fn(model):
      ...         return scaler.scale(jnp.mean(model(x).astype(jnp.float16)))
      ...     grads = nnx.grad(loss_fn)(model)
      ...     skipped = scaler.step(optimizer, model, grads)
      ...     scaler.update()
      ...     return skipped
      >>> print(train_step(model, optimizer, scaler, jnp.ones((2, 2))))
      False
      >>> print(scaler.get_scale(), jamp.metrics(scaler)["retried_steps"])
      32768.0 3

    PyTorch: no counterpart; `GradScaler` skips the batch (apex issue 114 asks for
    this).
    """
    if not callable(step):
        raise TypeError(f"step must be a function of NNX objects; got {shown(step)}.")
    at_most = positive("attempts", attempts)

    @functools.wraps(step)
    def retried(*args: Any, **kwargs: Any) -> Aux:
        call = Call("jamp.nnx.retry", step, args, kwargs)
        donating = DONATING.format(", ".join(map(str, range(len(call.objects)))))
        of_step = Attempts(call.caller, call.run, call, at_most, donating)
        state, aux = of_step.run(call.state, call.inputs)
        nnx.update(call.objects, state)
        return aux

    return retried


def find_loss_scale(step: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """`jamp.find_loss_scale` for a function over NNX objects: sets the loss scale.

    It sets the scale in the `GradScaler` (or the `nnx.Optimizer`) among the arguments
    to the largest power of two at which the step is finite, at most `max_scale` and
    2^32. Nothing else in the objects
    changes.

    Args:
      step: as for `jamp.nnx.retry`.
      *args: the step's arguments.
      **kwargs: the step's keyword arguments.

    Raises:
      TypeError: `step` is not a function, or gives an object other Variables.
      ValueError: no argument holds a loss scale, or the step is not finite at any.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scaler = jamp.GradScaler()
      >>> def train_step(model, optimizer, scaler, x):
      ...     def loss_fn(model):
      ...         return scaler.scale(jnp.mean(model(x).astype(jnp.float16)))
      ...     scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
      ...     scaler.update()
      >>> x = jnp.ones((2, 2))
      >>> jamp.nnx.find_loss_scale(train_step, model, optimizer, scaler, x)
      >>> scaler.get_scale()
      32768.0

    PyTorch: no counterpart; `GradScaler` starts at 2**16 and skips batches until the
    scale fits.
    """
    if not callable(step):
        raise TypeError(f"step must be a function of NNX objects; got {shown(step)}.")
    call = Call("jamp.nnx.find_loss_scale", step, args, kwargs)
    scales = search(Attempts(call.caller, call.run, call), call.state, call.inputs)
    nnx.update(call.objects, call.put(call.state, scales))


class Call:
    """One call of a step over NNX objects, as a function of their state."""

    def __init__(
        self,
        caller: str,
        step: Callable[..., PyTree],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ):
        self.caller, self.step, self.count = caller, step, len(args)
        given: dict[str, object] = {str(i): arg for i, arg in enumerate(args)} | kwargs
        self.names = [name for name, arg in given.items() if holds_variables(arg)]
        self.objects = [given[name] for name in self.names]
        self.inputs = {n: arg for n, arg in given.items() if n not in self.names}
        self.graph, state = nnx.split(self.objects)
        self.state = nnx.as_pure(state)
        holders = ScalerState, DynamicLossScaleState
        nodes = nnx.iter_graph(self.objects)
        self.places = [path for path, node in nodes if isinstance(node, holders)]
        if not self.places:
            raise ValueError(
                f"{caller}: no argument of the step holds a loss scale; got "
                f"{', '.join(type(arg).__name__ for arg in given.values()) or 'none'}. "
                "Pass the GradScaler as an argument."
            )

    def run(self, state: PyTree, inputs: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        """The objects' state after the step, and what it returned."""
        objects = nnx.merge(self.graph, state)
        given = inputs | dict(zip(self.names, objects, strict=True))
        args = [given.pop(str(i)) for i in range(self.count)]
        aux = self.step(*args, **given)
        graph, new = nnx.split(objects)
        if graph != self.graph:
            raise TypeError(STATIC.format(caller=self.caller))
        return nnx.as_pure(new), aux

    def get(self, state: PyTree) -> list[LossScaleState]:
        nodes = [_at(state, path) for path in self.places]
        return [scalars_of(SimpleNamespace(**node)) for node in nodes]

    def put(self, state: PyTree, scales: Sequence[LossScaleState]) -> PyTree:
        new = jax.tree.map(lambda leaf: leaf, state)
        for path, scale in zip(self.places, scales, strict=True):
            node = _at(new, path)
            for name, value in scale._asdict().items():
                node[name] = value
        return new


def _at(state: PyTree, path: Sequence[Hashable]) -> dict[str, jax.Array]:
    return functools.reduce(operator.getitem, path, state)


def holds_variables(arg: PyTree) -> bool:
    """Whether an argument is, or holds, an NNX object with state."""
    is_object = lambda node: isinstance(node, nnx.Variable | nnx.Pytree)
    return any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))
