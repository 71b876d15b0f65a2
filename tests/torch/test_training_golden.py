"""jamp against torch's training runs in parity/golden.npz."""

import pytest

from parity import golden, spread, training, training_jamp
from parity.training_data import SEEDS, STEPS, TASKS
from tests.marks import cover, walk

RUNS = [(task, seed) for task in TASKS.values() for seed in SEEDS]
TRAINED = [TASKS[name] for name in ("mlp, AdamW", "gan, AdamW")]


@pytest.fixture(scope="module")
def arrays():
    return golden.load()


@pytest.mark.slow
@pytest.mark.every_release
@walk("task, seed", RUNS)
def test_scales_follow_the_overflows_of_torch(task, seed, arrays):
    torch = training.recorded(arrays, task, seed)
    assert torch.skipped.any() and len(torch.scale) == STEPS
    assert training.replay(torch) == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.every_release
@cover(quick=0, ci=1)
@pytest.mark.parametrize("task", TRAINED, ids=lambda task: task.name)
def test_a_training_run_ends_where_torch_ends(task, arrays):
    torch = training.recorded(arrays, task, 0)
    trained = training.Trained(torch, training_jamp.run(task, 0), replayed=0)
    assert trained.skips_apart <= training.SKIPS_APART
    assert trained.loss_apart <= training.NOISE * spread.recorded(arrays, task)
