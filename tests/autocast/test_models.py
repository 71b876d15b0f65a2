"""Models of Linen and Equinox, unchanged, train under autocast as in float32.

Those of NNX and Haiku are the examples (`tests/test_examples.py`).
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.jaxprs import products_of
from tests.marks import cover

from . import models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("standard_promotion"),
]

STEPS = 50
TASKS = {
    "resnet50": models.resnet50,
    "vae": models.vae,
    "wmt": models.wmt,
    "vit": functools.partial(models.vit, inside=False),
    "vit_region_inside_vmap": functools.partial(models.vit, inside=True),
}
FULL_WIDTH = TASKS | {
    "resnet50": functools.partial(models.resnet50, width=64, size=224, batch=2),
}
SAME_IN_FLOAT32 = {"vit_region_inside_vmap": "vit"}


def float16():
    return jamp.autocast(dtype=jnp.float16)


float32 = contextlib.nullcontext


def new_key():
    return jax.random.key(0, impl="unsafe_rbg")  # compiles fast


def value_and_grad(task, region):
    """Loss and gradients of one batch, as a jaxpr; no array is made."""
    batch = task.batch(np.random.default_rng(0))

    def run(params, state):
        def loss(params):
            return task.loss(params, state, batch, new_key(), region)

        return jax.value_and_grad(loss, has_aux=True)(params)

    params, state = jax.eval_shape(task.init, new_key())
    jaxpr, (_, grads) = jax.make_jaxpr(run, return_shape=True)(params, state)
    return jaxpr.jaxpr, params, grads


@pytest.mark.parametrize("name", TASKS)
def test_products_run_in_float16_and_gradients_are_float32(name):
    task = FULL_WIDTH[name]()
    jaxpr, params, grads = value_and_grad(task, float16)
    plain, _, _ = value_and_grad(task, float32)
    found = products_of(jaxpr)
    assert all(dtypes == {"float16"} for dtypes in found)
    assert len(found) == len(products_of(plain)) > 0
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for grad, param in zip(*map(jax.tree.leaves, (grads, params)), strict=True):
        assert (grad.shape, grad.dtype) == (param.shape, jnp.float32)


@functools.cache
def initial(name):
    return jax.jit(TASKS[name]().init)(new_key())


@functools.cache
def train(name, region):
    """The state at the end, the skipped steps, and of each step the loss and more."""
    task = TASKS[name]()
    tx = jamp.dynamic_loss_scale(task.optimizer, init_scale=2.0**10)
    rng = np.random.default_rng(1)
    batches = [task.batch(rng) for _ in range(STEPS)]
    batches = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)

    def step(carry, inputs):
        params, state, opt_state = carry
        batch, index = inputs
        key = jax.random.fold_in(new_key(), index)

        def loss_fn(params):
            return task.loss(params, state, batch, key, region)

        loss_and_grad = jamp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, state), grads = loss_and_grad(params)
        finite = jnp.isfinite(optax.tree.norm(grads))
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return (params, state, opt_state), (loss, finite)

    @jax.jit
    def run(params, state, batches):
        carry = params, state, tx.init(params)
        (_, state, opt_state), curves = lax.scan(
            step, carry, (batches, np.arange(STEPS))
        )
        return state, opt_state.skipped_steps, *curves

    params, state = initial(SAME_IN_FLOAT32.get(name, name))
    return run(params, state, batches)


def dtypes_of(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def flat(tree, kind):
    """The numbers of one kind in a tree, one after the other."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, kind)]
    return np.concatenate([np.zeros(0), *map(np.ravel, leaves)])


@cover(ci=3)
@pytest.mark.parametrize(
    "name", ["vae", "wmt", "vit_region_inside_vmap", "vit", "resnet50"]
)
def test_training_follows_float32(name):
    state32, _, curve32, _ = train(SAME_IN_FLOAT32.get(name, name), float32)
    state, skipped, curve, finite = train(name, float16)
    assert skipped == 0
    assert finite.all()
    np.testing.assert_allclose(curve[0], curve32[0], rtol=0.02)
    np.testing.assert_allclose(curve, curve32, rtol=0.05)
    assert curve32[-5:].mean() < 0.9 * curve32[0]  # there was something to follow
    assert (curve != curve32).any()
    assert dtypes_of(state) == dtypes_of(state32)
    # Batch statistics are near, and as many random numbers were drawn.
    for kind, rtol in (jnp.floating, 0.05), (jnp.integer, 0):
        x, x32 = flat(state, kind), flat(state32, kind)
        assert np.linalg.norm(x - x32) <= rtol * np.linalg.norm(x32)
