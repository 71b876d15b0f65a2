"""What meets an integer or a bool keeps its dtype, also where JAX traced it before.

JAX promotes an integer to the dtype of the array beside it. In a function that is
jitted in a region that is float32 when JAX traces it, and half precision afterwards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import cover

from . import ways

half = jamp.autocast(jnp.float16)
x, w = np.full((4, 8), 0.25, np.float32), np.full((8, 8), 0.5, np.float32)


@functools.cache
def tables():
    """What follows half precision, and what widens it, with arrays of JAX."""
    mask, counts = jnp.asarray(np.arange(8) % 2 == 0), jnp.full((4, 1), 3)
    follows = {
        "h * mask": lambda h: h * mask,
        "mask * h": lambda h: mask * h,
        "h * mask[None]": lambda h: h * mask[None],
        "h * (h > 0)": lambda h: h * (h > 0),
        "h * ~mask": lambda h: h * ~mask,
        "h * tril": lambda h: h * jnp.tril(jnp.ones((4, 8), bool)),
        "h / counts": lambda h: h / counts,
        "counts / h": lambda h: counts / h,
        "h / sum(mask)": lambda h: h / jnp.sum(mask),
        "h / cumsum(mask)": lambda h: h / jnp.cumsum(mask),
        "h / bincount": lambda h: h / jnp.bincount(jnp.arange(8), length=8),
        "h + counts": lambda h: h + counts,
        "h - counts": lambda h: h - counts,
        "h * uint8": lambda h: h * counts.astype(jnp.uint8),
        "h * arange": lambda h: h * jnp.arange(8),
        "h * (mask + counts)": lambda h: h * (mask + counts),
        "h // counts": lambda h: h // counts,
        "h % counts": lambda h: h % counts,
        "where": lambda h: jnp.where(mask, h, counts),
        "maximum": lambda h: jnp.maximum(h, counts),
        "clip": lambda h: jnp.clip(h, 0, counts),
        "arctan2": lambda h: jnp.arctan2(h, counts),
        "concatenate": lambda h: jnp.concatenate([h, jnp.ones((4, 8), int)]),
        "stack": lambda h: jnp.stack([h, jnp.ones((4, 8), int)]),
        "set": lambda h: h.at[0].set(counts[0]),
        "dropout": lambda h: (
            h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape) / 0.5
        ),
    }
    widens = {
        "h * mask.astype": lambda h: h * mask.astype(jnp.float32),
        "h * float32(mask)": lambda h: h * jnp.float32(mask),
        "h * asarray(mask)": lambda h: h * jnp.asarray(mask, jnp.float32),
        "h * one_hot": lambda h: h * jax.nn.one_hot(1, 8),
        "h * cumsum of floats": lambda h: h / jnp.cumsum(mask, dtype=jnp.float32),
        "h * mean(counts)": lambda h: h * jnp.mean(counts),
        "h * (counts / 2)": lambda h: h * (counts / 2),
        "h * sqrt(counts)": lambda h: h * jnp.sqrt(counts),
        "h + (1 - mask) * -1e9": lambda h: h + (1 - mask[None].repeat(4, 0)) * -1e9,
    }
    return follows, widens


OTHERS = ("jit inside", "vmap inside", "jit twice", "checkpoint", "scan", "live")


def all_found(way):
    follows, widens = tables()

    def all_of_them(x):
        h = x @ w
        return {name: f(h) for name, f in (follows | widens).items()}

    return ways.WAYS[way](half, all_of_them)(jnp.asarray(x))


@functools.cache
def expected():
    return all_found("jit around")


@cover()
@pytest.mark.parametrize("way", OTHERS)
def test_integers_and_bools_follow_in_every_function(way, standard_promotion):
    follows, _ = tables()
    for name, y in all_found(way).items():
        wanted = expected()[name]
        assert wanted.dtype == ("float16" if name in follows else "float32")
        np.testing.assert_allclose(y, wanted, 1e-3, err_msg=name)
        assert y.dtype == wanted.dtype, name


@pytest.mark.parametrize("way", OTHERS)
def test_beside_float32_they_are_float32(way, standard_promotion):
    mask = jnp.asarray(np.arange(8) % 2 == 0)
    function = ways.WAYS[way](half, lambda x: (x * mask, x @ w + x * mask))
    found = function(jnp.asarray(x))
    assert [y.dtype for y in found] == [jnp.float32] * 2
