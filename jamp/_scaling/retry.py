"""`retry`: a step that overflowed is run again on the same batch, at a lower scale.

After an overflow, the next attempt starts from the state before the last one, with the
loss scale that the last one returned. So a step changes its state once per batch,
whatever it does to that state.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import is_traced, positive, shown
from .._tree import Flag, PyTree, T
from .calls import Call, attempt, scales_of, with_scales
from .mesh import on_every_replica
from .rule import LossScaleState
from .skip import as_types, select
from .state import check_not_stacked
from .styles import call_of
from .traced import Traced

P = ParamSpec("P")
R = TypeVar("R")
Carry = tuple[jax.Array, jax.Array, T, PyTree]  # attempts, whether to go on, results

DELETED = """{caller}: step donated the buffers of its state (donate_argnums), so it \
cannot run again after an overflow. Jit and donate around {caller}: {cure}."""


def retry(step: Callable[P, R], attempts: int = 8) -> Callable[P, R]:
    """A training step that loses no batch: after an overflow it runs again.

    The wrapped step has the same signature. When the gradients overflow, the loss scale
    backs off and the step runs again on the same batch, inside the same jitted program,
    until it is finite or `attempts` are used up. Then the batch is skipped, as without
    `retry`. A step that does not overflow computes what it did before, up to a last bit
    where XLA fuses the loop's body differently.

    It takes steps of two styles, and tells them apart by their arguments:

        state, aux = step(state, *batch)                  # optax: the state is returned
        aux = step(model, optimizer, scaler, *batch)      # NNX: the objects are changed

    Everything in the state, or in the objects, except the loss scale is held: each
    attempt starts from what was there before the first one. So batch statistics, an
    average of the parameters and counters advance once per batch, and a key in the
    state gives each attempt the same dropout. Effects outside the state cannot be held:
    prints, callbacks, Python variables and objects that the step closes over.

    Write `jax.jit(jamp.retry(step), donate_argnums=0)` or `nnx.jit(jamp.retry(step))`:
    the loop is then part of the program and the host never waits. Outside of a trace,
    the host reads after each attempt whether it overflowed, and the step must not
    donate its state.

    Inside `shard_map` or `pmap`, all replicas must agree that a step overflowed: give
    `axis_name` to `dynamic_loss_scale`, or average the gradients first. Like
    `jax.lax.while_loop`, the step with retries is not differentiable in reverse mode.

    Args:
      step: in the style of optax, `step(state, *batch) -> (state, aux)`. The state is
        any pytree that holds a loss scale: a tuple, a dict, a `TrainState`. It comes
        back with the structure, shapes and dtypes that it had. It may be several
        arguments (`params, opt_state`), and nothing else need come back. In the style
        of NNX, a function of NNX objects and a batch, in any order and by name too. One
        of the objects is the `GradScaler`, or an `nnx.Optimizer` of
        `dynamic_loss_scale`. An iteration of the scaler ends in the step, with
        `update`. `aux` is any pytree of arrays, and the last attempt's is returned. If
        a step updates one optimizer several times, the last update decides.
      attempts: the most attempts for one batch, >= 1. From the usual 2^16, the
        eighth runs at 2^9; to start from a scale that fits, see `find_loss_scale`.

    Returns:
      The step with retries. `jamp.metrics(state)["retried_steps"]`, or that of the
      scaler, counts the attempts that were run again, `["skipped_steps"]` the batches
      that were still lost.

    Raises:
      TypeError: `step` is not a function, does not return a pair (in the style of
        optax), returns another state than it got, gives an NNX object other Variables,
        or changes a static attribute, as `model.eval()` does.
      ValueError: `attempts` is below 1, no argument holds a loss scale, or one inside
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

      With NNX:

      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scaler = jamp.GradScaler(init_scale=2.0**18)
      >>> @nnx.jit
      ... @jamp.retry
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
        raise TypeError(f"step must be a function of a state; got {shown(step)}.")
    at_most = positive("attempts", attempts)

    @functools.wraps(step)
    def retried(*args: P.args, **kwargs: P.kwargs) -> Any:
        call = call_of("jamp.retry", step, args, kwargs)
        for scale in scales_of(call.state):
            check_not_stacked(scale._asdict(), call.caller)
        return call.returned(*run_attempts(call, at_most))

    return retried


def run_attempts(call: Call, at_most: int) -> tuple[PyTree, PyTree]:
    state = call.state
    if any(map(is_traced, jax.tree.leaves((state, call.inputs)))):
        return run_in_one_program(call, state, at_most)
    count = 0
    while True:
        count += 1
        new, aux = attempt(call, state, call.inputs)
        arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
        if any(not is_traced(x) and x.is_deleted() for x in arrays):
            raise ValueError(DELETED.format(caller=call.caller, cure=call.donating))
        again = is_worth_another(state, new)
        if is_traced(again):  # the step reads a traced value that it closes over
            return run_in_one_program(call, state, at_most)
        if count == at_most or not again:
            return new, aux
        state = with_next_scales(state, new)


def is_worth_another(state: PyTree, attempted: PyTree) -> Flag:
    """Whether an attempt overflowed, and left a scale that may not: bool [].

    A scale that does not move (at its floor, or static) would overflow again. A scale
    that the step did not use (inside `MultiSteps`) does not move either.
    """
    flags: list[jax.Array] = []
    for old, new in zip(scales_of(state), scales_of(attempted), strict=True):
        moved = (new.loss_scale != old.loss_scale) | (
            new.hysteresis_tracker != old.hysteresis_tracker
        )
        flags.append(new.found_inf & moved)
    return on_every_replica(jnp.any(jnp.stack(flags)))


def with_next_scales(state: T, attempted: T) -> T:
    """A state with the loss scales for another attempt.

    A scale that overflowed is as the attempt left it, except for the record of skipped
    steps: the batch is not skipped yet.
    """

    def following(old: LossScaleState, new: LossScaleState) -> LossScaleState:
        retried = old._replace(
            loss_scale=new.loss_scale,
            growth_tracker=new.growth_tracker,
            hysteresis_tracker=new.hysteresis_tracker,
            retried_steps=old.retried_steps + 1,
        )
        choose = lambda new, old: jnp.where(found_inf, new, old)
        found_inf = new.found_inf
        return LossScaleState(*map(choose, retried, old))

    scales = map(following, scales_of(state), scales_of(attempted))
    return with_scales(state, [*scales])


def run_in_one_program(call: Call, state: T, at_most: int) -> tuple[T, PyTree]:
    """`run_attempts` inside a trace: one `while`, the step traced once."""
    once = Traced(lambda state: attempt(call, state, call.inputs), state)
    aux = jax.tree.map(jnp.zeros_like, once.shapes[1])  # not read

    def body(carry: Carry[T]) -> Carry[T]:
        count, _, carried, _ = carry
        held = jax.tree.map(restored, carried, first, state)
        held = with_scales(held, scales_of(carried))
        new, aux = once(held)
        again = is_worth_another(held, new) & (count + 1 < at_most)
        held = with_next_scales(held, new)
        return count + 1, again, select(again, as_types(new, held), new), aux

    # The loop carries what the step returns. Where that has another type, such as a
    # split array for a whole one, each attempt gets the array that was given.
    first = as_types(once.shapes[0], state)
    restored = lambda carried, first, given: carried if first is given else given
    start = jnp.int32(0), jnp.bool_(True), first, aux
    _, _, state, aux = lax.while_loop(lambda carry: carry[1], body, start)
    return state, aux
