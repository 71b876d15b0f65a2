"""Calls of a `GradScaler` in any order, against a state machine of torch's."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import jamp

from .oracle import Scaling, bounded, check_bits, next_scaling
from .plans import draw_numbers
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
SETTINGS = "growth_factor", "backoff_factor", "growth_interval"
VECTORS = st.lists(st.integers(-3000, 3000), min_size=3, max_size=3).map(
    lambda numbers: np.float32(numbers) / 1000
)
WITH_INF = st.tuples(VECTORS, st.integers(0, 2), st.sampled_from([np.inf, np.nan]))
GRADS = VECTORS | WITH_INF.map(
    lambda drawn: np.where(np.arange(3) == drawn[1], np.float32(drawn[2]), drawn[0])
)
MODEL = st.integers(0, 2)
SCALE = st.floats(2.0**-10, 2.0**30, width=32)
is_enabled = precondition(lambda self: self.enabled)


class Net(nnx.Module):
    def __init__(self, values: np.ndarray):
        self.w = nnx.Param(jnp.asarray(values))


class Calls(RuleBasedStateMachine):
    """A `GradScaler` with three optimizers, and torch's state machine."""

    @initialize(
        numbers=draw_numbers(),
        enabled=st.sampled_from([True] * 9 + [False]),
        weights=st.tuples(VECTORS, VECTORS, VECTORS),
    )
    def start(self, numbers, enabled, weights):
        self.numbers, self.enabled, self.weights = numbers, enabled, [*weights]
        self.scaler = jamp.GradScaler(enabled=enabled, **numbers)
        scale = np.float32(numbers["init_scale"])  # a disabled one keeps it
        self.scaling = Scaling(scale, 0)
        self.nets = [Net(values) for values in weights]
        self.optimizers = [
            nnx.Optimizer(net, optax.sgd(0.5), wrt=nnx.Param) for net in self.nets
        ]
        self.stages: dict[int, tuple[str, bool]] = {}  # and whether it found an inf
        self.grads: dict[int, tuple[Any, Any]] = {}  # into unscale_, and out of it
        self.saved: list[dict[str, Any]] = []

    @invariant()
    def the_numbers_and_the_weights_are_torchs(self):
        scaler = self.scaler
        trackers = scaler.growth_tracker[...], scaler.hysteresis_tracker[...]
        got = [np.asarray(x) for x in (scaler.loss_scale[...], *trackers)]
        want = [np.asarray(x) for x in self.scaling[:3]]
        want = [leaf.astype(like.dtype) for leaf, like in zip(want, got, strict=True)]
        check_bits("scaler", got, want)
        assert bool(scaler.found_inf[...]) == self.scaling.found_inf
        shown = float(self.scaling.scale) if self.enabled else 1.0
        assert scaler.get_scale() == shown
        skipped = scaler.skipped_steps[...], scaler.recent_skips[...]
        assert tuple(map(int, skipped)) == (self.scaling.skipped, self.scaling.recent)
        for net, weights in zip(self.nets, self.weights, strict=True):
            check_bits("weights", net.w[...], weights)
        for name in SETTINGS:
            assert getattr(scaler, f"get_{name}")() == self.numbers[name]

    def of_net(self, i: int, values: np.ndarray) -> Any:
        leaf = jnp.asarray(values)
        return jax.tree.map(lambda _: leaf, nnx.state(self.nets[i], nnx.Param))

    def unscaled(self, values: np.ndarray) -> np.ndarray:
        if not self.enabled:
            return values
        with np.errstate(invalid="ignore"):
            return values * np.float32(1 / np.float64(self.scaling.scale))

    def stage(self, i: int) -> str:
        return self.stages.get(i, ("ready", False))[0]

    @rule(i=MODEL, values=GRADS)
    def unscale_(self, i, values):
        grads = self.of_net(i, values)
        call = lambda: self.scaler.unscale_(self.optimizers[i], grads)
        if self.enabled and self.stage(i) != "ready":
            return refused(call, *REFUSALS["unscale_", self.stage(i)])
        got = call()
        check_bits("unscaled", got["w"][...], self.unscaled(values))
        if self.enabled:
            self.stages[i] = "unscaled", not np.all(np.isfinite(values))
            self.grads[i] = grads, got

    @rule(i=MODEL, values=GRADS)
    def step(self, i, values):
        stage, grads = self.stage(i), self.of_net(i, values)
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
            values = self.unscaled(values)
        assert skipped.dtype == bool and bool(skipped) == found
        if not found:
            with np.errstate(invalid="ignore"):
                self.weights[i] = self.weights[i] + np.float32(-0.5) * values
        if self.enabled:
            self.stages[i] = "stepped", found

    @is_enabled
    @rule(i=MODEL, values=GRADS)
    def closure(self, i, values):
        call = lambda: self.scaler.step(
            self.optimizers[i], self.nets[i], self.of_net(i, values), closure=min
        )
        refused(call, RuntimeError, "Closure use is not currently supported")

    @rule(i=MODEL)
    def stale(self, i):
        """Steps with the gradients that went into `unscale_`, not with its result."""
        if self.stage(i) == "unscaled":
            grads = self.grads[i][0]
            call = lambda: self.scaler.step(self.optimizers[i], self.nets[i], grads)
            refused(call, ValueError, "got the gradients that went into unscale_()")

    @rule()
    def update(self):
        if self.enabled and not self.stages:
            words = "No inf checks were recorded prior to update."
            return refused(self.scaler.update, RuntimeError, words)
        self.scaler.update()
        if self.enabled:
            found = any(found for _, found in self.stages.values())
            self.scaling = next_scaling(self.scaling, found, self.numbers)
        self.stages.clear()

    @rule(
        value=SCALE,
        kind=st.sampled_from(
            [float, np.float32, jnp.float32, lambda v: jnp.full(1, v)]
        ),
    )
    def new_scale(self, value, kind):
        self.scaler.update(kind(value))
        if self.enabled:
            self.scaling = self.scaling._replace(scale=np.float32(value))
        self.stages.clear()

    @rule(values=VECTORS)
    def scale(self, values):
        got = self.scaler.scale({"a": jnp.asarray(values), "b": [jnp.float16(2)]})
        times = self.scaling.scale if self.enabled else np.float32(1)
        check_bits("scaled", got["a"], values * times)
        wide = np.float32 if self.enabled else np.float16
        check_bits("scaled", got["b"][0], wide(2) * wide(times))

    @rule()
    def state_dict(self):
        if self.stages:
            return refused(self.scaler.state_dict, *HALF_WAY)
        got = self.scaler.state_dict()
        want: dict[str, Any] = {}
        if self.enabled:
            want = {"scale": float(self.scaling.scale)}
            want |= {name: self.numbers[name] for name in SETTINGS}
            want["_growth_tracker"] = self.scaling.tracker
            if self.numbers["hysteresis"] > 1:
                left = self.numbers["hysteresis"] - self.scaling.forgiven
                want["_hysteresis_tracker"] = left
        assert got == want, f"{got} is not {want}"
        self.saved.append(got)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load_state_dict(self, data):
        saved = data.draw(st.sampled_from(self.saved))
        self.scaler.load_state_dict(saved)
        if self.enabled:
            most = self.numbers["hysteresis"]
            self.numbers |= {name: saved[name] for name in SETTINGS}
            loaded = self.scaling._replace(
                scale=np.float32(saved["scale"]),
                tracker=saved["_growth_tracker"],
                forgiven=most - saved.get("_hysteresis_tracker", most),
            )
            self.scaling = bounded(loaded, self.numbers)

    @is_enabled
    @rule()
    def load_too_little(self):
        load = self.scaler.load_state_dict
        refused(lambda: load({}), RuntimeError, "The source state dict is empty")
        words = "state_dict lacks _growth_tracker"
        refused(lambda: load({"scale": 1.0}), ValueError, words)

    @rule(
        copier=st.sampled_from(
            [
                lambda scaler: pickle.loads(pickle.dumps(scaler)),
                copy.deepcopy,
                lambda scaler: nnx.merge(*nnx.split(scaler)),  # as `nnx.jit` does
            ]
        )
    )
    def copy(self, copier):
        """Copies work between iterations."""
        if self.stages:
            return refused(lambda: copier(self.scaler), *HALF_WAY)
        self.scaler = copier(self.scaler)

    @rule(numbers=draw_numbers(), names=st.sets(st.sampled_from(SETTINGS)))
    def set_numbers(self, numbers, names):
        for name in sorted(names):
            getattr(self.scaler, f"set_{name}")(numbers[name])
            self.numbers[name] = numbers[name]

    @rule()
    def set_wrongly(self):
        wrong = {"growth_factor": 1.0, "backoff_factor": 1.5, "growth_interval": 0}
        for name, value in wrong.items():
            setter = getattr(self.scaler, f"set_{name}")
            refused(lambda s=setter, v=value: s(v), ValueError, f"{name} must be")
