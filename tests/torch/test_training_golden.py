"""jamp against training runs that torch left in parity/golden.npz."""

import pytest

from parity import golden, training, training_data, training_jamp
from tests.marks import mostly_slow

RUNS = [(task, seed) for task in training.CASES.values() for seed in training.SEEDS]
QUICK = [training.CASES[name] for name in ("mlp, AdamW", "gan, AdamW")]


@pytest.fixture(scope="module")
def arrays():
    return golden.load()


@pytest.mark.parametrize(
    "task, seed", RUNS, ids=lambda value: getattr(value, "name", value)
)
def test_scales_follow_the_overflows_of_torch(task, seed, arrays):
    torch = training.recorded(arrays, task, seed)
    assert torch.skipped.any() and len(torch.scale) == training_data.STEPS
    assert training.replay(torch) == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "task", mostly_slow(QUICK, QUICK[0]), ids=lambda task: task.name
)
def test_a_training_run_ends_where_torch_ends(task, arrays):
    torch = training.recorded(arrays, task, 0)
    jamp = training_jamp.run(task, 0)
    trained = training.Trained([torch], jamp, replayed=0)
    assert trained.skips_apart <= training.SKIPS_APART
    noise = arrays[f"training/{task.name}/noise"]
    assert trained.loss_apart <= training.NOISE * noise
