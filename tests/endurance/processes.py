"""One training run in several processes: `python -m tests.endurance.processes --help`.

`launch` starts the processes on this machine, each with a few fake devices. All train
on one mesh over all devices, with `jamp.dynamic_loss_scale` or with `jamp.GradScaler`,
and in three ways: under jit with the parameters replicated or sharded, or sharded under
`shard_map`. Each process writes what it saw. `train` does the same in one process.

An inf in one element of a batch makes only one row of one gradient nan: the hidden
layer saturates, and 0 * inf remains in the row of the element. With sharded parameters
that row is on a single device.
"""

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from shared.processes import end_group, start_group
from tests.trainers import nnx_trainer, optax_trainer

ROOT = Path(__file__).parents[2]
STEPS, INFS = 200, 20
ROWS, FEATURES, HIDDEN, OUT = 32, 16, 32, 8
SCALING = {"init_scale": 2.0**10, "growth_interval": 5}
WAYS = (
    "optax-replicated",
    "optax-fsdp",
    "optax-shard_map",
    "nnx-replicated",
    "nnx-fsdp",
    "nnx-shard_map",
)
ATTEMPTS = 2  # of a step in the ways that end in "-retry"


def injections() -> dict[int, tuple[int, int]]:
    """The steps whose batch holds an inf, with its row and column."""
    rng = np.random.default_rng(7)
    steps = rng.choice(STEPS, INFS, replace=False)
    places = rng.integers((ROWS, FEATURES), size=(INFS, 2))
    return dict(zip(steps.tolist(), map(tuple, places.tolist()), strict=True))


def make_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of all processes."""
    rng = np.random.default_rng([3, step])
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    teacher = np.random.default_rng(5).normal(size=(FEATURES, OUT)) / 4
    y = np.tanh(x @ teacher).astype(np.float32)
    if step in injections():
        x[injections()[step]] = np.inf
    return x, y


def make_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "w1": (rng.normal(size=(FEATURES, HIDDEN)) / 4).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.normal(size=(HIDDEN, OUT)) / 4).astype(np.float32),
    }


def loss_fn(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    with jamp.autocast(dtype=jnp.float16):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)


def gathered_loss(
    shards: dict[str, jax.Array], x: jax.Array, y: jax.Array
) -> jax.Array:
    """The mean loss of all devices, from one device's part of the batch."""
    gather = lambda shard: lax.all_gather(shard, "data", tiled=True)
    return lax.pmean(loss_fn(jax.tree.map(gather, shards), x, y), "data")


def make_mesh(devices: int) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,)
    chosen = jax.devices()[:devices]
    return jax.make_mesh((devices,), ("data",), axis_types=auto, devices=chosen)


def train(way: str, mesh: jax.sharding.Mesh) -> dict[str, np.ndarray]:
    """What this process sees of a run on a mesh with one axis, "data".

    `loss`, `jamp.metrics` and `checksum` have a row for each step; `checksum` is of the
    parameters on each device of this process. `shard/<name>/<row>` are the final
    parameters, by the first row of each shard.
    """
    engine, layout, *retry = way.split("-")
    trainer = {"optax": optax_trainer, "nnx": nnx_trainer}[engine]
    mapped = layout == "shard_map"
    loss, axis_name = (gathered_loss, "data") if mapped else (loss_fn, None)
    scaling = SCALING | {"axis_name": axis_name}
    carry, step = trainer(loss, make_params(), optax.adam(1e-2), **scaling)
    step = retried(step) if retry else step
    sharded = P() if layout == "replicated" else P("data")
    specs = jax.tree.map(lambda leaf: sharded if leaf.ndim else P(), carry)
    if mapped:
        in_specs, out_specs = (specs, P("data"), P("data")), (specs, P(), P())
        step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    placed = lambda spec: NamedSharding(mesh, spec)
    shardings = jax.tree.map(placed, specs)
    step = jax.jit(step, out_shardings=(shardings, placed(P()), placed(P())))

    def place(leaf, sharding):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    def place_rows(rows):
        own = np.split(rows, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(placed(P("data")), own)

    carry, history = jax.tree.map(place, carry, shardings), []
    for number in range(STEPS):
        carry, loss, metrics = step(carry, *map(place_rows, make_batch(number)))
        row = {
            name: np.asarray(value.addressable_data(0))
            for name, value in {"loss": loss, **metrics}.items()
        }
        history.append({**row, "checksum": checksums(parameters(carry, engine))})
    columns = {name: np.stack([row[name] for row in history]) for name in history[0]}
    return columns | shards(parameters(carry, engine))


def retried(step: Any) -> Any:
    """A step that runs again after an overflow."""

    def as_pair(carry, x, y):
        carry, *seen = step(carry, x, y)
        return carry, tuple(seen)

    again = jamp.retry(as_pair, ATTEMPTS)

    def unpacked(carry, x, y):
        carry, seen = again(carry, x, y)
        return carry, *seen

    return unpacked


def parameters(carry: Any, engine: str) -> dict[str, jax.Array]:
    return carry[0] if engine == "optax" else nnx.to_pure_dict(carry[0])


def checksums(params: dict[str, jax.Array]) -> np.ndarray:
    """One number for each device of this process."""
    sums = [0] * jax.device_count()
    for leaf in params.values():
        for i, shard in enumerate(leaf.addressable_shards):
            sums[i] = zlib.crc32(np.asarray(shard.data), sums[i])
    return np.asarray(sums[: len(leaf.addressable_shards)])


def shards(params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return {
        f"shard/{name}/{shard.index[0].start or 0}": np.asarray(shard.data)
        for name, leaf in params.items()
        for shard in leaf.addressable_shards
    }


def launch(
    folder: Path, count: int, devices: int, ways: Sequence[str], timeout: float
) -> dict[str, list[dict[str, np.ndarray]]]:
    """Trains in `count` processes of `devices` devices each: ways, then processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.endurance.processes", str(folder), address]
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    together(
        [[*command, str(count), str(i), *ways] for i in range(count)], env, timeout
    )
    return {
        way: [dict(np.load(folder / f"{way}-{i}.npz")) for i in range(count)]
        for way in ways
    }


def together(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], timeout: float
) -> None:
    """Runs commands at the same time, each in a separate process group.

    Raises:
      RuntimeError: a command failed, or was not done in time; with what it printed. No
        command is left running.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for command in commands:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            worker = start_group(command, log, ROOT, env)
            stack.callback(end_group, worker)
            workers.append((worker, log))
        deadline = time.monotonic() + timeout
        while True:
            codes = [worker.poll() for worker, _ in workers]
            if not any(code is None or code for code in codes):
                return
            late = time.monotonic() > deadline
            if late or any(codes):
                problem = f"were not done after {timeout} s" if late else "failed"
                raise RuntimeError(f"processes {problem}:{printed(workers, codes)}")
            time.sleep(0.05)


def printed(workers: Any, codes: Sequence[int | None]) -> str:
    """What the processes that failed have printed."""
    texts = []
    for i, ((_, log), code) in enumerate(zip(workers, codes, strict=True)):
        if code != 0:
            log.seek(0)
            texts.append(f"\n--- process {i}, exit code {code}:\n{log.read()}")
    return "".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="One process of a training run.")
    parser.add_argument("folder", type=Path, help="where to write the results")
    parser.add_argument("address", help="host:port of the first process")
    parser.add_argument("count", type=int, help="how many processes there are")
    parser.add_argument("index", type=int, help="which one this is")
    parser.add_argument("ways", nargs="+", help="how to train: see WAYS")
    args = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.address,
        args.count,
        args.index,
        initialization_timeout=60,
        coordinator_bind_address=args.address,
    )
    for way in args.ways:
        seen = train(way, make_mesh(jax.device_count()))
        np.savez(args.folder / f"{way}-{args.index}.npz", **seen)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
