"""The tests that look at JAX's inside, and so differ in a region that decides nothing.

At most 40 entries in all. A name may be a pattern of `fnmatch`.
"""

from fnmatch import fnmatchcase

INSIDE: dict[str, dict[str, str]] = {
    "jax": {
        "shard_map_test.py::*::test_different_devices_shmap_abstract_mesh_cache_hit": (
            "it counts how often JAX traces; a region traces a jaxpr once more"
        ),
    },
    "flax": {},
    "equinox": {},
    "optax": {},
}


def reason(suite: str, test: str) -> str | None:
    """Why a test may differ, or None.

    Args:
      test: such as "api_test.py::APITest::test_jit".
    """
    for pattern, why in INSIDE[suite].items():
        if fnmatchcase(test, pattern):
            return why
    return None
