"""The scale alone, with random numbers, against the oracle."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jamp

from .oracle import (
    FACTORS,
    TINY,
    Scaling,
    check_bits,
    draw_numbers,
    draw_steps,
    scaling_of,
    trajectory,
)


def rule_storm(seed: int, number: int, cases: int) -> None:
    """Random numbers, traced, and scales from 2**-126 to the largest float32."""
    rng = np.random.default_rng([seed, 0, number])
    x64, mapped = bool(number & 1), bool(number & 2)
    with jax.enable_x64(x64):
        wide = np.float64 if x64 else np.float32
        drawn = [draw_numbers(rng) for _ in range(cases)]
        for numbers in drawn:
            for name in FACTORS:
                numbers[name] = wide(numbers[name])
            if rng.random() < 0.5:  # the ends of float32
                scale = 2.0 ** rng.uniform(*rng.choice([[-126, -120], [100, 127.99]]))
                numbers |= {"min_scale": 0.0, "max_scale": math.inf}
                numbers["init_scale"] = float(np.float32(scale))
        stacked = {k: np.array([n[k] for n in drawn]) for k in drawn[0]}
        for name in ("growth_interval", "hysteresis"):
            stacked[name] = stacked[name].astype(np.int32)
        for name in ("init_scale", "min_scale", "max_scale"):
            stacked[name] = stacked[name].astype(np.float32)
        grads = rng.normal(size=(cases, 30)).astype(np.float32)
        grads *= np.float32(2) ** rng.integers(-20, 20, size=grads.shape)
        bad = draw_steps(rng, 30, cases)
        grads[bad] = rng.choice([np.inf, -np.inf, np.nan], size=int(bad.sum()))
        states, updates = rule_run(mapped)(stacked, grads)
    for case, numbers in enumerate(drawn):
        start = Scaling(np.float32(numbers["init_scale"]), 0)
        expected = trajectory(start, bad[case], numbers)
        before = np.append(start.scale, expected.scale[:-1])
        inverse = (1 / before.astype(np.float64)).astype(np.float32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            unscaled = np.where(bad[case], np.float32(-0.0), grads[case] * inverse)
        normal = bad[case] | (np.abs(unscaled) >= TINY)  # the CPU flushes others to 0
        got = jax.tree.map(lambda leaf, case=case: leaf[case], states)
        for name, a, b in zip(Scaling._fields, got, expected, strict=True):
            check_bits(f"case {case}, {name}", a, b.astype(a.dtype))
        got = np.where(normal, updates[case], 0)
        check_bits(f"case {case}, updates", got, np.where(normal, unscaled, 0))


@functools.cache
def rule_run(mapped: bool) -> Callable[..., Any]:
    """Steps of many scales: under vmap, where a cond runs both sides, or in a loop."""

    def one(case):
        numbers, grads = case
        tx = jamp.dynamic_loss_scale(optax.identity(), **numbers)

        def step(state, grad):
            update, state = tx.update(grad, state)
            return state, (scaling_of(state), update)

        return lax.scan(step, tx.init(jnp.float32(0)), grads)[1]

    def run(numbers, grads):
        over = jax.vmap(one) if mapped else functools.partial(lax.map, one)
        return over((numbers, grads))

    jitted = jax.jit(run)
    return lambda *args: jax.tree.map(np.asarray, jitted(*args))
