"""jamp on the streams of `cases`: its GradScaler, its optax wrapper, its arithmetic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jamp
from jamp._scaling import rule

from .cases import LEARNING_RATE, MOMENTUM, SIZE, Case, streams
from .trajectory import Trajectory, trajectory

Gradients = tuple[np.ndarray, np.ndarray]  # what `cases.streams` gives

SGD = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)


class Model(nnx.Module):
    def __init__(self, dtype: Any = jnp.float32):
        self.w = nnx.Param(jnp.zeros(SIZE, dtype))


def _step(
    train: tuple[tuple[Model, ...], tuple[nnx.Optimizer, ...], jamp.GradScaler],
    gradient: tuple[jax.Array, jax.Array],
    new_scale: jax.Array | float | None,
    unscale_first: bool,
) -> tuple[jax.Array, ...]:
    models, optimizers, scaler = train
    skipped = []
    for model, optimizer, base, poison in zip(
        models, optimizers, *gradient, strict=True
    ):
        scaled = jnp.where(poison == 0, scaler.scale(base), poison)
        grads = jax.tree.map(lambda _, g=scaled: g, nnx.state(model, nnx.Param))
        if unscale_first:
            grads = scaler.unscale_(optimizer, grads)
        skipped.append(scaler.step(optimizer, model, grads))
    scaler.update(new_scale)
    return (
        jnp.float32(scaler.get_scale()),
        scaler.growth_tracker[...],
        jnp.stack(skipped),
        jnp.stack([model.w[...] for model in models]),
    )


_jit_step = nnx.jit(_step, static_argnames="unscale_first")


@functools.partial(nnx.jit, static_argnames="unscale_first")
def _jit_steps(train: Any, gradients: Any, unscale_first: bool) -> tuple[Any, ...]:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scan(train, gradient):
        return train, _step(train, gradient, None, unscale_first)

    _, records = scan(train, gradients)
    return records


def run_nnx(
    case: Case, step_by_step: bool = False, gradients: Gradients | None = None
) -> Trajectory:
    """Runs a case with `jamp.GradScaler` and `nnx.Optimizer` under `nnx.jit`.

    Args:
      case: the case.
      step_by_step: one call of a jitted function for every step, as in a training
        script, instead of one `nnx.scan` from event to event, which is faster.
      gradients: used instead of `streams(case)`.
    """
    base, poison = gradients or streams(case)
    scaler = jamp.GradScaler(**case.scaler_kwargs)
    models = tuple(Model() for _ in range(case.n_optimizers))
    optimizers = tuple(nnx.Optimizer(model, SGD, wrt=nnx.Param) for model in models)
    train = (models, optimizers, scaler)
    records = []
    for start, stop in case.segments(case.steps):
        for method, value in case.setters(start):
            getattr(scaler, method)(value)
        new_scale = case.new_scale(start)
        part = slice(start, stop)
        if step_by_step or new_scale is not None:
            for gradient in zip(base[part], poison[part], strict=True):
                record = _jit_step(train, gradient, new_scale, case.unscale_first)
                records.append([np.asarray(value)[None] for value in record])
        else:
            gradients = (base[part], poison[part])
            records.append(_jit_steps(train, gradients, case.unscale_first))
    return trajectory(*map(np.concatenate, zip(*records, strict=True)))


def fits_optax(case: Case) -> bool:
    """Whether the optax wrapper can run a case: no setters, and a single optimizer."""
    return case.n_optimizers == 1 and not case.events and not case.unscale_first


@functools.partial(
    jax.jit,
    static_argnames=("growth_factor", "backoff_factor", "growth_interval", "enabled"),
)
def _optax_scan(
    init_scale: jax.Array, base: jax.Array, poison: jax.Array, **kwargs: Any
) -> tuple[Any, ...]:
    tx = jamp.dynamic_loss_scale(SGD, **kwargs)

    def step(carry, gradient):
        params, opt_state = carry
        base, poison = gradient
        scaled = jamp.scale_loss(base, opt_state)
        grads = jnp.where(poison == 0, scaled, poison)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        metrics = jamp.metrics(opt_state)
        names = ("loss_scale", "growth_tracker", "found_inf")
        return (params, opt_state), (*(metrics[name] for name in names), params)

    params = jnp.zeros(SIZE)
    # Set here, not in the wrapper, so that one compilation serves every initial scale.
    opt_state: Any = tx.init(params)
    carry = (params, opt_state._replace(loss_scale=init_scale))
    _, records = lax.scan(step, carry, (base, poison))
    return records


def run_optax(case: Case, gradients: Gradients | None = None) -> Trajectory:
    """Runs a case with `jamp.dynamic_loss_scale` and `jamp.step`, all in one scan.

    Args:
      case: the case.
      gradients: used instead of `streams(case)`.
    """
    kwargs = case.scaler_kwargs
    init_scale = kwargs.pop("init_scale")
    if not case.enabled:
        init_scale = 1.0
    base, poison = gradients or streams(case)
    scale, tracker, skipped, params = _optax_scan(
        jnp.float32(init_scale), base[:, 0], poison[:, 0], **kwargs
    )
    return trajectory(scale, tracker, skipped[:, None], params[:, None])


def run_scale(case: Case, found_inf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the tracker alone, from one `lax.scan` over the arithmetic."""
    kwargs = case.scaler_kwargs
    del kwargs["enabled"]
    config = rule.LossScaleConfig(**kwargs)

    @jax.jit
    def scan(found_inf):
        def step(state, found_inf):
            state = rule.update(state, found_inf, config)
            return state, (state.loss_scale, state.growth_tracker)

        return lax.scan(step, rule.init(config), found_inf)[1]

    scales, trackers = scan(found_inf)
    return np.asarray(scales), np.asarray(trackers)
