"""Training that is killed again and again, with the same results.

    python -m tests.endurance.kill_and_resume --kills 50

A process trains, saves a checkpoint every few steps in the background, and logs each
step. It is killed with SIGKILL at random moments, about half of them while it saves,
and restarted until it is done. Every logged step, including repeated ones, must equal
that of an undisturbed run bit for bit: the loss, scale, tracker, and everything carried
to the next step. The engine "feedback" averages gradients over devices in eight bits,
and carries the rounding errors.
"""

import argparse
import dataclasses
import functools
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

SAVE_EVERY, KEEP = 4, 3
STEPS_PER_KILL = 16  # more than a process makes, so that none reaches the end
SAMPLES, BATCH, FEATURES, HIDDEN = 96, 16, 8, 32
SCALING = {"init_scale": 2.0**10, "growth_interval": 5}
ENGINES = ("optax", "nnx", "feedback")
ADAM = optax.adam(1e-2)


class Data:
    """Batches in a new order each epoch; `position` is what a checkpoint must hold."""

    def __init__(self, position: int = 0):
        self.position = position
        self.samples = np.random.default_rng(1).normal(size=(SAMPLES, FEATURES))

    def next(self) -> np.ndarray:
        epoch, index = divmod(self.position, SAMPLES // BATCH)
        order = np.random.default_rng([2, epoch]).permutation(SAMPLES)
        batch = self.samples[order[index * BATCH :][:BATCH]].astype(np.float32)
        if self.position % 11 == 7:
            batch[3, 5] = np.inf
        self.position += 1
        return batch


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(3)
    shapes = {"w1": (FEATURES, HIDDEN), "w2": (HIDDEN, FEATURES)}
    return {
        name: jnp.asarray(rng.normal(size=s) / 3, "float32")
        for name, s in shapes.items()
    }


def loss_fn(params: Any, dropout: Any, x: jax.Array) -> jax.Array:
    with jamp.autocast(dtype=jnp.float16):
        hidden = dropout(jnp.tanh(x @ params["w1"]))
        return jnp.mean((hidden @ params["w2"] - jnp.sin(x)) ** 2)


def optax_trainer(
    inner: optax.GradientTransformation = ADAM,
    own: Callable[[Any], Any] = lambda params: params,
    **scaling: Any,
) -> tuple[Any, Any]:
    """What is carried from step to step, and the step.

    Args:
      own: what a device makes of the parameters before it differentiates.
    """
    tx = jamp.dynamic_loss_scale(inner, **SCALING, **scaling)
    params = make_params()

    @jax.jit
    def step(carry, x):
        key, use = jax.random.split(carry["key"])

        def dropout(hidden):
            return hidden * jax.random.bernoulli(use, 0.5, hidden.shape)

        grad_fn = jamp.value_and_grad(loss_fn, carry["opt_state"])
        loss, grads = grad_fn(own(carry["params"]), dropout, x)
        params, opt_state = jamp.step(tx, grads, carry["opt_state"], carry["params"])
        carry = {"params": params, "opt_state": opt_state, "key": key}
        return carry, loss, jamp.metrics(opt_state)

    key = jax.random.key(4)
    return {"params": params, "opt_state": tx.init(params), "key": key}, step


def feedback_trainer() -> tuple[Any, Any]:
    """What is carried from step to step, and the step; on a mesh of all devices."""
    count = math.gcd(BATCH, jax.device_count())
    feedback = jamp.sharding.error_feedback("data", count)
    inner = optax.chain(feedback, ADAM)
    own = lambda params: jax.lax.pcast(params, "data", to="varying")
    carry, step = optax_trainer(inner, own, axis_name="data")
    auto = (jax.sharding.AxisType.Auto,)
    chosen = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), axis_types=auto, devices=chosen)

    def local_step(carry, x):
        carry, loss, metrics = step(carry, x)
        return carry, jax.lax.pmean(loss, "data"), metrics

    is_split = lambda node: isinstance(node, jamp.sharding.ErrorFeedbackState)
    place = lambda node: P("data") if is_split(node) else P()
    specs = jax.tree.map(place, carry, is_leaf=is_split)
    mapped = jax.shard_map(
        local_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P(), P())
    )
    places = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.device_put(carry, places), jax.jit(mapped)


class Model(nnx.Module):
    def __init__(self):
        self.params = nnx.Dict({k: nnx.Param(v) for k, v in make_params().items()})
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(4))


def nnx_trainer() -> tuple[Any, Any]:
    """What is carried from step to step, and the step."""
    model = Model()
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    graph, carry = nnx.split((model, optimizer, jamp.GradScaler(**SCALING)))

    @jax.jit
    def step(carry, x):
        model, optimizer, scaler = nnx.merge(graph, carry)

        def scaled_loss(model):
            params = {name: param[...] for name, param in model.params.items()}
            loss = loss_fn(params, model.dropout, x)
            return scaler.scale(loss), loss

        grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
        scaler.step(optimizer, model, grads)
        scaler.update()
        metrics = jamp.metrics(scaler)
        return nnx.state((model, optimizer, scaler)), loss, metrics

    return carry, step


def train(engine: str, folder: Path, steps: int) -> None:
    """Trains to the end, from the latest checkpoint in the folder if there is one.

    Appends to `log`: `launch`, `start <step>`, `save <step>` before a save whose
    predecessor is complete, `step <step> ...` with what it saw.
    """
    folder.mkdir(exist_ok=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    write = lambda *words: os.write(log, (" ".join(map(str, words)) + "\n").encode())
    write("launch")
    trainers = optax_trainer, nnx_trainer, feedback_trainer
    carry, step = dict(zip(ENGINES, trainers, strict=True))[engine]()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP,
        save_interval_steps=SAVE_EVERY,
        enable_async_checkpointing=True,
    )
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        data, latest = Data(), manager.latest_step()
        if latest is not None:
            target = {"carry": carry, "position": 0}
            saved = manager.restore(latest, args=ocp.args.StandardRestore(target))
            carry, data = saved["carry"], Data(int(saved["position"]))
        write("start", data.position)
        while data.position < steps:
            number = data.position
            carry, loss, metrics = step(carry, data.next())
            names = ("loss_scale", "growth_tracker", "skipped_steps")
            seen = [np.asarray(loss).tobytes().hex(), *(metrics[n] for n in names)]
            write("step", number, *seen, checksum(carry))
            if manager.should_save(data.position):
                manager.wait_until_finished()
                write("save", data.position)
                tree = {"carry": carry, "position": data.position}
                manager.save(data.position, args=ocp.args.StandardSave(tree))
    write("done")


def checksum(carry: Any) -> int:
    """A digest of all bits that are carried."""
    total = 0
    for leaf in jax.tree.leaves(carry):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return total


def live(engine: str, folder: Path, steps: int, cache: Path) -> None:
    """Runs in each process. Writes a failure to `error`."""
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        train(engine, folder, steps)
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
        raise


@dataclasses.dataclass
class Report:
    """The outcome of the kills of one run."""

    engine: str
    kills: int = 0
    in_a_save: int = 0  # kills while a checkpoint was being written
    resumes: int = 0  # starts from a checkpoint
    repeated: int = 0  # steps that had been logged before
    mismatches: int = 0  # logged steps that differ from the undisturbed run

    def __str__(self) -> str:
        numbers = dataclasses.asdict(self).items()
        return ", ".join(f"{name} {value}" for name, value in numbers)


def kill_and_resume(engine: str, kills: int, folder: Path, seed: int = 0) -> Report:
    """Trains twice, once undisturbed and once killed `kills` times, and compares.

    Raises:
      RuntimeError: a process failed without a kill, did not start from the latest
        complete checkpoint, or lost more than the save under way.
    """
    context = multiprocessing.get_context("forkserver")  # imports once, forks often
    context.set_forkserver_preload(["jamp", "orbax.checkpoint"])
    steps, rng, report = kills * STEPS_PER_KILL, random.Random(seed), Report(engine)
    alone, killed = folder / f"{engine}-alone", folder / f"{engine}-killed"

    def launch(where):
        args = (engine, where, steps, folder / "cache")
        process = context.Process(target=live, args=args)
        process.start()
        return process

    finish(launch(alone), alone)
    expected = {words[1]: words for words in read_log(alone) if words[0] == "step"}
    seen, latest = set(), 0
    while True:
        before = len(read_log(killed))
        process = launch(killed)
        if report.kills < kills and wait_for_moment(process, killed, before, rng):
            process.kill()
        finish(process, killed)

        words = read_log(killed)[before:]
        saves = [int(word[1]) for word in words if word[0] == "save"]
        for word in words:
            if word[0] == "start":
                report.resumes += latest > 0
                check(int(word[1]) == latest, f"started at {word[1]}, not {latest}")
            if word[0] == "step":
                report.repeated += word[1] in seen
                report.mismatches += word != expected[word[1]]
                seen.add(word[1])
        if process.exitcode == 0:
            check(seen == {*expected} and len(seen) == steps, "steps are missing")
            return report
        report.kills += 1
        report.in_a_save += save_under_way(words, killed)
        kept = max([latest, *saves[:-1]])
        latest = latest_checkpoint(killed)
        check(latest >= kept, f"checkpoint {kept} was lost, {latest} is the latest")


def wait_for_moment(
    process: Any, folder: Path, before: int, rng: random.Random
) -> bool:
    """Waits for a random moment in a process; False if it ends before that.

    One in eight comes while it starts. Half of the others come while it saves.
    """
    starting, in_a_save = rng.random() < 1 / 8, rng.random() < 1 / 2
    lines = 1 if starting else rng.randrange(2, 14)
    deadline = time.monotonic() + 300
    while process.is_alive() and time.monotonic() < deadline:
        words = read_log(folder)[before:]
        fits = starting or save_under_way(words, folder) == in_a_save
        if fits and len(words) >= lines:
            time.sleep(rng.uniform(0, 0.5 if starting else 0.01))
            return process.is_alive()
        time.sleep(0.002)
    return False


def save_under_way(words: list[list[str]], folder: Path) -> bool:
    """Whether the last save that was logged is not complete."""
    saves = [int(word[1]) for word in words if word[0] == "save"]
    return bool(saves) and saves[-1] > latest_checkpoint(folder)


def latest_checkpoint(folder: Path) -> int:
    """The step of the latest complete checkpoint, 0 if there is none.

    Orbax gives a checkpoint its name, the step, when it is complete.
    """
    checkpoints = folder / "checkpoints"
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return max([0, *(int(name) for name in names if name.isdigit())])


def read_log(folder: Path) -> list[list[str]]:
    """The words of each whole line."""
    log = folder / "log"
    return (
        [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    )


def finish(process: Any, folder: Path) -> None:
    """Waits until a process ends or is killed; RuntimeError if it failed on its own."""
    process.join(300)
    if process.is_alive():
        process.kill()
        raise RuntimeError("the process was not done after 300 s")
    if process.exitcode not in (0, -signal.SIGKILL):
        error = folder / "error"
        text = error.read_text() if error.exists() else "it left no traceback"
        raise RuntimeError(f"the process failed with {process.exitcode}: {text}")


def check(holds: bool, problem: str) -> None:
    if not holds:
        raise RuntimeError(problem)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training that is killed and resumed.")
    parser.add_argument("--kills", type=int, default=6, help="kills of each engine")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random moments"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for engine in args.engines:
            print(kill_and_resume(engine, args.kills, Path(folder), args.seed))


if __name__ == "__main__":
    main()
