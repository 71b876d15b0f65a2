"""One training step, in each of the ways to compare.

A row is a function from a size to `(step, state)`, and `step(state, x, y)` gives the
next state and the loss. Each row begins with the same float32 parameters and uses
`optax.adamw`. As in torch, every forward pass updates the batch statistics, even if its
step is skipped. The models for flax, jmp and mpx are also cast by hand, since
`nnx.Embed` would turn the parameters that jmp and mpx cast back into float32.
"""

import contextlib
import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import jamp

from . import models
from .model_sizes import GPT2, LEARNING_RATE, MLP, SEED, Llama, ResNet50

INNER = optax.adamw(LEARNING_RATE)
autocast = functools.partial(jamp.autocast, dtype=jnp.float16)
tf32 = functools.partial(jax.default_matmul_precision, "tensorfloat32")


def parts(model, region=contextlib.nullcontext, compare=models.loss):
    """The loss as a function of parameters and batch statistics, and both of these."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, stats = nnx.as_pure(states)

    def loss_fn(params, stats, x, y):
        model = nnx.merge(graph, params, stats)
        with region():
            loss = compare(model(x), y)
        return loss, nnx.as_pure(nnx.state(model, nnx.BatchStat))

    return loss_fn, params, stats


def unchecked(
    size, flash, *dtypes, region=contextlib.nullcontext, inner=INNER, scale=1.0
):
    return of_loss(*parts(models.make(size, flash, *dtypes), region), inner, scale)


def of_loss(loss_fn, params, stats, inner=INNER, scale=1.0):
    """A step that checks nothing. `inner` divides the gradients by the scale."""

    def step(state, x, y):
        params, stats, opt_state = state
        of_params = lambda params: loss_fn(params, stats, x, y)
        loss, pull_back, stats = jax.vjp(of_params, params, has_aux=True)
        (grads,) = pull_back(jnp.full_like(loss, scale))
        updates, opt_state = inner.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return step, (params, stats, inner.init(params))


def float32(size, flash):
    return unchecked(size, flash, region=tf32 if flash else contextlib.nullcontext)


def bfloat16_by_hand(size, flash):
    return unchecked(size, flash, jnp.bfloat16)


def float16_by_hand(size, flash):
    return unchecked(size, flash, jnp.float16)


def saving_once(size, flash):
    """By hand, too, what a region does: it keeps as little as torch for the backward
    pass, of each gelu and of the label's logit."""
    model = models.saving_once(models.make(size, flash, jnp.float16))
    return of_loss(*parts(model, compare=models.masked_loss))


def float32_residual(size, flash):
    """Float32 embeddings, and thus residual stream, as under torch's autocast."""
    return unchecked(size, flash, jnp.float16, jnp.float32)


def clipped(size, flash):
    """Each update depends on all gradients, as with a check. No norm is that large."""
    inner = optax.chain(optax.clip_by_global_norm(1e6), INNER)
    return unchecked(size, flash, jnp.float16, inner=inner)


def static_scale(size, flash):
    """A loss scale that divides each gradient and depends on none."""
    scale = 2.0**10
    inner = optax.chain(optax.scale(1 / scale), INNER)
    return unchecked(size, flash, jnp.float16, inner=inner, scale=scale)


def with_dynamic_loss_scale(model, region=contextlib.nullcontext):
    loss_fn, params, stats = parts(model, region)
    tx = jamp.dynamic_loss_scale(INNER)

    def step(state, x, y):
        params, stats, opt_state = state
        grad_fn = jamp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, stats), grads = grad_fn(params, stats, x, y)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (params, stats, opt_state), loss

    return step, (params, stats, tx.init(params))


def jamp_autocast(size, flash):
    return with_dynamic_loss_scale(models.make(size, flash), autocast)


def jamp_autocast_attention(size, flash):
    """A model that calls `jamp.dot_product_attention`, and names no kernel."""
    model = models.with_jamp_attention(models.make(size, flash))
    return with_dynamic_loss_scale(model, autocast)


def jamp_autocast_embed(size, flash):
    """Rounds the embeddings' results, and thus the residual stream."""
    region = functools.partial(autocast, rules={nnx.Embed: jnp.float16})
    return with_dynamic_loss_scale(models.make(size, flash), region)


def jamp_policy(size, flash):
    model = models.make(size, flash)
    return with_dynamic_loss_scale(jamp.nnx.with_policy(model, "mixed_float16"))


def jamp_grad_scaler(size, flash):
    model = models.make(size, flash)
    optimizer = nnx.Optimizer(model, INNER, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer, jamp.GradScaler()))

    def step(state, x, y):
        model, optimizer, scaler = nnx.merge(graph, state)

        def loss_fn(model):
            with autocast():
                loss = models.loss(model(x), y)
            return scaler.scale(loss), loss

        (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        scaler.step(optimizer, model, grads)
        scaler.update()
        return nnx.state((model, optimizer, scaler)), loss

    return step, state


def flax_dynamic_scale(size, flash):
    loss_fn, params, stats = parts(models.make(size, flash, jnp.float16))

    def step(state, x, y):
        params, stats, opt_state, scale = state
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, stats), grads = grad_fn(params, stats, x, y)
        updates, new_opt_state = INNER.update(grads, opt_state, params)
        params, opt_state = jax.tree.map(
            functools.partial(jnp.where, finite),
            (optax.apply_updates(params, updates), new_opt_state),
            (params, opt_state),
        )
        return (params, stats, opt_state, scale), loss

    scale = jax.tree.map(jnp.asarray, DynamicScale())
    return step, (params, stats, INNER.init(params), scale)


def by_jmp(size, flash):
    import jmp

    loss_fn, params, stats = parts(models.make(size, flash, jnp.float16))
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def step(state, x, y):
        params, stats, opt_state, scale = state

        def objective(params):
            args = policy.cast_to_compute((params, x))
            loss, new_stats = loss_fn(args[0], stats, args[1], y)
            return scale.scale(loss), (loss, new_stats)

        grads, (loss, stats) = jax.grad(objective, has_aux=True)(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = INNER.update(grads, opt_state, params)
        params, opt_state = jmp.select_tree(
            finite,
            (optax.apply_updates(params, updates), new_opt_state),
            (params, opt_state),
        )
        return (params, stats, opt_state, scale.adjust(finite)), loss

    scale = jmp.DynamicLossScale(jnp.float32(2.0**15), jnp.int32(0))
    return step, (params, stats, INNER.init(params), scale)


def by_mpx(size, flash):
    import mpx

    mpx.set_half_precision_datatype(jnp.float16)
    loss_fn, params, stats = parts(models.make(size, flash, jnp.float16))

    def step(state, x, y):
        params, stats, opt_state, scale = state

        def objective(params, x):  # mpx would cast the statistics too
            loss, new_stats = loss_fn(params, stats, x, y)
            return loss, (loss, new_stats)  # mpx unscales the loss by the next scale

        grad_fn = mpx.filter_value_and_grad(objective, scale, has_aux=True)
        (_, (loss, stats)), scale, finite, grads = grad_fn(params, x)
        params, opt_state = mpx.optimizer_update(
            params, INNER, opt_state, grads, finite
        )
        return (params, stats, opt_state, scale), loss

    scale = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1))
    return step, (params, stats, INNER.init(params), scale)


def flax_float8(size, flash):
    """An MLP in Flax's own float8, with a history of scales, cast by hand in Linen."""
    del flash

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(size.layers):
                dot_general = nn.fp8_ops.Fp8DirectDotGeneralOp
                layer = nn.Dense(
                    size.width, dtype=jnp.bfloat16, dot_general_cls=dot_general
                )
                x = nn.gelu(layer(x))
            return x

    model = Layers()
    variables = dict(model.init(jax.random.key(SEED), *models.make_batch(size)[:1]))
    params = variables.pop("params")

    def loss_fn(params, scales, x, y):
        return models.loss(model.apply({"params": params, **scales}, x), y)

    def step(state, x, y):
        params, scales, opt_state = state
        grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
        # Flax returns the next scales as the gradient of the scales.
        loss, (grads, scales) = grad_fn(params, scales, x, y)
        updates, opt_state = INNER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), scales, opt_state), loss

    return step, (params, variables, INNER.init(params))


EMBED = "the same, rules={nnx.Embed: float16}"
BASE, REFERENCE = "float16 by hand", "float32"
ONCE = "float16 by hand, saving as torch"
RESIDUAL = "float16 by hand, float32 residual"
ROWS = {
    REFERENCE: float32,
    "bfloat16 by hand": bfloat16_by_hand,
    BASE: float16_by_hand,
    ONCE: saving_once,
    RESIDUAL: float32_residual,
    "jamp.autocast + dynamic_loss_scale": jamp_autocast,
    EMBED: jamp_autocast_embed,
    "jamp Policy + dynamic_loss_scale": jamp_policy,
    "jamp.autocast + GradScaler": jamp_grad_scaler,
    "flax DynamicScale, by hand": flax_dynamic_scale,
}
# What tells the price of a dependency on all gradients from jamp's own, and the
# baseline a second time, which tells what the figures resolve.
AGAIN = "float16 by hand, again"
CONTROLS = {
    AGAIN: float16_by_hand,
    "float16 by hand, clipped by global norm": clipped,
    "float16 by hand, static scale, no check": static_scale,
}
PEERS = {"jmp": by_jmp, "mpx": by_mpx}
ABSENT = [name for name in PEERS if importlib.util.find_spec(name) is None]
ROWS |= {name: row for name, row in PEERS.items() if name not in ABSENT}


def within(dtype):
    """A row under autocast without a loss scale."""
    region = functools.partial(jamp.autocast, dtype)
    return functools.partial(unchecked, region=region)


SCALED = "float16 + loss scale"
FLAX_FLOAT8 = "flax Fp8DirectDotGeneralOp"
ATTENTION = "float16 + loss scale, jamp.dot_product_attention"
XLA_ATTENTION = "float16 with XLA's attention"  # all that scaled float16 reaches
# What a step becomes in each precision, for `benchmarks.targets`.
PRECISIONS = {
    REFERENCE: float32,
    "bfloat16": within(jnp.bfloat16),
    "float16": within(jnp.float16),
    SCALED: jamp_autocast,
    "scaled float16": within(jamp.ScaledFloat16()),
    "float8": within(jamp.Float8()),
    "rowwise": within(jamp.Float8("rowwise")),
    "policy + loss scale": jamp_policy,
    BASE: float16_by_hand,
}
OTHERS = {
    "rowwise_with_gw_hp": within(jamp.Float8("rowwise_with_gw_hp")),
    FLAX_FLOAT8: flax_float8,
    ATTENTION: jamp_autocast_attention,
    XLA_ATTENTION: lambda size, flash: within(jnp.float16)(size, False),
}


ALL = PRECISIONS | OTHERS | ROWS


def rows_for(size, rows=ROWS | CONTROLS):
    """The rows for a model: only GPT-2 has embeddings, others lack a residual stream
    that could be float32, ResNet and Llama keep nothing twice, and Flax's float8 is
    that of the MLP."""
    dropped = set() if isinstance(size, GPT2) else {EMBED}
    if isinstance(size, ResNet50 | MLP):
        dropped.add(RESIDUAL)
    if isinstance(size, ResNet50 | Llama):  # no gelu, and few classes or none
        dropped.add(ONCE)
    if not isinstance(size, MLP):
        dropped.add(FLAX_FLOAT8)
    return {name: row for name, row in rows.items() if name not in dropped}
