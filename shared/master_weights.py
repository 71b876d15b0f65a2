"""Trainings that half-precision parameters can follow only with master weights.

A wide net trains on all of its 256 points at each step. Every weight is near 1, and
most updates are smaller than half the distance between two float16 numbers.

A small net in bfloat16 trains with its masters in both forms, to compare all bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

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


def nearest(x, dtype):
    """float32 numbers as parameters; in bfloat16 a tie goes away from zero."""
    x = np.asarray(x, np.float32)
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    assert not np.isnan(x).any()
    half = (x.view(np.uint32) + np.uint32(0x8000)) >> 16
    return half.astype(np.uint16).view(dtype)


def worst_difference(losses, reference):
    return np.max(np.abs(losses - reference) / reference)


FORMS = {
    "AdamW": optax.adamw(1e-3, weight_decay=0.1),
    "SGD, momentum": optax.sgd(1e-2, momentum=0.9),
    "Lion": optax.lion(1e-4),
    "Adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
}


class Forms(NamedTuple):
    """Two runs of a small net, with full masters and with remainders."""

    numbers: int  # parameters and masters compared
    differ: int  # those with other bits
    skipped: int  # steps, in each run
    ties: int  # parameters, over all steps, that `astype` would round otherwise
    lost: float  # of the path of the masters, in bfloat16 without them


def both_forms(inner, steps, seed):
    """Trains twice, each step on a new batch, some of which hold an inf.

    In the middle, each run is saved and restored.
    """
    runs = [small_run(inner, steps, seed, remainder) for remainder in (False, True)]
    (start, *full), (_, *rest) = runs
    pairs = zip(*map(jax.tree.leaves, (full[:2], rest[:2])), strict=True)
    differ = sum(int(np.sum(bits_of(a) != bits_of(b))) for a, b in pairs)
    plain = small_run(inner, steps, seed, None)[1]
    distance = lambda a, b: np.sqrt(
        sum(
            np.sum((np.float32(x) - np.float32(y)) ** 2)
            for x, y in zip(a, b, strict=True)
        )
    )
    leaves = [jax.tree.leaves(t) for t in (start, full[1], plain)]
    return Forms(
        numbers=sum(x.size for x in jax.tree.leaves(full[:2])),
        differ=differ,
        skipped=int(rest[2]),
        ties=int(rest[3]),
        lost=float(distance(*leaves[1:]) / distance(*leaves[:2])),
    )


def bits_of(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


def small_run(inner, steps, seed, remainder):
    """The first parameters, the last ones, their masters, skips and ties."""
    keys = jax.random.split(jax.random.key(seed), 3)
    start = {
        "in": jax.random.normal(keys[0], (16, 32)) / 4,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32, 1)) / 6,
    }
    start = jax.tree.map(lambda p: p.astype(jnp.bfloat16), start)
    is_plain = remainder is None
    tx = inner if is_plain else jamp.master_weights(inner, remainder=remainder)
    tx = jamp.dynamic_loss_scale(tx, growth_interval=20, max_scale=2.0**100)

    def loss_fn(params, x):
        hidden = jax.nn.relu(x @ params["in"] + params["bias"])
        y = jnp.sin(x[:, :1].astype(jnp.float32)) + x[:, 1:2]
        return jnp.mean(((hidden @ params["out"]).astype(jnp.float32) - y) ** 2)

    def step(carry, number):
        params, state, ties = carry
        x = jax.random.normal(jax.random.fold_in(keys[2], number), (8, 16))
        x = jnp.where(number % 97 == 5, jnp.inf, x).astype(jnp.bfloat16)
        grads = jamp.value_and_grad(loss_fn, state)(params, x)[1]
        params, state = jamp.step(tx, grads, state, params)
        if not is_plain:
            masters = jamp.master_params(params, state)
            even = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
            unlike = jax.tree.map(lambda a, b: jnp.sum(a != b), even, params)
            ties += sum(jax.tree.leaves(unlike))
        return (params, state, ties), None

    train = jax.jit(lambda carry, numbers: jax.lax.scan(step, carry, numbers)[0])
    carry = start, tx.init(start), jnp.int32(0)
    for numbers in np.array_split(np.arange(steps), 2):
        carry = train(carry, numbers)
        carry = serialization.from_bytes(carry, serialization.to_bytes(carry))
    params, state, ties = carry
    masters = None if is_plain else jamp.master_params(params, state)
    return start, params, masters, jamp.metrics(state)["skipped_steps"], ties
