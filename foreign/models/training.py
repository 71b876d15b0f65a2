"""Trains a model in float32, in an autocast region, and with a policy."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

from .kinds import Equinox, Linen, Nnx

WAYS = ("float32", "autocast", "policy")
POLICY = "mixed_float16"
STEPS, ATTEMPTS = 20, 24
LEARNING_RATE = 1e-3


class Step(NamedTuple):
    """A step's loss and unscaled gradients, and whether it was skipped."""

    loss: Any
    gradients: Any
    skipped: Any


class Run(NamedTuple):
    """A training run.

    Attributes:
      losses: the loss of each step that was not skipped.
      gradients: those of the first such step, by path.
      skipped: how many steps were skipped.
      share: the share of the work in matrix products that is in half precision.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    skipped: int
    share: float | None


class Failed(NamedTuple):
    error: str
    notes: list[str]
    trace: str


def region(way: str) -> AbstractContextManager[Any]:
    return jamp.autocast(jnp.float16) if way == "autocast" else nullcontext()


def train(model: Linen | Nnx | Equinox, way: str) -> Run | Failed:
    """Trains the model, or says what stopped it."""
    try:
        start = {Linen: of_linen, Nnx: of_nnx, Equinox: of_equinox}[type(model)]
        return repeat(*start(model, way))
    except Exception as error:
        first = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        notes = getattr(error, "__notes__", [])
        notes = [note for note in notes if "internal frames" not in note]
        return Failed(first, notes, traceback.format_exc())


def repeat(step: Callable[[Any], Step], share: float | None) -> Run:
    """Repeats each skipped step with the same key, so that all ways see the same."""
    losses, gradients, skipped = [], {}, 0
    for key in jax.random.split(jax.random.key(7), STEPS):
        for _ in range(ATTEMPTS):
            result = step(key)
            if not result.skipped:
                break
            skipped += 1
        else:
            raise ArithmeticError(f"{ATTEMPTS} steps on one batch were skipped")
        losses.append(float(result.loss))
        gradients = gradients or by_path(result.gradients)
    return Run(losses, gradients, skipped, share)


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree as float32, by their paths."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def cosines(
    plain: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> tuple[float, list[Any]]:
    """The cosine of all gradients together, and the parameter with the smallest."""
    if plain.keys() != other.keys():
        raise ValueError(f"other parameters: {sorted(plain.keys() ^ other.keys())}")

    def cosine(a, b):
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not (a @ a and b @ b):  # zeros agree with zeros alone
            return float(a @ a == b @ b)
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    def joined(tree):
        return np.concatenate([tree[k].ravel() for k in plain])

    by_leaf = {k: cosine(plain[k].ravel(), other[k].ravel()) for k in plain}
    worst = min(by_leaf, key=lambda k: by_leaf[k])
    return cosine(joined(plain), joined(other)), [worst, by_leaf[worst]]


def share_of(loss: Callable[..., Any], *args: Any) -> float | None:
    """The share of the work in matrix products that is done in half precision."""
    flops = jamp.debug.explain(loss)(*args).matmul_flops
    halves = sum(flops.get(name, 0) for name in ("float16", "bfloat16"))
    return halves / total if (total := sum(flops.values())) else None


def of_linen(model: Linen, way: str):
    module = model.module
    if way == "policy":
        module = jamp.linen.with_policy(module, POLICY)
    params = model.variables["params"]
    rest = {k: v for k, v in model.variables.items() if k != "params"}

    def loss_fn(params, state, key):
        with region(way):
            return model.loss(module, {"params": params, **state}, key)

    return functional(loss_fn, params, rest, way)


def of_equinox(model: Equinox, way: str):
    """A step of an Equinox model: of its arrays of real numbers."""
    params, static = eqx.partition(model.module, eqx.is_inexact_array)
    wrap = jamp.get_policy(POLICY).wrap if way == "policy" else lambda module: module

    def loss_fn(params, state, key):
        with region(way):
            return model.loss(wrap(eqx.combine(params, static)), key), state

    return functional(loss_fn, params, {}, way)


def functional(loss_fn, params: Any, state: Any, way: str):
    """A step with `jamp.dynamic_loss_scale`, and the share of half precision."""
    inner = optax.adam(LEARNING_RATE)
    tx = jamp.dynamic_loss_scale(inner, enabled=way != "float32")

    @jax.jit
    def one(params, state, opt_state, key):
        grad_fn = jamp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, state), grads = grad_fn(params, state, key)
        skips = jamp.metrics(opt_state)["skipped_steps"] if way != "float32" else 0
        unscaled = jamp.unscale(grads, opt_state) if way != "float32" else grads
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        after = jamp.metrics(opt_state)["skipped_steps"] if way != "float32" else 0
        return (params, state, opt_state), Step(loss, unscaled, after > skips)

    now = (params, state, tx.init(params))

    def step(key):
        nonlocal now
        after, result = one(*now, key)
        check_dtypes(now, after)
        if result.skipped:  # drop what the model wrote on a skipped step
            after = (after[0], now[1], after[2])
        now = after
        return result

    share = share_of(lambda p: loss_fn(p, state, jax.random.key(0))[0], params)
    return step, share


def check_dtypes(before: Any, after: Any) -> None:
    old, new = (dict(dtypes(tree)) for tree in (before, after))
    changed = [f"{k} from {old.get(k)} to {d}" for k, d in new.items() if old[k] != d]
    if changed:
        raise TypeError(f"a step has changed the dtype of {', '.join(changed[:3])}")


def dtypes(tree: Any) -> Iterator[tuple[str, str]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), str(leaf.dtype)


def of_nnx(model: Nnx, way: str):
    """A step of an NNX model, with `jamp.GradScaler`."""
    module = nnx.clone(model.module)
    if way == "policy":
        module = jamp.nnx.with_policy(module, POLICY)
    optimizer = nnx.Optimizer(module, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    scaler = jamp.GradScaler(enabled=way != "float32")

    def loss_fn(module, key):
        with region(way):
            return model.loss(module, key)

    @nnx.jit
    def one(module, optimizer, scaler, key):
        def scaled(module):
            loss = loss_fn(module, key)
            return scaler.scale(loss), loss

        (_, loss), grads = nnx.value_and_grad(scaled, has_aux=True)(module)
        grads = scaler.unscale_(optimizer, grads)
        skipped = scaler.step(optimizer, module, grads)
        scaler.update()
        return Step(loss, nnx.to_pure_dict(grads), skipped)

    def step(key):
        before = nnx.to_pure_dict(nnx.state(module))
        result = one(module, optimizer, scaler, key)
        check_dtypes(before, nnx.to_pure_dict(nnx.state(module)))
        return result

    return step, share_of(loss_fn, module, jax.random.key(0))
