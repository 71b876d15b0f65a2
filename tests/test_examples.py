"""The examples that are quick enough run, and do what they say."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def logging_metrics(standard_promotion):
    pytest.importorskip("sklearn")
    return load("logging_metrics")


def test_metrics_are_printed(logging_metrics, capsys, tmp_path):
    args = ["--logger", "print", "--steps", "110", "--logdir", str(tmp_path)]
    history = logging_metrics.main(args)
    printed = capsys.readouterr().out
    assert re.search(r"step +100  loss \d\S+ +grad_norm \d\S+ +loss_scale", printed)
    assert "History of 110 steps" in printed
    skipped = history["found_inf"]
    assert 0 < skipped.sum() == history["skipped_steps"][-1]
    assert np.array_equal(np.isfinite(history["grad_norm"]), ~skipped)
    assert np.isfinite(history["loss"]).all() and history["loss"][-1] < 0.5


def test_metrics_go_to_tensorboard(logging_metrics, tmp_path):
    pytest.importorskip("tensorboardX")
    args = ["--logger", "tensorboard", "--steps", "5", "--logdir", str(tmp_path)]
    logging_metrics.main(args)
    (events,) = tmp_path.iterdir()
    assert events.read_bytes().count(b"train/grad_norm") >= 5


def test_a_missing_logger_is_named(logging_metrics, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match=r'pip install "jamp-jax\[examples,logging\]"'):
        logging_metrics.main(["--logger", "wandb", "--logdir", str(tmp_path)])


def test_non_finite_values_are_left_out(logging_metrics):
    row = {"loss": 0.5, "grad_norm": float("nan"), "found_inf": True}
    assert logging_metrics.finite(row) == {"loss": 0.5, "found_inf": 1.0}
