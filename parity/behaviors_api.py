"""What GradScaler does outside of training, as questions with answers in words.

Each library has a driver. A probe asks it questions and returns the answers by
question.
"""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

Answers = dict[str, str]
SCALER, SCALE_LOSS = "GradScaler", "scale_loss"
CONFIG = {
    "init_scale": 1000.1,
    "growth_factor": 1.1,
    "backoff_factor": 0.7,
    "growth_interval": 3,
}


class Driver:
    """One vector of parameters, its scaled gradient, an optimizer and jamp's scaler."""

    def __init__(self, dtype: str = "float32", **config: Any):
        self.model = nnx.Dict(w=nnx.Param(jnp.zeros(8, dtype)))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(2.0**-4), wrt=nnx.Param)
        self.scaler = jamp.GradScaler(**config)
        self.set_gradient(np.ones(8, np.float32))

    def set_gradient(self, values: np.ndarray) -> None:
        self.grads = jax.tree.map(
            lambda param: jnp.asarray(values, param.dtype),
            nnx.state(self.model, nnx.Param),
        )

    def drop_gradient(self) -> None:
        self.grads = jax.tree.map(lambda _: None, self.grads)

    def unscale_(self) -> None:
        self.grads = self.scaler.unscale_(self.optimizer, self.grads)

    def step(self, **kwargs: Any) -> None:
        self.scaler.step(self.optimizer, self.model, self.grads, **kwargs)

    def scale(self, values: Any, dtype: str) -> str:
        """What `scale` returns for an array, or for a nest of scalars."""
        with jax.enable_x64(dtype == "float64"):
            if isinstance(values, tuple):
                values = jax.tree.map(lambda value: jnp.array(value, dtype), values)
            else:
                values = jnp.array(values, dtype)
            return show(self.scaled(values), lambda x: np.asarray(x, np.float64))

    def scaled(self, values: Any) -> Any:
        return self.scaler.scale(values)

    @staticmethod
    def pair() -> Any:
        """An array of two elements, which cannot be a scale."""
        return jnp.ones(2)


class OptaxDriver(Driver):
    """The same with `jamp.scale_loss`."""

    def __init__(self, **config: Any):
        tx = jamp.dynamic_loss_scale(optax.sgd(1.0), **config)
        self.opt_state = tx.init(jnp.zeros(8))

    def scaled(self, values: Any) -> Any:
        scale = lambda value: jamp.scale_loss(value, self.opt_state)
        return jax.tree.map(scale, values)


def show(result: Any, to_numpy: Callable[[Any], np.ndarray]) -> str:
    """An array, or a nest of them, in words: dtype and values."""
    if isinstance(result, tuple | list):
        return (
            f"{type(result).__name__}({', '.join(show(r, to_numpy) for r in result)})"
        )
    return f"{str(result.dtype).removeprefix('torch.')} {to_numpy(result).tolist()}"


def _iterate(driver: Driver, overflow: bool) -> None:
    values = np.ones(8, np.float32)
    values[3] = np.inf if overflow else 1.0
    driver.set_gradient(values)
    driver.step()
    driver.scaler.update()


def _exception(ask: Callable[[], Any]) -> Exception | None:
    try:
        ask()
    except Exception as error:
        return error
    return None


MISUSES: dict[str, Callable[[Any], Any]] = {
    "unscale_ twice": lambda d: (d.unscale_(), d.unscale_()),
    "unscale_ after step": lambda d: (d.step(), d.unscale_()),
    "step twice": lambda d: (d.step(), d.step()),
    "step twice after unscale_": lambda d: (d.unscale_(), d.step(), d.step()),
    "update before step": lambda d: d.scaler.update(),
    "update twice": lambda d: (d.step(), d.scaler.update(), d.scaler.update()),
    "step without a gradient": lambda d: (d.drop_gradient(), d.step()),
    "a closure": lambda d: d.step(closure=lambda: 0.0),
    "loading an empty state": lambda d: d.scaler.load_state_dict({}),
}
ADVISED = "update before step", "update twice"
FLOAT16: dict[str, Callable[[Any], Any]] = {
    "unscale_ of float16 gradients": lambda d: d.unscale_(),
    "step with float16 gradients": lambda d: d.step(),
}


def messages(make: Callable[..., Any]) -> Answers:
    """The error of each misuse: its type and its text."""
    answers = {}
    for name, misuse in (MISUSES | FLOAT16).items():
        driver = make("float16") if name in FLOAT16 else make()
        error = _exception(lambda driver=driver, misuse=misuse: misuse(driver))
        # torch raises AssertionError for what it checks with `if`.
        kind = type(error).__name__.replace("Assertion", "Runtime")
        text = str(error)
        if name in FLOAT16:  # jamp's text also names the leaf
            text = text.partition(". ")[0].removesuffix(".")
        if name in ADVISED:  # after torch's sentence jamp says what to call
            text = text.partition(".")[0] + "."
        answers |= {f"{name}, type": kind, f"{name}, text": text}
    return answers


REFUSALS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name}={value}": lambda make, name=name, value=value: make(**{name: value})
        for name, value in (
            ("growth_factor", 1.0),
            ("growth_factor", 0.5),
            ("growth_factor", 1.0000001),
            ("backoff_factor", 1.0),
            ("backoff_factor", 1.5),
            ("backoff_factor", 0.999),
        )
    },
    "scale(None)": lambda make: make().scaler.scale(None),
    "update(two elements)": lambda make: make().scaler.update(make.pair()),
    "pickle after update": lambda make: _copied(make, pickle.dumps, True),
    "pickle before update": lambda make: _copied(make, pickle.dumps, False),
    "deepcopy after update": lambda make: _copied(make, copy.deepcopy, True),
    "deepcopy before update": lambda make: _copied(make, copy.deepcopy, False),
}


def _copied(make: Callable[..., Any], function: Any, updated: bool) -> None:
    driver = make()
    driver.step()
    if updated:
        driver.scaler.update()
    function(driver.scaler)


def refusals(make: Callable[..., Any]) -> Answers:
    """Whether a call raises; each library has its own texts."""
    return {
        name: "accepted" if _exception(lambda ask=ask: ask(make)) is None else "refused"
        for name, ask in REFUSALS.items()
    }


def _getters(scaler: Any) -> Answers:
    names = ("get_scale", "get_growth_factor", "get_backoff_factor")
    names += ("get_growth_interval", "is_enabled", "state_dict")
    return {name: repr(getattr(scaler, name)()) for name in names}


def states(make: Callable[..., Any]) -> Answers:
    """What getters and `state_dict` return, before and after saving and loading."""
    saver, loader, disabled = make(**CONFIG), make(), make(enabled=False)
    answers = {f"new, {k}": answer for k, answer in _getters(saver.scaler).items()}
    for overflow in (True, False, False):
        _iterate(saver, overflow)
    state = saver.scaler.state_dict()
    loader.scaler.load_state_dict(json.loads(json.dumps(state)))
    stages = {
        "used": saver.scaler,
        "loaded": loader.scaler,
        "pickled": pickle.loads(pickle.dumps(saver.scaler)),
        "deepcopied": copy.deepcopy(saver.scaler),
    }
    for stage, scaler in stages.items():
        answers |= {f"{stage}, {k}": answer for k, answer in _getters(scaler).items()}
    answers["types"] = repr({name: type(value) for name, value in state.items()})
    disabled.scaler.load_state_dict(state)  # does nothing
    for name in ("get_scale", "is_enabled", "state_dict"):
        answers[f"disabled, {name}"] = repr(getattr(disabled.scaler, name)())
    return answers


def scaled(make: Callable[..., Any]) -> Answers:
    """dtype and value of what `scale` returns: scalars, arrays and nests."""
    floats = (0.0, 1.0, -1.5, 0.1, 3.0, 1e4, np.inf, -np.inf, np.nan)
    values = {
        **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), floats),
        "int32": (0, 1, 3, 2**24 + 1),
        "bool": (0, 1),
    }
    answers = {}
    for scale, dtype in itertools.product((2.0**16, 1000.1, 2.0**-20, 3e38), values):
        driver = make(init_scale=scale)
        one, two = values[dtype][:2]
        inputs = [*values[dtype], list(values[dtype]), [list(values[dtype])]]
        inputs += [(one, (two, one), (two, (one,)))]
        for value in inputs:
            question = f"scale {scale!r}, {dtype}, {value!r}"
            answers[question] = driver.scale(value, dtype)
    return answers


class Probe(NamedTuple):
    """A set of questions.

    Attributes:
      name: unique.
      tests: torch's own tests of it, without the prefix `test_`.
      ask: takes a class of drivers.
      sides: which parts of jamp answer.
      as_on_cpu: whether jamp answers a question as torch on a CPU does, and not as on
        CUDA.
    """

    name: str
    tests: tuple[str, ...]
    ask: Callable[[Callable[..., Any]], Answers]
    sides: tuple[str, ...] = (SCALER,)
    as_on_cpu: Callable[[str], bool] = lambda question: False


DRIVERS = {SCALER: Driver, SCALE_LOSS: OptaxDriver}
PROBES = (
    Probe("error messages", (), messages),
    Probe("what is refused", ("pickle_gradscaler",), refusals),
    Probe("states", ("grad_scaling_state_dict", "pickle_gradscaler"), states),
    Probe(
        "what scale() returns",
        ("grad_scaling_scale",),
        scaled,
        tuple(DRIVERS),
        lambda question: "float16, [" in question,  # of bfloat16 too
    ),
)
