"""What a `GradScaler` remembers of each optimizer from `unscale_` to `update`.

torch's stage of each optimizer and its `found_inf` are state of one iteration, not of
the scaler. They live in plain Python, keyed by the optimizer object, and do not outlive
the trace that they were made in, because a trace gives every optimizer a new identity.
Flattening the scaler in the middle of an iteration, as `nnx.jit`, `nnx.split`, deepcopy
and checkpoints do, raises an error.

An exception between `unscale_` and `step` leaves a record behind, and gradients of the
next backward pass would count as unscaled. So a record knows the gradients that
`unscale_` returned, and whether something was scaled since.
"""

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Generator
from typing import Self

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from .._tree import Flag, PyTree, is_inexact

HALF_WAY = (
    "GradScaler crossed a trace boundary, or was copied or saved, in the middle of an "
    "iteration. An iteration (scale, unscale_, step, update) must be inside one "
    "trace, or wholly outside. Call update() before the jitted function returns:\n"
    "    @nnx.jit\n"
    "    def train_step(model, optimizer, scaler, x):\n"
    "        ...\n"
    "        scaler.step(optimizer, model, grads)\n"
    "        scaler.update()"
)

OTHER_GRADIENTS = (
    "step() got gradients that unscale_() did not return, and scale() was called "
    "since. They are applied unchanged. If an exception ended the last iteration "
    "before its step(), they come from another backward pass and are still scaled, and "
    "this step is far too long: call update() when an iteration ends early. If they "
    "were made from what unscale_() returned (clipped), step() before scale() again."
)


References = tuple[weakref.ref[jax.Array | np.ndarray], ...]


def references(tree: PyTree) -> References:
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray) and is_inexact(x)
    return tuple(map(weakref.ref, filter(is_array, jax.tree.leaves(tree))))


def holds_one_of(known: References, tree: PyTree) -> bool:
    alive = [reference() for reference in known]
    ids = {id(leaf) for leaf in alive if leaf is not None}
    return any(id(leaf) in ids for leaf in jax.tree.leaves(tree))


@dataclasses.dataclass
class Record:
    optimizer: object  # kept alive, so that no other object gets its id
    finite: Flag
    has_stepped: bool = False  # and otherwise unscaled
    scaled: References = ()  # the gradients that went into `unscale_`
    unscaled: References = ()  # and what came out
    is_old: bool = False  # whether something was scaled since

    def check_unscaled(self, grads: PyTree) -> None:
        """Warns if gradients are known not to be those that `unscale_` returned.

        Raises:
          ValueError: they are those that went into it.
        """
        if holds_one_of(self.scaled, grads):
            raise ValueError(
                "step() got the gradients that went into unscale_(); pass the ones "
                "it returned: grads = scaler.unscale_(optimizer, grads)."
            )
        if self.is_old and not holds_one_of(self.unscaled, grads):
            warnings.warn(OTHER_GRADIENTS, RuntimeWarning, stacklevel=3)


@jax.tree_util.register_pytree_node_class
class Iteration:
    """The records of the current iteration: a pytree only while there are none."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.trace: object = None

    def tree_flatten(self) -> tuple[tuple[()], None]:
        self.check_whole()
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: object, children: object) -> Self:
        del aux, children
        return cls()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        self.check_whole()
        return type(self), ()

    def check_whole(self) -> None:
        if self.records:
            raise RuntimeError(HALF_WAY)

    def check_trace(self) -> None:
        """Raises RuntimeError if the records are from another trace, and drops them."""
        if self.records and self.trace != get_opaque_trace_state(convention="nnx"):
            self.records.clear()
            raise RuntimeError(HALF_WAY)

    def record_of(self, optimizer: object) -> Record | None:
        self.check_trace()
        return self.records.get(id(optimizer))

    def note_scaling(self) -> None:
        """Notes that another loss is scaled, mostly in a derivative's own trace."""
        for record in self.records.values():
            record.is_old = True

    def add(self, record: Record) -> None:
        self.trace = get_opaque_trace_state(convention="nnx")
        self.records[id(record.optimizer)] = record

    @contextlib.contextmanager
    def set_aside(self) -> Generator[None]:
        """Hides the records while NNX flattens a model that holds the scaler."""
        records, self.records = self.records, {}
        try:
            yield
        finally:
            self.records = records
