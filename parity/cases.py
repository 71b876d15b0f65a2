"""What is compared: configurations of a scaler, each with a stream of gradients.

A case is plain data, and its stream follows from its seed alone, so that both
libraries and the golden file see the same bits. At every step each optimizer gets a
gradient whose elements have magnitudes in [1, 2). The library under test scales it
itself; then, on some steps, one element is replaced by inf, -inf or nan.

Magnitudes of at least 1 keep a scaled gradient out of the subnormal numbers down to
a scale of 2**-126. Below that scale jamp differs from torch on purpose, so a stream
must not push torch's scale there; `trajectory.require_normal_scales` checks it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
SIZE = 8  # elements of a gradient
LEARNING_RATE, MOMENTUM = 2.0**-4, 0.5  # exact products: a fused multiply-add is equal
_POISONS = (math.inf, -math.inf, math.nan)
Event = tuple[int, str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A scaler's configuration, and what changes it during a run.

    Attributes:
      unscale_first: whether `unscale_` is called before `step`.
      events: `(step, method, value)`. A setter such as `set_growth_interval` is called
        before that step; `update` means that the step ends in `update(value)`.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    unscale_first: bool = False
    events: tuple[Event, ...] = ()

    @property
    def scaler_kwargs(self) -> dict[str, Any]:
        """The arguments that both scalers take."""
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        return {name: getattr(self, name) for name in (*names, "enabled")}

    def setters(self, step: int) -> list[tuple[str, float]]:
        """The setters to call before a step, with their values."""
        return [
            (method, value)
            for at, method, value in self.events
            if at == step and method != "update"
        ]

    def new_scale(self, step: int) -> float | None:
        """The argument of the `update` that ends a step."""
        values = [
            v for at, method, v in self.events if (at, method) == (step, "update")
        ]
        return values[0] if values else None

    def segments(self, steps: int) -> Iterator[tuple[int, int]]:
        """Starts and stops of the steps between which nothing changes the scaler."""
        edges = {0, steps}
        for at, method, _ in self.events:
            edges |= {at, at + 1} if method == "update" else {at}
        return itertools.pairwise(sorted(edges))


@dataclasses.dataclass(frozen=True)
class Case(Config):
    """One configuration and its stream.

    Attributes:
      name: unique; begins with the kind.
      kind: the group it is reported in.
      overflow: chance that a step of an optimizer holds an inf or nan.
      poisons: what a poisoned gradient holds.
    """

    name: str
    kind: str
    overflow: float = 0.01
    seed: int = 0
    steps: int = 1000
    n_optimizers: int = 1
    poisons: tuple[float, ...] = _POISONS

    @property
    def configuration(self) -> "Case":
        """The case without the fields that vary between streams of a configuration."""
        return dataclasses.replace(self, name="", seed=0)


def streams(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of a case, and what overwrites them.

    Returns:
      Two float32 arrays [steps, n_optimizers, SIZE]: gradients before scaling, and
      inf, -inf or nan where one is to be written over the scaled gradient, else 0.
    """
    # RandomState: NumPy promises that its streams never change.
    random = np.random.RandomState(case.seed)
    shape = (case.steps, case.n_optimizers, SIZE)
    mantissa = random.randint(0, 2**23, shape).astype(np.uint32)
    sign = random.randint(0, 2, shape).astype(np.uint32) << 31
    base = (sign | np.uint32(0x3F800000) | mantissa).view(np.float32)

    poisoned = random.random_sample(shape[:2]) < case.overflow
    place = random.randint(0, SIZE, shape[:2])[..., None] == np.arange(SIZE)
    value = random.choice(np.array(case.poisons, np.float32), shape[:2])[..., None]
    poison = np.where(poisoned[..., None] & place, value, np.float32(0))
    return base, poison


def balanced(growth_factor: float, backoff_factor: float, interval: int) -> float:
    """The chance of an overflow at which growing and backing off cancel out.

    With q the chance of a finite step, the scale grows (1 - q) q^n / (1 - q^n) times
    a step and backs off 1 - q times; their logarithms balance where
    q^n / (1 - q^n) = -log(backoff_factor) / log(growth_factor).
    """
    ratio = -math.log(backoff_factor) / math.log(growth_factor)
    chance = 1 - (ratio / (1 + ratio)) ** (1 / interval)
    return max(chance, min(0.005, 1 / interval))


INTERVALS = (1, 2, 3, 10, 2000)
GROWTH_FACTORS = (2.0, 1.5, 1.1, 3.7, 1.0000001)
BACKOFF_FACTORS = (0.5, 0.7, 0.9, 0.1)


_LABELED = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_LABELED += ("n_optimizers",)


def _family(kind: str, seeds: Iterable[int], configs: Iterable[Any]) -> list[Case]:
    """A case for each configuration and seed, by default with a balanced stream."""
    cases = []
    for config, seed in itertools.product(configs, seeds):
        labels = [f"{k}={v:.9g}" for k, v in config.items() if k in _LABELED]
        name = f"{kind}: {', '.join([*labels, f'seed={seed}'])}"
        case = Case(name, kind, seed=seed, **config)
        if "overflow" not in config:
            chance = balanced(
                case.growth_factor, case.backoff_factor, case.growth_interval
            )
            # `update` backs off once, however many of the optimizers overflowed.
            chance = 1 - (1 - chance) ** (1 / case.n_optimizers)
            case = dataclasses.replace(case, overflow=chance)
        if case.growth_interval == 2000:  # long enough to grow
            case = dataclasses.replace(case, steps=6000)
        cases.append(case)
    return cases


def _grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        dict(zip(values, chosen, strict=True))
        for chosen in itertools.product(*values.values())
    ]


_MOVES = {
    "interval changed": [
        (100, "set_growth_interval", 3),  # often below the tracker: no growth for now
        (300, "set_growth_interval", 25),
        (500, "set_growth_interval", 1),
        (520, "set_growth_interval", 10),
        (800, "set_growth_interval", 2),
    ],
    "factors changed": [
        (200, "set_growth_factor", 3.7),
        (400, "set_backoff_factor", 0.1),
        (600, "set_growth_factor", 1.1),
        (600, "set_backoff_factor", 0.9),
        (800, "set_growth_interval", 1),
    ],
    "update(new_scale)": [
        (step, "update", value)
        for step, value in zip(
            range(0, 1000, 71),
            (8.0, 1e-3, 65537.1, FLOAT32_MAX, 2.0**-100, 2.0**127, 1.0, 3e38) * 2,
            strict=False,
        )
    ],
}
_LARGE = (FLOAT32_MAX, 3e38, 2.0**127, 1.1 * 2.0**126, 2.0**126)
_SMALL = (2.0**-126, 1.7 * 2.0**-126, 2.0**-110)

CASES: tuple[Case, ...] = (
    *_family("default", range(5), [{}]),
    *_family("interval", (10, 11), _grid(growth_interval=INTERVALS)),
    *_family(
        "factors",
        (20,),
        _grid(
            init_scale=(2.0**16, 1000.1),
            growth_factor=GROWTH_FACTORS,
            backoff_factor=BACKOFF_FACTORS,
            growth_interval=(1, 2, 3, 10),
        ),
    ),
    *_family(
        "large scale",
        (30, 31),
        _grid(init_scale=_LARGE, growth_factor=(2.0, 1.1), growth_interval=(3,)),
    ),
    *_family(
        "small scale",
        (43, 89),  # seeds that grow before they back off
        [
            {"init_scale": scale, "growth_factor": growth, "backoff_factor": backoff}
            | {"growth_interval": 3, "overflow": 0.15}  # more growth than backing off
            for growth, backoff in ((2.0, 0.5), (1.1, 0.9))
            for scale in _SMALL
        ],
    ),
    *_family(
        "non-dyadic scale",
        (50,),
        _grid(
            init_scale=(65537.1, 1e7 / 3, 1e-3, 12345.678, 1 / 3),
            growth_factor=(2.0, 1.5),
            growth_interval=(3,),
        ),
    ),
    *(
        case
        for kind, events in _MOVES.items()
        for case in _family(
            kind, range(60, 64), _grid(growth_interval=(3,), events=(tuple(events),))
        )
    ),
    *_family(
        "several optimizers",
        (70, 71),
        _grid(n_optimizers=(2, 3), growth_interval=(1, 3), growth_factor=(2.0, 1.1)),
    ),
    *_family(
        "unscale_ first",
        (80, 81),
        _grid(n_optimizers=(1, 2), growth_interval=(3,), unscale_first=(True,)),
    ),
    *_family(
        "overflow in the product",  # with the inverse scale: torch does not skip
        (85, 86),
        _grid(
            init_scale=(2.0**-100,),
            growth_interval=(100,),
            overflow=(0.05,),
            poisons=((2.0**40, -(2.0**40)),),
        ),
    ),
    *_family(
        "disabled",
        (90, 91),
        _grid(n_optimizers=(1, 2), growth_interval=(3,), enabled=(False,)),
    ),
)

FIRST_OF_KIND = tuple({case.kind: case for case in reversed(CASES)}.values())

# The scale alone, for a million steps, with factors that are not binary fractions.
(LONG_RUN,) = (
    dataclasses.replace(case, steps=1_000_000)
    for case in _family(
        "long run",
        (0,),
        _grid(growth_factor=(1.1,), backoff_factor=(0.7,), growth_interval=(3,)),
    )
)


def overflows(case: Case) -> np.ndarray:
    """Which steps overflow when the scale runs alone: bool [steps]."""
    return np.random.RandomState(case.seed).random_sample(case.steps) < case.overflow
