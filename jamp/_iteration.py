"""One iteration of a `GradScaler`: what happens from `unscale_` or `step` to `update`.

torch's stage of each optimizer and its `found_inf` are no state of the scaler but of
one iteration. They live in plain Python, keyed by the optimizer object, and do not
outlive the trace they were made in: a trace gives every optimizer a new identity.
Flattening the scaler in the middle of an iteration, as `nnx.jit`, `nnx.split`, deepcopy
and checkpoints do, raises.
"""

import dataclasses
import enum
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
        if self.records:
            raise RuntimeError(HALF_WAY)
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        del aux, children
        return cls()

    def __reduce__(self):
        self.tree_flatten()
        return type(self), ()

    def record_of(self, optimizer: Any) -> Record | None:
        trace = get_opaque_trace_state(convention="nnx")
        if self.records and self.trace != trace:
            self.records.clear()
            raise RuntimeError(HALF_WAY)
        self.trace = trace
        return self.records.get(id(optimizer))
