"""The models that measure float8: an MLP and a block of Llama, in Flax, of any width.

Neither sets a dtype, except that attention takes its inputs in the region's dtype.
`training` turns a model into a step like those of the other benchmarks.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jamp

from .model_sizes import LEARNING_RATE, SEED
from .models import gpu_attention, plain_attention

BFLOAT16 = "bfloat16"
REGIONS = {
    BFLOAT16: functools.partial(jamp.autocast, jnp.bfloat16),
    **{
        f"float8 {recipe}": functools.partial(jamp.autocast, jamp.Float8(recipe))
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    },
}
# Flax's own float8, with a history of scales. Its model is cast to bfloat16 by hand.
FLAX = "flax Fp8DirectDotGeneralOp"


class MLP(nn.Module):
    """Layers of equal width, each with a bias and a GELU."""

    width: int
    layers: int = 4
    by_flax: bool = False

    @nn.compact
    def __call__(self, x):
        how = {}
        if self.by_flax:
            how = {
                "dtype": jnp.bfloat16,
                "dot_general_cls": nn.fp8_ops.Fp8DirectDotGeneralOp,
            }
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(self.width, **how)(x))
        return x


class Llama(nn.Module):
    """Llama blocks without rotary positions: RMSNorm, attention, SwiGLU."""

    width: int
    layers: int = 1
    flash: bool = True

    @nn.compact
    def __call__(self, x):
        for layer in range(self.layers):
            x = LlamaBlock(self.width, self.flash, name=f"block{layer}")(x)
        return x


class LlamaBlock(nn.Module):
    width: int
    flash: bool
    head: int = 128

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        # As in Llama: 8/3 of the width, as a multiple of 256.
        hidden = -(-8 * self.width // (3 * 256)) * 256
        attend = gpu_attention if self.flash else plain_attention

        y = nn.RMSNorm(name="norm1")(x)
        head = min(self.head, self.width)
        shape = (*x.shape[:2], self.width // head, head)
        q, k, v = (dense(self.width, name=n)(y).reshape(shape) for n in "qkv")
        y = attend(q, k, v, True).reshape(x.shape)
        x = x + dense(self.width, name="out")(y)

        y = nn.RMSNorm(name="norm2")(x)
        y = nn.silu(dense(hidden, name="gate")(y)) * dense(hidden, name="up")(y)
        return x + dense(self.width, name="down")(y)


def make_batch(*shape):
    """Inputs, and the numbers that the model should make of them."""
    keys = jax.random.split(jax.random.key(SEED))
    return tuple(jax.random.normal(key, shape) for key in keys)


def training(model, region, shape, axis_name=None):
    """The step `step(state, x, y)`, and its state: parameters and AdamW's.

    Args:
      axis_name: of the devices, in `shard_map`.
    """
    variables = dict(jax.jit(model.init)(jax.random.key(SEED), jnp.zeros(shape)))
    params = variables.pop("params")
    tx = optax.adamw(LEARNING_RATE)

    def loss_fn(params, variables, x, y):
        with region():
            out = model.apply({"params": params, **variables}, x)
        loss = jnp.mean((out.astype(jnp.float32) - y) ** 2)
        return loss if axis_name is None else jax.lax.pmean(loss, axis_name)

    def step(state, x, y):
        params, variables, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(
            params, variables, x, y
        )
        updates, opt_state = tx.update(grads[0], opt_state, params)
        # Flax returns the next scales as the gradient of the scales.
        return (optax.apply_updates(params, updates), grads[1], opt_state), loss

    return step, (params, variables, tx.init(params))
