"""One iteration of a `GradScaler`: what happens from `unscale_` or `step` to `update`.

torch's stage of each optimizer and its `found_inf` are no state of the scaler but of
one iteration. They live in plain Python, keyed by the optimizer object, and do not
outlive the trace they were made in: a trace gives every optimizer a new identity.
Flattening the scaler in the middle of an iteration, as `nnx.jit`, `nnx.split`, deepcopy
and checkpoints do, raises.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

HALF_WAY = (
    "GradScaler crossed a trace boundary, or was copied or saved, in the middle of an "
    "iteration. An iteration (scale, unscale_, step, update) must lie inside one "
    "trace, or wholly outside. Call update() before the jitted function returns:\n"
    "    @nnx.jit\n"
    "    def train_step(model, optimizer, scaler, x):\n"
    "        ...\n"
    "        scaler.step(optimizer, model, grads)\n"
    "        scaler.update()"
)


class Stage(enum.Enum):
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


@dataclasses.dataclass
class Record:
    """What one optimizer did in this iteration."""

    optimizer: Any  # held, so that its id is not given to another one
    stage: Stage
    finite: Any  # bool []
    scaled: Any  # one scaled gradient leaf, to know it again


@jax.tree_util.register_pytree_node_class
class Iteration:
    """The records of the current iteration: a pytree only while there are none."""

    def __init__(self):
        self.records: dict[int, Record] = {}
        self.trace = None

    def tree_flatten(self):
        self.check_whole()
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        del aux, children
        return cls()

    def __reduce__(self):
        self.check_whole()
        return type(self), ()

    def check_whole(self) -> None:
        """Raises RuntimeError in the middle of an iteration."""
        if self.records:
            raise RuntimeError(HALF_WAY)

    def check_trace(self) -> None:
        """Raises RuntimeError if the records are of another trace, and drops them."""
        if self.records and self.trace != _current_trace():
            self.records.clear()
            raise RuntimeError(HALF_WAY)

    def record_of(self, optimizer: Any) -> Record | None:
        self.check_trace()
        return self.records.get(id(optimizer))

    def add(self, record: Record) -> None:
        self.trace = _current_trace()
        self.records[id(record.optimizer)] = record

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """While NNX flattens a model that holds the scaler, which is fine."""
        records, self.records = self.records, {}
        try:
            yield
        finally:
            self.records = records


def _current_trace() -> Any:
    return get_opaque_trace_state(convention="nnx")
