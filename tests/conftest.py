"""Strict settings for the whole suite: eight fake devices, no silent promotion."""

import gc
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import pytest

from . import time_limit

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# `make test` tries fewer random inputs. Each profile tries the same ones every time.
repeatable = {"derandomize": True, "deadline": None, "database": None}
hypothesis.settings.register_profile("quick", max_examples=10, **repeatable)
hypothesis.settings.register_profile("all", max_examples=100, **repeatable)


def pytest_configure(config):
    quick = config.getoption("markexpr") == "not slow"
    hypothesis.settings.load_profile("quick" if quick else "all")
    if quick:
        config.pluginmanager.register(time_limit)


@pytest.fixture
def standard_promotion():
    """For third-party code that mixes dtypes and is tested as it is."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def checking_leaks():
    """`jax.checking_leaks`, which searches all that Python holds, after each trace.

    What was there before is left out: it is much, and a leak is in none of it.
    """
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield
    gc.unfreeze()
