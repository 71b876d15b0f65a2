"""How a step is skipped: two ways with equal results, and the cheaper one per platform.

Branching (`lax.cond`) lets XLA's CPU backend update donated buffers in place. Selecting
(`lax.select_n`) costs less everywhere else: `docs/performance.md` says why.

A trace holds both: a conditional, and a selection of its result. Which of the two
decides is known when the program is lowered, since one trace may be compiled for a CPU
and exported for a GPU. XLA folds what depends on the platform, and drops the
conditional or the selection.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._checks import is_traced
from .._tree import Flag, PyTree, T, cloned, dtype_of, is_inexact
from .mesh import typed_as
from .state_types import check_same


def branches() -> Flag:
    """Whether the program is for a CPU: bool [], a constant once it is lowered."""
    yes, no = (lambda: jnp.bool_(True)), (lambda: jnp.bool_(False))
    return lax.platform_dependent(cpu=yes, default=no)


def keeps(finite: Flag) -> Flag:
    """Whether the conditional's result is the final one: always, if it branches."""
    return jnp.logical_or(finite, branches())


def run_or_hold(
    finite: Flag,
    run: Callable[[], T],
    hold: Callable[[Callable[[], T]], T],
) -> T:
    """`run()` if finite, otherwise `hold(like)`, of the same structure and dtypes.

    Outside a trace the flag is read, as in torch, whose `step` reads it too. Inside
    one, `run` may run either way, see `harmless`, and the result has the types of
    `run()`: a whole parameter that the step would return split is split if it is held.

    Args:
      hold: the result without the step. `like()` has the types of `run()`.
    """
    if not is_traced(finite):
        return run() if finite else hold(lambda: jax.eval_shape(run))
    types: list[T] = []

    def running() -> T:
        new = run()
        types.append(jax.tree.map(jax.typeof, new))
        return new

    def holding() -> T:
        (like,) = types  # JAX traces the other branch first
        return as_types(like, hold(lambda: like))

    runs = jnp.logical_or(finite, jnp.logical_not(branches()))
    # XLA copies far more with the branches the other way round.
    new = lax.cond(runs, running, holding)
    return select(keeps(finite), new, hold(lambda: new))


def select(finite: Flag, new: T, old: T) -> T:
    """Each leaf of `new` if finite, otherwise that of `old`, in the types of `new`."""
    return jax.tree.map(lambda new, old: choose(finite, new, old), new, old)


def as_types(like: PyTree, old: T) -> T:
    check_same(like, old, "a step")
    return jax.tree.map(typed_as, old, like)


def choose(flag: Flag, a: ArrayLike, b: ArrayLike) -> ArrayLike:
    """`a` if the flag is true, otherwise `b`; for `float0`, which is empty, `b`.

    The type is that of `a`, the new value.
    """
    if dtype_of(b) == jax.dtypes.float0:
        return b
    a, b = cloned((jnp.asarray(a), jnp.asarray(b)))
    # Not jnp.where, a jitted function: JAX would lower a call and a broadcast.
    return cloned(lax.select_n(flag, typed_as(b, a), a))


def harmless(finite: Flag, grads: T) -> T:
    """Gradients for a `run` that may run on a skipped step: zeros then.

    So an optimizer never sees an inf or a nan, whichever way the step is skipped. The
    zeros are negative: an array of positive ones XLA would share with that into which
    an embedding's gradient is scattered, and write it for both.
    """
    if not is_traced(finite):
        return grads
    kept = keeps(finite)

    def zeroed(g: ArrayLike) -> ArrayLike:
        return choose(kept, g, lax.full_like(g, -0.0)) if is_inexact(g) else g

    return jax.tree.map(zeroed, grads)
