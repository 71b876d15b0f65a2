"""torch's rule in NumPy and float64, bits compared, random settings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp

TINY = np.float32(2.0**-126)
STEPS = (1, 2, 3, 7, 15, 30)
FACTORS = {"growth_factor": (1.1, 1.5, 2.0, 3.7), "backoff_factor": (0.3, 0.5, 0.9)}
# With these, a compiled step rounds like its ops one by one in any program. Fusion
# would round a * b + c once, and the simplifier would reorder products.
UNFUSED = {
    "xla_backend_optimization_level": 0,
    "xla_allow_excess_precision": False,
    "xla_disable_hlo_passes": "fusion,algsimp,small-while-loop-hoisting",
}


class Scaling(NamedTuple):
    """The oracle's state: torch's two numbers, hysteresis, and counts of skips."""

    scale: np.float32
    tracker: int
    forgiven: int = 0
    found_inf: bool = False
    skipped: int = 0
    recent: int = 0
    floor_steps: int = 0


def floor_of(numbers: dict[str, Any]) -> np.float32:
    return max(np.float32(numbers["min_scale"]), TINY)


def bounded(was: Scaling, numbers: dict[str, Any]) -> Scaling:
    """A scale that was set from outside, within its bounds."""
    kept = np.clip(was.scale, floor_of(numbers), np.float32(numbers["max_scale"]))
    if kept == was.scale:
        return was
    return was._replace(scale=kept, tracker=0, floor_steps=0)


def next_scaling(was: Scaling, found_inf: bool, numbers: dict[str, Any]) -> Scaling:
    """One step of torch's rule: products in float64, rounded once to float32."""
    before, was = was, was if numbers.get("fixed") else bounded(was, numbers)
    scale, tracker, forgiven = was[:3]
    floor = floor_of(numbers)
    with np.errstate(over="ignore"):
        shrunk = np.float32(np.float64(scale) * np.float64(numbers["backoff_factor"]))
        grown = np.float32(np.float64(scale) * np.float64(numbers["growth_factor"]))
        grown = min(grown, np.float32(numbers["max_scale"]))
    if numbers.get("fixed") or scale != before.scale:
        pass
    elif found_inf:
        tracker, forgives = 0, forgiven < numbers["hysteresis"] - 1
        scale = scale if forgives else max(shrunk, floor)
        forgiven += forgives
    elif tracker + 1 == numbers["growth_interval"]:
        tracker, forgiven = 0, 0
        scale = grown if np.isfinite(grown) else scale
    else:
        tracker += 1
    stuck = scale <= floor and (found_inf or was.floor_steps > 0)
    return Scaling(
        scale,
        tracker,
        forgiven,
        found_inf,
        was.skipped + found_inf,
        (was.recent << 1 | found_inf) % 2**32,
        was.floor_steps + 1 if stuck else 0,
    )


def trajectory(start: Scaling, found: np.ndarray, numbers: dict[str, Any]) -> Scaling:
    """The states after each step, stacked."""
    states = []
    for flag in found:
        start = next_scaling(start, bool(flag), numbers)
        states.append(start)
    return Scaling(*map(np.array, zip(*states, strict=True)))


def scaling_of(state: jamp.DynamicLossScaleState) -> Scaling:
    """The same numbers of jamp's state."""
    return Scaling(
        state.loss_scale,
        state.growth_tracker,
        state.hysteresis_tracker,
        state.found_inf,
        state.skipped_steps,
        state.recent_skips,
        state.floor_steps,
    )


def check_bits(what: str, got: Any, expected: Any) -> None:
    """Raises AssertionError unless two trees agree in every bit; any nan is nan."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    leaves, tree = jax.tree_util.tree_flatten_with_path(expected)
    assert got_tree == tree, f"{what}: {got_tree} is not {tree}"
    for (path, a), (_, b) in zip(got_leaves, leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        name = f"{what} at {jax.tree_util.keystr(path)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (
            f"{name}: {a.dtype}{a.shape} is not {b.dtype}{b.shape}"
        )
        a, b = as_real(a), as_real(b)
        bits = f"u{a.dtype.itemsize}"
        differ = a.view(bits) != b.view(bits)
        if jnp.issubdtype(a.dtype, jnp.floating):
            differ &= ~(np.isnan(a) & np.isnan(b))
        where = np.argwhere(differ)
        assert not len(where), (
            f"{name}: {len(where)} of {a.size} differ, first at {tuple(where[0])}: "
            f"{a[tuple(where[0])]} is not {b[tuple(where[0])]}"
        )


def as_real(array: np.ndarray) -> np.ndarray:
    """A complex array as pairs of real numbers."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not np.iscomplexobj(array):
        return array
    return array[..., None].view(f"f{array.dtype.itemsize // 2}")


def draw_steps(rng: np.random.Generator, steps: int, cases: int) -> np.ndarray:
    """Which steps are bad: a share of each case, from none to all."""
    share = rng.choice([0.0, 0.1, 0.3, 0.7, 1.0], size=(cases, 1))
    return rng.random((cases, steps)) < share
