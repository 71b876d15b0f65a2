"""A JAX whose internals have moved breaks only autocast, and only when it is used."""

import os
import subprocess
import sys

import pytest

import jamp

from .marks import cover

# What may be gone: the file that uses JAX's internals, or one of those internals.
GONE = {
    "the module": "import sys; sys.modules['jamp._compat'] = None",
    "a name": "from jax._src import source_info_util as s; del s.register_exclusion",
    "a module of JAX": (
        "import jax._src.state as state, sys; del state.discharge; "
        "sys.modules['jax._src.state.discharge'] = None"
    ),
}
WORKS = """
import pickle
import jax, jax.numpy as jnp, optax
from flax import nnx
import jamp
from jamp import autocast  # importing is not using

params = {"w": jnp.ones(2)}
tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.sgd(0.5)), init_scale=8.0)
opt_state = tx.init(params)

@jax.jit
def step(params, opt_state, x):
    grad_fn = jamp.value_and_grad(lambda params: jnp.sum(params["w"] * x), opt_state)
    loss, grads = grad_fn(params)
    return *jamp.step(tx, grads, opt_state, params), grads

params, opt_state, grads = step(params, opt_state, jnp.ones(2))
params, opt_state, grads = step(params, opt_state, jnp.array([1.0, jnp.inf]))
assert params["w"].tolist() == [0.5, 0.5] and jamp.loss_scale(opt_state) == 4
assert jamp.metrics(opt_state)["skipped_steps"] == 1
pickle.loads(pickle.dumps(opt_state))

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
scaler = jamp.GradScaler()
grads_of = nnx.grad(lambda model: scaler.scale(jnp.sum(model(jnp.full(2, jnp.inf)))))
assert scaler.step(optimizer, model, grads_of(model))
scaler.update()
assert scaler.get_scale() == 2**15 and scaler.state_dict()["scale"] == 2**15

policy = jamp.get_policy("mixed_float16")
assert policy.cast_to_compute(params)["w"].dtype == jnp.float16
assert jamp.cast_to_full(jnp.ones(1, jnp.float16)).dtype == jnp.float32
assert jamp.debug.overflow_report(grads).found
assert "2^" in str(jamp.debug.grad_histogram({"w": jnp.ones(3)}))
history = jamp.debug.History()
history.append(jamp.metrics(opt_state))
history.fetch()
jamp.debug.check(opt_state)
jamp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
"""
USED = {
    "jamp.autocast": "jamp.autocast(jnp.float16)",
    "jamp.is_autocast_enabled": "jamp.is_autocast_enabled()",
    "jamp.get_autocast_dtype": "jamp.get_autocast_dtype()",
    "jamp.calibrate": "jamp.calibrate(jnp.sin)",
    "jamp.debug.explain": "jamp.debug.explain(jnp.sin)",
    "jamp.debug.find_nonfinite": "jamp.debug.find_nonfinite(jnp.sin)",
    "jamp.linen.with_policy": "jamp.linen.with_policy(None, policy)",
    "jamp.nnx.with_policy": "jamp.nnx.with_policy(model, policy)",
    "jamp.Policy.wrap": "policy.wrap(jnp.sin)",
}
REFUSED = """
for name, call in {used}.items():
    try:
        eval(call)
    except ImportError as error:
        text = str(error)
        assert text.startswith(name + " does not run on JAX " + jax.__version__), text
        assert "jamp " + jamp.__version__ in text and "0.10 to 0.12" in text, text
        assert error.__cause__ is not None
    else:
        raise AssertionError(name + " was not refused")
print("all as it should be")
"""


@cover(quick=0, ci=1)
@pytest.mark.parametrize("gone", GONE)
def test_loss_scaling_goes_on_and_autocast_says_why(gone):
    code = f"import jax, flax, optax\n{GONE[gone]}\n{WORKS}{REFUSED.format(used=USED)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "all as it should be" in done.stdout


def test_here_nothing_is_missing():
    faces = (jamp, jamp.debug, jamp.linen, jamp.nnx, jamp.sharding)
    assert jamp.GradScaler and jamp.calibrate
    missing = [
        f"{face.__name__}.{name}"
        for face in faces
        for name, value in vars(face).items()
        if type(value).__name__ == "Unavailable"
    ]
    assert not missing
