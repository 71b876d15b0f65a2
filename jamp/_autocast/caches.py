"""One switch for all that autocast keeps of what it has done before.

Nothing that is kept may change a result. Tests compare programs with and without:

    with without_caches():
        expected = program()
"""

import contextlib

import jax

# A context of JAX's, so that what is traced in one setting is not found in the other.
CACHED = jax.make_user_context(True)


def without_caches() -> contextlib.AbstractContextManager[object]:
    """Decides about each op and rewrites each jaxpr anew.

    The copies that a region keeps of weights belong to what a region is, and stay.
    """
    return CACHED(False)


def are_used() -> bool:
    return CACHED.value
