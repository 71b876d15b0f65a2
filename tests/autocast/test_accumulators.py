"""What is made in float32 stays float32, and numbers follow half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.marks import cover, walk

from . import ways

half = jamp.autocast(jnp.float16)
x, w = np.full((4, 8), 0.25, np.float32), np.full((8, 4), 0.5, np.float32)
WAYS = {name: ways.WAYS[name] for name in ("jit inside", "live", "jit around")}


def run(way, function, x=x):
    """What a function returns, in a shape if it is jitted."""
    function = WAYS[way](half, function)
    return function(jnp.asarray(x)) if way == "live" else jax.eval_shape(function, x)


MADE_IN_FLOAT32 = {
    "zeros": lambda h: jnp.zeros((4, 4)) + h,
    "zeros_on_the_right": lambda h: h + jnp.zeros((4, 4)),
    "full": lambda h: jnp.full((4, 4), 2.0) * h,
    "ones": lambda h: jnp.ones((4, 4)) * h,
    "lax_full": lambda h: lax.full((4, 4), 2.0) + h,
    "broadcast_to": lambda h: jnp.broadcast_to(2.0, (4, 4)) * h,
    "dynamic_update_slice": lambda h: jax.jit(
        lambda h: lax.dynamic_update_slice(jnp.zeros((4, 4)), h, (0, 0))
    )(h.astype(jnp.float32)),
    "set": lambda h: jnp.zeros((4, 4)).at[0].set(h[0]),
    "where": lambda h: jnp.where(h > 0, h, jnp.zeros((4, 4))),
    "weak": lambda h: jnp.arange(4)[:, None] * 0.1 + h,
    "weak_stack": lambda h: jnp.concatenate([jnp.arange(4)[:, None] * 0.1, h], 1),
    "loop": lambda h: sum([h, h], start=jnp.zeros((4, 4))),
}


@cover()
@pytest.mark.parametrize("way", WAYS)
@walk("name", MADE_IN_FLOAT32)
def test_an_array_of_one_number_is_an_array(name, way, standard_promotion):
    function = MADE_IN_FLOAT32[name]
    y = run(way, lambda x: function(x @ w))
    assert y.dtype == jnp.float32
    # After the region too.
    assert jax.eval_shape(lambda y: y + y.astype(jnp.float16), y).dtype == jnp.float32
    assert run(way, lambda x: function(jnp.tanh(x @ w))).dtype == jnp.float32


def test_a_loop_does_not_change_the_type_of_its_carry(standard_promotion):
    c = jnp.full((4, 4), 0.25)  # it is weakly typed: it follows other arrays
    body = lambda c: c @ c + c
    loops = (
        lambda c: lax.scan(lambda c, _: (body(c), None), c, None, 3)[0],
        lambda c: lax.fori_loop(0, 3, lambda i, c: body(c), c),
        lambda c: lax.while_loop(lambda c: c[0, 0] < 9, body, c),
    )
    for loop in loops:
        assert jax.typeof(half(loop)(c)) == jax.typeof(loop(c)) == jax.typeof(c)


FOLLOWS = {
    "number": lambda h: 2.0 * h + 1.0,
    "zeros_like": lambda h: jnp.zeros_like(h) + h,
    "full_like": lambda h: jnp.full_like(h, 3.0) * h,
    "where": lambda h: jnp.where(h > 0, h, 0.0),
    "maximum": lambda h: jnp.maximum(h, 0.0),
    "bias": lambda h: h + jnp.zeros(4)[None],
    "pad": lambda h: jnp.pad(h, 1),
}


@cover()
@pytest.mark.parametrize("way", WAYS)
@walk("name", FOLLOWS)
def test_what_follows_half_precision_still_does(name, way, standard_promotion):
    function = FOLLOWS[name]
    assert run(way, lambda x: function(x @ w)).dtype == jnp.float16


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_asks_for_half_precision_gets_it(way, standard_promotion):
    asks = [
        lambda x: jnp.linspace(0.0, 1.0, 5, dtype=jnp.float16) * x[0, 0],
        lambda x: jnp.full((4,), x[0, 0], jnp.float16),
        lambda x: (jnp.arange(4) * 0.1).astype(jnp.float16),
        lambda x: jnp.asarray(jnp.arange(4) * 0.1, jnp.float16),
    ]
    for ask in asks:
        assert run(way, ask, np.ones((1, 1), np.float16)).dtype == jnp.float16


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_keeps_its_small_terms(way, standard_promotion):
    def total(x):
        acc = jnp.zeros((4, 4))
        for _ in range(8):
            acc = acc + x @ w  # each adds 1
            acc = acc + 512 * (x @ w)
        return acc + 0.25 * (x @ w)

    assert float(WAYS[way](half, total)(x)[0, 0]) == 8 + 8 * 512 + 0.25  # float16: 4104
