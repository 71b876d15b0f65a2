"""jamp's sides of `behaviors`: `GradScaler` with NNX, `dynamic_loss_scale` with optax.

Both share one model and one loss, written in plain JAX.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jamp

from .behaviors_table import (
    BETAS,
    EAGER,
    GRID,
    LEAVES,
    MAX_NORM,
    STEPS,
    WEIGHT_DECAY,
    Behavior,
    Record,
    Saved,
    Trainer,
    copied,
    data,
    record,
)

Params = dict[str, jax.Array]


def unflatten(behavior: Behavior, flat: Any) -> Params:
    """The parameters, or gradients, in a flat vector."""
    dtype = jnp.bfloat16 if behavior.bfloat16 else jnp.float32
    return {
        name: jnp.asarray(flat[part], dtype).reshape(shape)
        for name, (part, shape) in LEAVES.items()
    }


def flatten(params: Any) -> np.ndarray:
    leaves = [np.asarray(params[name], np.float32).ravel() for name in LEAVES]
    return np.concatenate(leaves)


def _rounded(w: jax.Array) -> jax.Array:
    return jnp.round(lax.stop_gradient(w) * GRID) / GRID + (w - lax.stop_gradient(w))


def forward(behavior: Behavior, params: Params, x: jax.Array) -> jax.Array:
    activation = jnp.tanh
    if behavior.exact:
        params, activation = jax.tree.map(_rounded, params), jax.nn.relu
    hidden = activation(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def losses(behavior: Behavior, params: list[Params], x: Any, y: Any) -> list[jax.Array]:
    """A loss for each model; with several, each depends on all of them."""
    region = contextlib.nullcontext()
    if behavior.autocast:
        region = jamp.autocast(dtype=jnp.float16)
    with region:
        outputs = [forward(behavior, p, x) for p in params]
        if behavior.models == 2:
            first, second = outputs
            outputs = [0.25 * first + 0.75 * second, 0.5 * first - 0.5 * second]
        return [jnp.mean(jnp.square(output - y)) for output in outputs]


def total_loss(
    behavior: Behavior,
    params: list[Params],
    batch: tuple[Any, Any, Any],
    scale: Callable[[Any], jax.Array],
    loss_scale: Any,
) -> jax.Array:
    """The loss of one batch, with the gradient penalty if there is one."""
    x, y, factor = batch
    factor = factor / behavior.accumulate

    def loss_fn(params):
        return add([loss * factor for loss in losses(behavior, params, x, y)])

    if not behavior.penalty:
        return loss_fn(params)
    scaled = jax.grad(lambda params: scale(loss_fn(params)))(params)
    squares = [jnp.sum((g / loss_scale) ** 2) for g in jax.tree.leaves(scaled)]
    return loss_fn(params) + jnp.sqrt(sum(squares))


def clip(grads: Any, max_norm: Any) -> Any:
    """`torch.nn.utils.clip_grad_norm_`: adds 1e-6, which optax's clipping does not."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor, grads)


def write(grads: Any, flat: Any, behavior: Behavior, everything: bool = False) -> Any:
    """Writes the nonzero elements of a flat vector, or all, over the gradients."""
    leaves, structure = jax.tree.flatten(grads)
    news = jax.tree.leaves(unflatten(behavior, flat))  # in the same order, by name
    return structure.unflatten(
        new if everything else jnp.where(new == 0, old, new)
        for old, new in zip(leaves, news, strict=True)
    )


def optimizer(behavior: Behavior) -> optax.GradientTransformation:
    if behavior.optimizer == "AdamW":
        return optax.adamw(behavior.learning_rate, *BETAS, weight_decay=WEIGHT_DECAY)
    return optax.sgd(behavior.learning_rate, momentum=behavior.momentum or None)


def add(trees: list[Any]) -> Any:
    return functools.reduce(lambda *pair: jax.tree.map(jnp.add, *pair), trees)


# GradScaler


class Model(nnx.Module):
    def __init__(self, behavior: Behavior, flat: Any):
        for name, value in unflatten(behavior, flat).items():
            setattr(self, name, nnx.Param(value))


def pure(model: Any) -> Any:
    return nnx.as_pure(nnx.state(model, nnx.Param))


def _nnx_step(train: Any, batch: Any, new_scale: Any, behavior: Behavior) -> Any:
    models, optimizers, scaler = train
    xs, ys, factor, poison, drawn = batch

    def loss_fn(models, x, y):
        loss = total_loss(
            behavior,
            [dict(pure(model)) for model in models],
            (x, y, factor),
            scaler.scale,
            scaler.get_scale(),
        )
        return scaler.scale(loss), loss

    if behavior.bfloat16:
        like = nnx.state(models[0], nnx.Param)
        loss, grads = 0.0, [write(like, drawn, behavior, everything=True)]
    else:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        results = [grad_fn(models, x, y) for x, y in zip(xs, ys, strict=True)]
        loss = sum(loss for (_, loss), _ in results)
        grads = list(add([grads for _, grads in results]))
    poisoned = lambda grads: [
        write(g, flat, behavior) for g, flat in zip(grads, poison, strict=True)
    ]
    if behavior.clip == "scaled":
        grads = [clip(g, MAX_NORM * scaler.get_scale()) for g in grads]
    if not behavior.overwrite:
        grads = poisoned(grads)
    if behavior.unscales:
        grads[0] = scaler.unscale_(optimizers[0], grads[0])
    if behavior.clip == "unscaled":
        grads[0] = clip(grads[0], MAX_NORM)
    if behavior.overwrite:
        grads = poisoned(grads)
    skipped = [
        scaler.step(opt, model, g)
        for opt, model, g in zip(optimizers, models, grads, strict=True)
    ]
    scaler.update(new_scale)
    return jnp.stack(skipped), loss


_jit_step = nnx.jit(_nnx_step, static_argnames="behavior")


class Run(Trainer):
    """A training run with `jamp.GradScaler`."""

    def __init__(self, behavior: Behavior, side: str, saved: Saved | None = None):
        self.behavior = behavior
        self.take_step = _nnx_step if side == EAGER else _jit_step
        self.data = data(behavior)
        self.scaler = jamp.GradScaler(**behavior.scaler_kwargs)
        params = self.data.params
        if saved is not None:
            self.scaler = jamp.GradScaler()
            self.scaler.load_state_dict(json.loads(saved.scaler))
            params = saved.params
        self.models = tuple(Model(behavior, flat) for flat in params)
        wrt = nnx.Param
        if behavior.frozen:
            wrt = nnx.All(nnx.Param, nnx.Any(*map(nnx.PathContains, behavior.trained)))
        self.optimizers = tuple(
            nnx.Optimizer(model, optimizer(behavior), wrt=wrt) for model in self.models
        )
        if saved is not None:
            for opt, flat in zip(self.optimizers, saved.momentum, strict=True):
                for name, value in unflatten(behavior, flat).items():
                    opt.opt_state[0].trace[name][...] = value

    def save(self) -> Saved:
        params = np.stack([flatten(pure(model)) for model in self.models])
        momentum = np.stack(
            [flatten(nnx.as_pure(opt.opt_state[0].trace)) for opt in self.optimizers]
        )
        return Saved(json.dumps(self.scaler.state_dict()), params, momentum)

    def step(self, step: int, new_scale: Any) -> tuple[Any, ...]:
        train = (self.models, self.optimizers, self.scaler)
        batch = tuple(a[step] for a in self.data[1:])
        skipped, loss = self.take_step(train, batch, new_scale, behavior=self.behavior)
        params = np.stack([flatten(pure(model)) for model in self.models])
        return np.asarray(skipped), np.asarray(loss), params

    def array(self, value: float) -> jax.Array:
        return jnp.float32(value)


# dynamic_loss_scale


def run_optax(behavior: Behavior) -> Record:
    """Runs a behavior of one model with `jamp.value_and_grad` and `jamp.step`."""
    inputs, records = data(behavior), []
    config = behavior.scaler_kwargs
    step_fn = _optax_step(behavior, config)
    everything = unflatten(behavior, inputs.params[0])
    trained = {name: everything.pop(name) for name in behavior.trained}
    opt_state = _transformation(behavior, config).init(trained)
    for step in range(STEPS):
        changes = behavior.setters(step)
        if changes:  # a new transformation takes over the old state
            config |= {name.removeprefix("set_"): value for name, value in changes}
            step_fn = _optax_step(behavior, config)
        batch = tuple(a[step] for a in inputs[1:])
        trained, opt_state, loss = step_fn(trained, opt_state, everything, batch)
        opt_state = copied(behavior, step, opt_state)
        metrics = jamp.metrics(opt_state)
        records.append(
            (
                *(metrics[name] for name in ("loss_scale", "growth_tracker")),
                metrics["found_inf"][None],
                loss,
                flatten(everything | trained)[None],
            )
        )
    return record(jax.device_get(records))


def _transformation(behavior: Behavior, config: dict[str, Any]) -> Any:
    inner = optimizer(behavior)
    if behavior.clip == "unscaled":
        inner = optax.chain(optax.stateless(lambda g, _: clip(g, MAX_NORM)), inner)
    return jamp.dynamic_loss_scale(inner, **config)


def _optax_step(behavior: Behavior, config: dict[str, Any]) -> Callable[..., Any]:
    tx = _transformation(behavior, config)

    @jax.jit
    def step(params, opt_state, frozen, batch):
        xs, ys, factor, (poison,), drawn = batch
        poison = unflatten(behavior, poison)
        scale = lambda loss: jamp.scale_loss(loss, opt_state)

        def loss_fn(params, x, y):
            everything, batch = [frozen | params], (x, y, factor)
            return total_loss(
                behavior, everything, batch, scale, jamp.loss_scale(opt_state)
            )

        if behavior.bfloat16:
            loss, grads = 0.0, unflatten(behavior, drawn)
        else:
            grad_fn = jamp.value_and_grad(loss_fn, opt_state)
            results = [grad_fn(params, x, y) for x, y in zip(xs, ys, strict=True)]
            loss, grads = (add(list(parts)) for parts in zip(*results, strict=True))
        if behavior.clip == "scaled":
            grads = clip(grads, MAX_NORM * jamp.loss_scale(opt_state))
        grads = {k: jnp.where(poison[k] == 0, g, poison[k]) for k, g in grads.items()}
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return params, opt_state, loss

    return step
