"""Masters of parameters, some of which the optimizer freezes.

A frozen parameter's master never moves. The state that init makes has the dtypes that
update returns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from shared.master_weights import nearest
from tests.bits import check_rounded, check_same_bits
from tests.marks import cover

from .masters import NESTINGS, SCALE, masters_in, types, updated

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 4
FROZEN = {"w": False, "b": True}
LABELS = {"w": "train", "b": "freeze"}


def parts(train):
    return {"train": train, "freeze": optax.set_to_zero()}


FREEZES = {
    "freeze": lambda tx: optax.chain(tx, optax.freeze(FROZEN)),
    "masked": lambda tx: optax.chain(tx, optax.masked(optax.set_to_zero(), FROZEN)),
    "behind": lambda tx: optax.chain(
        tx, optax.multi_transform(parts(optax.identity()), LABELS)
    ),
    "before": lambda tx: optax.chain(optax.freeze(FROZEN), tx),
    "multi_transform": lambda tx: optax.multi_transform(parts(tx), LABELS),
    "partition": lambda tx: optax.partition(parts(tx), LABELS),
    "selective": lambda tx: optax.selective_transform(tx, freeze_mask=FROZEN),
}
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.5, momentum=0.5),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "lion": lambda: optax.lion(0.1),
    "ema": lambda: optax.chain(optax.ema(0.5, debias=False), optax.sgd(0.5)),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "half moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
}
EXACT = ("momentum", "ema")
NESTS = [
    "alone",
    "scaled",
    "scaled inside",
    "MultiSteps inside",
    "MultiSteps inside, scaled",
    "MultiSteps around",
    "MultiSteps around, scaled",
    "injected",
]
FORMS = [(jnp.float16, False), (jnp.bfloat16, False), (jnp.bfloat16, True)]


def make(freeze, optimizer, nest, remainder):
    return NESTINGS[nest](
        functools.partial(jamp.master_weights, remainder=remainder),
        lambda tx: jamp.dynamic_loss_scale(tx, SCALE),
        FREEZES[freeze](OPTIMIZERS[optimizer]()),
    )


def make_plain(freeze, optimizer, nest):
    """The same without masters and without a loss scale."""
    same = lambda tx: tx
    return NESTINGS[nest](same, same, FREEZES[freeze](OPTIMIZERS[optimizer]()))


# Numbers of few bits, whose sums and products with powers of two are not rounded.
def make_params(dtype):
    return {"w": np.array([[1, 2, 3], [4, 5, 6]], dtype), "b": -np.ones(3, dtype)}


def make_grads(params, number, scale=1.0):
    grad = lambda p: (p * number * scale / 4).astype(p.dtype)
    return jax.tree.map(grad, make_params(params["w"].dtype))


@cover(quick=3)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("freeze", FREEZES)
def test_init_makes_the_state_that_update_returns(freeze, optimizer, nest):
    for dtype, remainder in FORMS:
        tx, params = make(freeze, optimizer, nest, remainder), make_params(dtype)
        state = jax.eval_shape(tx.init, params)
        for step in (
            lambda state, params, tx=tx: tx.update(params, state, params)[1],
            lambda state, params, tx=tx: jamp.step(tx, params, state, params)[1],
        ):
            after = jax.eval_shape(step, state, params)
            assert types(after) == types(state), (dtype, remainder)
        masters = jax.tree.leaves(masters_in(state))
        assert len(masters) == 2, "what is frozen may be moved by what stands behind"


def counted(traced, function):
    def run(*args):
        traced.append(1)
        return function(*args)

    return run


@cover(ci=12)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("freeze", FREEZES)
def test_what_is_trained_follows_float32_and_the_rest_stays(freeze, optimizer, nest):
    """Op by op, and in one program where its numbers are exact."""
    for dtype, remainder in FORMS:
        plain, tx = (
            make_plain(freeze, optimizer, nest),
            make(freeze, optimizer, nest, remainder),
        )
        params, full = jax.device_put((make_params(dtype), make_params(jnp.float32)))
        state, full_state = tx.init(params), plain.init(full)
        scale = SCALE if "scaled" in nest else 1.0
        traced, compiled = [], (params, state)
        jitted = jax.jit(counted(traced, updated(tx)))
        for number in range(1, STEPS + 1):
            grads = jax.device_put(make_grads(params, number, scale))
            compiled = jitted(*compiled, grads)
            params, state = jamp.step(tx, grads, state, params)
            grads = jax.device_put(make_grads(full, number))
            updates, full_state = plain.update(grads, full_state, full)
            full = optax.apply_updates(full, updates)
        assert len(traced) == 1
        if optimizer in EXACT:
            check_same_bits(compiled, (params, state))
        masters = jamp.master_params(params, state)
        if "around" in nest and optimizer not in EXACT:
            # In the branch of MultiSteps, XLA may fuse each step's product and sum.
            check_rounded(masters["w"], full["w"], 2 * STEPS)
        else:
            check_same_bits(masters["w"], full["w"])  # op by op
        check_same_bits(params["w"], nearest(np.asarray(masters["w"]), dtype))
        check_same_bits(params["b"], make_params(dtype)["b"])
        assert np.any(params["w"] != make_params(dtype)["w"])
