"""The edits and the verdicts of `foreign.train`, without any checkout."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .models.source import Checkouts
from .models.training import cosines
from .trainers import TRAINERS, WAYS, Trainer
from .trainers.compare import lines, part, row, wrong
from .trainers.conversion import Edit, convert, count, edited
from .trainers.record import STEPS, Outcome, Record, record

TEXT = "def f(x):\n    y = x\n    return y\n\ndef g(x):\n    return y\n"


@pytest.mark.parametrize("old", ["z = x", "y = ", "return y", "    y = x"])
def test_a_line_stands_exactly_once(old):
    with pytest.raises(ValueError, match="exactly once"):
        edited(TEXT, [Edit("a.py", old, ["pass"])])


def test_two_edits_of_a_line():
    edit = Edit("a.py", "y = x", ["y = 2 * x"])
    with pytest.raises(ValueError, match="two edits of line 2"):
        edited(TEXT, [edit, edit])


def test_new_lines_are_indented_as_the_old_one():
    new = edited(TEXT, [Edit("a.py", "y = x", ["if x:", "    y = x", "", "z = x"])])
    assert new.splitlines()[1:5] == ["    if x:", "        y = x", "", "    z = x"]
    assert edited(TEXT, []) == TEXT
    assert "y = x" not in edited(TEXT, [Edit("a.py", "y = x", [])])


@pytest.mark.parametrize(
    ("new", "lines"),
    [
        (["y = x"], (0, 0)),
        (["y = 2"], (1, 1)),
        ([], (0, 1)),
        (["a", "y = x", "b"], (2, 0)),
    ],
)
def test_count(new, lines):
    assert count(TEXT, edited(TEXT, [Edit("a.py", "y = x", new)])) == lines


# A whole project: a loop with one optimizer, and how it is converted.
PROJECT = """
import jax
import jax.numpy as jnp
import optax


def train(x, y):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    params = {"a": jnp.ones((16, 16)) / 16, "b": jnp.eye(16) / 4}
    tx = optax.sgd(0.1)
    state = tx.init(params)
    losses = []
    for _ in range(20):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
    return losses, params, state, loss_fn
"""
SCALED_TX = Edit(
    "loop.py", "state = tx.init(params)",
    ["tx = jamp.dynamic_loss_scale(tx, SCALE)", "state = tx.init(params)"],
)  # fmt: skip
SCALED_LOSS = Edit(
    "loop.py", "loss, grads = jax.value_and_grad(loss_fn)(params)",
    ["loss, grads = jamp.value_and_grad(loss_fn, state)(params)"],
)  # fmt: skip
REGION = (
    Edit("loop.py", "import jax", ["import jamp", "import jax"]),
    Edit(
        "loop.py",
        "def loss_fn(params):",
        ["@jamp.autocast(DTYPE)", "def loss_fn(params):"],
    ),
)


def run_loop(checkouts: Checkouts) -> Outcome:
    import jamp

    spec = importlib.util.spec_from_file_location("loop", checkouts.folder / "loop.py")
    assert spec and spec.loader
    loop: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(32, 16)).astype("f4") for _ in range(2))
    losses, params, state, loss_fn = loop.train(x, y)
    products = jamp.debug.explain(loss_fn)(params).matmul_flops
    return Outcome(losses, params, state, products)


TOY = Trainer(
    "toy",
    (
        Edit("loop.py", "import optax", [
            "import optax", "from foreign.trainers.record import recorded",
        ]),
        Edit("loop.py", "tx = optax.sgd(0.1)", ["tx = recorded(optax.sgd(0.1))"]),
    ),
    REGION,
    (SCALED_TX, SCALED_LOSS),
    run_loop,
)  # fmt: skip


def toy(folder: Path, way: str, trainer: Trainer = TOY) -> Record:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "loop.py").write_text(PROJECT)
    target = folder / way.replace(" ", "_")
    added = convert(source, target, trainer.harness, trainer.edits(WAYS[way]))
    return record(trainer.run(Checkouts(target)), added, bool(WAYS[way].scale))


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_in_each_way(tmp_path, way):
    plain = toy(tmp_path, "float32")
    other = plain if way == "float32" else toy(tmp_path, way)
    verdict = row(way, plain, other)
    assert verdict["wrong"] == []
    assert verdict["skipped"] == (STEPS if way == "from 2^100" else 0)
    changed = {"float32": (0, 0), "bfloat16": (2, 0), "float8": (2, 0)}
    assert other.lines == changed.get(way, (4, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scaling": (SCALED_TX,)}, "norm"),  # the loss is not scaled
        ({"region": REGION[:1]}, "share"),  # no region
        ({"scaling": (SCALED_LOSS._replace(new=[
            "loss, grads = jamp.value_and_grad(loss_fn, state)(params)",
            "grads['a'] = grads['a'].T",
        ]), SCALED_TX)}, "cosine"),
        ({"scaling": (SCALED_LOSS._replace(new=[
            "loss, grads = jamp.value_and_grad(loss_fn, state)(params)",
            "loss = loss * 1.01",
        ]), SCALED_TX)}, "first loss"),
    ],
)  # fmt: skip
def test_a_wrong_conversion_is_outside(tmp_path, change: Mapping[str, Any], said):
    plain = toy(tmp_path, "float32")
    other = toy(tmp_path, "float16", TOY._replace(**change))
    assert said in row("float16", plain, other)["wrong"]


def right() -> Record:
    gradients = {"w": np.array([3.0, 4.0], np.float32)}
    losses = list(np.linspace(2, 1, STEPS))
    return Record(losses, gradients, 0.1, False, STEPS, 0, {"float16": 1.0}, (5, 3))


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("float16", {"losses": [2.0] * STEPS}),
        ("float16", {"losses": [2.0] * (STEPS - 1)}),
        ("float16", {"losses": [*np.linspace(2, 1, STEPS - 1), np.nan]}),
        ("float16", {"losses": [np.nan, *np.linspace(2, 1, STEPS)[1:]]}),
        ("float16", {"gradients": {"w": np.array([4.0, 3.0], np.float32)}}),
        ("float16", {"gradients": {"w": np.array([0.0, 0.0], np.float32)}}),
        ("float16", {"gradients": {"w": np.array([np.nan, 4.0], np.float32)}}),
        ("float16", {"gradients": {"w": np.array([6.0, 8.0], np.float32)}}),
        ("float16", {"applied": STEPS - 1}),
        ("float16", {"applied": STEPS - 1, "skipped": 1}),
        ("float16", {"held": True}),
        ("float16", {"products": {"float16": 0.4, "float32": 0.6}}),
        ("float8", {}),  # the products are in float16
        ("from 2^16", {"held": True}),
        ("from 2^16", {"applied": STEPS - 3, "skipped": 2}),
        ("from 2^100", {}),
        ("from 2^100", {"applied": 0, "skipped": STEPS}),
        ("from 2^100", {"applied": 1, "skipped": STEPS - 1, "held": True}),
    ],
)
def test_a_planted_fault_is_outside(way, fault):
    assert row("float16", right(), right())["wrong"] == []
    verdict = row(way, right(), right()._replace(**fault))
    assert verdict["wrong"]
    assert wrong({"ways": {way: verdict}})
    assert "**outside" in lines("nanoGPT", {"ways": {way: verdict}})


def test_gradients_of_zeros_agree_with_zeros_alone():
    zeros, ones = {"w": np.zeros(2)}, {"w": np.ones(2)}
    assert cosines(zeros, zeros)[0] == 1
    assert cosines(ones, zeros)[0] == cosines(zeros, ones)[0] == 0


def test_the_part_of_the_page():
    ways = {way: row(way, right(), right()) for way in ("float32", "float16")}
    result = {"ways": ways, "versions": ["jax 1"], "commit": "at abc"}
    text = part(dict.fromkeys(TRAINERS, result))
    assert text.count("| float16 | +5 -3 | 100% | 0.0e+00 |") == len(TRAINERS)
