"""Running ops on another trace, and tracing repeated ops cheaply.

A cache must not change a result. Tests compare programs with and without jamp's caches:

    with without_caches():
        expected = program()

JAX caches the derivative of a jitted function, but derives an op anew each time. So an
op that is seen for the second time, on a trace that is differentiated, is jitted. The
`jit` is inlined, so a jaxpr does not show it.
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
Seen = set[Hashable]
SEEN: weakref.WeakKeyDictionary[_compat.Trace, Seen] = weakref.WeakKeyDictionary()


def run(
    trace: _compat.Trace,
    function: Callable[..., Out],
    args: Sequence[ArrayLike],
    params: dict[str, object],
    seen: Seen | None,
) -> Out:
    """Calls a function of arrays with `trace` as the current one.

    Args:
      seen: what ran on the trace before, or None if nothing is to be jitted.
    """
    if seen is not None:
        fixed = function, tuple(params.items())
        key = fixed, tuple(map(jax.typeof, args))
        if key in seen:
            function, params = jitted(*fixed), {}
        seen.add(key)
    with set_current_trace(trace):
        return function(*args, **params)


@functools.lru_cache(maxsize=4096)
def jitted(
    function: Callable[..., Out], params: tuple[tuple[str, object], ...]
) -> Callable[..., Out]:
    bound = functools.partial(function, **dict(params))
    return jax.jit(bound, inline=_compat.INLINE)


def seen_on(trace: _compat.Trace) -> Seen | None:
    """What ran on this trace, if it is differentiated and goes into a jaxpr."""
    if _compat.is_differentiated_into_a_jaxpr(trace):
        return SEEN.setdefault(trace, set())
    return None
