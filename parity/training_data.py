"""The tasks to train, as plain arrays with torch's names and layouts."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

STEPS = 500
LAST = 50  # the final loss is the mean of this many steps
GROWTH_INTERVAL = 20
SEEDS = (0, 1, 2)

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, an optimizer and the data.

    Attributes:
      model: "mlp", "cnn", "transformer" or "gan".
      optimizer: "SGD" (with momentum) or "AdamW".
    """

    model: str
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.optimizer}"

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.model][self.optimizer]


TASKS = {
    task.name: task
    for task in itertools.starmap(
        Task, itertools.product(("mlp", "cnn", "transformer", "gan"), ("SGD", "AdamW"))
    )
}


class Variant(NamedTuple):
    """How torch runs a task.

    Attributes:
      rows: reorders the rows of each batch.
      kernels: whether torch's own kernels run instead of oneDNN's. The CNN always uses
        torch's own, since oneDNN's take minutes on a CPU.
      bias: whether a bias is added after its product has been rounded, as XLA does on
        a CPU, instead of before.
    """

    rows: Callable[[np.ndarray], np.ndarray] = np.asarray
    kernels: bool = False
    bias: bool = False


class Run(NamedTuple):
    loss: np.ndarray  # float32 [steps]; for a GAN, the discriminator's
    scale: np.ndarray  # float32 [steps]: after the step
    tracker: np.ndarray  # int32 [steps]
    skipped: np.ndarray  # bool [steps, n_optimizers]

    @property
    def final_loss(self) -> float:
        return float(self.loss[-LAST:].mean(dtype=np.float64))


# Weights: torch's names and layouts.


def _linear(random: Any, name: str, n_in: int, n_out: int) -> Arrays:
    bound = n_in**-0.5
    return {
        f"{name}.weight": random.uniform(-bound, bound, (n_out, n_in)),
        f"{name}.bias": random.uniform(-bound, bound, n_out),
    }


def _conv(random: Any, name: str, n_in: int, n_out: int) -> Arrays:
    bound = (9 * n_in) ** -0.5
    return {
        f"{name}.weight": random.uniform(-bound, bound, (n_out, n_in, 3, 3)),
        f"{name}.bias": random.uniform(-bound, bound, n_out),
    }


def _norm(name: str, size: int) -> Arrays:
    return {f"{name}.weight": np.ones(size), f"{name}.bias": np.zeros(size)}


WIDTH, VOCABULARY, LENGTH, BLOCKS = 32, 16, 8, 4
# The slope of the leaky ReLUs, which float16 holds exactly. JAX rounds a number to the
# dtype of the array that it multiplies, and torch multiplies in float32, so 0.01 would
# differ by 2e-4.
SLOPE = 0.25


def weights(model: str, seed: int) -> Arrays:
    """Initial parameters by torch's names, float32."""
    random = np.random.RandomState(1000 + seed)
    make: dict[str, Callable[[], Sequence[Arrays]]] = {
        "mlp": lambda: (
            _linear(random, "fc1", 64, 128),
            _linear(random, "fc2", 128, 128),
            _linear(random, "fc3", 128, 10),
        ),
        "cnn": lambda: (
            _conv(random, "conv1", 1, 8),
            _norm("bn1", 8),
            _conv(random, "conv2", 8, 16),
            _norm("bn2", 16),
            _linear(random, "fc", 16, 10),
        ),
        "transformer": lambda: (
            {
                "token.weight": 0.1 * random.standard_normal((VOCABULARY, WIDTH)),
                "position.weight": 0.1 * random.standard_normal((LENGTH, WIDTH)),
            },
            *(
                part
                for block in (f"block{i}" for i in range(BLOCKS))
                for part in (
                    _norm(f"{block}.ln1", WIDTH),
                    *(_linear(random, f"{block}.{n}", WIDTH, WIDTH) for n in "qkvo"),
                    _norm(f"{block}.ln2", WIDTH),
                    _linear(random, f"{block}.up", WIDTH, 4 * WIDTH),
                    _linear(random, f"{block}.down", 4 * WIDTH, WIDTH),
                )
            ),
            _norm("ln", WIDTH),
            _linear(random, "head", WIDTH, VOCABULARY),
        ),
        "gan": lambda: (
            _linear(random, "generator.fc1", 8, 32),
            _linear(random, "generator.fc2", 32, 32),
            _linear(random, "generator.fc3", 32, 8),
            _linear(random, "discriminator.fc1", 8, 32),
            _linear(random, "discriminator.fc2", 32, 32),
            _linear(random, "discriminator.fc3", 32, 1),
        ),
    }
    return {
        name: value.astype(np.float32)
        for part in make[model]()
        for name, value in part.items()
    }


# Batches: new rows at each step, so that nothing can be memorized.


def _classes(random: Any, shape: tuple[int, ...], noise: float) -> list[np.ndarray]:
    templates = random.standard_normal((10, *shape))
    labels = random.randint(0, 10, (STEPS, 32))
    x = templates[labels] + noise * random.standard_normal((STEPS, 32, *shape))
    return [x.astype(np.float32), labels.astype(np.int32)]


def _chain(random: Any) -> list[np.ndarray]:
    """Sequences of a Markov chain, and the same shifted by one."""
    logits = 1.5 * random.standard_normal((VOCABULARY, VOCABULARY))
    cumulative = np.cumsum(np.exp(logits), axis=1)
    cumulative /= cumulative[:, -1:]
    tokens = random.randint(0, VOCABULARY, (STEPS, 8, 1))
    for _ in range(LENGTH):
        chance = random.random_sample((STEPS, 8, 1))
        following = (chance > cumulative[tokens[..., -1]]).sum(axis=-1, keepdims=True)
        tokens = np.concatenate([tokens, following], axis=-1)
    tokens = np.minimum(tokens, VOCABULARY - 1).astype(np.int32)
    return [tokens[..., :-1], tokens[..., 1:]]


def _rings(random: Any) -> list[np.ndarray]:
    """Real samples of a mixture, and the noise that the generator starts from."""
    centers = random.standard_normal((8, 8))
    chosen = random.randint(0, 8, (STEPS, 32))
    real = centers[chosen] + 0.3 * random.standard_normal((STEPS, 32, 8))
    noise = random.standard_normal((STEPS, 32, 8))
    return [real.astype(np.float32), noise.astype(np.float32)]


def batches(model: str, seed: int) -> list[np.ndarray]:
    """The arrays of a task's batches, each [STEPS, rows, ...]; images are NHWC."""
    random = np.random.RandomState(seed)
    return {
        "mlp": lambda: _classes(random, (64,), 4.0),
        "cnn": lambda: _classes(random, (8, 8, 1), 2.0),
        "transformer": lambda: _chain(random),
        "gan": lambda: _rings(random),
    }[model]()


LEARNING_RATES = {
    "mlp": {"SGD": 0.003, "AdamW": 5e-4},
    "cnn": {"SGD": 0.01, "AdamW": 1e-3},
    "transformer": {"SGD": 0.05, "AdamW": 2e-3},
    "gan": {"SGD": 0.002, "AdamW": 2e-4},
}
MOMENTUM = 0.9
ADAMW: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
