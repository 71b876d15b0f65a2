"""What a chain does around a loss scale to its gradients, or behind master weights.

What stands in front of a loss scale sees scaled gradients, and so does what a mask or a
condition leaves to others. No value shows this; the program of the update does, in
which a loss scale labels what it gets and returns, and master weights what they make.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jaxprs import follow, inside
from .._tree import dtype_of, is_inexact, path_text
from .labels import GIVEN, LABELLED, OF_MASTERS, RETURNED, label_of
from .traced import NEEDS_VALUES, PLACES, Traced

CHANGED = """jamp.step: the gradient at {} was changed before it reached the loss \
scale. What stands in front of it, such as optax.clip_by_global_norm, sees scaled \
gradients, and its result is divided by the scale. Put it inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))."""

PASSED_BY = """jamp.step: the scaled gradient at {} is used, although it did not pass \
through the loss scale: a mask around that (optax.masked) passes on what it leaves \
out. Put the loss scale outside: jamp.dynamic_loss_scale(optax.masked(...)). To freeze \
a parameter, give it optax.set_to_zero(), as one of the optimizers of \
optax.multi_transform."""

BEHIND = """{}: the update at {} was changed after jamp.master_weights made it. It \
takes the parameter to its master, rounded: what stands behind that in a chain (a \
scale, decayed weights, a mask) parts them. Put it inside: \
jamp.master_weights(optax.chain(optimizer, optax.scale(0.5)))."""


class Origin(enum.Enum):
    """What a value in a program is, unless it is a gradient: then, its place."""

    OTHER = enum.auto()
    OF_GRADIENTS = enum.auto()  # but not of one that passed through a loss scale
    OF_LOSS_SCALE = enum.auto()  # an update, as a loss scale returned it


Origins = list[Origin | int]


Update = Callable[[optax.Updates], optax.Updates]


def labelled_program(update: Update, grads: optax.Updates) -> Traced | None:
    """The program of an update, or None if JAX cannot trace it."""
    try:
        with LABELLED(True):
            return Traced(update, grads)
    except NEEDS_VALUES:
        return None


def arrivals(update: Update, grads: optax.Updates) -> tuple[bool, bool]:
    """Whether a loss scale runs, and whether all updates are as it returned them.

    It raises ValueError if a gradient is changed before it arrives, or used without
    arriving. Of an update that JAX cannot trace, nothing is known.
    """
    if (program := labelled_program(update, grads)) is None:
        return True, False
    given = jax.tree_util.tree_leaves_with_path(grads)
    start: Origins = [
        place if is_inexact(leaf) else Origin.OTHER
        for place, (_, leaf) in enumerate(given)
    ]
    arrived: list[tuple[str, Origin | int]] = []
    found = origins_of(program.closed, start, arrived)
    for at, origin in arrived:
        if not isinstance(origin, int):
            raise ValueError(CHANGED.format(at))
    made = jax.tree_util.tree_leaves_with_path(program.shapes)
    for origin, (path, _) in zip(found, made, strict=True):
        if arrived and is_of_gradients(origin):
            path = given[origin][0] if isinstance(origin, int) else path
            raise ValueError(PASSED_BY.format(path_text(path)))
    return bool(arrived), set(found) <= {Origin.OF_LOSS_SCALE}


def is_of_gradients(origin: Origin | int) -> bool:
    return isinstance(origin, int) or origin is Origin.OF_GRADIENTS


def origins_of(
    jaxpr: ClosedJaxpr, inputs: Origins, arrived: list[tuple[str, Origin | int]]
) -> Origins:
    """The origin of each output. `arrived` gets those of what loss scales are given."""

    def results(eqn: JaxprEqn, sources: Origins) -> Origins:
        # A flag or a count, such as whether all are finite, is not scaled.
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        return [
            end if is_inexact(aval) else Origin.OTHER
            for end, aval in zip(ends_of(eqn, sources), avals, strict=True)
        ]

    def ends_of(eqn: JaxprEqn, sources: Origins) -> Origins:
        name = eqn.primitive.name
        if (of := label_of(eqn)) is not None:
            what, at = of
            if what == GIVEN:
                arrived.append((at, sources[0]))
            ends = {GIVEN: Origin.OTHER, RETURNED: Origin.OF_LOSS_SCALE}
            return [ends.get(what, sources[0])]
        if name in PLACES or (name == "convert_element_type" and not narrows(eqn)):
            return sources  # master weights widen, as a loss scale does
        if any(map(label_of, inside(eqn))):  # in a loop: nothing is known
            return [Origin.OTHER] * len(eqn.outvars)
        used = any(map(is_of_gradients, sources[name == "select_n" :]))
        return [Origin.OF_GRADIENTS if used else Origin.OTHER] * len(eqn.outvars)

    return follow(jaxpr, inputs, results, joined, Origin.OTHER)


def joined(origins: Sequence[Origin | int]) -> Origin | int:
    if len(set(origins)) == 1:
        return origins[0]
    used = any(map(is_of_gradients, origins))
    return Origin.OF_GRADIENTS if used else Origin.OTHER


class Master(enum.Enum):
    """What a value is to the updates that `master_weights` makes."""

    NO_UPDATE = enum.auto()
    FLAG = enum.auto()  # a bool as a number, such as whether MultiSteps updates
    UPDATE = enum.auto()  # one of them, or perhaps zero
    CHANGED = enum.auto()


def check_last(caller: str, update: Update, grads: optax.Updates) -> None:
    """Raises ValueError if an optimizer changes the updates of master weights in it."""
    if (program := labelled_program(update, grads)) is None:
        return

    def results(eqn: JaxprEqn, given: list[Master]) -> list[Master]:
        avals: list[Any] = [variable.aval for variable in eqn.outvars]
        found = made(eqn, eqn.primitive.name, given)
        return [found if is_inexact(aval) else Master.NO_UPDATE for aval in avals]

    def made(eqn: JaxprEqn, name: str, given: list[Master]) -> Master:
        label, kinds = label_of(eqn), set(given)
        if label is not None and label[0] == OF_MASTERS:
            return Master.UPDATE
        if label is not None or name == "select_n" or name in PLACES:
            return joined(given[name == "select_n" :])
        if name == "convert_element_type" and dtype_of(eqn.invars[0].aval) == jnp.bool_:
            return Master.FLAG
        is_widened = name == "convert_element_type" and not narrows(eqn)
        if is_widened or name in ("broadcast_in_dim", "reshape"):
            return given[0]
        if name == "mul" and kinds == {Master.FLAG, Master.UPDATE}:
            return Master.UPDATE
        used = kinds - {Master.NO_UPDATE, Master.FLAG}
        return Master.CHANGED if used else Master.NO_UPDATE

    def joined(given: Sequence[Master]) -> Master:
        several = set(given) - {Master.NO_UPDATE, Master.FLAG}
        if len(several) > 1:
            return Master.CHANGED
        return several.pop() if several else Master.NO_UPDATE

    start = [Master.NO_UPDATE] * len(program.closed.in_avals)
    found = follow(program.closed, start, results, joined, Master.NO_UPDATE)
    updates = jax.tree_util.tree_leaves_with_path(program.shapes)
    for value, (path, _) in zip(found, updates, strict=True):
        if value is Master.CHANGED:
            raise ValueError(BEHIND.format(caller, path_text(path)))


def narrows(eqn: JaxprEqn) -> bool:
    given, made = (dtype_of(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    return given.itemsize > made.itemsize
