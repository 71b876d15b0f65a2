"""purejaxrl's PPO: rollouts, epochs and minibatches in one compiled program."""

import importlib

import jax
import numpy as np

import jamp

from ..models.source import Checkouts
from .conversion import AUTOCAST, RECORDED, Edit, above
from .record import Outcome

FILE = "purejaxrl/ppo.py"
HARNESS = (
    above(FILE, "import gymnax", RECORDED),
    above(FILE, "train_state = TrainState.create(", "tx = recorded(tx)"),
    Edit(FILE, "return runner_state, metric", ["return runner_state, loss_info"]),
)
REGION = (
    above(FILE, "import optax", "import jamp"),
    above(FILE, "def _loss_fn(params, traj_batch, gae, targets):", AUTOCAST),
)
SCALING = (
    Edit(
        FILE,
        "from flax.training.train_state import TrainState",
        ["from jamp.linen import TrainState"],
    ),
    Edit(FILE, "tx=tx,", ["tx=jamp.dynamic_loss_scale(tx, SCALE),"]),
    Edit(
        FILE,
        "grad_fn = jax.value_and_grad(_loss_fn, has_aux=True)",
        [
            "grad_fn = jamp.value_and_grad("
            "_loss_fn, train_state.opt_state, has_aux=True)"
        ],
    ),
)
CONFIG = {
    "LR": 2.5e-4,
    "NUM_ENVS": 4,
    "NUM_STEPS": 32,
    "TOTAL_TIMESTEPS": 5 * 4 * 32,
    "UPDATE_EPOCHS": 2,
    "NUM_MINIBATCHES": 2,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": True,
}


def run(checkouts: Checkouts) -> Outcome:
    """5 rollouts, and 4 updates after each."""
    importlib.import_module("distrax")  # before stand-ins for what it asks after
    (ppo,) = checkouts.modules("purejaxrl/purejaxrl", "ppo")
    train, rng = ppo.make_train(dict(CONFIG)), jax.random.PRNGKey(30)
    products = jamp.debug.explain(train)(rng).matmul_flops
    out = jax.jit(train)(rng)
    state, (total, _) = out["runner_state"][0], out["metrics"]
    losses = np.asarray(total).ravel().tolist()
    return Outcome(losses, state.params, state.opt_state, products)
