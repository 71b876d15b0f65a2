"""A small model with a layer whose input rows differ by 2^16 in size, and its training.

Two sensors measure the same thing, one of them in a unit 2^16 times as large: half of
the rows are small. The layer's output is normalized row by row, so that a small row
counts as much as a large one. With experts, each has its share of the rows and a weight
of its own, and the rows of the first one are small. Labels are drawn from what another
network says of the vector before the unit, so that no model has a loss of zero.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp

LAYER = "sensor"  # the module path of the layer
OCTAVES = 16  # between the sizes of its rows
INPUTS, HIDDEN, CLASSES = 64, 128, 16
ROWS, TEST_ROWS = 256, 4096
STEPS = 300

Params = dict[str, jax.Array]
Batch = tuple[jax.Array, jax.Array]


def init(key: jax.Array, experts: int = 0) -> Params:
    one, two = jax.random.split(key)
    shape = (experts, INPUTS, HIDDEN) if experts else (INPUTS, HIDDEN)
    return {
        "sensor": jax.random.normal(one, shape) * INPUTS**-0.5,
        "head": jax.random.normal(two, (HIDDEN, CLASSES)) * HIDDEN**-0.5,
    }


def logits_of(params: Params, x: jax.Array) -> jax.Array:
    w = params["sensor"]
    with jax.named_scope(LAYER):
        h = x.reshape(*w.shape[:-2], -1, INPUTS) @ w
    h = h.reshape(-1, HIDDEN)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True))
    with jax.named_scope("head"):
        return jax.nn.relu(h) @ params["head"]


def loss_of(params: Params, batch: Batch) -> jax.Array:
    """The mean cross entropy; knows nothing of mixed precision."""
    x, labels = batch
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_batch(
    key: jax.Array, rows: int = ROWS, octaves: int = OCTAVES, experts: int = 0
) -> Batch:
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (rows, INPUTS))
    teacher = init(jax.random.key(7), experts)
    labels = jax.random.categorical(keys[1], 4 * logits_of(teacher, x))
    is_small = jax.random.bernoulli(keys[2], shape=(rows, 1))
    if experts:
        is_small = jnp.arange(rows)[:, None] < rows // experts
    return x * jnp.where(is_small, 2.0**-octaves, 1.0), labels


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def trained(
    region: jamp.autocast, octaves: int, experts: int, seed: jax.Array
) -> tuple[Params, jax.Array]:
    """The parameters after training with Adam in a region, and their test loss."""
    init_key, data_key, test_key = jax.random.split(jax.random.key(seed), 3)
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    params, loss_fn = init(init_key, experts), region(loss_of)
    batch = functools.partial(make_batch, octaves=octaves, experts=experts)

    def step(carry, key):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, batch(key))
        updates, opt_state = tx.update(grads, opt_state)
        return (jax.tree.map(jnp.add, params, updates), opt_state), None

    keys = jax.random.split(data_key, STEPS)
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
    return params, loss_fn(params, batch(test_key, TEST_ROWS))


def loss_after_training(
    dtype: Any,
    rules: Mapping[Any, Any] | None = None,
    *,
    octaves: int = OCTAVES,
    experts: int = 0,
    seed: int = 0,
) -> float:
    region = jamp.autocast(dtype, rules=rules)
    return float(trained(region, octaves, experts, seed)[1])
