"""`retry`: a step that overflowed is run again on the same batch, at a lower scale."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .._checks import positive, shown
from .attempts import call_of, run

P, R = ParamSpec("P"), TypeVar("R")


def retry(step: Callable[P, R], attempts: int = 8) -> Callable[P, R]:
    """A training step that loses no batch: after an overflow it runs again.

    The wrapped step has the same signature. When the gradients overflow, the loss scale
    backs off and the step runs again on the same batch, inside the same jitted program,
    until it is finite or `attempts` are used up. Then the batch is skipped, as without
    `retry`. A step that does not overflow computes what it did before.

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
        back with the structure, shapes and dtypes that it had. In the style of NNX, a
        function of NNX objects and a batch, in any order and by name too. One of the
        objects is the `GradScaler`, or an `nnx.Optimizer` of `dynamic_loss_scale`. An
        iteration of the scaler ends in the step, with `update`. `aux` is any pytree of
        arrays, and the last attempt's is returned. If a step updates one optimizer
        several times, the last update decides.
      attempts: the most attempts for one batch, >= 1. From the usual 2^16, eight
        attempts reach 2^8; to start from a scale that fits, see `find_loss_scale`.

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
        return call.returned(*run(call, at_most))

    return retried
