"""Training steps that use their loss scale wrongly, and right ones beside them.

Each is a change of one right step, in three styles (a pair of parameters and a state,
a `TrainState`, NNX objects with a `GradScaler`), alone or in a loop, in a branch or on
several devices.
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
from jax.experimental import io_callback

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
    # of the parameters, the batch and the scaled loss, added to it
    more: Callable[[PyTree, jax.Array, jax.Array], jax.Array] | None = None
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


def summed(function):
    """What is added to scaled gradients without being scaled: of each parameter."""
    return lambda grads, params, scale: jax.tree.map(
        lambda g, p: g + function(p), grads, params
    )


def unscaled(grads, params, scale):
    return jax.tree.map(lambda g: g / scale, grads)


def of_whole_norm(grads, params, scale):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g / (norm + 1e-6), grads)


stop = jax.lax.stop_gradient
KEY = np.array([0, 0], np.uint32)  # without a program to run on import
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
    # No bound on scaled gradients tells these from right ones: seen in float32 alone.
    "a second loss": Change(more=lambda p, x, y: loss_of(p, 2 * x, y), message=DEPENDS),
    "a far larger second loss": Change(
        more=lambda p, x, y: 1e4 * loss_of(p, 2 * x, y), message=DEPENDS
    ),
    "a penalty that is not scaled": Change(
        more=lambda p, x, y: sum(jnp.sum(a**2) for a in jax.tree.leaves(p)),
        message=DEPENDS,
    ),
    "decay": Change(grads=summed(lambda p: 0.1 * p), message=DEPENDS),
    "a small decay": Change(grads=summed(lambda p: 1e-5 * p), message=DEPENDS),
    "noise": Change(
        grads=by_leaf(lambda g: g + 0.01 * jax.random.normal(KEY, g.shape)),
        message=DIVIDED,  # Adam moves each element by its rate, so that none moves less
    ),
    "clipped at 65504": Change(
        grads=functools.partial(clipped, most=65504.0), message=DEPENDS
    ),
    "clipped at 1e7": Change(
        grads=functools.partial(clipped, most=1e7), message=DEPENDS
    ),
}


def by_scan(loss, scale):
    body = lambda total, part: (total + scale * part, None)
    return jax.lax.scan(body, jnp.float32(0), jnp.stack([loss / 2] * 2))[0]


def by_ref(loss, scale):
    ref = jax.new_ref(jnp.float32(1))
    ref[...] = scale
    return loss * stop(ref[...])


def by_callback(loss, scale):
    kept = []
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    io_callback(kept.append, None, scale, ordered=True)
    return loss * stop(io_callback(kept.pop, shape, ordered=True))


def by_custom_vjp(loss, scale):
    scaled = jax.custom_vjp(lambda loss, scale: loss)
    forward = lambda loss, scale: (loss, scale)
    scaled.defvjp(forward, lambda scale, g: (scale * g, jnp.zeros_like(g)))
    return scaled(loss, scale)


def on_a_device(loss, scale):
    product = lambda loss, scale: scale * loss
    spec = jax.sharding.PartitionSpec
    places = {"mesh": mesh(1), "in_specs": (spec(), spec()), "out_specs": spec()}
    return jax.shard_map(product, **places)(loss, scale)


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
    "scaled in a loop": Change(loss=by_scan),
    "scaled in a branch": Change(
        loss=lambda loss, scale: jax.lax.cond(
            loss > -1, lambda: scale * loss, lambda: loss
        )
    ),
    "scaled in a derivative of its own": Change(loss=by_custom_vjp),
    "scaled by a ref": Change(loss=by_ref),
    "scaled by a callback": Change(loss=by_callback),
    "scaled on a device": Change(loss=on_a_device),
}
# What JAX takes in no loop, or on no other devices.
ALONE = "scaled by a ref", "scaled by a callback", "scaled on a device"


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
    def scaled(params):
        loss = change.loss(loss_of(params, x, y), stop(scale))
        return loss if change.more is None else loss + change.more(params, x, y)

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


def behind_a_cond(step):
    keep = lambda state, *batch: (state, jnp.float32(0))

    def branched(state, *batch):
        is_float = lambda a: jnp.issubdtype(getattr(a, "dtype", int), jnp.floating)
        first = next(filter(is_float, jax.tree.leaves(state)))
        return jax.lax.cond(first.sum() < 1e6, step, keep, state, *batch)

    return branched


def selected(step):
    def chosen(state, *batch):
        new, loss = step(state, *batch)
        choose = lambda old, new: jnp.where(loss < 1e6, new, old)
        return jax.tree.map(choose, state, new), loss

    return chosen


def in_fori_loop(step):
    def looped(state, *batch):
        body = lambda _, state: step(state, *batch)[0]
        return jax.lax.fori_loop(0, 1, body, state), jnp.float32(0)

    return looped


def in_while_loop(step):
    def looped(state, *batch):
        body = lambda pair: (step(pair[0], *batch)[0], pair[1] + 1)
        return jax.lax.while_loop(lambda pair: pair[1] < 1, body, (state, 0))[0], None

    return looped


def in_scan(step, length=1):
    def scanned(state, *batch):
        body = lambda state, _: step(state, *batch)
        return jax.lax.scan(body, state, None, length=length)

    return scanned


# From a step of a state and a batch to another one.
WRAPS = {
    "cond": behind_a_cond,
    "jit": jax.jit,
    "scan of 3": functools.partial(in_scan, length=3),
    "alone": lambda step: step,
    "checkpoint": jax.checkpoint,
    "select": selected,
    "fori_loop": in_fori_loop,
    "while_loop": in_while_loop,
    "in a scan": in_scan,
    "jit, cond, loop": lambda step: jax.jit(behind_a_cond(in_fori_loop(step))),
}

STYLES = {"pair": Pair, "TrainState": State, "NNX": Objects}
ON_BATCHES = ("jit", "scan", "pmap", "shard_map")
# NNX has no step under shard_map; a state of Flax or of optax is the same in a wrap.
CASES = [
    (style, way)
    for way in ON_BATCHES
    for style in STYLES
    if (style, way) != ("NNX", "shard_map")
]
CASES += [("pair", way) for way in WRAPS if way != "jit"]


def call(style, change, way):
    """A step and its arguments, for `find_loss_scale`."""
    made, (x, y) = STYLES[style](change), make_batch()
    if style == "NNX":
        return call_nnx(made, way, x, y)
    state, step = made.state, made.step
    if way in WRAPS:
        return WRAPS[way](step), state, x, y
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


def mesh(devices=DEVICES):
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), axis_types=kinds)
