"""`retry`: a step that overflowed is run again on the same batch, at a lower scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._checks import positive, shown
from .._tree import PyTree, T, check_leaves
from .attempts import Attempts
from .rule import LossScaleState
from .state import DynamicLossScaleState, describe, find_states, scalars_of

Aux = TypeVar("Aux")

ARRAYS_OF_THE_STATE = """ Keep arrays alone in the state; for an Equinox model, \
write params, static = eqx.partition(model, eqx.is_inexact_array), put params into the \
state, and call eqx.combine(params, static) in the step."""


def retry(
    step: Callable[..., tuple[T, Aux]], attempts: int = 8
) -> Callable[..., tuple[T, Aux]]:
    """A training step that loses no batch: after an overflow it runs again.

    The wrapped step has the same signature. When the gradients overflow, the loss scale
    backs off and the step runs again on the same batch, inside the same jitted program,
    until it is finite or `attempts` are used up. Then the batch is skipped, as without
    `retry`. A step that does not overflow computes what it did before.

    Everything in `state` except the loss scale is held: each attempt starts from the
    state before the first one. So batch statistics, an average of the parameters and
    counters advance once per batch, and a key in the state gives each attempt the same
    dropout. Effects outside the state cannot be held: prints, callbacks, and Python
    variables that the step changes.

    Write `jax.jit(jamp.retry(step), donate_argnums=0)`: the loop is then part of the
    program and the host never waits. Outside of a trace, the host reads after each
    attempt whether it overflowed, and the step must not donate its state.

    Inside `shard_map` or `pmap`, all replicas must agree that a step overflowed: give
    `axis_name` to `dynamic_loss_scale`, or average the gradients first. Like
    `jax.lax.while_loop`, the step with retries is not differentiable in reverse mode.

    Args:
      step: `step(state, *batch) -> (state, aux)`. The state is any pytree that holds a
        loss scale: a tuple, a dict, a `TrainState`. It comes back with the structure,
        shapes and dtypes that it had. `aux` is any pytree of arrays, and the last
        attempt's is returned. If a step updates one optimizer several times, the last
        update decides.
      attempts: the most attempts for one batch, >= 1. From the usual 2^16, eight
        attempts reach 2^8; to start from a scale that fits, see `find_loss_scale`.

    Returns:
      The step with retries. `jamp.metrics(state)["retried_steps"]` counts the attempts
      that were run again, `["skipped_steps"]` the batches that were still lost.

    Raises:
      TypeError: `step` is not a function, does not return a pair, or returns another
        state than it got.
      ValueError: `attempts` is below 1, the state holds no loss scale, or one inside
        `optax.MultiSteps`, or the step donated its state.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=2.0**18)
      >>> def step(state, x):
      ...     params, opt_state = state
      ...     loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
      ...     loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
      ...     return jamp.step(tx, grads, opt_state, params), loss
      >>> params = jnp.ones(2)
      >>> state = params, tx.init(params)
      >>> state, loss = jax.jit(jamp.retry(step))(state, jnp.ones(2))
      >>> print(state[0], jamp.loss_scale(state))
      [0.5 0.5] 32768.0
      >>> metrics = jamp.metrics(state)
      >>> print(metrics["retried_steps"], metrics["skipped_steps"])
      3 0

    PyTorch: no counterpart; `GradScaler` skips the batch (apex issue 114 asks for
    this).
    """
    if not callable(step):
        raise TypeError(f"step must be a function of a state; got {shown(step)}.")
    at_most = positive("attempts", attempts)

    @functools.wraps(step)
    def retried(state: T, *batch: Any, **kwargs: Any) -> tuple[T, Aux]:
        check_holds_one(state, "jamp.retry")
        call = lambda state, inputs: step(state, *inputs[0], **inputs[1])
        of_step = Attempts("jamp.retry", call, InState(), at_most)
        return of_step.run(state, (batch, kwargs))

    return retried


class InState:
    """The loss scales in a pytree: those of optax states."""

    def get(self, state: PyTree) -> list[LossScaleState]:
        return [scalars_of(node) for node in find_states(state).values()]

    def put(self, state: T, scales: Sequence[LossScaleState]) -> T:
        remaining = iter(scales)

        def is_scale(node: object) -> bool:
            return isinstance(node, DynamicLossScaleState)

        def replaced(node: PyTree) -> PyTree:
            if not is_scale(node):
                return node
            return node._replace(**next(remaining)._asdict())

        return jax.tree.map(replaced, state, is_leaf=is_scale)


def check_holds_one(state: PyTree, caller: str) -> None:
    """Raises an error if a state has no loss scale, or stacked ones, or other leaves.

    Raises:
      TypeError: a leaf is not an array.
      ValueError: there is not one loss scale per optimizer, which is one number.
    """
    found = find_states(state)
    if not found:
        raise ValueError(
            f"{caller}: the state holds no loss scale; found {describe(state)}. The "
            "first argument of the step must hold the state of an optimizer in "
            "jamp.dynamic_loss_scale."
        )
    check_leaves(state, f"{caller}: the state", ARRAYS_OF_THE_STATE)
    for path, node in found.items():
        if jnp.shape(scalars_of(node).loss_scale) != ():
            raise ValueError(
                f"{caller}: the loss scale at {path} must be one number; got shape "
                f"{jnp.shape(node.loss_scale)}. For stacked states use jax.vmap "
                "of the step with retries."
            )
