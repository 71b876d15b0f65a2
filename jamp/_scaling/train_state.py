"""Flax's `TrainState`, with steps by `jamp.step`."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import optax
from flax import linen  # Flax first, then its parts, so that threads can import it
from flax.training import train_state

from .._tree import PyTree
from .step import step
from .transformation import as_transformation

FP8_SCALES = linen.fp8_ops.OVERWRITE_WITH_GRADIENT  # a collection that Flax handles


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, with `jamp.step` in `apply_gradients`.

    It has the same fields, the same `create` and the same results, and checkpoints are
    interchangeable. With `tx=jamp.dynamic_loss_scale(...)`, a step with non-finite
    gradients changes neither `params` nor the inner optimizer state. `step` counts
    every call, skipped or not; `jamp.metrics(state)["skipped_steps"]` counts the
    skipped ones. Flax's fp8 scales, which gradients overwrite, are not held.

    Attributes:
      step: int32 []: calls of `apply_gradients` so far.
      apply_fn: of the model; jamp does not call it.
      params: any pytree of arrays.
      tx: an optax transformation, such as `jamp.dynamic_loss_scale(...)`.
      opt_state: its state.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> state = jamp.linen.TrainState.create(
      ...     apply_fn=None,
      ...     params={"w": jnp.ones(2)},
      ...     tx=jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=8.0),
      ... )
      >>> loss_fn = lambda params: jnp.sum(params["w"] ** 2)
      >>> loss, grads = jamp.value_and_grad(loss_fn, state)(state.params)
      >>> state = state.apply_gradients(grads=grads)
      >>> print(loss, state.params["w"], jamp.loss_scale(state))
      2.0 [0. 0.] 8.0
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., object] | None,
        params: PyTree,
        tx: optax.GradientTransformation | optax.MultiSteps,
        **kwargs: Any,
    ) -> Self:
        """A state at step 0, with `tx.init(params)`: Flax's `create`.

        Args:
          apply_fn: stored in the state; it may be None.
          params: any pytree of arrays.
          tx: an optax transformation.
          **kwargs: fields of a subclass.

        Raises:
          TypeError: `tx` is not a gradient transformation.
        """
        as_transformation(tx, "tx")
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """One optimizer step: `jamp.step`, then `step + 1`, then `**kwargs`.

        Args:
          grads: scaled gradients, of the structure of `params`.
          **kwargs: other fields to replace, such as `batch_stats`. They are replaced
            on a skipped step too.

        Raises:
          ValueError: the gradients do not have the parameters' structure, or
            `opt_state` belongs to another `tx`.
        """
        is_dict = isinstance(grads, Mapping)
        if is_dict and FP8_SCALES in grads:
            return super().apply_gradients(grads=grads, **kwargs)
        params, opt_state = step(self.tx, grads, self.opt_state, self.params)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
