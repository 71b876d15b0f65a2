"""Strict settings for the whole suite: eight fake devices, no silent promotion."""

import gc
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

from . import time_limit

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

try:
    import hypothesis
except ImportError:  # `make gpu` does without
    hypothesis = None


def pytest_addoption(parser):
    said = "fail the tests that are not marked slow and take more than five seconds"
    parser.addoption("--time-limit", action="store_true", help=said)


def pytest_configure(config):
    if config.getoption("time_limit"):
        config.pluginmanager.register(time_limit)
    quick = config.getoption("markexpr") == "not slow"
    if hypothesis is not None:  # the same random inputs every time
        hypothesis.settings.register_profile(
            "jamp",
            max_examples=10 if quick else 100,
            derandomize=True,
            deadline=None,
            database=None,
        )
        hypothesis.settings.load_profile("jamp")


@pytest.fixture
def standard_promotion():
    """For third-party code that mixes dtypes and is tested as it is."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def checking_leaks():
    """`jax.checking_leaks`, which searches all that Python holds, after each trace.

    Objects made before are left out: they are many, and none of them is a leak.
    """
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield
    gc.unfreeze()
