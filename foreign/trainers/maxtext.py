"""MaxText's pre-training loop, with a small decoder whose layers are scanned."""

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

import jamp

from ..models.source import Checkouts, imports_from
from .conversion import AUTOCAST, RECORDED, Edit, above
from .record import STEPS, Outcome

STEP = "src/maxtext/trainers/pre_train/train.py"
TOOLS = "src/maxtext/utils/train_utils.py"
VOCABULARY, BATCH, LENGTH = 128, 4, 32
OPTIONS = {
    "run_name": "made_up",
    "steps": STEPS,
    "base_num_decoder_layers": 2,
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "per_device_batch_size": BATCH // 2,
    "max_target_length": LENGTH,
    "learning_rate": 5e-3,
    "dtype": "float32",
    "attention": "dot_product",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
}
OPTIMIZER = "tx = optimizers.get_optimizer(config, learning_rate_schedule, model)"
HARNESS = (
    above(TOOLS, "import optax", RECORDED),
    Edit(TOOLS, OPTIMIZER, [OPTIMIZER, "tx = recorded(tx)"]),
)
REGION = (
    above(STEP, "import jax", "import jamp"),
    above(
        STEP,
        "def loss_fn(model, config, data, dropout_rng, params, sparsity_state=None, "
        "is_train=True):",
        AUTOCAST,
    ),
)
SCALING = (
    Edit(
        STEP,
        "grad_func = jax.value_and_grad(diff_wrapper, argnums=(0, 1), has_aux=True)",
        [
            "grad_func = jamp.value_and_grad(diff_wrapper, state.optimizer.opt_state, "
            "argnums=(0, 1), has_aux=True)"
        ],
    ),
    Edit(  # it would clip scaled gradients
        STEP,
        "grads = maxtext_utils.apply_gradient_clipping(raw_grads, None, "
        "config.gradient_clipping_threshold)",
        ["grads = raw_grads"],
    ),
    above(TOOLS, "import jax", "import jamp"),
    above(
        TOOLS,
        "return learning_rate_schedule, tx",
        "clip = optax.clip_by_global_norm(config.gradient_clipping_threshold)",
        "tx = jamp.dynamic_loss_scale(optax.chain(clip, tx), SCALE)",
    ),
)


def batches():
    """Random words, each three times in a row."""
    rng = np.random.default_rng(0)
    position = np.tile(np.arange(LENGTH), (BATCH, 1))
    segment = np.ones_like(position)
    while True:
        words = rng.integers(0, VOCABULARY, (BATCH, LENGTH // 3 + 1))
        text = np.repeat(words, 3, axis=1)[:, : LENGTH + 1]
        yield {
            "inputs": text[:, :-1],
            "inputs_position": position,
            "inputs_segmentation": segment,
            "targets": text[:, 1:],
            "targets_position": position,
            "targets_segmentation": segment,
        }


def run(checkouts: Checkouts) -> Outcome:
    """`train_loop`, with its own compiled step, meshes and file of metrics."""
    folder = checkouts.folder / "maxtext"
    metrics = folder / "metrics.json"
    options = {**OPTIONS, "base_output_directory": folder, "metrics_file": metrics}
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    kept: list[Any] = []
    with imports_from(folder / "src"):
        # Both derive classes from those of packages that only read data.
        sys.modules["maxtext.common.grain_utility"] = mock.MagicMock()
        data: Any = SimpleNamespace(create_data_iterator=lambda *_: (batches(), None))
        sys.modules["maxtext.input_pipeline.input_pipeline_interface"] = data
        train: Any = importlib.import_module("maxtext.trainers.pre_train.train")
        made = train.train_utils.jit_train_and_eval_step

        def jit_train_and_eval_step(config, graph, mesh, *args):
            steps = made(config, graph, mesh, *args)
            kept.extend([graph, mesh, steps[0]])
            return steps

        train.train_utils.jit_train_and_eval_step = jit_train_and_eval_step
        file = str(folder / "src/maxtext/configs/base.yml")
        lines = [f"{name}={value}" for name, value in options.items()]
        config, recorder = train.initialize([STEP, file, *lines])
        state = train.train_loop(config, recorder)
        graph, mesh, step = kept
        rules = train.nn_partitioning.axis_rules(config.logical_axis_rules)
        with jax.set_mesh(mesh), rules:
            products = jamp.debug.explain(step)(state, next(batches())).matmul_flops
        state = nnx.merge(graph, state)
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["learning/loss"] for line in logged]
    opt_state = state.optimizer.opt_state
    params = nnx.to_pure_dict(nnx.state(state.model, nnx.Param))
    return Outcome(losses, params, opt_state, products)
