"""What is skipped where JAX has one device, or another one than a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import AxisType

jax.default_backend = lambda: "gpu"  # before marks are read
of_import = jax.pmap(lambda x: x)

def test_of_one_device(): jax.make_mesh((1,), ("x",), (AxisType.Auto,))
def test_mesh(): jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
def test_mesh_of_some(): jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
def test_pmap(): of_import(jnp.ones((2, 3)))
@pytest.mark.devices(6)
def test_marked(): jax.devices()[5]
@pytest.mark.cpu
def test_of_a_cpu(): assert False
def test_precision(): assert jax.config.jax_default_matmul_precision == "float32"
def test_of_the_default(default_precision):
    assert jax.config.jax_default_matmul_precision is None
"""
SKIPPED = {"8 devices": 1, "2 devices": 2, "6 devices": 1, "a CPU": 1}


@pytest.mark.slow
def test_what_the_device_cannot_run_is_skipped_with_a_word(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", "-rs"]
    argv += ["-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert f"3 passed, {sum(SKIPPED.values())} skipped" in run.stdout, run.stdout
    for needed, count in SKIPPED.items():
        assert f"SKIPPED [{count}] " in run.stdout
        assert f"needs {needed}" in run.stdout
