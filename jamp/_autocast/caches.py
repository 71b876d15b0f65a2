"""One switch for all caches of autocast.

A cache must not change a result. Tests compare programs with and without them:

    with without_caches():
        expected = program()
"""

import contextlib

import jax

# A JAX context, so that JAX does not reuse in one setting what it traced in the other.
CACHED = jax.make_user_context(True)


def without_caches() -> contextlib.AbstractContextManager[object]:
    """Decides about each op and rewrites each jaxpr anew.

    The copies of weights that a region keeps are part of its behavior, and stay.
    """
    return CACHED(False)


def are_used() -> bool:
    return CACHED.value
