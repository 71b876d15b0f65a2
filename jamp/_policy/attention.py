"""Attention in the form that Flax's attention modules take."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._autocast.attention import dot_product_attention


def in_flax(
    own: Callable[..., jax.Array],
    inputs: Sequence[jax.Array],
    bias: jax.Array | None,
    mask: jax.Array | None,
    options: Mapping[str, Any],
    is_causal: bool = False,
) -> jax.Array:
    """`jamp.dot_product_attention` of inputs with any number of batch dimensions.

    Flax's own function runs where the weights are asked for, or there is dropout, or
    the products are the user's.

    Args:
      own: Flax's function.
      options: its other arguments. None is one that was not given.
    """
    drops = options["dropout_rate"] > 0 and not options["deterministic"]
    plain = "dtype", "broadcast_dropout", "dropout_rng", "dropout_rate", "deterministic"
    if drops or any(x is not None for n, x in options.items() if n not in plain):
        given = {name: x for name, x in options.items() if x is not None}
        causal = {"is_causal": True} if is_causal else {}
        return own(*inputs, bias, mask, **given, **causal)
    dtype = options["dtype"] or jnp.result_type(*inputs)
    shape, batch = inputs[0].shape, inputs[0].shape[:-3]

    def with_one_batch(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        own_batch = x.shape[:-3]
        if all(n == 1 for n in own_batch):
            return x.reshape(1, *x.shape[-3:])
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(batch), *x.shape[-3:])

    if mask is not None:
        mask = mask.astype(bool)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in inputs
    )
    bias, mask = with_one_batch(bias), with_one_batch(mask)
    out = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)
    return out.reshape(shape)
