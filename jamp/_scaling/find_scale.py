"""`find_loss_scale`: finds a first scale without losing batches."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import is_traced, shown
from .._tree import PyTree, T
from .arithmetic import power_of_two
from .attempts import Attempts
from .mesh import on_every_replica
from .retry import InState, check_holds_one
from .rule import LossScaleState

LOWEST, HIGHEST = -126, 126  # exponents, above which a scale's inverse is subnormal
MARK = np.uint32(1)  # `recent_skips` before a step; using the scale shifts it

NEVER_FINITE = """{caller}: the step overflows at every loss scale down to 2**-126: \
there is an inf or nan in the batch, the parameters or the loss. \
jamp.debug.find_nonfinite names the op that makes it."""


def find_loss_scale(
    step: Callable[..., tuple[T, Any]], state: T, *batch: Any, **kwargs: Any
) -> T:
    """The state with the largest power-of-two loss scale at which the step is finite.

    It runs the step at eight scales, on the same state and batch, in one jitted
    program, and discards the results. Only the scale of the returned state differs.
    Later batches may need a lower scale: leave some room, or use `retry`.

    If the state holds several loss scales, each is found for its own gradients. A scale
    that the step does not use (disabled, or of an optimizer that does not step) does
    not change. `min_scale` and `max_scale` are ignored.

    Args:
      step: `step(state, *batch) -> (state, aux)`, as for `retry`. Nothing is donated.
      state: any pytree that holds a loss scale.
      *batch: the step's other arguments.
      **kwargs: the step's keyword arguments.

    Returns:
      The state with a scale between 2**-126 and 2**126. Inside a trace, which cannot
      raise an error, a step that is never finite keeps the scale that was there.

    Raises:
      TypeError: `step` is not a function, does not return a pair, or returns another
        state than it got.
      ValueError: the state holds no loss scale, or one inside `optax.MultiSteps`, or
        the step is not finite at any scale.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.5))
      >>> def step(state, x):
      ...     params, opt_state = state
      ...     loss_fn = lambda params: jnp.sum((params * x).astype(jnp.float16))
      ...     loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
      ...     return jamp.step(tx, grads, opt_state, params), loss
      >>> params = jnp.ones(2)
      >>> state = params, tx.init(params)
      >>> state = jamp.find_loss_scale(step, state, jnp.full(2, 1e-3))
      >>> print(state[0], jamp.loss_scale(state))
      [1. 1.] 32768.0

    PyTorch: no counterpart; `GradScaler` starts at 2**16 and skips batches until the
    scale fits.
    """
    caller = "jamp.find_loss_scale"
    if not callable(step):
        raise TypeError(f"step must be a function of a state; got {shown(step)}.")
    check_holds_one(state, caller)
    call = lambda state, inputs: step(state, *inputs[0], **inputs[1])
    scales = InState()
    return scales.put(
        state, search(Attempts(caller, call, scales), state, (batch, kwargs))
    )


def search(attempts: Attempts, state: PyTree, inputs: PyTree) -> list[LossScaleState]:
    """The loss scales of a state, with the largest at which its step is finite.

    Raises:
      ValueError: the step is not finite at any scale (only outside a trace).
    """
    leaves, tree = jax.tree.flatten(inputs)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = list(itertools.compress(leaves, is_array))

    def run(state: PyTree, arrays: list[Any]) -> tuple[jax.Array, jax.Array]:
        given = iter(arrays)  # other leaves, such as `train=True`, do not change
        both = zip(leaves, is_array, strict=True)
        all_leaves = [next(given) if is_one else leaf for leaf, is_one in both]
        return bisect(attempts, state, tree.unflatten(all_leaves))

    is_inside = any(map(is_traced, jax.tree.leaves((state, inputs))))
    exponents, asked = (run if is_inside else jax.jit(run))(state, arrays)
    never = asked & (exponents < LOWEST)
    if not is_traced(never) and np.any(np.asarray(never)):
        raise ValueError(NEVER_FINITE.format(caller=attempts.caller))
    old = attempts.scales.get(state)
    found = asked & (exponents >= LOWEST)
    kept = [
        jnp.where(is_found, power_of_two(exponent), scale.loss_scale)
        for is_found, exponent, scale in zip(found, exponents, old, strict=True)
    ]
    return [o._replace(loss_scale=k) for o, k in zip(old, kept, strict=True)]


def bisect(
    attempts: Attempts, state: PyTree, inputs: PyTree
) -> tuple[jax.Array, jax.Array]:
    """The largest exponent at which the step is finite, and whether the scale is used.

    Returns:
      For each scale, int32 [scales]: the exponent, or `LOWEST - 1` if there is none.
      And bool [scales]: whether the step checked for an overflow, which it does not do
      if the scale is disabled, or if its optimizer does not step.
    """
    old, mark = attempts.scales.get(state), jnp.uint32(MARK)

    def halve(_: Any, between: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        finite, infinite, _ = between
        middle = jnp.maximum((finite + infinite) // 2, LOWEST)
        tried = [
            scale._replace(
                loss_scale=power_of_two(exponent), recent_skips=jnp.uint32(MARK)
            )
            for scale, exponent in zip(old, middle, strict=True)
        ]
        at_those = attempts.scales.put(state, tried)
        _, _, new = attempts.attempt(at_those, inputs)
        found = on_every_replica(jnp.stack([scale.found_inf for scale in new]))
        asked = jnp.stack([scale.recent_skips != mark for scale in new])
        finite = jnp.where(found, finite, middle)
        return finite, jnp.where(found, middle, infinite), asked

    count = (len(old),)
    start = (
        jnp.full(count, LOWEST - 1, jnp.int32),
        jnp.full(count, HIGHEST + 1, jnp.int32),
        jnp.zeros(count, bool),
    )
    times = math.ceil(math.log2(HIGHEST - LOWEST + 2))
    exponents, _, asked = lax.fori_loop(0, times, halve, start)
    return exponents, asked
