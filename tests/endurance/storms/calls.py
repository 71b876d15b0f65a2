"""Random calls of a `GradScaler`, against a state machine of torch's."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

from .oracle import Scaling, check_bits, draw_numbers, next_scaling
from .refusals import refused

HALF_WAY = (RuntimeError, "in the middle of an iteration")
AGAIN = "has already been called on this optimizer since the last update()."
REFUSALS = {
    ("unscale_", "unscaled"): (RuntimeError, f"unscale_() {AGAIN}"),
    ("unscale_", "stepped"): (RuntimeError, "unscale_() is being called after step()."),
    ("step", "stepped"): (
        RuntimeError,
        "step() has already been called since the last update().",
    ),
}


CALLS = [
    *("unscale_", "step", "step", "step", "update", "update", "scale", "new_scale"),
    *("state_dict", "load_state_dict", "load_nothing", "load_less", "copy", "split"),
    *("set_numbers", "set_wrongly", "closure", "stale"),
]


class Net(nnx.Module):
    def __init__(self, values: np.ndarray):
        self.w = nnx.Param(jnp.asarray(values))


class Calls:
    """A `GradScaler` with one to three optimizers, and torch's state machine."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.numbers = draw_numbers(rng)
        self.enabled = bool(rng.random() < 0.9)
        self.scaler = jamp.GradScaler(enabled=self.enabled, **self.numbers)
        scale = np.float32(self.numbers["init_scale"])  # a disabled one keeps it
        self.scaling = Scaling(scale, 0)
        self.weights = [
            rng.normal(size=3).astype(np.float32) for _ in range(rng.integers(1, 4))
        ]
        self.nets = [Net(values) for values in self.weights]
        self.optimizers = [
            nnx.Optimizer(net, optax.sgd(0.5), wrt=nnx.Param) for net in self.nets
        ]
        self.stages: dict[int, tuple[str, bool]] = {}  # and whether it found an inf
        self.grads: dict[int, tuple[Any, Any]] = {}  # into unscale_, and out of it
        self.saved: list[dict[str, Any]] = []

    def run(self, calls: int) -> None:
        history = []
        try:
            for _ in range(calls):
                history.append(str(self.rng.choice(CALLS)))
                getattr(self, history[-1])()
                self.check()
        except Exception as error:
            error.add_note(f"after the calls {history}")
            raise

    def check(self) -> None:
        """The numbers, and every weight's bits."""
        scaler = self.scaler
        trackers = scaler.growth_tracker[...], scaler.hysteresis_tracker[...]
        got = Scaling(scaler.loss_scale[...], *trackers, scaler.found_inf[...])
        got = [np.asarray(leaf) for leaf in got[:4]]
        want = [
            leaf.astype(got[i].dtype)
            for i, leaf in enumerate(map(np.array, self.scaling[:4]))
        ]
        check_bits("scaler", got, want)
        shown = float(self.scaling.scale) if self.enabled else 1.0
        assert scaler.get_scale() == shown
        skipped = scaler.skipped_steps[...], scaler.recent_skips[...]
        assert tuple(map(int, skipped)) == (self.scaling.skipped, self.scaling.recent)
        for net, weights in zip(self.nets, self.weights, strict=True):
            check_bits("weights", net.w[...], weights)

    def draw_grads(self, i: int) -> tuple[Any, np.ndarray]:
        values = self.rng.normal(size=3).astype(np.float32)
        if self.rng.random() < 0.3:
            bad = self.rng.choice([np.inf, -np.inf, np.nan])
            values[self.rng.integers(3)] = bad
        leaf = jnp.asarray(values)
        return jax.tree.map(lambda _: leaf, nnx.state(self.nets[i], nnx.Param)), values

    def unscaled(self, values: np.ndarray) -> np.ndarray:
        if not self.enabled:
            return values
        return values * np.float32(1 / np.float64(self.scaling.scale))

    def draw_optimizer(self) -> tuple[int, str]:
        i = int(self.rng.integers(len(self.nets)))
        return i, self.stages.get(i, ("ready", False))[0]

    def unscale_(self) -> None:
        i, stage = self.draw_optimizer()
        grads, values = self.draw_grads(i)
        call = lambda: self.scaler.unscale_(self.optimizers[i], grads)
        if self.enabled and stage != "ready":
            return refused(call, *REFUSALS["unscale_", stage])
        got = call()
        with np.errstate(invalid="ignore"):
            check_bits("unscaled", got["w"][...], self.unscaled(values))
        if self.enabled:
            self.stages[i] = "unscaled", not np.all(np.isfinite(values))
            self.grads[i] = grads, got

    def step(self) -> None:
        i, stage = self.draw_optimizer()
        grads, values = self.draw_grads(i)
        if stage == "unscaled":
            grads = self.grads[i][1]
            values = np.asarray(grads["w"][...])
        call = lambda: self.scaler.step(self.optimizers[i], self.nets[i], grads)
        if stage == "stepped":
            return refused(call, *REFUSALS["step", stage])
        skipped = call()
        found = not np.all(np.isfinite(values)) and self.enabled
        if stage == "unscaled":
            found = self.stages[i][1]
        else:
            with np.errstate(invalid="ignore"):
                values = self.unscaled(values)
        assert skipped.dtype == bool and bool(skipped) == found
        if not found:
            with np.errstate(invalid="ignore"):
                self.weights[i] = self.weights[i] + np.float32(-0.5) * values
        if self.enabled:
            self.stages[i] = "stepped", found

    def closure(self) -> None:
        i, _ = self.draw_optimizer()
        if self.enabled:
            call = lambda: self.scaler.step(
                self.optimizers[i], self.nets[i], self.draw_grads(i)[0], closure=min
            )
            refused(call, RuntimeError, "Closure use is not currently supported")

    def stale(self) -> None:
        """Steps with the gradients that went into `unscale_`, not with its result."""
        i, stage = self.draw_optimizer()
        if stage == "unscaled":
            grads = self.grads[i][0]
            call = lambda: self.scaler.step(self.optimizers[i], self.nets[i], grads)
            refused(call, ValueError, "got the gradients that went into unscale_()")

    def update(self) -> None:
        if self.enabled and not self.stages:
            words = "No inf checks were recorded prior to update."
            return refused(self.scaler.update, RuntimeError, words)
        self.scaler.update()
        if self.enabled:
            found = any(found for _, found in self.stages.values())
            self.scaling = next_scaling(self.scaling, found, self.numbers)
        self.stages.clear()

    def new_scale(self) -> None:
        value = float(np.float32(2.0 ** self.rng.uniform(-10, 30)))
        kinds = [float, np.float32, jnp.float32, lambda v: jnp.full((1,), v)]
        self.scaler.update(kinds[self.rng.integers(len(kinds))](value))
        if self.enabled:
            self.scaling = self.scaling._replace(scale=np.float32(value))
        self.stages.clear()

    def scale(self) -> None:
        values = self.rng.normal(size=3).astype(np.float32)
        got = self.scaler.scale({"a": jnp.asarray(values), "b": [jnp.float16(2)]})
        times = self.scaling.scale if self.enabled else np.float32(1)
        check_bits("scaled", got["a"], values * times)
        wide = np.float32 if self.enabled else np.float16
        check_bits("scaled", got["b"][0], wide(2) * wide(times))

    def state_dict(self) -> None:
        if self.stages:
            return refused(self.scaler.state_dict, *HALF_WAY)
        got = self.scaler.state_dict()
        want: dict[str, Any] = {}
        if self.enabled:
            want = {"scale": float(self.scaling.scale)}
            names = "growth_factor", "backoff_factor", "growth_interval"
            want |= {name: self.numbers[name] for name in names}
            want["_growth_tracker"] = self.scaling.tracker
            if self.numbers["hysteresis"] > 1:
                left = self.numbers["hysteresis"] - self.scaling.forgiven
                want["_hysteresis_tracker"] = left
        assert got == want, f"{got} is not {want}"
        self.saved.append(got)

    def load_state_dict(self) -> None:
        if not self.saved:
            return
        saved = self.saved[self.rng.integers(len(self.saved))]
        self.scaler.load_state_dict(saved)
        if self.enabled:
            most = self.numbers["hysteresis"]
            self.numbers |= {k: saved[k] for k in list(saved)[1:4]}
            self.scaling = self.scaling._replace(
                scale=np.float32(saved["scale"]),
                tracker=saved["_growth_tracker"],
                forgiven=most - saved.get("_hysteresis_tracker", most),
            )

    def load_nothing(self) -> None:
        if self.enabled:
            call = lambda: self.scaler.load_state_dict({})
            refused(call, RuntimeError, "The source state dict is empty")

    def load_less(self) -> None:
        if self.enabled:
            call = lambda: self.scaler.load_state_dict({"scale": 1.0})
            refused(call, ValueError, "state_dict lacks _growth_tracker")

    def copy(self) -> None:
        """Pickle and deepcopy, which work between iterations."""
        make = [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy]
        call = make[self.rng.integers(2)]
        if self.stages:
            return refused(lambda: call(self.scaler), *HALF_WAY)
        self.scaler = call(self.scaler)

    def split(self) -> None:
        """Copies a scaler as `nnx.jit` does on the way in and out."""
        if self.stages:
            return refused(lambda: nnx.split(self.scaler), *HALF_WAY)
        self.scaler = nnx.merge(*nnx.split(self.scaler))

    def set_numbers(self) -> None:
        numbers = draw_numbers(self.rng)
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if self.rng.random() < 0.5:
                getattr(self.scaler, f"set_{name}")(numbers[name])
                self.numbers[name] = numbers[name]
            assert getattr(self.scaler, f"get_{name}")() == self.numbers[name]

    def set_wrongly(self) -> None:
        wrong = {"growth_factor": 1.0, "backoff_factor": 1.5, "growth_interval": 0}
        for name, value in wrong.items():
            setter = getattr(self.scaler, f"set_{name}")
            refused(lambda s=setter, v=value: s(v), ValueError, f"{name} must be")


def call_storm(seed: int, number: int, cases: int) -> None:
    """Random calls, in any order, of scalers with one to three optimizers."""
    for case in range(cases):
        rng = np.random.default_rng([seed, 3, number, case])
        try:
            Calls(rng).run(int(rng.integers(1, 30)))
        except Exception as error:
            error.add_note(f"case {case}")
            raise
