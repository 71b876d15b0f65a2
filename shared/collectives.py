"""Sharded trainings of one model, and the collectives that XLA compiles for them.

The model is a float16 MLP with residual blocks, two kernels and two biases each. It
trains in each layout of `LAYOUTS`, with loss scaling or without. The counts are from
one device's HLO, and bytes are those of a collective's result. The devices may be
absent: then arrays are shapes.
"""

import collections
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
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


ARRAYS = ("up", "up_bias", "down", "down_bias")  # of a block


def make_mesh(layout, axis_type=AxisType.Auto, devices=None):
    devices = jax.devices() if devices is None else devices
    others = math.prod(n for n in layout.shape if n > 0)
    shape = [len(devices) // others if n < 0 else n for n in layout.shape]
    types = (axis_type,) * len(shape)
    if devices[0] in jax.devices():
        return jax.make_mesh(shape, layout.axes, axis_types=types)
    devices = np.array(devices).reshape(shape)
    return jax.sharding.Mesh(devices, layout.axes, axis_types=types)


def init_params(layers, width, hidden=None, seed=0):
    """A list of blocks with float32 arrays.

    Args:
      hidden: twice the width if it is None.
    """
    key = jax.random.key(seed)
    hidden = hidden or 2 * width

    def block(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (width, hidden)) / width**0.5,
            "up_bias": jnp.zeros(hidden),
            "down": jax.random.normal(down, (hidden, width)) / hidden**0.5,
            "down_bias": jnp.zeros(width),
        }

    return [block(key) for key in jax.random.split(key, layers)]


def place(tree, layout, mesh):
    """The arrays of a tree on a mesh, those of a block and their moments as the layout
    says. On absent devices an array is a shape."""

    def put(path, x):
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        spec = next((getattr(layout, n) for n in names if n in (*ARRAYS, "batch")), P())
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map_with_path(put, tree)


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


def updated_step(tx, loss_fn, params, opt_state, x):
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class Blocks(nnx.Module):
    """Parameters as those of a model in Flax NNX."""

    def __init__(self, params):
        self.params = nnx.data(jax.tree.map(nnx.Param, params))


def grad_scaler_step(graph, loss_fn, state, nothing, x):
    """The same with `GradScaler`. All that changes is in one state."""
    model, optimizer, scaler = nnx.merge(graph, state)

    def scaled_loss(model):
        pure = jax.tree.map(
            lambda param: param[...],
            model.params,
            is_leaf=lambda node: isinstance(node, nnx.Param),
        )
        loss = loss_fn(pure, x)
        return scaler.scale(loss), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    scaler.step(optimizer, model, grads)
    scaler.update()
    return nnx.state((model, optimizer, scaler)), nothing, loss


APIS = ("jamp.step", "tx.update", "GradScaler")


def starts_of(api, tx, init, axis_name):
    """A function that makes the two parts of a state, and the step on them.

    Args:
      api: one of `APIS`, or None for a step without a loss scale.
      init: makes the parameters.
    """
    if api == "GradScaler":
        graph = None

        def start():
            nonlocal graph
            model = Blocks(init())
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            scaler = jamp.GradScaler(axis_name=axis_name)
            graph, state = nnx.split((model, optimizer, scaler))
            return state, ()

        return start, lambda loss_fn: functools.partial(
            grad_scaler_step, graph, loss_fn
        )
    if api is not None:
        tx = jamp.dynamic_loss_scale(tx, axis_name=axis_name)
    steps = {None: plain_step, "jamp.step": scaled_step, "tx.update": updated_step}

    def start():
        params = init()
        return params, tx.init(params)

    return start, lambda loss_fn: functools.partial(steps[api], tx, loss_fn)


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
    api="jamp.step",
    devices=None,
    layers=4,
    width=64,
    hidden=None,
    rows=64,
    **gather_dtypes,
):
    """A training of the model in a layout.

    Args:
      layout: a `Layout`.
      mode: "jit", "explicit" (sharding in types), or "shard_map" (over data; XLA
        handles a model axis).
      tx: the optimizer; None: Adam.
      api: what scales the loss, one of `APIS`; None: nothing.
      devices: those of the mesh; None: all that are here.
      layers, width, hidden, rows: of the model and its batch.
      **gather_dtypes: of `jamp.sharding.gather`, under "shard_map".
    """
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = make_mesh(layout, axis_type, devices)
    axis_name = "data" if mode == "shard_map" else None
    start, step_for = starts_of(
        api,
        tx or optax.adam(1e-2),
        lambda: init_params(layers, width, hidden),
        axis_name,
    )
    make_batch = lambda: jax.random.normal(jax.random.key(1), (rows, width))
    if mesh.devices.flat[0] not in jax.devices():
        start, make_batch = (
            functools.partial(jax.eval_shape, f) for f in (start, make_batch)
        )
    params, opt_state = place(start(), layout, mesh)
    batch = place({"batch": make_batch()}, layout, mesh)["batch"]

    loss = loss_fn
    if mode == "explicit":
        loss = functools.partial(explicit_loss_fn, layout)
    if mode == "shard_map":
        manual = lambda spec: P(*(a if a == "data" else None for a in spec))
        block = {name: manual(getattr(layout, name)) for name in ARRAYS}

        def loss(params, x):
            specs = [block] * layers
            whole = jamp.sharding.gather(params, "data", specs, **gather_dtypes)
            return loss_fn(whole, x)

    step = step_for(loss)
    if mode == "shard_map":
        local_step = step

        def mean_step(*args):
            *new, loss = local_step(*args)
            return *new, jax.lax.pmean(loss, "data")

        held = jax.tree.map(lambda x: manual(x.sharding.spec), (params, opt_state))
        step = jax.shard_map(
            mean_step,
            mesh=mesh,
            in_specs=(*held, layout.batch),
            out_specs=(*held, P()),
            axis_names={"data"},
        )
    out = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*out, None))
    return Training(mesh, step, params, opt_state, batch)


class Collectives(NamedTuple):
    count: int
    bytes: int
    by_dtype: dict[str, int]  # bytes
    instructions: int  # of the compiled program
    seconds: float  # of the processor, for lowering and compiling


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# A collective with a start returns its operands as well, before the results.
COLLECTIVE = re.compile(rf"= (?:\(\(.*?\), )?(.*?) (?:{KINDS})(?:-start)?\(")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


def collectives_of(training):
    """The collectives of a step."""
    mesh, step, *args = training
    start = time.process_time()
    with jax.set_mesh(mesh):
        hlo = step.lower(*args).compile().as_text()
    seconds = time.process_time() - start
    found = COLLECTIVE.findall(hlo)
    by_dtype = collections.Counter()
    for result in found:
        for dtype, shape in ARRAY.findall(result):
            width = 1 if dtype == "pred" else int(re.sub("[a-z]", "", dtype)) // 8
            by_dtype[dtype] += width * math.prod(int(n) for n in shape.split(",") if n)
    return Collectives(
        len(found), by_dtype.total(), dict(by_dtype), hlo.count(" = "), seconds
    )


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


def measure(name, mode, gather_dtypes, api="jamp.step", **options):
    """A row of the table, as a dict.

    Args:
      api: one of `APIS`.
      **options: those of `training`.
    """
    options |= gather_dtypes
    plain, scaled = (
        collectives_of(training(LAYOUTS[name], mode, api=api, **options))
        for api in (None, api)
    )
    return {
        "layout": name,
        "mode": ", ".join([mode, *(f"{k}={v}" for k, v in gather_dtypes.items())]),
        "api": api,
        "plain": plain._asdict(),
        "scaled": scaled._asdict(),
        "extra_count": scaled.count - plain.count,
        "extra_bytes": scaled.bytes - plain.bytes,
    }
