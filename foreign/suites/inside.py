"""Tests that look at JAX's internals, and so differ in a region that decides nothing.

The table has at most 40 entries. A name may be a pattern of `fnmatch`.
"""

from fnmatch import fnmatchcase

LOGS = "it reads what JAX logs when it traces and compiles"

INSIDE: dict[str, dict[str, str]] = {
    "jax": {
        "api_test.py::APITest::test_clear_cache": LOGS,
        "api_test.py::APITest::test_jit_compilation_time_logging": LOGS,
        "api_test.py::APITest::test_fwd_and_bwd": (
            "it forbids tracing, and a region traces jitted functions again"
        ),
        "api_test.py::CleanupTest::test_call_wrapped_second_phase_cleanup": (
            "it asserts that no trace is current, and a region is one"
        ),
        "api_test.py::TracebackTest::test_custom_vjp_traceback": (
            "it counts the frames of the stack"
        ),
        "random_test.py::PrngTest::testNoOpByOpUnderHash": (
            "it forbids running op by op, and an eager region binds each op separately"
        ),
        "shard_map_test.py::*::test_different_devices_shmap_abstract_mesh_cache_hit": (
            "it counts how often JAX traces, and a region traces a jaxpr once more"
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
