"""What surrounds the numbers: messages, saved states, dtypes of `scale`, bfloat16."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp

from .jamp_side import Model

torch = pytest.importorskip("torch")

CONFIG = {
    "init_scale": 1000.1,
    "growth_factor": 1.1,
    "backoff_factor": 0.7,
    "growth_interval": 3,
}


class TorchDriver:
    """One parameter, one optimizer and torch's scaler."""

    def __init__(self, dtype: str = "float32", **config: Any):
        dtype = getattr(torch, dtype)
        self.param = torch.zeros(8, dtype=dtype, requires_grad=True)
        self.param.grad = torch.ones(8, dtype=dtype)
        self.optimizer = torch.optim.SGD([self.param], lr=2.0**-4)
        self.scaler = torch.amp.GradScaler("cpu", **config)
        self.scaler.scale(torch.ones(()))  # torch makes the scale on first use

    def set_gradient(self, values: np.ndarray):
        self.param.grad = torch.from_numpy(values).to(self.param.dtype)

    def drop_gradient(self):
        self.param.grad = None

    def unscale_(self) -> np.ndarray:
        self.scaler.unscale_(self.optimizer)
        return self.param.grad.float().numpy()

    def step(self, **kwargs: Any) -> np.ndarray:
        self.scaler.step(self.optimizer, **kwargs)
        return self.param.detach().float().numpy().copy()


class JampDriver:
    """The same with jamp's scaler, outside any trace."""

    def __init__(self, dtype: str = "float32", **config: Any):
        self.model = Model(dtype)
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(2.0**-4), wrt=nnx.Param)
        self.scaler = jamp.GradScaler(**config)
        self.set_gradient(np.ones(8, np.float32))

    def set_gradient(self, values: np.ndarray):
        self.grads = jax.tree.map(
            lambda param: jnp.asarray(values, param.dtype),
            nnx.state(self.model, nnx.Param),
        )

    def drop_gradient(self):
        self.grads = jax.tree.map(lambda _: None, self.grads)

    def unscale_(self) -> np.ndarray:
        self.grads = self.scaler.unscale_(self.optimizer, self.grads)
        return np.asarray(self.grads["w"][...], np.float32)

    def step(self, **kwargs: Any) -> np.ndarray:
        self.scaler.step(self.optimizer, self.model, self.grads, **kwargs)
        return np.asarray(self.model.w[...], np.float32)


def iterate(driver: Any, overflow: bool) -> tuple[float, int]:
    values = np.ones(8, np.float32)
    values[3] = np.inf if overflow else 1.0
    driver.set_gradient(values)
    driver.step()
    driver.scaler.update()
    return driver.scaler.get_scale(), driver.scaler.state_dict()["_growth_tracker"]


MISUSES = {
    "unscale_ twice": lambda d: (d.unscale_(), d.unscale_()),
    "unscale_ after step": lambda d: (d.step(), d.unscale_()),
    "step twice": lambda d: (d.step(), d.step()),
    "update before step": lambda d: d.scaler.update(),
    "update twice": lambda d: (d.step(), d.scaler.update(), d.scaler.update()),
    "no gradient": lambda d: (d.drop_gradient(), d.step()),
    "closure": lambda d: d.step(closure=lambda: 0.0),
    "empty state": lambda d: d.scaler.load_state_dict({}),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_messages(misuse: str):
    # torch raises AssertionError for what it checks with `if`; jamp a RuntimeError.
    with pytest.raises((RuntimeError, AssertionError)) as in_torch:
        MISUSES[misuse](TorchDriver())
    with pytest.raises(RuntimeError) as in_jamp:
        MISUSES[misuse](JampDriver())
    assert str(in_jamp.value) == str(in_torch.value)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_message_for_float16_gradients(method: str):
    with pytest.raises(ValueError) as in_torch:
        getattr(TorchDriver("float16"), method)()
    with pytest.raises(ValueError) as in_jamp:
        getattr(JampDriver("float16"), method)()
    assert str(in_jamp.value).startswith(str(in_torch.value))


@pytest.mark.parametrize(
    "first, second", [(TorchDriver, JampDriver), (JampDriver, TorchDriver)]
)
def test_states_are_interchangeable(first: Any, second: Any):
    flags = (np.random.RandomState(0).random_sample(180) < 0.1).tolist()
    reference = TorchDriver(**CONFIG)
    expected = [iterate(reference, flag) for flag in flags]

    found, driver = [], first(**CONFIG)
    for part, following in (
        (flags[:60], second),
        (flags[60:120], first),
        (flags[120:], first),
    ):
        found += [iterate(driver, flag) for flag in part]
        state = json.loads(json.dumps(driver.scaler.state_dict()))
        driver = following()
        driver.scaler.load_state_dict(state)
    assert found == expected
    assert driver.scaler.state_dict() == reference.scaler.state_dict()


def test_state_dicts_have_the_same_keys_and_types():
    states = [d(**CONFIG).scaler.state_dict() for d in (TorchDriver, JampDriver)]
    kinds = [{key: type(value) for key, value in state.items()} for state in states]
    assert kinds[0] == kinds[1]
    disabled = [d(enabled=False).scaler.state_dict() for d in (TorchDriver, JampDriver)]
    assert disabled == [{}, {}]


@pytest.mark.parametrize("scale", [2.0**16, 1000.1, 2.0**-20, 3e38])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32", "bool"]
)
def test_dtype_and_value_of_scale(dtype: str, scale: float):
    values = [0.0, 1.0, -1.5, 0.1, 3.0, 1e4, np.inf, -np.inf, np.nan]
    if dtype in ("int32", "bool"):
        values = [0, 1, 3, 2**24 + 1] if dtype == "int32" else [0, 1]
    in_torch = torch.amp.GradScaler("cpu", init_scale=scale)
    in_jamp = jamp.GradScaler(init_scale=scale)
    with jax.enable_x64(dtype == "float64"):
        for outputs in (*values, values, [values]):
            expected = in_torch.scale(
                torch.tensor(outputs, dtype=getattr(torch, dtype))
            )
            found = in_jamp.scale(jnp.array(outputs, dtype=dtype))
            assert str(found.dtype) == str(expected.dtype).removeprefix("torch.")
            np.testing.assert_array_equal(
                np.asarray(found, np.float64), expected.double().numpy(), strict=True
            )


def drawn_gradients(steps: int) -> np.ndarray:
    """Random bfloat16 values as float32, one in ten steps with an inf."""
    random = np.random.RandomState(1)
    values = random.standard_normal((steps, 8)).astype(np.float32) * 1000
    values[random.random_sample(steps) < 0.1, 2] = np.inf
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_bfloat16_gradients(jit: bool, unscale_first: bool):
    # bfloat16 parameters too: the unscaled gradients go back to bfloat16, as in torch.
    def step(model, optimizer, scaler, grads):
        if unscale_first:
            grads = scaler.unscale_(optimizer, grads)
        scaler.step(optimizer, model, grads)
        scaler.update()
        return grads["w"][...]

    step = nnx.jit(step) if jit else step
    in_torch = TorchDriver("bfloat16", **CONFIG)
    in_jamp = JampDriver("bfloat16", **CONFIG)
    for values in drawn_gradients(100):
        for driver in (in_torch, in_jamp):
            driver.set_gradient(values)
        expected = in_torch.unscale_() if unscale_first else values
        params = in_torch.step()
        in_torch.scaler.update()
        found = step(in_jamp.model, in_jamp.optimizer, in_jamp.scaler, in_jamp.grads)
        np.testing.assert_array_equal(np.float32(found), expected)
        np.testing.assert_array_equal(np.float32(in_jamp.model.w[...]), params)
        assert in_jamp.scaler.get_scale() == in_torch.scaler.get_scale()
