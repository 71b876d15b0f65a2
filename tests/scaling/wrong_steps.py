"""Training steps that use their loss scale wrongly, and right ones beside them.

Each is a change of one right step, in three styles (a pair of parameters and a state,
a `TrainState`, NNX objects with a `GradScaler`), alone or in a loop or on several
devices.

A penalty or noise that is added to scaled gradients is not among them: it changes a
step by its size over the scale, which is less than what rounding may do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx
from flax.training.train_state import TrainState

import jamp

PyTree = Any
DEVICES = 4
DEPENDS = "What the step computes depends on the loss scale"
DIVIDED = f"divided by the scale once too often.*{DEPENDS}"
MULTIPLIED = f"multiplied by the scale once too often.*{DEPENDS}"
HIDDEN = "hides an inf or nan from the loss scale"
NOT_SCALED = "is not scaled"


class Change(NamedTuple):
    """What is done otherwise than in the right step."""

    # of the loss and the loss scale, of what is differentiated
    loss: Callable[[jax.Array, jax.Array], jax.Array] = lambda loss, scale: scale * loss
    # of scaled gradients, their parameters and the loss scale
    grads: Callable[[PyTree, PyTree, jax.Array], PyTree] = lambda g, p, s: g
    inner: tuple[optax.GradientTransformation, ...] = ()  # in front of the optimizer
    message: str = ""  # of the error; none for a right step


def by_leaf(function):
    return lambda grads, params, scale: jax.tree.map(function, grads)


def clipped(grads, params, scale, most=1.0):
    norm = optax.tree.norm(grads)
    return jax.tree.map(
        lambda g: g * jnp.minimum(1, most / norm).astype(g.dtype), grads
    )


def adaptively_clipped(grads, params, scale):
    clip = optax.adaptive_grad_clip(0.01)
    return clip.update(grads, clip.init(params), params)[0]


def unscaled(grads, params, scale):
    return jax.tree.map(lambda g: g / scale, grads)


def of_whole_norm(grads, params, scale):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g / (norm + 1e-6), grads)


stop = jax.lax.stop_gradient
WRONG = {
    "clipped by its norm": Change(grads=clipped, message=DIVIDED),
    "scaled by hand": Change(
        grads=lambda g, p, s: jax.tree.map(lambda g: g * s, g), message=MULTIPLIED
    ),
    "nan_to_num": Change(grads=by_leaf(jnp.nan_to_num), message=HIDDEN),
    "a loss that is not scaled": Change(
        loss=lambda loss, scale: loss, message=NOT_SCALED
    ),
    "squared": Change(grads=by_leaf(lambda g: g * jnp.abs(g)), message=DEPENDS),
    "dropped if its norm is large": Change(
        grads=lambda g, p, s: jax.tree.map(
            lambda a: jnp.where(optax.tree.norm(g) < 10, a, 0), g
        ),
        message=f"{DIVIDED}|{HIDDEN}|depends on the size of scaled gradients",
    ),
    "clipped at 100": Change(
        grads=functools.partial(clipped, most=100.0), message=DIVIDED
    ),
    "clipped by value": Change(
        grads=by_leaf(lambda g: jnp.clip(g, -1, 1)), message=DIVIDED
    ),
    "clipped by its parameters": Change(grads=adaptively_clipped, message=DIVIDED),
    "normalized": Change(grads=of_whole_norm, message=DIVIDED),
    "normalized by leaf": Change(
        grads=by_leaf(lambda g: g / (jnp.linalg.norm(g) + 1e-6)), message=DIVIDED
    ),
    "its sign": Change(grads=by_leaf(jnp.sign), message=DIVIDED),
    "tanh": Change(grads=by_leaf(jnp.tanh), message=DIVIDED),
    "its root": Change(
        grads=by_leaf(lambda g: jnp.sign(g) * jnp.sqrt(jnp.abs(g))), message=DEPENDS
    ),
    "soft threshold": Change(
        grads=by_leaf(lambda g: g / (1 + jnp.abs(g))), message=DIVIDED
    ),
    "unscaled by hand": Change(grads=unscaled, message=DIVIDED),
    "a loss scaled twice": Change(
        loss=lambda loss, scale: scale * (scale * loss), message=MULTIPLIED
    ),
    "a loss divided by the scale": Change(
        loss=lambda loss, scale: scale * (loss / scale), message=DIVIDED
    ),
    "the log of a scaled loss": Change(
        loss=lambda loss, scale: jnp.log(scale * loss), message=DIVIDED
    ),
    "the root of a scaled loss": Change(
        loss=lambda loss, scale: jnp.sqrt(scale * loss), message=DEPENDS
    ),
    "an old scale": Change(loss=lambda loss, scale: 2.0**16 * loss, message=NOT_SCALED),
    "where isfinite": Change(
        grads=by_leaf(lambda g: jnp.where(jnp.isfinite(g), g, 0)), message=HIDDEN
    ),
    "nan_to_num and a clip": Change(
        grads=lambda g, p, s: clipped(jax.tree.map(jnp.nan_to_num, g), p, s),
        message=f"{DIVIDED}|{HIDDEN}",
    ),
    "nan is zero, inf is large": Change(
        grads=by_leaf(lambda g: jnp.nan_to_num(g, posinf=1e4, neginf=-1e4)),
        message=HIDDEN,
    ),
    "dropped if its norm is not finite": Change(
        grads=lambda g, p, s: jax.tree.map(
            lambda a: jnp.where(jnp.isfinite(optax.tree.norm(g)), a, 0), g
        ),
        message=HIDDEN,
    ),
    "clipped to what is finite": Change(
        grads=by_leaf(lambda g: jnp.where(jnp.isnan(g), 0, jnp.clip(g, -1e30, 1e30))),
        message=HIDDEN,
    ),
}

RIGHT = {
    "as it is": Change(),
    "a penalty": Change(loss=lambda loss, scale: scale * (loss + 0.1 * loss**2)),
    "the log of the loss": Change(loss=lambda loss, scale: scale * jnp.log(loss)),
    "clipped inside": Change(inner=(optax.clip_by_global_norm(0.01),)),
    "clipped by value inside": Change(inner=(optax.clip(0.001),)),
    "clipped by its parameters inside": Change(inner=(optax.adaptive_grad_clip(0.01),)),
    "normalized inside": Change(inner=(optax.normalize_by_update_norm(),)),
    "noise inside": Change(inner=(optax.add_noise(0.01, 0.55, 0),)),
    "decayed inside": Change(inner=(optax.add_decayed_weights(0.1),)),
    "zero_nans inside": Change(inner=(optax.zero_nans(),)),
    "twice": Change(grads=by_leaf(lambda g: 2 * g)),
    "in half precision": Change(
        grads=by_leaf(lambda g: g.astype(jnp.bfloat16).astype(g.dtype))
    ),
}


def make_params():
    rng = np.random.default_rng(0)
    w1, w2 = rng.standard_normal((8, 32)) / 3, rng.standard_normal((32, 3)) / 6
    params = {"w1": w1, "b": np.zeros(32), "w2": w2}
    return {name: jnp.asarray(p, jnp.float32) for name, p in params.items()}


def make_batch():
    x = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)
    return x, np.sin(x @ np.ones((8, 3), np.float32))


def loss_of(params, x, y):
    with jamp.autocast(dtype=jnp.float16):
        hidden = jax.nn.gelu(x @ params["w1"] + params["b"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2).astype(jnp.float32)


def gradients(change, params, scale, x, y):
    scaled = lambda params: change.loss(loss_of(params, x, y), stop(scale))
    return change.grads(jax.grad(scaled)(params), params, scale)


def average(grads, axis):
    return grads if axis is None else jax.lax.pmean(grads, axis)


def optimizer_of(change):
    return optax.chain(*change.inner, optax.adamw(1e-3))


class Pair:
    """`step((params, opt_state), x, y)`."""

    def __init__(self, change):
        self.change, self.tx = change, jamp.dynamic_loss_scale(optimizer_of(change))
        self.state = make_params(), self.tx.init(make_params())

    def step(self, state, x, y, axis=None):
        params, opt_state = state
        scale = jamp.loss_scale(opt_state)
        grads = average(gradients(self.change, params, scale, x, y), axis)
        return jamp.step(self.tx, grads, opt_state, params), jnp.float32(0)


class State(Pair):
    """`step(train_state, x, y)`, which calls `tx.update`."""

    def __init__(self, change):
        super().__init__(change)
        self.state = TrainState.create(apply_fn=None, params=self.state[0], tx=self.tx)

    def step(self, state, x, y, axis=None):
        scale = jamp.loss_scale(state.opt_state)
        grads = average(gradients(self.change, state.params, scale, x, y), axis)
        return state.apply_gradients(grads=grads), jnp.float32(0)


class Model(nnx.Module):
    def __init__(self):
        for name, value in make_params().items():
            setattr(self, name, nnx.Param(value))


class Objects:
    """`step(model, optimizer, scaler, x, y)`."""

    def __init__(self, change):
        self.change, model = change, Model()
        optimizer = nnx.Optimizer(model, optimizer_of(change), wrt=nnx.Param)
        self.state = model, optimizer, jamp.GradScaler()

    def step(self, model, optimizer, scaler, x, y, axis=None):
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        grads = gradients(self.change, params, scaler.get_scale(), x, y)
        grads = nnx.State(jax.tree.map(nnx.Param, average(grads, axis)))
        scaler.step(optimizer, model, grads)
        scaler.update()


STYLES = {"pair": Pair, "TrainState": State, "NNX": Objects}
WAYS = ("jit", "scan", "pmap", "shard_map")


def call(style, change, way):
    """A step and its arguments, for `find_loss_scale`.

    Returns:
      None if the style cannot be run in this way.
    """
    made, (x, y) = STYLES[style](change), make_batch()
    if style == "NNX":
        return call_nnx(made, way, x, y)
    state, step = made.state, made.step
    if way == "jit":
        return jax.jit(step), state, x, y
    if way == "scan":
        looped = lambda state, xs, ys: jax.lax.scan(
            lambda state, batch: step(state, *batch), state, (xs, ys)
        )
        return looped, state, np.stack([x] * 3), np.stack([y] * 3)
    mapped = functools.partial(step, axis="data")
    if way == "pmap":
        state = jax_utils.replicate(state, jax.devices()[:DEVICES])
        pmapped = jax.pmap(mapped, "data", devices=jax.devices()[:DEVICES])
        return pmapped, state, split(x), split(y)
    spec = jax.sharding.PartitionSpec
    return (
        jax.shard_map(
            mapped,
            mesh=mesh(),
            in_specs=(spec(), spec("data"), spec("data")),
            out_specs=spec(),
            check_vma=False,
        ),
        state,
        x,
        y,
    )


def call_nnx(made, way, x, y):
    if way == "jit":
        return nnx.jit(made.step), *made.state, x, y
    if way == "scan":

        def looped(model, optimizer, scaler, xs, ys):
            graph, state = nnx.split((model, optimizer, scaler))

            def body(state, batch):
                objects = nnx.merge(graph, state)
                made.step(*objects, *batch)
                return nnx.state(objects), None

            state, _ = jax.lax.scan(body, state, (xs, ys))
            nnx.update((model, optimizer, scaler), state)

        return looped, *made.state, np.stack([x] * 3), np.stack([y] * 3)
    if way == "shard_map":
        return None
    graph, _ = nnx.split(made.state)

    def on_each(state, x, y):
        objects = nnx.merge(graph, state)
        made.step(*objects, x, y, axis="data")
        return nnx.state(objects)

    def mapped(model, optimizer, scaler, x, y):
        objects = model, optimizer, scaler
        spread = lambda a: jnp.broadcast_to(a, (DEVICES, *jnp.shape(a)))
        state = jax.tree.map(spread, nnx.state(objects))
        new = jax.pmap(on_each, "data", devices=jax.devices()[:DEVICES])(state, x, y)
        nnx.update(objects, jax.tree.map(lambda a: a[0], new))

    return mapped, *made.state, split(x), split(y)


def split(array):
    return array.reshape(DEVICES, -1, *array.shape[1:])


def mesh():
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((DEVICES,), ("data",), axis_types=kinds)
