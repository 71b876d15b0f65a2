"""Attention in the form that Flax's attention modules take."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._autocast.attention import dot_product_attention, is_moved
from .._checks import floating

HANDLED = "query key value bias mask is_causal dtype".split()
DROPOUT = "broadcast_dropout dropout_rng dropout_rate deterministic".split()


def in_flax(own: Callable[..., jax.Array], args: tuple, kwargs: dict) -> jax.Array:
    """`jamp.dot_product_attention` of inputs with any number of batch dimensions.

    Flax's own function runs where the weights are asked for, or there is dropout, or
    the products are the user's, or for integers and values of another size.
    """
    given: dict[str, Any] = inspect.signature(own).bind(*args, **kwargs).arguments
    given.pop("force_fp32_for_softmax", None)  # it always is
    given = {name: x for name, x in given.items() if x is not None}
    if "dtype" in given:
        given["dtype"] = floating("dtype", given["dtype"])
    drops = given.get("dropout_rate", 0) > 0 and not given.get("deterministic")
    inputs = [jnp.asarray(given[name]) for name in HANDLED[:3]]
    _, key, value = (x.shape for x in inputs)
    is_other_size = key[:-1] == value[:-1] and key[-1] != value[-1]
    takes = all(map(is_moved, inputs)) and not is_other_size
    if drops or not takes or not given.keys() <= {*HANDLED, *DROPOUT}:
        return own(**given)
    dtype = given.get("dtype", jnp.result_type(*inputs))
    shape, batch = inputs[0].shape, inputs[0].shape[:-3]

    def with_one_batch(x: jax.Array) -> jax.Array:
        if all(n == 1 for n in x.shape[:-3]):
            return x.reshape(1, *x.shape[-3:])
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(batch), *x.shape[-3:])

    others = given.get("bias"), given.get("mask")
    bias, mask = jax.tree.map(with_one_batch, others)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in inputs
    )
    mask = None if mask is None else mask.astype(bool)
    is_causal = given.get("is_causal", False)
    out = dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)
    return out.reshape(shape)
