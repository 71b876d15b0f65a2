"""jamp against torch's training runs in parity/golden.npz."""

import pytest

from parity import golden
from tests.marks import mostly_slow

RUNS = [(task, seed) for task in golden.TASKS.values() for seed in golden.SEEDS]
QUICK = [golden.TASKS[name] for name in ("mlp, AdamW", "gan, AdamW")]


@pytest.fixture(scope="module")
def arrays():
    return golden.load()


@pytest.mark.parametrize(
    "task, seed", RUNS, ids=lambda value: getattr(value, "name", value)
)
def test_scales_follow_the_overflows_of_torch(task, seed, arrays):
    torch = golden.recorded(arrays, task, seed)
    assert torch.skipped.any() and len(torch.scale) == golden.TRAINING_STEPS
    assert golden.replay(torch) == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "task", mostly_slow(QUICK, QUICK[0]), ids=lambda task: task.name
)
def test_a_training_run_ends_where_torch_ends(task, arrays):
    torch = golden.recorded(arrays, task, 0)
    jamp = golden.train(task, 0)
    trained = golden.Trained([torch], jamp, replayed=0)
    assert trained.skips_apart <= golden.SKIPS_APART
    noise = arrays[f"training/{task.name}/noise"]
    assert trained.loss_apart <= golden.NOISE * noise
