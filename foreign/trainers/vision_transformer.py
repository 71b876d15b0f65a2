"""google-research's vision_transformer: `pmap`, with accumulated gradients."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

import jamp

from ..models.source import Checkouts
from .conversion import AUTOCAST, RECORDED, Edit, above
from .record import STEPS, Outcome

FILE = "vit_jax/train.py"
CLASSES, BATCH = 16, 16
HARNESS = (
    above(FILE, "import optax", RECORDED),
    above(FILE, "update_fn_repl = make_update_fn(", "tx = recorded(tx)"),
)
REGION = (
    above(FILE, "import jax", "import jamp"),
    above(FILE, "def loss_fn(params, images, labels):", AUTOCAST),
)
SCALING = (
    Edit(
        FILE,
        "jax.value_and_grad(loss_fn), params, batch['image'], batch['label'],",
        [
            "jamp.value_and_grad(loss_fn, opt_state), params, batch['image'], "
            "batch['label'],"
        ],
    ),
    Edit(
        FILE,
        "updates, opt_state = tx.update(g, opt_state)",
        ["params, opt_state = jamp.step(tx, g, opt_state, params)"],
    ),
    Edit(FILE, "params = optax.apply_updates(params, updates)", []),
    above(
        FILE,
        "update_fn_repl = make_update_fn(",
        "tx = jamp.dynamic_loss_scale(tx, SCALE)",
    ),
)


class Writer(mock.MagicMock):
    """Keeps the losses that the trainer logs."""

    def write_scalars(self, step, scalars):
        """Called in each step, and with other numbers after an evaluation."""
        if "train_loss" in scalars:
            self.losses.append(scalars["train_loss"])


def config() -> Any:
    """A vision transformer of two layers, with the project's own option names."""
    config_dict = importlib.import_module("ml_collections").ConfigDict
    return config_dict(
        {
            "dataset": "made up",
            "pretrained_dir": "",
            "total_steps": STEPS,
            "base_lr": 0.03,
            "decay_type": "cosine",
            "warmup_steps": 5,
            "grad_norm_clip": 1.0,
            "accum_steps": 2,
            "prefetch": 1,
            "batch": BATCH,
            "batch_eval": BATCH,
            "progress_every": 1,
            "eval_every": 0,
            "checkpoint_every": 0,
            "model": {
                "model_name": "made up",
                "patches": {"size": (8, 8)},
                "hidden_size": 32,
                "transformer": {
                    "mlp_dim": 64,
                    "num_heads": 2,
                    "num_layers": 2,
                    "attention_dropout_rate": 0.0,
                    "dropout_rate": 0.1,
                },
                "classifier": "gap",
                "representation_size": None,
            },
        }
    )


class Images:
    """Batches of made-up images for each device, and one batch to evaluate."""

    def __init__(self, batches: int):
        devices, rng = jax.local_device_count(), np.random.default_rng(0)
        shape = (batches, devices, BATCH // devices)
        kinds = rng.integers(0, CLASSES, shape)
        means = rng.normal(size=(CLASSES, 32, 32, 3))
        self.images = (means[kinds] + rng.normal(size=(*shape, 32, 32, 3))).astype("f4")
        self.labels = np.eye(CLASSES, dtype="f4")[kinds]

    def __iter__(self):
        for image, label in zip(self.images, self.labels, strict=True):
            yield {"image": image, "label": label}

    def cardinality(self):
        """The number of batches, as TensorFlow's data sets have it."""
        return SimpleNamespace(numpy=lambda: len(self.images))


def run(checkouts: Checkouts) -> Outcome:
    """`train_and_evaluate`, with all that it does but reading and writing files."""
    sys.modules["vit_jax.models_lit"] = mock.MagicMock()  # needs flaxformer
    (train,) = checkouts.modules("vision_transformer", "vit_jax.train")
    train.input_pipeline = SimpleNamespace(
        get_dataset_info=lambda *_: {"num_classes": CLASSES},
        get_datasets=lambda _: (Images(STEPS), Images(1)),
        prefetch=lambda images, _: iter(images),
    )
    train.checkpoint = SimpleNamespace(
        load_pretrained=lambda init_params, **_: init_params
    )
    train.periodic_actions = mock.MagicMock()
    writer = Writer(losses=[])
    train.metric_writers = SimpleNamespace(
        create_default_writer=lambda *_, **__: writer
    )
    saved: list[Any] = []
    train.flax_checkpoints = SimpleNamespace(
        restore_checkpoint=lambda _, target: target,
        save_checkpoint=lambda _, target, step: saved.append(target),
    )
    made, products = train.make_update_fn, {}

    def make_update_fn(**kwargs):
        update_fn = made(**kwargs)

        def explained(*args):
            if not products:
                products.update(jamp.debug.explain(update_fn)(*args).matmul_flops)
            return update_fn(*args)

        return explained

    train.make_update_fn = make_update_fn
    train.train_and_evaluate(config(), "")
    ((params, opt_state, _),) = saved
    return Outcome(writer.losses, params, opt_state, products)
