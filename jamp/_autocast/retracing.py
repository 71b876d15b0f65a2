"""Running ops on another trace, and tracing repeated ops cheaply.

A cache must not change a result. Tests compare programs with and without jamp's caches:

    with without_caches():
        expected = program()

JAX derives an op anew each time. So on a trace that is differentiated, the derivative
of an op or a small function is kept, and written again. Where that is not just
`jax.grad` in `jax.jit`, the function is jitted, and JAX keeps its derivative. The `jit`
is inlined, so a jaxpr does not show it.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
from jax.extend.core import set_current_trace
from jax.typing import ArrayLike

from .. import _compat

# Whether caches are used. A JAX context, so that JAX does not reuse in one setting what
# it traced in the other.
CACHED = jax.make_user_context(True)


def without_caches() -> contextlib.AbstractContextManager[object]:
    """Decides about each op and rewrites each jaxpr anew.

    The copies of weights that a region keeps are part of its behavior, and stay.
    """
    return CACHED(False)


Out = TypeVar("Out")
Kept = dict[Hashable, _compat.Linearized]
KEPT: weakref.WeakKeyDictionary[_compat.Trace, Kept] = weakref.WeakKeyDictionary()


def run(
    trace: _compat.Trace,
    function: Callable[..., Out],
    args: Sequence[ArrayLike],
    params: dict[str, object],
    kept: Kept | None,
) -> Out:
    """Calls a function of arrays with `trace` as the current one.

    Args:
      kept: what is kept for the trace, or None if no derivative is to be.
    """
    if kept is not None:
        fixed = function, tuple(params.items())
        if _compat.Linearized.takes(trace):
            avals = tuple(map(jax.typeof, args))
            key = fixed, avals, _compat.tracing_context()
            if (linearized := kept.get(key)) is None:
                bound = functools.partial(function, **params)
                linearized = kept[key] = _compat.Linearized(bound, trace, avals)
            return linearized(trace, args)
        function, params = jitted(*fixed), {}
    with set_current_trace(trace):
        return function(*args, **params)


@functools.lru_cache(maxsize=4096)
def jitted(
    function: Callable[..., Out], params: tuple[tuple[str, object], ...]
) -> Callable[..., Out]:
    bound = functools.partial(function, **dict(params))
    return jax.jit(bound, inline=_compat.INLINE)


def kept_for(trace: _compat.Trace) -> Kept | None:
    """What is kept for a trace, if it is differentiated and goes into a jaxpr."""
    if _compat.is_differentiated_into_a_jaxpr(trace):
        return KEPT.setdefault(trace, {})
    return None
