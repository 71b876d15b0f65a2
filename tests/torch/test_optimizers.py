"""optax beside torch: a table of docs/coming-from-torch.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
SIZES = 10.0 ** RNG.integers(-6, 1, size=(30, 8))
GRADS = (SIZES * RNG.normal(size=(30, 8))).astype(np.float32)
START = RNG.normal(size=8).astype(np.float32)
RATE, DECAY = 1e-2, 0.1
before = lambda optimizer: optax.chain(optax.add_decayed_weights(DECAY), optimizer)
rmsprop = lambda: optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False)

SAME = {
    "RMSprop": ({}, rmsprop),
    "RMSprop, decay": ({"weight_decay": DECAY}, lambda: before(rmsprop())),
    "Adam": ({}, lambda: optax.adam(RATE)),
    "Adam, decay": ({"weight_decay": DECAY}, lambda: before(optax.adam(RATE))),
    "AdamW": ({}, lambda: optax.adamw(RATE, weight_decay=0.01)),
    "SGD": ({"momentum": 0.9}, lambda: optax.sgd(RATE, momentum=0.9)),
    "SGD, nesterov": (
        {"momentum": 0.9, "nesterov": True},
        lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    ),
    "SGD, decay": (
        {"momentum": 0.9, "weight_decay": DECAY},
        lambda: before(optax.sgd(RATE, momentum=0.9)),
    ),
    "Adadelta": ({}, lambda: optax.adadelta(RATE)),
    "Adamax": ({}, lambda: optax.adamax(RATE)),
}
OTHERS = {
    "RMSprop": ({}, lambda: optax.rmsprop(RATE)),
    "RMSprop, rate of decay": ({}, lambda: optax.rmsprop(RATE, decay=0.99)),
    "Adam, decay": (
        {"weight_decay": DECAY},
        lambda: optax.adamw(RATE, weight_decay=DECAY),
    ),
    "AdamW": ({}, lambda: optax.adamw(RATE)),
    "SGD, dampening": (
        {"momentum": 0.9, "dampening": 0.9},
        lambda: optax.sgd(RATE, momentum=0.9),
    ),
    "Adagrad": ({}, lambda: optax.adagrad(RATE)),
    "Adagrad, from 0": (
        {},
        lambda: optax.adagrad(RATE, initial_accumulator_value=0.0),
    ),
    "NAdam": ({}, lambda: optax.nadam(RATE)),
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def apart(torch, name, arguments, make):
    """The distance between the two after 30 steps, in units of torch's way."""
    param = torch.nn.Parameter(torch.tensor(START))
    theirs = getattr(torch.optim, name.split(",")[0])([param], lr=RATE, **arguments)
    for grad in GRADS:
        param.grad = torch.tensor(grad)
        theirs.step()

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def trained(params, grads):
        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]

    tx = make()
    ours, of_torch = np.asarray(trained(START, GRADS)), param.detach().numpy()
    return np.max(np.abs(ours - of_torch) / np.abs(of_torch - START))


@cover(quick=2, ci=len(SAME))
@pytest.mark.parametrize("name", SAME)
def test_steps_as_torchs(name, torch):
    assert apart(torch, name, *SAME[name]) < 1e-3


@cover()
@pytest.mark.parametrize("name", OTHERS)
def test_steps_otherwise(name, torch):
    assert apart(torch, name, *OTHERS[name]) > 0.05


def test_clipping_is_torchs(torch):
    param = torch.nn.Parameter(torch.tensor(START))
    param.grad = torch.tensor(100 * GRADS[0])
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    clip = optax.clip_by_global_norm(1.0)
    ours, _ = clip.update(jnp.asarray(100 * GRADS[0]), clip.init(None))
    np.testing.assert_allclose(ours, param.grad.numpy(), rtol=1e-5)
