"""Attention in the form that Flax's attention modules take."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._autocast.attention import dot_product_attention, is_moved
from .._checks import floating

HANDLED = (
    "query key value bias mask is_causal dtype broadcast_dropout dropout_rng "
    "dropout_rate deterministic"
).split()


def in_flax(own: Callable[..., jax.Array], given: dict[str, Any]) -> jax.Array:
    """`jamp.dot_product_attention` of inputs with any number of batch dimensions.

    Flax's own function runs where the weights are asked for, or there is dropout, or
    the products are the user's, or for integers and values of another size.

    Args:
      own: Flax's function.
      given: its arguments. None is one that was not given.
    """
    given = {name: x for name, x in given.items() if x is not None}
    if "dtype" in given:
        given["dtype"] = floating("dtype", given["dtype"])
    if not given.get("is_causal"):  # which Flax's function may not have
        given.pop("is_causal", None)
    drops = given["dropout_rate"] > 0 and not given["deterministic"]
    inputs = [jnp.asarray(given[name]) for name in HANDLED[:3]]
    _, key, value = (x.shape for x in inputs)
    is_other_size = key[:-1] == value[:-1] and key[-1] != value[-1]
    takes = all(map(is_moved, inputs)) and not is_other_size
    if drops or not takes or not given.keys() <= {*HANDLED}:
        return own(**given)
    dtype = given.get("dtype", jnp.result_type(*inputs))
    shape, batch = inputs[0].shape, inputs[0].shape[:-3]

    def with_one_batch(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        if all(n == 1 for n in x.shape[:-3]):
            return x.reshape(1, *x.shape[-3:])
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(batch), *x.shape[-3:])

    bias, mask = with_one_batch(given.get("bias")), with_one_batch(given.get("mask"))
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in inputs
    )
    mask = None if mask is None else mask.astype(bool)
    is_causal = given.get("is_causal", False)
    out = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)
    return out.reshape(shape)
