"""The pair in examples/torch_port: a torch script, and its port, from the same weights.

Scales and skipped steps are equal at each of 200 steps: the glitches in the data
overflow at any scale, so no decision hangs on rounding. Losses drift apart, as those of
torch do when its inputs move by one unit in the last place.
"""

import contextlib
import functools
import importlib
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from . import torch_autocast  # noqa: E402

PAIR = Path(__file__).parents[1] / "examples" / "torch_port"
STEPS = 200
UNIT = np.float32(np.finfo(np.float16).eps)  # inputs of the region are float16
# As in `check_near` of the tests: twice as far as torch moves.
FACTOR = 2.0


class Run(NamedTuple):
    loss: np.ndarray  # [steps]
    scale: np.ndarray  # [steps]
    skipped: np.ndarray  # [steps, optimizers]
    lr: np.ndarray  # [steps]
    beta1: np.ndarray  # [steps]
    final: float  # the average's loss on held-out images

    @classmethod
    def of(cls, log: list[dict[str, Any]], final: float) -> "Run":
        columns = {key: np.array([row[key] for row in log]) for key in log[0]}
        return cls(**columns, final=final)


@pytest.fixture(scope="module")
def pair():
    """The modules of the pair, imported as Python does when it runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAIR)
        names = "blobs", "train_torch", "train_jamp"
        blobs, *sides = map(importlib.import_module, names)
        yield blobs, *sides


def batches(blobs, steps, seed=None, rows=lambda a: a):
    """The data, each input moved by a unit up or down if there is a seed."""
    rng = np.random.default_rng(seed)
    for micro in blobs.batches(steps):
        if seed is not None:
            move = lambda x: x * (1 + rng.choice([-UNIT, UNIT], x.shape))
            micro = [(move(x), y) for x, y in micro]
        yield [(rows(x).copy(), rows(y).copy()) for x, y in micro]


@contextlib.contextmanager
def as_on_cuda():
    """CUDA's lists, and torch's own kernels on one thread."""
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    try:
        with torch_autocast.cuda_lists():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = mkldnn


def torch_model(train_torch):
    torch.manual_seed(0)
    return train_torch.Model()


def of_torch(pair, steps=STEPS, compiled=False, **changes):
    blobs, train_torch, _ = pair
    data = batches(blobs, steps, **changes)
    with as_on_cuda():
        model = torch_model(train_torch)
        return Run.of(*train_torch.train(model, data, steps, compiled))


def of_jamp(pair, train_jamp=None, steps=STEPS):
    blobs, train_torch, port = pair
    train_jamp = train_jamp or port
    state = torch_model(train_torch).state_dict()
    model = train_jamp.Model(nnx.Rngs(0))
    train_jamp.load_torch(model, {k: v.numpy() for k, v in state.items()})
    return Run.of(*train_jamp.train(model, batches(blobs, steps), steps))


@pytest.fixture(scope="module")
def first(pair):
    return of_torch(pair)


@pytest.fixture(scope="module")
def nearby(pair):
    """torch, with inputs moved by a unit, and with sums in another order."""
    moved = [of_torch(pair, seed=seed) for seed in range(4)]
    return [*moved, of_torch(pair, rows=lambda a: a[::-1])]


def apart(first, other):
    """How far losses have been apart so far, as a share of the first's."""
    steps = len(other.loss)
    far = np.abs(other.loss - first.loss[:steps]) / np.abs(first.loss[:steps])
    return np.maximum.accumulate(far)


def wrong(first, nearby, other):
    """What differs from torch by more than rounding explains."""
    found, steps = [], len(other.loss)
    for name in ("scale", "skipped"):
        if not np.array_equal(getattr(other, name), getattr(first, name)[:steps]):
            found.append(name)
    own = np.max([apart(first, run)[:steps] for run in nearby], 0)
    if not np.all(apart(first, other) <= FACTOR * own):
        found.append("loss")
    taken = ~first.skipped[:steps, 0]  # jamp's log has the rate of the last step taken
    # The largest number that is rounded is the peak, and a dozen operations round.
    for name in ("lr", "beta1"):
        expected = getattr(first, name)[:steps]
        bound = 12 * np.finfo(np.float32).eps * expected.max()
        if np.any(np.abs(getattr(other, name) - expected)[taken] > bound):
            found.append(name)
    finals = [abs(run.final - first.final) for run in nearby]
    if steps == STEPS and not abs(other.final - first.final) <= FACTOR * max(finals):
        found.append("final")
    return found


def test_the_port_trains_as_torch(pair, first, nearby):
    assert not wrong(first, nearby, of_jamp(pair))


def test_the_run_has_what_a_port_can_miss(first, nearby):
    """Each optimizer is skipped alone, both are, and the scale grows."""
    kinds, counts = np.unique(first.skipped, axis=0, return_counts=True)
    assert kinds.tolist() == [[False, False], [False, True], [True, False], [True] * 2]
    assert counts[1] > 5 and counts[2] > 5
    assert np.sum(np.diff(first.scale) > 0) > 10
    assert first.beta1.min() == pytest.approx(0.85, abs=1e-3)
    assert np.median(first.loss[-20:]) < np.median(first.loss[:20]) / 4
    # The losses' bound says something, and so does that of the skips.
    assert all(apart(first, run)[-1] < 1 / 16 for run in nearby)
    for run in nearby:
        assert np.array_equal(run.scale, first.scale)
        assert np.array_equal(run.skipped, first.skipped)


def test_wrappers_change_nothing(pair, monkeypatch):
    """DDP with one process, with `no_sync`, and `torch.compile`, without a compiler."""
    plain = of_torch(pair, 8)
    compile = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = of_torch(pair, 8, compiled=True)
    finally:
        dist.destroy_process_group()
    assert plain.final == wrapped.final
    assert np.array_equal(plain.loss, wrapped.loss)


def test_batch_statistics(pair):
    """The running variance is torch's, unbiased."""
    ours, theirs = pair[2].BatchNorm(3, nnx.Rngs(0)), torch.nn.BatchNorm2d(3)
    xs = np.random.default_rng(0).normal(1, 2, (3, 4, 5, 5, 3)).astype(np.float32)
    for x in xs:
        ours(x)
        theirs(torch.from_numpy(x).movedim(-1, 1))
    n = xs[0].size // 3  # numbers that are added
    for name, other in (("mean", theirs.running_mean), ("var", theirs.running_var)):
        expected = other.numpy()
        bound = n * np.finfo(np.float32).eps * np.abs(expected).max()
        assert np.abs(getattr(ours, name)[...] - expected).max() <= bound


def test_initializers(pair):
    """Weights and biases are uniform in torch's bounds."""
    torchs, ours = torch_model(pair[1]), pair[2].Model(nnx.Rngs(0))
    for name in ("net.trunk.conv1", "net.trunk.conv2", "net.head", "probe"):
        first, second = (
            functools.reduce(getattr, name.split("."), model)
            for model in (torchs, ours)
        )
        bound = first.weight[0].numel() ** -0.5
        pairs = (first.weight, second.kernel), (first.bias, second.bias)
        for theirs, flax in pairs:
            sides = [np.abs(theirs.detach().numpy()), np.abs(flax[...])]
            for side in sides:
                assert side.max() <= bound
                # Five standard errors of the mean of a uniform number.
                error = bound / np.sqrt(12 * side.size)
                assert abs(side.mean() - bound / 2) <= 5 * error


# What a port can get wrong, and what then differs.
FAULTS = {
    ("momentum=0.9,", "momentum=0.99,"): "final",
    ("strides=2, padding=1", "strides=2"): "loss",
    ("x.transpose(0, 3, 1, 2).reshape", "x.reshape"): "loss",
    ("adamw(1e-3, 0.0", "adamw(4e-3, 0.0"): "loss",
    ("adamw(4e-3, 0.05", "adamw(4e-3, 0.5"): "loss",
    ("trainer.n_averaged[...] == 0", "False"): "final",
    ("jnp.clip(g, -0.1, 0.1)", "g"): "loss",
    ("b1=one_cycle(0.95, 0.85, 0.95, steps)", "b1=0.9"): "loss",
    ("top = pct_start * total_steps - 1", "top = pct_start * total_steps"): "lr",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_fault_in_the_port_is_seen(pair, first, nearby, fault):
    source = (PAIR / "train_jamp.py").read_text()
    assert source.count(fault[0]) == 1
    port = types.ModuleType("train_jamp_with_a_fault")
    exec(source.replace(*fault), port.__dict__)
    assert FAULTS[fault] in wrong(first, nearby, of_jamp(pair, port))
