"""What GradScaler does, as data: each behavior is a training run that shows it.

The model has two linear layers of 8 x 8 with a bias, and the loss is the mean squared
error. At recorded steps an inf or nan enters the run: in the input, as a factor of the
loss, or in place of an element of a scaled gradient.

Parameters can agree bit for bit only where no sum depends on its order. Where `exact`
is set, the forward pass rounds the parameters to multiples of 1/16, with a gradient of
1, and uses `relu`; data, learning rate and factors are small binary fractions. Every
activation and every gradient then fits into float32's 24 bits, and each step rounds
each parameter once. Elsewhere the layers keep their parameters unrounded, with `tanh`
between them, and the parameters agree to `TOLERANCE`.
"""

import abc
import copy
import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .cases import FLOAT32_MAX, Config, Event

STEPS, BATCH, WIDTH = 64, 8, 8
LEAVES = {  # where each parameter lies in a flat vector, and its shape
    "w1": (slice(0, 64), (8, 8)),
    "b1": (slice(64, 72), (8,)),
    "w2": (slice(72, 136), (8, 8)),
    "b2": (slice(136, 144), (8,)),
}
SIZE = 144
GRID = 16.0  # parameters are rounded to multiples of 1 / GRID
MAX_NORM = 0.2
# optax corrects AdamW's bias in float32, torch in float64: with torch's beta2 of 0.999
# the first steps differ by 3e-5 of their size, whatever the scaler does.
BETAS = (0.875, 0.96875)
# torch multiplies by 1 - rate * decay, and optax subtracts the product. With a binary
# fraction that factor is exact; otherwise its rounding adds up from step to step.
WEIGHT_DECAY = 2.0**-7
TOLERANCE = 1e-6  # of the largest parameter of a leaf; for losses, of the loss
# Two float16 gradients may fall on the two sides of a rounding boundary, one unit in
# the last place apart, at worst in the same direction at every step. Over a run a
# parameter moves about as far as the largest one is from zero, so its error stays
# within one unit in the last place of the largest.
FLOAT16_TOLERANCE = 2.0**-10

JIT, EAGER, OPTAX = "GradScaler in nnx.jit", "GradScaler", "dynamic_loss_scale"
TORCH_TO_TORCH, TORCH_TO_JAMP = "torch to torch", "torch to jamp"
JAMP_TO_TORCH, JAMP_TO_JAMP = "jamp to torch", "jamp to jamp"
LIVE = (TORCH_TO_TORCH, JAMP_TO_TORCH)  # these end in torch
HANDOVER = 29  # the step at which a saved run resumes, between two growths


@dataclasses.dataclass(frozen=True)
class Behavior(Config):
    """A training run.

    Attributes:
      name: unique.
      tests: torch's own tests of it, without the prefix `test_`.
      sides: which parts of jamp it is run with.
      optimizer: "SGD", with momentum 0.5, or "AdamW".
      exact: whether the parameters must agree bit for bit.
      new_scale_array: whether `update` gets an array of no dimensions.
      accumulate: how many batches a gradient is summed over.
      clip: "scaled" clips the scaled gradients by `MAX_NORM` times the scale, before
        an inf is written; "unscaled" clips what `unscale_` gives, after.
      penalty: whether the norm of the unscaled gradients is added to the loss.
      models: how many models, each with an optimizer, share the scaler.
      frozen: whether the optimizer holds the second layer alone.
      overwrite: whether an inf is written over unscaled gradients, which no check sees.
      copied: whether the scaler is pickled or deepcopied every few steps.
      autocast: whether the forward pass runs in float16.
      bfloat16: whether parameters and gradients are bfloat16; the gradients are random.
      loss_factor: what the loss is multiplied by. SGD's rate is divided by it.
      poisoned: chance that a step overflows.
    """

    name: str
    tests: tuple[str, ...]
    sides: tuple[str, ...] = (JIT, OPTAX)
    optimizer: str = "SGD"
    exact: bool = True
    init_scale: float = dataclasses.field(default=2.0**10, kw_only=True)
    growth_interval: int = dataclasses.field(default=3, kw_only=True)
    new_scale_array: bool = False
    accumulate: int = 1
    clip: str = ""
    penalty: bool = False
    models: int = 1
    frozen: bool = False
    overwrite: bool = False
    copied: bool = False
    autocast: bool = False
    bfloat16: bool = False
    loss_factor: float = 1.0
    poisoned: float = 0.12

    @property
    def learning_rate(self) -> float:
        if self.optimizer == "AdamW":  # takes a step of this size whatever the loss
            return 2.0**-7
        return 2.0**-4 / self.loss_factor

    @property
    def momentum(self) -> float:
        # In bfloat16 XLA may keep the sum with the old momentum unrounded.
        return 0.0 if self.bfloat16 else 0.5

    @property
    def unscales(self) -> bool:
        return self.unscale_first or self.clip == "unscaled" or self.overwrite

    @property
    def resumed(self) -> bool:
        return TORCH_TO_JAMP in self.sides

    @property
    def tolerance(self) -> float:
        """How far from torch parameters may be, relative to their leaf's largest."""
        if self.autocast:
            return FLOAT16_TOLERANCE
        return 0.0 if self.exact else TOLERANCE

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that the optimizer holds."""
        return ("w2", "b2") if self.frozen else tuple(LEAVES)


class Record(NamedTuple):
    """What a run leaves behind, of `n` steps."""

    scale: np.ndarray  # float32 [n], after the step
    tracker: np.ndarray  # int32 [n]
    skipped: np.ndarray  # bool [n, models]
    loss: np.ndarray  # float32 [n]
    params: np.ndarray  # float32 [n, models, SIZE]

    def then(self, following: "Record") -> "Record":
        """This run and the steps that follow it."""
        return Record(*map(np.concatenate, zip(self, following, strict=True)))


class Saved(NamedTuple):
    """A run saved between two steps."""

    scaler: str  # `state_dict()` as JSON
    params: np.ndarray  # float32 [models, SIZE]
    momentum: np.ndarray  # float32 [models, SIZE]


class Reference(NamedTuple):
    """torch's run of a behavior."""

    record: Record  # parameters only after the steps in `rows`
    rows: Sequence[int] = range(STEPS)
    saved: Saved | None = None  # at the step HANDOVER

    def beside(self, found: Record) -> tuple[list[int], Record, Record]:
        """The parts that can be compared with a run that may have begun later.

        Returns:
          The steps whose parameters both runs have, this run and the other one.
        """
        start = STEPS - len(found.scale)
        rows = [row for row in self.rows if row >= start]
        mine = self.record.params[len(self.rows) - len(rows) :]
        theirs = found.params[[row - start for row in rows]]
        return (
            rows,
            Record(*(a[start:] for a in self.record[:-1]), params=mine),
            found._replace(params=theirs),
        )


def record(steps: list[tuple[Any, ...]]) -> Record:
    dtypes = (np.float32, np.int32, np.bool_, np.float32, np.float32)
    fields = zip(*steps, strict=True)
    return Record(*(np.array(f, d) for f, d in zip(fields, dtypes, strict=True)))


def copied(behavior: Behavior, step: int, value: Any) -> Any:
    """A scaler or its state, every few steps pickled or deepcopied."""
    if not behavior.copied or step % 5 != 4:
        return value
    return pickle.loads(pickle.dumps(value)) if step % 2 else copy.deepcopy(value)


class Trainer(abc.ABC):
    """A library's training run, which can be saved and resumed between two steps."""

    behavior: Behavior
    scaler: Any

    @abc.abstractmethod
    def step(self, step: int, new_scale: Any) -> tuple[Any, ...]:
        """Trains on a batch; returns skipped flags, loss and parameters."""

    @abc.abstractmethod
    def array(self, value: float) -> Any:
        """An array of no dimensions."""

    def run(self, start: int = 0, stop: int = STEPS) -> Record:
        behavior, records = self.behavior, []
        for step in range(start, stop):
            for method, value in behavior.setters(step):
                getattr(self.scaler, method)(value)
            new_scale = behavior.new_scale(step)
            if behavior.new_scale_array and new_scale is not None:
                new_scale = self.array(new_scale)
            found = self.step(step, new_scale)
            self.scaler = copied(behavior, step, self.scaler)
            tracker = self.scaler.state_dict().get("_growth_tracker", 0)
            records.append((self.scaler.get_scale(), tracker, *found))
        return record(records)


class Data(NamedTuple):
    params: np.ndarray  # float32 [models, SIZE]: initial
    x: np.ndarray  # float32 [STEPS, accumulate, BATCH, WIDTH]
    y: np.ndarray  # the same
    factor: np.ndarray  # float32 [STEPS]: of the loss; inf poisons it
    poison: np.ndarray  # float32 [STEPS, models, SIZE]: inf, nan, or 0 for nothing
    drawn: np.ndarray  # float32 [STEPS, SIZE]: gradients, where no loss gives them


def data(behavior: Behavior) -> Data:
    """The same numbers for every side."""
    # RandomState: NumPy promises that its streams never change.
    random = np.random.RandomState(sum(map(ord, behavior.name)))
    shape = (STEPS, behavior.accumulate, BATCH, WIDTH)
    params = random.randint(-8, 9, (behavior.models, SIZE)) / GRID
    x, y = random.randint(-2, 3, (2, *shape)) / 2.0
    factor = np.full(STEPS, behavior.loss_factor)
    poison = np.zeros((STEPS, behavior.models, SIZE))
    drawn = random.randint(-255, 256, (STEPS, SIZE)) * 2.0

    steps = np.flatnonzero(random.random_sample(STEPS) < behavior.poisoned)
    in_gradient = behavior.models > 1 or behavior.frozen or behavior.bfloat16
    if behavior.overwrite or not behavior.enabled:  # nothing is skipped: at the end
        steps, in_gradient = np.array([STEPS - 1]), True
    for count, step in enumerate(steps):
        kind = "gradient" if in_gradient else ("gradient", "input", "loss")[count % 3]
        value = (np.inf, -np.inf, np.nan)[count // 2 % 3]
        if kind == "input":
            x[step, 0, count % BATCH, 3] = value
        elif kind == "loss":
            factor[step] *= value
        else:
            leaf = LEAVES[("w1", "b2", "w2", "b1")[count % 4]][0]
            poison[step, count // 2 % behavior.models, leaf.start + 5] = value
    return Data(*(a.astype(np.float32) for a in (params, x, y, factor, poison, drawn)))


_SGD_INEXACT: dict[str, Any] = {
    "exact": False,
    "growth_factor": 1.1,
    "backoff_factor": 0.7,
    "growth_interval": 4,
}
_ADAMW: dict[str, Any] = _SGD_INEXACT | {"optimizer": "AdamW"}
_AUTOCAST = ("grad_scaling_autocast",)


def _updates(values: tuple[float, ...]) -> tuple[Event, ...]:
    steps = (9, 10, 33, 50)
    return tuple((step, "update", v) for step, v in zip(steps, values, strict=True))


BEHAVIORS = (
    Behavior("plain, SGD", _AUTOCAST, (JIT, EAGER, OPTAX)),
    Behavior("plain, AdamW", _AUTOCAST, **_ADAMW),
    Behavior("autocast, SGD", _AUTOCAST, autocast=True),
    Behavior("autocast, AdamW", _AUTOCAST, autocast=True, **_ADAMW),
    Behavior("accumulation", ("grad_scaling_accumulation",), accumulate=2),
    Behavior(
        "clipping of scaled gradients",
        ("grad_scaling_clipping",),
        clip="scaled",
        **_SGD_INEXACT,
    ),
    Behavior(
        "clipping after unscale_",
        ("grad_scaling_clipping_separate_unscale",),
        clip="unscaled",
        **_SGD_INEXACT,
    ),
    Behavior(
        "gradient penalty", ("grad_scaling_penalty",), penalty=True, **_SGD_INEXACT
    ),
    Behavior(
        "two models, two optimizers, one poisoned",
        ("grad_scaling_multiple",),
        (JIT,),
        models=2,
    ),
    Behavior(
        "two models, one unscaled first, AdamW",
        ("grad_scaling_multiple",),
        (JIT,),
        models=2,
        unscale_first=True,
        **_ADAMW,
    ),
    Behavior(
        "saved and resumed",
        ("grad_scaling_state_dict",),
        (TORCH_TO_TORCH, TORCH_TO_JAMP, JAMP_TO_TORCH, JAMP_TO_JAMP),
    ),
    Behavior(
        "saved and resumed, growth 1.1",
        ("grad_scaling_state_dict",),
        (TORCH_TO_JAMP, JAMP_TO_TORCH),
        **_SGD_INEXACT,
    ),
    Behavior(
        "growth that must not overflow",
        ("grad_scale_will_not_overflow", "grad_scaling_update_scale"),
        init_scale=2.0**124,
        growth_factor=16.0,
        growth_interval=1,
        loss_factor=2.0**-30,
    ),
    Behavior(
        "growth that must not overflow, AdamW",
        ("grad_scale_will_not_overflow",),
        (JIT,),
        optimizer="AdamW",
        exact=False,
        init_scale=3e38,
        growth_factor=1.1,
        backoff_factor=0.7,
        growth_interval=2,
        loss_factor=2.0**-30,
    ),
    Behavior(
        "pickled and deepcopied",
        ("grad_scaling_autocast", "pickle_gradscaler"),
        copied=True,
    ),
    Behavior("disabled", _AUTOCAST, enabled=False),
    Behavior(
        "update(new_scale), a float",
        (),
        (EAGER,),
        events=_updates((8.0, 2.0**20, 0.25, 2.0**-20)),
    ),
    Behavior(
        "update(new_scale), an array",
        (),
        (JIT,),
        new_scale_array=True,
        events=_updates((65537.1, FLOAT32_MAX, 1e-3, 1 / 3)),
        **_SGD_INEXACT,
    ),
    Behavior(
        "setters in mid-run",
        (),
        events=(
            (16, "set_growth_factor", 4.0),
            (16, "set_backoff_factor", 0.25),
            (40, "set_growth_interval", 2),
        ),
    ),
    Behavior("part of the parameters", (), frozen=True, poisoned=0.25),
    Behavior(
        "inf written after unscale_",
        ("params_invalidated_with_grads_invalidated_between_unscale_and_step",),
        (JIT,),
        overwrite=True,
    ),
    Behavior("bfloat16", ("grad_scaling_unscale",), bfloat16=True),
    Behavior(
        "bfloat16 after unscale_",
        ("grad_scaling_unscale",),
        (JIT,),
        bfloat16=True,
        unscale_first=True,
        growth_factor=1.1,
        backoff_factor=0.7,
    ),
)
