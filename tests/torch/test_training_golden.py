"""jamp against torch's training runs in parity/golden.npz."""

import pytest

from parity import golden
from tests.marks import mostly_nightly, walk

RUNS = [(task, seed) for task in golden.TASKS.values() for seed in golden.SEEDS]
QUICK = [golden.TASKS[name] for name in ("mlp, AdamW", "gan, AdamW")]


@pytest.fixture(scope="module")
def arrays():
    return golden.load()


@walk("task, seed", RUNS)
def test_scales_follow_the_overflows_of_torch(task, seed, arrays):
    torch = golden.recorded(arrays, task, seed)
    assert torch.skipped.any() and len(torch.scale) == golden.TRAINING_STEPS
    assert golden.replay(torch) == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "task", mostly_nightly(QUICK, QUICK[0]), ids=lambda task: task.name
)
def test_a_training_run_ends_where_torch_ends(task, arrays):
    torch = golden.recorded(arrays, task, 0)
    spreads = [golden.recorded_spread(arrays, task, seed) for seed in golden.SEEDS]
    jamp = golden.train(task, 0)
    trained = golden.Trained(torch, spreads[0], jamp, replayed=0)
    assert trained.skips_apart <= golden.SKIPS_APART
    noise = golden.noise(spreads)
    assert trained.loss_apart <= golden.NOISE * noise
