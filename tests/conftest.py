"""Strict settings for the whole suite: eight fake devices, no silent promotion.

On another backend than the CPU (`JAX_PLATFORMS=cuda,cpu`) there are as many devices as
there are. What needs more of them, or a CPU, is skipped.
"""

import functools
import gc
import math
import os

import jax
import pytest

from . import marks, mlir_contexts, time_limit

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

DEVICES = "--xla_force_host_platform_device_count=8"
# XLA compiles in a third of the time without LLVM's optimizations.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # later versions drop the flag and abort
    UNOPTIMIZED += " --xla_cpu_parallel_codegen_split_count=1"
if (0, 10, 2) <= jax.__version_info__ < (0, 11):  # earlier ones round float8 wrongly
    UNOPTIMIZED += " --xla_cpu_use_fusion_emitters=false"

# JAX itself is not asked for its backend before XLA has its flags.
ON_CPU = (jax.config.jax_platforms or "cpu").split(",")[0] == "cpu"

try:
    import hypothesis
except ImportError:  # `make gpu` runs without it
    hypothesis = None


def pytest_addoption(parser):
    said = "fail the tests that are not marked slow and take more than a second"
    parser.addoption("--time-limit", action="store_true", help=said)
    said = "compile with XLA's default optimizations, which take longer"
    parser.addoption("--optimized", action="store_true", help=said)


def pytest_configure(config):
    unoptimized = ON_CPU and not config.getoption("optimized")
    flags = f"{DEVICES} {UNOPTIMIZED}" if unoptimized else DEVICES
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    if not ON_CPU:  # where float32 may be multiplied in TF32
        jax.config.update("jax_default_matmul_precision", "float32")
    jax.make_mesh = with_devices(jax.make_mesh, lambda shape, *_: math.prod(shape))
    jax.pmap = for_several(jax.pmap)
    mlir_contexts.reuse()
    if config.getoption("time_limit"):
        config.pluginmanager.register(time_limit)
    quick = config.getoption("markexpr").startswith("not slow")
    if hypothesis is not None:  # the same random inputs every time
        hypothesis.settings.register_profile(
            "jamp",
            max_examples=10 if quick else 100,
            derandomize=True,
            deadline=None,
            database=None,
        )
        hypothesis.settings.load_profile("jamp")


def with_devices(function, needed_by):
    """A function of JAX's that skips a test where there are too few devices for it."""

    @functools.wraps(function)
    def run(*args, **options):
        given, needed = options.get("devices"), needed_by(*args)
        if len(jax.devices() if given is None else given) < needed:
            pytest.skip(f"needs {needed} devices")
        return function(*args, **options)

    return run


def for_several(pmap):
    """`jax.pmap`, whose functions skip a test where there is one device."""

    @functools.wraps(pmap)
    def run(*args, **options):
        mapped = pmap(*args, **options)
        return mapped if jax.device_count() > 1 else with_devices(mapped, lambda *_: 2)

    return run


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
    marks.mark_covers(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        if item.get_closest_marker("cpu") and jax.default_backend() != "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a CPU"))
        needed = max((mark.args[0] for mark in item.iter_markers("devices")), default=1)
        if jax.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} devices"))


def pytest_collection_finish():
    """Collects garbage less often, and never among objects that exist by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def standard_promotion():
    """For tests of unmodified third-party code that mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def default_precision():
    """For tests of what a call says about its precision, whatever the suite's is."""
    usual = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)
    yield
    jax.config.update("jax_default_matmul_precision", usual)


@pytest.fixture
def checking_leaks():
    """`jax.checking_leaks`, which searches all Python objects after each trace.

    Leaves out objects made before: there are many, and none of them is a leak.
    """
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield
