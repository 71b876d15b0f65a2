"""A training with optax and one with NNX: what is carried between steps, and the step.

The carry is a pytree of arrays, which a test saves, places on a mesh, or compares bit
by bit. A step takes it and a batch, and returns the next one, the loss and the metrics.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

import jamp

Inner = optax.GradientTransformation | optax.MultiSteps
Params = Mapping[str, Any]
Trainer = tuple[Any, Callable[..., tuple[Any, Any, dict[str, Any]]]]


def optax_trainer(
    loss_fn: Callable[..., Any], params: Params, inner: Inner, **scaling: Any
) -> Trainer:
    """With `jamp.dynamic_loss_scale`; the loss is of parameters and a batch."""
    tx = jamp.dynamic_loss_scale(inner, **scaling)

    def step(carry, *batch):
        params, opt_state = carry
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *batch)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (params, opt_state), loss, jamp.metrics(opt_state)

    return (params, tx.init(params)), step


class Model(nnx.Module):
    def __init__(self, params: Params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))


def nnx_trainer(
    loss_fn: Callable[..., Any],
    params: Params,
    inner: optax.GradientTransformation,
    **scaling: Any,
) -> Trainer:
    """With `jamp.GradScaler`."""
    model = Model(params)
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    graph, carry = nnx.split((model, optimizer, jamp.GradScaler(**scaling)))

    def step(carry, *batch):
        model, optimizer, scaler = nnx.merge(graph, carry)

        def scaled_loss(model):
            loss = loss_fn(nnx.to_pure_dict(nnx.state(model, nnx.Param)), *batch)
            return scaler.scale(loss), loss

        grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
        scaler.step(optimizer, model, grads)
        scaler.update()
        metrics = jamp.metrics(scaler)
        return nnx.state((model, optimizer, scaler)), loss, metrics

    return carry, step
