"""nanoGPT-jax, a port of nanoGPT's `train.py` and `model.py` to Flax Linen."""

import contextlib
import pickle
import runpy
import sys
from typing import Any
from unittest import mock

import numpy as np

import jamp

from ..models.source import Checkouts, imports_from
from .conversion import AUTOCAST, RECORDED, Edit, above
from .record import STEPS, Outcome

SCRIPT, MODEL = "train.py", "model.py"
VOCABULARY = 128
OPTIONS = {
    "out_dir": "out",
    "batch_size": 4,
    "block_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "dropout": 0.1,
    "max_iters": STEPS - 1,
    "eval_interval": 1000,
    "eval_iters": 1,
    "warmup_iters": 5,
    "lr_decay_iters": STEPS,
    "max_new_tokens": 2,
    "top_k": 5,
}
CREATE = (
    "return train_state.TrainState.create(apply_fn=self.apply, params=params, tx={})"
)
HARNESS = (
    above(SCRIPT, "iter_num += 1", "LOSSES.append(float(loss))"),
    above(MODEL, "import optax", RECORDED),
    above(MODEL, CREATE.format("tx"), "tx = recorded(tx)"),
    Edit(  # Flax's parameters are dictionaries now
        MODEL,
        "param_partitions = freeze(path_aware_map(partition_fn, params))",
        ["param_partitions = path_aware_map(partition_fn, params)"],
    ),
    Edit(  # JAX's arrays no longer have the method
        MODEL,
        "q, k ,v  = self.c_attn(x).split(3, axis=-1)",
        ["q, k, v = jnp.split(self.c_attn(x), 3, axis=-1)"],
    ),
)
REGION = (
    above(SCRIPT, "import jax", "import jamp"),
    above(SCRIPT, "def loss_fn(params):", AUTOCAST),
)
SCALING = (
    Edit(
        SCRIPT,
        "grad_fn = jax.value_and_grad(loss_fn)",
        ["grad_fn = jamp.value_and_grad(loss_fn, state.opt_state)"],
    ),
    above(MODEL, "import jax", "import jamp"),
    Edit(
        MODEL,
        CREATE.format("tx"),
        [CREATE.format("jamp.dynamic_loss_scale(tx, SCALE)")],
    ),
)


def run(checkouts: Checkouts) -> Outcome:
    """The script, with its options on the command line, and a text of random bytes."""
    folder = checkouts.folder / "nanoGPT-jax"
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        text = np.repeat(rng.integers(0, VOCABULARY, 2000), 3).astype(np.uint16)
        text.tofile(folder / "data" / "shakespeare" / f"{name}.bin")
    meta = {"vocab_size": VOCABULARY}
    (folder / "data" / "shakespeare" / "meta.pkl").write_bytes(pickle.dumps(meta))
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    losses: list[float] = []
    np.random.seed(0)
    with (
        imports_from(folder),
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["train.py", *options]),
    ):
        script: dict[str, Any] = runpy.run_path("train.py", {"LOSSES": losses})
        state, batch = script["state"], script["get_batch"]("train")
        products = jamp.debug.explain(script["train_step"])(state, batch).matmul_flops
    return Outcome(losses, state.params, state.opt_state, products)
