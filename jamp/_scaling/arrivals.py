"""What `jamp.step` gives to an optimizer, and what of it arrives at a loss scale.

The loss scale may be one member of a chain. What stands in front of it sees scaled
gradients, and what stands behind it moves parameters on a skipped step. `jamp.step`
knows the gradients that it was given, so it can tell.
"""

import contextlib
import threading
from collections.abc import Generator

import jax
import optax

from .._tree import PyTree, is_inexact, path_text
from .optimizer_stages import trace_state

CHANGED = """jamp.step: the gradient at {} was changed before it reached the loss \
scale. What stands in front of it, such as optax.clip_by_global_norm, sees scaled \
gradients, and its result is divided by the scale. Put it inside: \
jamp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optimizer))."""


class Watch:
    """One call of an optimizer's `update`: which leaves go in, arrive and come out.

    Leaves are recognized by identity, which a jitted function or a conditional around
    the loss scale does not keep: there, nothing is known.
    """

    def __init__(self, grads: optax.Updates):
        self._trace, self._alive = trace_state(), [grads]  # ids stay unique
        self._given = {id(leaf): id(leaf) for leaf in jax.tree.leaves(grads)}
        self._arrived, self._made = set[int](), set[int]()
        self.ran, self.is_blind = False, False

    def arrive(self, grads: optax.Updates) -> None:
        """A loss scale got these: ValueError if they are not those that went in."""
        self.ran = True
        if self._trace != trace_state():
            self.is_blind = True
            return
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            if is_inexact(leaf) and id(leaf) not in self._given:
                at = path_text(path)
                raise ValueError(CHANGED.format(at))
            self._arrived.add(self._given.get(id(leaf), 0))

    def leave(self, updates: optax.Updates) -> None:
        """A loss scale returned these, which move nothing on a skipped step."""
        self._alive.append(updates)
        self._made |= set(map(id, jax.tree.leaves(updates)))

    def widen(self, grads: optax.Updates, wide: optax.Updates) -> None:
        """Gradients were cast to float32, which a loss scale would do too."""
        self._alive.append(wide)
        for old, new in zip(jax.tree.leaves(grads), jax.tree.leaves(wide), strict=True):
            if id(old) in self._given:
                self._given[id(new)] = self._given[id(old)]

    def passed_by(self, leaf: PyTree) -> bool:
        """Whether a gradient has not arrived at a loss scale."""
        return self.ran and not self.is_blind and id(leaf) not in self._arrived

    def has_made(self, update: PyTree) -> bool:
        """Whether an update is as a loss scale returned it."""
        return id(update) in self._made


class ActiveWatch(threading.local):
    """The call of `jamp.step` that runs now, in this thread."""

    watch: Watch | None = None


_active = ActiveWatch()


def current() -> Watch | None:
    return _active.watch


@contextlib.contextmanager
def watching(watch: Watch) -> Generator[None]:
    """Lets the loss scales inside an optimizer tell what arrives at them."""
    before, _active.watch = _active.watch, watch
    try:
        yield
    finally:
        _active.watch = before
