"""`find_loss_scale`: finds a first scale without losing batches. It proves the step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .calls import with_scales
from .proof import Proof, proof_of
from .rule import LossScaleState
from .styles import call_of
from .trials import LOWEST, Exponents, Trials

NEVER_FINITE = """{caller}: the step overflows at every loss scale down to 2**-126: \
there is an inf or nan in the batch, the parameters or the loss. \
jamp.debug.find_nonfinite names the op that makes it."""


def find_loss_scale(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sets the largest power-of-two loss scale at which a step is finite.

    It runs the step at some five scales, on the same state and batch, compiled once,
    and discards the results. Only the scale of the state, or of the NNX objects, is
    changed. Later batches may need a lower scale: leave some room, or use `retry`.

    Then it proves the step, in float32, at scales far apart: what a right step computes
    does not depend on a power-of-two loss scale, and a scale that overflows skips.
    `jamp.debug.check_step` reports more of it, and raises nothing.

    If the state holds several loss scales, each is found for its own gradients. A scale
    that the step does not use (disabled, or of an optimizer that does not step) does
    not change. `max_scale` is obeyed. `min_scale` is not, until the next step, after
    which a static scale is its argument again. The search ends at 2^32.

    Args:
      step: in the style of optax or of NNX, as for `retry`. It may be jitted, mapped by
        `jax.pmap` or `jax.vmap`, or a loop over steps. Nothing is donated.
      *args: the step's arguments: a state that holds a loss scale and a batch, or NNX
        objects and a batch. The state may be several arguments that the step returns
        in their order, such as `params, opt_state`.
      **kwargs: the step's keyword arguments.

    Returns:
      In the style of optax, the state with a scale between 2^-126 and 2^32, or the
      arguments that are the state. In the style of NNX, None: the scale is set in the
      objects.

    Raises:
      TypeError: `step` is not a function, does not return a pair (in the style of
        optax), or returns another state than it got, or it was called inside a trace.
      ValueError: no argument holds a loss scale, or one inside `optax.MultiSteps`, or
        the step is not finite at any scale, moves no parameter, or uses the scale
        wrongly: the message names what is likely, and what depends on the scale.

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

      With NNX:

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
      >>> jamp.find_loss_scale(train_step, model, optimizer, scaler, x)
      >>> scaler.get_scale()
      32768.0

    PyTorch: no counterpart; `GradScaler` starts at 2**16 and skips batches until the
    scale fits.
    """
    if not callable(step):
        raise TypeError(f"step must be a function of a state; got {shown(step)}.")
    call = call_of("jamp.find_loss_scale", step, args, kwargs)
    trials = Trials(call)
    found = find(trials)
    if found.proof.problems:
        raise ValueError("\n".join(found.proof.problems))
    return call.returned(with_scales(call.state, found_scales(trials, found)))


class Found(NamedTuple):
    exponents: Exponents  # the largest at which it is finite; its own if not asked
    asked: Sequence[jax.Array]  # bool: whether it asks each scale
    proof: Proof


def find(trials: Trials) -> Found:
    """The largest scales at which a step is finite, and whether it is right.

    Raises:
      ValueError: it is not finite at any scale.
    """
    exponents, asked = trials.highest()
    never = lambda exponent, asked: np.any(np.asarray(asked & (exponent < LOWEST)))
    if any(map(never, exponents, asked)):
        raise ValueError(NEVER_FINITE.format(caller=trials.call.caller))
    own = [np.floor(np.log2(np.asarray(s.loss_scale))) for s in trials.scales]
    rows = zip(asked, exponents, own, strict=True)
    exponents = [np.where(*row).astype(np.int32) for row in rows]
    return Found(exponents, asked, proof_of(trials.call, exponents))


def found_scales(trials: Trials, found: Found) -> list[LossScaleState]:
    def kept(scale: LossScaleState, exponent: Any, asked: Any) -> LossScaleState:
        value = np.where(asked, np.exp2(exponent), scale.loss_scale)
        return scale._replace(loss_scale=jnp.asarray(value, jnp.float32))

    return [*map(kept, trials.scales, found.exponents, found.asked)]
