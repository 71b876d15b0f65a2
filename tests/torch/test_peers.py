"""Defects of other loss scalers, of which jamp must not have any.

Tests of the scale's rule and of skipped steps hold the others: growth that is a step
late, a scale that reaches 0 or inf, a floor that is lost under jit, and a selection by
hand. `docs/parity/peers.md` says what the libraries themselves gave.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp


def quadratic(params):
    return jnp.sum(params**2)


# mpx 0.1.8: unscales with the *new* scale, so a growth step halves loss and gradients.
def test_mpx_growth_step_keeps_loss_and_gradients():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.25), growth_interval=2)
    params = np.array([1.0, 2.0], np.float32)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def train(params, state):
        loss, grads = jamp.value_and_grad(quadratic, state)(params)
        return loss, *jamp.step(tx, grads, state, params)

    for _ in range(4):
        loss, new_params, state = train(params, state)
        assert loss == np.sum(params**2)
        np.testing.assert_array_equal(new_params, params - 0.25 * 2 * params)
        params = np.asarray(new_params)
    assert state.loss_scale == 2.0**18


# mpx 0.1.8: multiplies the loss in float16; a loss above 1 overflows at 2**16.
def test_mpx_float16_loss_above_one_does_not_overflow():
    state = jamp.dynamic_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
    scaled = jamp.scale_loss(jnp.float16(100.0), state)
    assert scaled == 100 * 2.0**16
    assert jnp.float16(100.0) * jnp.float16(2.0**15) == jnp.inf  # the control
    half = jnp.ones(2, jnp.float16) * 50
    loss, grads = jamp.value_and_grad(lambda p: jnp.sum(p), state)(half)
    assert loss == 100 and np.all(np.isinf(grads))  # float16 ends below 2**16: a skip


# jmp 0.0.4: a float16 scale raises TypeError.
def test_jmp_half_precision_scale_is_taken():
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=jnp.float16(2.0**10))
    state = tx.init(jnp.ones(2))
    assert state.loss_scale == 2.0**10 and state.loss_scale.dtype == jnp.float32
    static = jamp.static_loss_scale(optax.sgd(0.1), np.float16(8)).init(jnp.ones(2))
    assert static.loss_scale == 8.0


# flax DynamicScale: drops the imaginary part of complex gradients.
def test_flax_complex_gradients_keep_their_imaginary_part():
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0)
    params = np.array([1 + 1j], np.complex64)
    update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
    grads = np.array([4 + 8j], np.complex64)
    updates, _ = update(grads, state, params)
    np.testing.assert_array_equal(updates, [-1 - 2j])
    _, state = update(np.array([complex(0, np.inf)], np.complex64), state, params)
    assert state.found_inf


# optax apply_if_finite: accepts the NaN update after N errors.
def test_apply_if_finite_gives_in_and_jamp_does_not():
    params = np.ones(2, np.float32)
    peer = optax.apply_if_finite(optax.sgd(0.1), 3)
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))

    @jax.jit
    def last_updates(params, grads):
        states = peer.init(params), tx.init(params)
        for _ in range(10):
            both = zip((peer, tx), states, strict=True)
            found = [each.update(grads, state, params) for each, state in both]
            updates, states = zip(*found, strict=True)
        return updates

    peer_updates, updates = last_updates(params, params * np.nan)
    assert np.all(np.isnan(peer_updates))  # the control
    np.testing.assert_array_equal(updates, 0.0)


# optax apply_if_finite: one bad microbatch poisons MultiSteps.
def test_multi_steps_is_not_poisoned(standard_promotion):
    params = np.ones(2, np.float32)

    def last_update(tx):
        update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
        for grads in (params, params * np.nan, params, params, params):
            updates, state = update(grads, state, params)
        return updates

    peer = optax.MultiSteps(optax.apply_if_finite(optax.sgd(0.1), 100), 2)
    assert not np.any(last_update(peer))  # the control: stuck
    tx = jamp.static_loss_scale(optax.MultiSteps(optax.sgd(0.1), 2), 1.0)
    np.testing.assert_array_equal(last_update(tx), np.float32(-0.1))
