"""Sharded trainings of one model, and the collectives that XLA compiles for them.

The model is a float16 MLP with residual blocks, two kernels and two biases each. It
trains in each layout of `LAYOUTS`, with `dynamic_loss_scale` or without. The counts are
from one device's HLO, and bytes are those of a collective's result.
"""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp


class Layout(NamedTuple):
    """The axes of a mesh, and how a block's arrays are split over it."""

    shape: tuple[int, ...]  # -1: as many as there are devices left
    axes: tuple[str, ...]
    up: P  # [width, hidden]
    up_bias: P  # [hidden]
    down: P  # [hidden, width]
    down_bias: P  # [width]
    batch: P


LAYOUTS = {
    "data parallel": Layout((-1,), ("data",), P(), P(), P(), P(), P("data")),
    "FSDP": Layout(
        (-1,), ("data",), P("data"), P("data"), P("data"), P("data"), P("data")
    ),
    "tensor parallel": Layout(
        (-1,), ("model",), P(None, "model"), P("model"), P("model"), P(), P()
    ),
    "2-D, FSDP x tensor": Layout(
        (-1, 2),
        ("data", "model"),
        P("data", "model"),
        P("model"),
        P("model", "data"),
        P("data"),
        P("data"),
    ),
}


def make_mesh(layout, axis_type=AxisType.Auto):
    others = math.prod(n for n in layout.shape if n > 0)
    shape = [jax.device_count() // others if n < 0 else n for n in layout.shape]
    return jax.make_mesh(shape, layout.axes, axis_types=(axis_type,) * len(shape))


def init_params(layers, width, seed=0):
    """A list of blocks with float32 arrays."""
    key = jax.random.key(seed)
    hidden = 2 * width

    def block(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (width, hidden)) / width**0.5,
            "up_bias": jnp.zeros(hidden),
            "down": jax.random.normal(down, (hidden, width)) / hidden**0.5,
            "down_bias": jnp.zeros(width),
        }

    return [block(key) for key in jax.random.split(key, layers)]


def place(tree, specs, mesh):
    """The arrays of a tree, each placed by its spec."""
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, P),
    )


def loss_fn(params, x):
    """The mean square of the blocks' result for x: float32 []."""
    with jamp.autocast(dtype=jnp.float16):
        for block in params:
            hidden = jnp.tanh(x @ block["up"] + block["up_bias"])
            x = x + hidden @ block["down"] + block["down_bias"]
        return jnp.mean(x**2)


def explicit_loss_fn(layout, params, x):
    """The same, where types carry shardings: whole over data, split over model."""
    model = "model" if "model" in layout.axes else None
    whole = jax.sharding.reshard
    with jamp.autocast(dtype=jnp.float16):
        for block in params:
            up, down = (
                whole(block["up"], P(None, model)),
                whole(block["down"], P(model)),
            )
            up_bias = whole(block["up_bias"], P(model))
            hidden = jnp.tanh(x @ up + up_bias)
            out = jnp.matmul(hidden, down, out_sharding=layout.batch)
            x = x + out + whole(block["down_bias"], P())
        return jnp.mean(x**2)


def plain_step(tx, loss_fn, params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def scaled_step(tx, loss_fn, params, opt_state, x):
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
    return *jamp.step(tx, grads, opt_state, params), loss


def on_mesh(mesh, tree):
    """Places every array on all devices, copying those that are on one."""
    everywhere = NamedSharding(mesh, P())
    move = lambda x: x if len(x.devices()) > 1 else jax.device_put(x, everywhere)
    return jax.tree.map(move, tree)


class Training(NamedTuple):
    """A jitted step that donates its state, for the current mesh; and its arguments."""

    mesh: jax.sharding.Mesh
    step: Callable[..., Any]
    params: Any
    opt_state: Any
    batch: jax.Array


def training(
    layout,
    mode="jit",
    *,
    tx=None,
    scaled=True,
    layers=4,
    width=64,
    rows=64,
    **gather_dtypes,
):
    """A training of the model in a layout.

    Args:
      layout: a `Layout`.
      mode: "jit", "explicit" (sharding in types), or "shard_map" (over data; XLA
      handles
        a model axis).
      tx: the optimizer; None: Adam.
      scaled: with `dynamic_loss_scale`, or without.
      layers, width, rows: of the model and its batch.
      **gather_dtypes: of `jamp.sharding.gather`, under "shard_map".
    """
    mesh = make_mesh(layout, AxisType.Explicit if mode == "explicit" else AxisType.Auto)
    params = init_params(layers, width)
    specs = [{name: getattr(layout, name) for name in block} for block in params]
    params = place(params, specs, mesh)
    batch = jax.random.normal(jax.random.key(1), (rows, width))
    batch = place(batch, layout.batch, mesh)

    loss = loss_fn
    if mode == "explicit":
        loss = functools.partial(explicit_loss_fn, layout)
    if mode == "shard_map":
        manual = lambda spec: P(*(a if a == "data" else None for a in spec))
        specs = jax.tree.map(manual, specs, is_leaf=lambda node: isinstance(node, P))

        def loss(params, x):
            whole = jamp.sharding.gather(params, "data", specs, **gather_dtypes)
            return loss_fn(whole, x)

    tx = tx or optax.adam(1e-2)
    if scaled:
        axis_name = "data" if mode == "shard_map" else None
        tx = jamp.dynamic_loss_scale(tx, axis_name=axis_name)
    opt_state = on_mesh(mesh, tx.init(params))
    step = functools.partial(scaled_step if scaled else plain_step, tx, loss)
    if mode == "shard_map":
        local_step = step

        def mean_step(*args):
            *new, loss = local_step(*args)
            return *new, jax.lax.pmean(loss, "data")

        held = jax.tree.map(lambda x: manual(x.sharding.spec), (params, opt_state))
        step = jax.shard_map(
            mean_step,
            in_specs=(*held, layout.batch),
            out_specs=(*held, P()),
            axis_names={"data"},
        )
    out = jax.tree.map(lambda x: x.sharding.spec, (params, opt_state))
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*out, None))
    return Training(mesh, step, params, opt_state, batch)


class Collectives(NamedTuple):
    count: int
    bytes: int
    by_dtype: dict[str, int]  # bytes


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# A collective with a start returns its operands as well, before the results.
COLLECTIVE = re.compile(rf"= (?:\(\(.*?\), )?(.*?) (?:{KINDS})(?:-start)?\(")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


def collectives_of(training, devices=None):
    """The collectives of a step, compiled for other devices if any are given."""
    mesh, step, *args = training
    if devices is None:
        devices = mesh.devices.flat
    devices = np.array(devices).reshape(mesh.devices.shape)
    mesh = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    def moved(x):
        sharding = NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        hlo = step.lower(*jax.tree.map(moved, args)).compile().as_text()
    found = COLLECTIVE.findall(hlo)
    by_dtype = collections.Counter()
    for result in found:
        for dtype, shape in ARRAY.findall(result):
            width = 1 if dtype == "pred" else int(re.sub("[a-z]", "", dtype)) // 8
            by_dtype[dtype] += width * math.prod(int(n) for n in shape.split(",") if n)
    return Collectives(len(found), by_dtype.total(), dict(by_dtype))


HALF = {"reduce_dtype": "float16"}
ALL_HALF = {"param_dtype": "float16", "reduce_dtype": "float16"}
ROWS = [
    *((name, "jit", {}) for name in LAYOUTS),
    *((name, "explicit", {}) for name in LAYOUTS),
    ("data parallel", "shard_map", {}),
    ("data parallel", "shard_map", HALF),
    ("FSDP", "shard_map", {}),
    ("FSDP", "shard_map", HALF),
    ("FSDP", "shard_map", ALL_HALF),
    ("2-D, FSDP x tensor", "shard_map", ALL_HALF),
]


def measure(name, mode, gather_dtypes, devices=None, **sizes):
    """A row of the table, as a dict."""
    plain, scaled = (
        collectives_of(
            training(LAYOUTS[name], mode, scaled=scaled, **gather_dtypes, **sizes),
            devices,
        )
        for scaled in (False, True)
    )
    return {
        "layout": name,
        "mode": ", ".join([mode, *(f"{k}={v}" for k, v in gather_dtypes.items())]),
        "plain": plain._asdict(),
        "extra_count": scaled.count - plain.count,
        "extra_bytes": scaled.bytes - plain.bytes,
    }
