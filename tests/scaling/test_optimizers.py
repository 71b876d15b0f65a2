"""Every optax optimizer inside the wrapper, against the same optimizer bare."""

import functools
import json
import os
import platform
import subprocess
import sys
import time
import uuid

import chex
import jax
import numpy as np
import optax
import pytest

import jamp

from ..bits import check_near, check_same_bits, nudged
from .optimizer_bits import (
    SCALE,
    compare_steps,
    extra_args,
    make_grads,
    make_params,
    scaled,
    stepped,
    updated,
)
from .optimizers import OPTIMIZERS, exported_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("standard_promotion"),
]


@pytest.fixture(scope="module")
def without_fma(tmp_path_factory):
    """What `optimizer_bits` found on a processor without fused multiply-add."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("turning fused multiply-add off needs an x86 processor")
    # It takes a minute: the first worker of pytest-xdist runs it, the others wait.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    result = tmp_path_factory.getbasetemp().parent / f"optimizer_bits-{run}.json"
    try:
        result.with_suffix(".begun").touch(exist_ok=False)
    except FileExistsError:
        deadline = time.monotonic() + 600
        while not result.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return json.loads(result.read_text())
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_max_isa=AVX",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "tests.scaling.optimizer_bits"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = done.stdout.splitlines()[-1] if done.returncode == 0 else "null"
    written = result.with_suffix(".written")
    written.write_text(found)
    written.rename(result)
    assert done.returncode == 0, done.stderr
    return json.loads(found)


def test_the_table_holds_every_optimizer_that_optax_exports():
    assert len(exported_names()) >= 30
    assert set(exported_names()) <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_equal_the_bare_optimizer_bit_for_bit(name, without_fma):
    assert name in without_fma["compared"]
    assert name not in without_fma["failures"], without_fma["failures"][name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_steps_equal_the_bare_optimizer_bit_for_bit(name):
    compare_steps(name, updated, lambda function: function)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_as_compiled_by_default_agrees_within_rounding(name):
    factory = OPTIMIZERS[name]
    plain, wrapped = factory(), jamp.dynamic_loss_scale(factory(), init_scale=SCALE)
    params, grads, extra = make_params(), make_grads(0), extra_args(name, 0)
    state = plain.init(params)
    plain_step = jax.jit(stepped(plain))
    expected, _ = plain_step(grads, state, params, extra)
    result, _ = jax.jit(stepped(wrapped))(
        scaled(grads), wrapped.init(params), params, extra
    )
    moved = nudged(grads)
    if name == "contrib.muon":  # each of its five iterations rounds
        more = lambda i: functools.reduce(lambda g, _: nudged(g)[i], range(5), grads)
        moved = [more(i) for i in range(4)]
    nearby = [plain_step(g, state, params, extra)[0] for g in moved]
    check_near(result, expected, nearby)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_holds_everything(name):
    tx = jamp.dynamic_loss_scale(OPTIMIZERS[name](), init_scale=SCALE)
    update, step = jax.jit(updated(tx)), jax.jit(stepped(tx))
    params, extra = make_params(), extra_args(name, 0)
    state = tx.init(params)
    for seed in (0, 1):  # the control; some do nothing in their first step
        params, state = step(scaled(make_grads(seed)), state, params, extra)
    moved = jax.tree.map(lambda a, b: np.any(a != b), params, make_params())
    assert all(jax.tree.leaves(moved))
    assert not state.found_inf and state.skipped_steps == 0
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))

    for bad in (np.inf, -np.inf, np.nan):
        grads = scaled(make_grads(1))
        grads["bias"] = grads["bias"].at[3].set(bad)
        updates, skipped = update(grads, state, params, extra)
        check_same_bits(optax.apply_updates(params, updates), params)
        check_same_bits(skipped.inner_state, state.inner_state)
        chex.assert_trees_all_equal_shapes_and_dtypes(skipped, state)
        assert skipped.found_inf and skipped.skipped_steps == 1
        assert skipped.loss_scale == SCALE / 2

        same_params, same_state = step(grads, state, params, extra)
        check_same_bits(same_params, params)
        check_same_bits(same_state, skipped)
