"""Each example runs at a small size and does what it says."""

import functools
import importlib
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jamp

from .marks import cover

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = [path.stem for path in EXAMPLES.glob("*.py")]
SMALL = {
    "equinox_lstm": "--steps 40 --layers 1 --width 16 --batch-size 16",
    "haiku_cnn": "--steps 40 --widths 8 8 --batch-size 16",
    "resnet": "--steps 16 --stages 1 1 --width 4 --batch-size 16",
    "gan": "--steps 12 --width 4 --batch-size 8",
}
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def load(monkeypatch):
    """Imports an example the way Python does when running it."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboardX")
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


@cover(quick=0, ci=2)
@pytest.mark.parametrize("name", SMALL)
def test_float16_trains_beside_float32(name, load, tmp_path, capsys):
    flags = "--growth-interval 3 --save-every 1000 --out"  # short: overflows soon
    runs = load(name).main([*SMALL[name].split(), *flags.split(), str(tmp_path)])
    full, half = runs["float32", 0], runs["float16", 0]
    found_inf = half.history["found_inf"]
    assert found_inf.any() and not full.history["found_inf"].any()
    if name == "gan":  # the norm is the critic's
        found_inf = half.history["critic_skipped"]
        assert (found_inf != half.history["generator_skipped"]).any()
    assert np.array_equal(np.isfinite(half.history["grad_norm"]), ~found_inf)
    losses = [run.history["loss"] for run in (full, half)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0][:3] == pytest.approx(losses[1][:3], rel=0.01)
    assert full.results.keys() == half.results.keys()
    assert (tmp_path / "training.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "results.json").read_text())["results"]
    for (precision, _), run in runs.items():
        assert {key: written[precision][key] for key in run.results} == {
            key: [value] for key, value in run.results.items()
        }
    (events,) = (tmp_path / "float16-seed0").glob("events.*")
    for tag in (b"train/grad_norm", b"train/loss_scale", b"train/skipped_steps"):
        assert tag in events.read_bytes()
    assert re.search(r"float16.*\d", capsys.readouterr().out)


@pytest.mark.nightly
def test_float8_trains_beside_bfloat16(load, tmp_path):
    gpt = load("gpt")
    precisions = "bfloat16", *gpt.FLOAT8
    flags = (
        "--steps 12 --layers 1 --width 32 --heads 2 --length 16 --batch-size 4 "
        f"--precisions {' '.join(precisions)} --out"
    )
    runs = gpt.main([*flags.split(), str(tmp_path)])
    losses = {name: runs[name, 0].history["loss"] for name in precisions}
    for name in gpt.FLOAT8:
        assert losses[name] == pytest.approx(losses["bfloat16"], rel=0.01)
    assert len({tuple(values) for values in losses.values()}) == len(precisions)

    model, text = runs["float8", 0].state[0], np.zeros((2, 17), np.uint8)
    for name in gpt.FLOAT8:
        loss_fn = functools.partial(gpt.loss_fn, precision=name)
        rows = jamp.debug.explain(loss_fn)(model, text).rows
        notes = [row.note for row in rows for _ in range(row.times) if row.note]
        recipe = gpt.FLOAT8[name].recipe
        assert notes.count(f"float8 {recipe}") == 5  # of each layer, and the head
        stays = "no float8: neither input is a weight"
        assert set(notes) == {f"float8 {recipe}", stays}


@pytest.mark.slow
def test_experts_train_in_float8_beside_bfloat16(load, tmp_path):
    gpt, precisions = load("gpt"), ("bfloat16", "float8")
    flags = (
        "--steps 12 --layers 1 --width 32 --heads 2 --length 16 --batch-size 4 "
        f"--experts 4 --precisions {' '.join(precisions)} --out"
    )
    runs = gpt.main([*flags.split(), str(tmp_path)])
    low, float8 = (runs[name, 0].history["loss"] for name in precisions)
    # Of single steps the losses differ more: a token may go to another expert.
    assert np.mean(float8) == pytest.approx(np.mean(low), rel=0.01)
    assert tuple(float8) != tuple(low)
    model, text = runs["float8", 0].state[0], np.zeros((2, 17), np.uint8)
    loss_fn = functools.partial(gpt.loss_fn, precision="float8")
    rows = jamp.debug.explain(loss_fn)(model, text).rows
    notes = [row.note for row in rows for _ in range(row.times) if row.flops]
    # Attention's other two products, and those that send tokens to experts, have none.
    assert notes.count("float8 tensorwise") == 5
    assert notes.count("no float8: neither input is a weight") == 4


@pytest.mark.slow
def test_another_example_has_no_float8(load, capsys):
    with pytest.raises(SystemExit):
        load("resnet").main(["--precisions", "float8"])
    assert "invalid choice: 'float8'" in capsys.readouterr().err


@pytest.mark.slow
def test_half_precision_disagrees_with_its_sampler(load, tmp_path):
    flags = "--steps 8 --layers 1 --width 16 --heads 2 --prompts 8 --out"
    runs = load("rl").main([*flags.split(), str(tmp_path)])
    mismatch = {name: run.results["mismatch"] for (name, _), run in runs.items()}
    assert 0 < mismatch["float32"] < mismatch["float16"] < mismatch["bfloat16"]
    rl, params = load("rl"), runs["float16", 0].state[0]
    prompts = np.zeros((2, 4), np.int32)
    lowered = rl.sample.lower(params, prompts, jax.random.key(0), "float16").as_text()
    products = re.findall(r"dot_general.*: \((.*)\) ->", lowered)
    assert products and all(types.count("xf16>") == 2 for types in products)
    assert (tmp_path / "mismatch.png").exists()


@pytest.mark.slow
def test_an_overflow_on_one_device_is_skipped_by_all(load, tmp_path, capsys):
    flags = "--steps 4 --layers 1 --width 32 --length 16 --precisions float16 --out"
    run = load("fsdp").main([*flags.split(), str(tmp_path)])["float16", 0]
    devices = jax.device_count()
    assert run.results["MB a device"] < 1.02 / devices * run.results["MB of state"]
    printed = capsys.readouterr().out
    scales = ", ".join(["65536.0"] * devices), ", ".join(["32768.0"] * devices)
    everywhere = [*range(devices)]
    for planted, scale, changed in ((1.0, 0, everywhere), (np.inf, 1, [])):
        assert (
            f"{planted} in the batch of device {devices - 1}: "
            f"loss scales [{scales[scale]}],\n"
            f"  parameters and moments change on devices {changed}\n"
        ) in printed
    (difference,) = re.findall(r"on one device: the same within (\S+)", printed)
    assert float(difference) < 1e-3


@pytest.mark.nightly
def test_devices_exchange_gradients_as_they_are_told(load, tmp_path):
    flags = "--steps 4 --layers 1 --width 32 --length 16 --precisions float32 --out"
    norms = {}
    for name in ("xla", "float16", "int8", "float8"):
        folder = str(tmp_path / name)
        runs = load("fsdp").main([*flags.split(), folder, "--reduce", name])
        norms[name] = runs["float32", 0].history["grad_norm"]
    exact = norms.pop("xla")
    for name, found in norms.items():
        assert 1e-6 < np.abs(found / exact - 1).max() < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        ("--steps 0", "argument --steps: must be at least 1; got 0"),
        ("--save-every 0", "argument --save-every: must be at least 1"),
        ("--heads 3", "--heads must divide --width"),
    ],
)
def test_bad_flags_are_named(load, capsys, flags, message):
    with pytest.raises(SystemExit):
        load("gpt").main(flags.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("folders", [(), ("cats",)], ids=["none", "empty"])
def test_a_folder_without_images_is_refused(load, tmp_path, folders):
    for folder in folders:
        (tmp_path / folder).mkdir()
    with pytest.raises(SystemExit, match=r"--images: .* has no (subfolders|images)"):
        load("resnet").main(["--images", str(tmp_path)])


@pytest.mark.slow
def test_an_exported_function_is_served_without_jamp(load, tmp_path):
    flags = "--steps 20 --width 8 --precisions float16 --out"
    main = load("export").main
    _, dtypes, served, own = main([*flags.split(), str(tmp_path)])
    assert [*map(set, dtypes)] == [{"f32"}, {"f16"}]
    for name in ("float32", "float16"):
        np.testing.assert_array_equal(served[name], own[name])
    assert (served["float16"] != served["float32"]).any()


class Stopped(Exception):
    """The process is killed."""


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_not_stopped(load, tmp_path, monkeypatch):
    gpt, harness = load("gpt"), load("harness")
    flags = (
        "--layers 1 --width 16 --heads 2 --length 16 --batch-size 4 --steps 12 "
        "--precisions float16 --growth-interval 2 --save-every 4"
    )
    main = lambda folder, *more: gpt.main(
        [*flags.split(), "--out", str(tmp_path / folder), *more]
    )
    whole = main("whole")["float16", 0]

    train_step, calls = gpt.train_step, []

    def stopping(*args):
        calls.append(1)
        if len(calls) == 7:
            raise Stopped
        return train_step(*args)

    with pytest.raises(SystemExit, match=r"--resume: there is no checkpoint in"):
        main("nowhere", "--resume")
    with pytest.raises(SystemExit, match=r"is at step 12; raise --steps"):
        main("whole", "--resume", "--steps", "8")
    with pytest.raises(SystemExit, match=r"began with --width 16; got 32"):
        main("whole", "--resume", "--width", "32")
    monkeypatch.setattr(gpt, "train_step", stopping)
    with pytest.raises(Stopped):
        main("stopped")
    calls.append(1)  # not stopped again
    resumed = main("stopped", "--resume")["float16", 0]
    assert len(calls) == 7 + 1 + 12 - 4  # from the checkpoint of step 4
    assert resumed.history.keys() == whole.history.keys()
    for key, values in whole.history.items():
        assert np.array_equal(resumed.history[key], values), key
    for one, other in zip(*map(arrays, (resumed, whole)), strict=True):
        assert np.array_equal(one, other)
    assert harness.mean_and_deviation([1.0, 3.0]) == "2 ± 1.4"


def arrays(run):
    return jax.tree.leaves(run.state)


@pytest.fixture
def logging_metrics(load):
    return load("logging_metrics")


@pytest.mark.slow
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


@pytest.mark.slow
def test_metrics_go_to_tensorboard(logging_metrics, tmp_path):
    args = ["--logger", "tensorboard", "--steps", "5", "--logdir", str(tmp_path)]
    logging_metrics.main(args)
    (events,) = tmp_path.iterdir()
    assert events.read_bytes().count(b"train/grad_norm") >= 5


@pytest.mark.slow
def test_a_missing_logger_is_named(logging_metrics, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match=r'pip install "\.\[examples,logging\]"'):
        logging_metrics.main(["--logger", "wandb", "--logdir", str(tmp_path)])


@pytest.mark.slow
def test_non_finite_values_are_left_out(logging_metrics):
    row = {"loss": 0.5, "grad_norm": float("nan"), "found_inf": True}
    assert logging_metrics.finite(row) == {"loss": 0.5, "found_inf": 1.0}
