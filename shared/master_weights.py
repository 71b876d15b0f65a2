"""A training that float16 parameters can follow only with master weights.

A wide net trains on all of its 256 points at each step. Every weight is near 1, and
most updates are smaller than half the distance between two float16 numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from jamp._scaling.state import DynamicLossScaleState

WIDTH = 4096
STEPS = 100
POLICY = jamp.get_policy("params=float16,compute=float16,output=float32")
TRAINED = {"SGD": optax.sgd(0.01), "Adam": optax.adam(5e-5)}


def make_problem():
    """A wide net, in which every weight is near 1 and contributes little."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (256, 16))
    y = jnp.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 2 + jnp.abs(x[:, 3])
    params = {
        "hidden": jax.random.normal(keys[1], (16, WIDTH)),
        "out": jax.random.normal(keys[2], (WIDTH,)),
    }
    return params, x, y


def net(params, x):
    hidden = jax.nn.relu(x @ params["hidden"] * (2 / x.shape[1]) ** 0.5)
    return hidden @ params["out"] * WIDTH**-0.5


def losses_of(tx, policy=None):
    """The losses before each step and after the last one."""
    params, x, y = make_problem()
    model = net
    if policy is not None:
        params, model = policy.cast_to_param(params), policy.wrap(net)

    def loss_fn(params):
        return jnp.mean((model(params, x) - y) ** 2)

    @jax.jit
    def train(params):
        def body(carry, _):
            params, state = carry
            if isinstance(state, DynamicLossScaleState):
                loss, grads = jamp.value_and_grad(loss_fn, state)(params)
            else:
                loss, grads = jax.value_and_grad(loss_fn)(params)
            return jamp.step(tx, grads, state, params), loss

        start = params, tx.init(params)
        (params, _), losses = jax.lax.scan(body, start, length=STEPS)
        return jnp.append(losses, loss_fn(params))

    return np.asarray(train(params))


def curves(inner):
    """Losses over training, by how the parameters are kept."""
    scaled, wrap = jamp.dynamic_loss_scale, jamp.master_weights
    return {
        "float32": losses_of(inner),
        "float16, master weights": losses_of(scaled(wrap(inner)), POLICY),
        "float16, loss scale alone": losses_of(scaled(inner), POLICY),
        "float16": losses_of(inner, POLICY),
    }


def worst_difference(losses, reference):
    return np.max(np.abs(losses - reference) / reference)
