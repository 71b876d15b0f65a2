"""Several processes train as one: the same losses, scales and skips in all of them."""

import dataclasses
import os
import sys

import numpy as np
import pytest

from jamp._scaling.rule import LossScaleConfig

from ..marks import cover
from . import processes
from .storms.oracle import Scaling, trajectory

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.usefixtures("standard_promotion"),
]

# Processes, devices per process, ways to train; without the short run these cover all.
SHORT = 2, 1, ("optax-fsdp",)
RUNS = (
    SHORT,
    (2, 2, ("optax-replicated", "nnx-fsdp", "nnx-shard_map")),
    (4, 1, ("nnx-replicated", "optax-fsdp", "optax-shard_map")),
)


@cover(quick=0, ci=1)
@pytest.mark.parametrize("count, devices, ways", RUNS, ids=["short", "2", "4"])
def test_processes_agree_with_each_other_and_with_one(count, devices, ways, tmp_path):
    rows = processes.ROWS // count
    hit = {row // rows for row, _ in processes.injections().values()}
    assert hit == {*range(count)}
    injected = np.isin(np.arange(processes.STEPS), [*processes.injections()])
    assert injected.sum() == processes.INFS
    numbers = dataclasses.asdict(LossScaleConfig(**processes.SCALING))
    start = Scaling(np.float32(numbers["init_scale"]), 0)
    scale, tracker, *_ = trajectory(start, injected, numbers)
    assert len({*scale}) > 8  # it grows and backs off

    runs = processes.launch(tmp_path, count, devices, ways, timeout=300)
    alone = {}
    for way, seen in runs.items():
        for one in seen:
            disagreements = np.sum(one["found_inf"] != seen[0]["found_inf"])
            assert disagreements == 0, way
            np.testing.assert_array_equal(one["found_inf"], injected, way)
            np.testing.assert_array_equal(one["skipped_steps"], injected.cumsum(), way)
            np.testing.assert_array_equal(one["loss_scale"], scale, way)
            np.testing.assert_array_equal(one["growth_tracker"], tracker, way)
            bits = one["loss"].view(np.uint32)
            np.testing.assert_array_equal(bits, seen[0]["loss"].view(np.uint32), way)
            assert one["checksum"].shape == (processes.STEPS, devices)
            if way.endswith("replicated"):
                first = seen[0]["checksum"][:, :1]
                assert np.all(one["checksum"] == first), way

        layout = way.split("-")[1]
        if layout not in alone:
            mesh = processes.make_mesh(count * devices)
            alone[layout] = processes.train(f"optax-{layout}", mesh)
        check_close(seen, alone[layout], count * devices)


@pytest.mark.nightly
def test_processes_retry_together(tmp_path):
    ways = "optax-fsdp-retry", "optax-shard_map-retry"
    injected = np.isin(np.arange(processes.STEPS), [*processes.injections()])
    for way, seen in processes.launch(tmp_path, 2, 2, ways, timeout=300).items():
        for one in seen:
            # An inf in the batch overflows at every scale, so the batch is finally
            # dropped.
            np.testing.assert_array_equal(one["found_inf"], injected, way)
            np.testing.assert_array_equal(one["skipped_steps"], injected.cumsum(), way)
            retries = injected.cumsum() * (processes.ATTEMPTS - 1)
            np.testing.assert_array_equal(one["retried_steps"], retries, way)
            # The scale falls where gradients vanish, and sums in another order drift.
            bits = one["loss"].view(np.uint32)
            np.testing.assert_array_equal(bits, seen[0]["loss"].view(np.uint32), way)
        alone = processes.train(way, processes.make_mesh(4))
        for name in ("found_inf", "loss_scale", "growth_tracker", "retried_steps"):
            np.testing.assert_array_equal(seen[0][name], alone[name], name)


def check_close(seen, alone, devices):
    """The same training in one process, except for the order of sums over devices.

    Each device adds one float16 gradient, so another order can move a sum by half a
    unit in the last place, 2**-11, per device. Training pulls both runs towards the
    same parameters, so this does not grow with the steps.
    """
    for name in ("found_inf", "loss_scale", "growth_tracker", "skipped_steps"):
        np.testing.assert_array_equal(seen[0][name], alone[name], name)
    rounding = devices * 2.0**-11
    np.testing.assert_allclose(seen[0]["loss"], alone["loss"], rtol=rounding)
    assert alone["loss"][-1] < 0.05 * alone["loss"][0]
    names = [name for name in alone if name.startswith("shard/")]
    assert {name for one in seen for name in one} == {*alone}
    bound = rounding * max(np.abs(alone[name]).max() for name in names)
    for one in seen:
        for name in {*names} & {*one}:
            np.testing.assert_allclose(one[name], alone[name], rtol=0, atol=bound)


def test_a_process_that_dies_fails_the_group_with_what_it_printed():
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    last = "import os; print('last words', flush=True)\nos.abort()"
    dies = [sys.executable, "-c", last]
    with pytest.raises(RuntimeError, match=r"processes failed:(.|\n)*last words"):
        processes.together([sleeps, dies], os.environ, timeout=30)
    with pytest.raises(RuntimeError, match=r"were not done after 0\.1 s"):
        processes.together([sleeps], os.environ, timeout=0.1)
