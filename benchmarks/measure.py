"""What each precision brings on the device at hand.

    python -m benchmarks.measure
    python -m benchmarks.measure --json measured.json

It trains an MLP and a transformer block, at sizes that fill the device, in each
precision that the device's units have. A row is printed as soon as it is measured, so
that an interrupted run leaves what it had. A row that fails, for lack of memory or
because a compiler refuses it, says so, and the others are measured.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import _harness
from jamp import _targets
from jamp._tree import PyTree

FLOAT32 = "float32"


class Precision(NamedTuple):
    unit: str  # the dtype that the device's units need
    region: jamp.autocast
    write: str  # what a user writes for it
    is_scaled: bool = False  # whether the gradients need a loss scale


PRECISIONS = {
    FLOAT32: Precision(FLOAT32, jamp.autocast(jnp.float32, enabled=False), ""),
    "bfloat16": Precision(
        "bfloat16", jamp.autocast(jnp.bfloat16), "jamp.autocast(jnp.bfloat16)"
    ),
    "float16": Precision(
        "float16",
        jamp.autocast(jnp.float16),
        "jamp.autocast(jnp.float16) and jamp.dynamic_loss_scale(tx)",
        is_scaled=True,
    ),
    "scaled float16": Precision(
        "float16",
        jamp.autocast(jamp.ScaledFloat16()),
        "jamp.autocast(jamp.ScaledFloat16())",
    ),
    "float8": Precision("float8", jamp.autocast("float8"), 'jamp.autocast("float8")'),
    "float8, rowwise": Precision(
        "float8",
        jamp.autocast(jamp.Float8("rowwise")),
        'jamp.autocast(jamp.Float8("rowwise"))',
    ),
}
COLUMNS = "model", "precision", "ms a step", "float32 = 1", "peak GB", "skipped"

HEAD = 64  # numbers in a head of attention
SEQUENCE = 512  # tokens
WIDTHS = 128, 256, 512, 1024, 2048, 4096
BATCHES = 1, 2, 4, 8, 16, 32  # sequences
FLOAT32_STEP = 0.2  # seconds that a float32 step takes at most
SHARE = 0.4  # of the device's memory that a float32 step takes at most
CPU_MEMORY = 4e9
TIME_LIMIT = 90.0  # seconds after which no row starts
ROW_SECONDS = 1.0  # of steps in one row
LEAST_STEPS, MOST_STEPS = 4, 100

CPU = """This is a CPU, whose units multiply in float32: these figures say nothing \
about a GPU or a TPU."""
TOO_LITTLE = "Too little was measured to choose a precision."
CHOOSE = "Choose {} here: {:.1f} times as fast as float32. Write {}."
CHOOSE_FLOAT32 = "Choose float32 here: no other precision was faster."


class Model(NamedTuple):
    """A model of `[batch, SEQUENCE, width]`: layers of `width` by a multiple of it."""

    apply: Callable[[PyTree, jax.Array], jax.Array]
    multiples: Sequence[tuple[int, int]]  # shapes of the weights, in widths

    def parameters(self, width: int) -> int:
        return sum(a * b for a, b in self.multiples) * width**2

    def flops(self, width: int, batch: int) -> float:
        """Of a training step, without attention's two products."""
        return 6.0 * self.parameters(width) * batch * SEQUENCE

    def memory(self, width: int, batch: int) -> float:
        """Bytes of a float32 step, from above: Adam's state, and what is kept."""
        kept = batch * SEQUENCE * (40 * width + 3 * SEQUENCE * width // HEAD)
        return 4.0 * (5 * self.parameters(width) + kept)

    def weights(self, width: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(self.multiples))
        return [
            jax.random.normal(key, (a * width, b * width)) / math.sqrt(a * width)
            for key, (a, b) in zip(keys, self.multiples, strict=True)
        ]


def mlp(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + jax.nn.gelu(x @ up) @ down
    return x


def block(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    qkv, out, *rest = weights
    parts = jnp.split(jax.nn.standardize(x) @ qkv, 3, axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], -1, HEAD) for part in parts)
    x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ out
    up, down = rest
    return x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down


MODELS = {
    "MLP": Model(mlp, [(1, 4), (4, 1)] * 2),
    "transformer block": Model(block, [(1, 3), (1, 1), (1, 4), (4, 1)]),
}


class Row(NamedTuple):
    """What was measured of one model in one precision, or what failed."""

    model: str
    precision: str
    seconds: float | None = None  # the median step
    ratio: float | None = None  # to float32's
    peak_bytes: int = 0
    skipped: int = 0
    steps: int = 0
    error: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.seconds is None:
            return (self.model, self.precision, f"failed: {self.error}", "", "", "")
        return (
            self.model,
            self.precision,
            f"{self.seconds * 1e3:.2f}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            f"{self.peak_bytes / 1e9:.2f}",
            f"{self.skipped} of {self.steps}",
        )


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    path = parser.parse_args(arguments).json
    device = _targets.default_device()
    here = f"{_targets.described(device)}: {_targets.said_of_units(device)}"
    print(f"jamp {jamp.__version__}, JAX {jax.__version__}, {here}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * 4}", flush=True)
    rows: list[Row] = []
    advice, status = "Interrupted.", 130
    try:
        for row in measure(device):
            rows.append(row)
            print(f"| {' | '.join(row.cells())} |", flush=True)
        advice, status = advise(device, rows), int(any(row.error for row in rows))
    except KeyboardInterrupt:
        pass
    measured = [row._asdict() for row in rows]
    _harness.save(path, {"device": here, "rows": measured, "advice": advice})
    print(f"\n{advice}")
    return status


def measure(device: _targets.Device) -> Iterator[Row]:
    """Measures each model, float32 first. What a row takes is freed after it."""
    start = time.perf_counter()
    rate = flops_per_second(device)
    memory = (device.memory_stats() or {}).get("bytes_limit", CPU_MEMORY)
    has = _targets.units(device) or {row.unit for row in PRECISIONS.values()}
    for model in MODELS:
        size = fitting(MODELS[model], rate, memory)
        base: float | None = None
        for precision in PRECISIONS:
            if PRECISIONS[precision].unit not in (FLOAT32, *has):
                continue
            if time.perf_counter() - start > TIME_LIMIT:
                return
            try:
                with jax.default_device(device):
                    row = measure_row(model, precision, *size)
            except Exception as error:  # whatever it is, the other rows are measured
                row = Row(model, precision, error=first_line(error))
            if precision == FLOAT32:
                base = row.seconds
            if base and row.seconds:
                row = row._replace(ratio=row.seconds / base)
            yield row
            jax.clear_caches()
            gc.collect()


def first_line(error: Exception) -> str:
    said = str(error).partition("\n")[0] or "no message"
    return f"{type(error).__name__}: {said[:200]}".replace("|", "/")


def measure_row(model: str, precision: str, width: int, batch: int) -> Row:
    """Times training steps with Adam, without `ratio`."""
    _, region, _, is_scaled = PRECISIONS[precision]
    tx = jamp.dynamic_loss_scale(optax.adam(1e-4), enabled=is_scaled)
    x, y = jax.random.normal(jax.random.key(1), (2, batch, SEQUENCE, width))

    def step(
        params: PyTree, opt_state: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[PyTree, optax.OptState]:
        def loss_fn(params: PyTree) -> jax.Array:
            with region:
                out = MODELS[model].apply(params, x)
                return jnp.mean(jnp.square(out.astype(jnp.float32) - y))

        _, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        return jamp.step(tx, grads, opt_state, params)

    params = MODELS[model].weights(width)
    opt_state = tx.init(params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    program = jitted.lower(params, opt_state, x, y).compile()
    seconds: list[float] = []
    while len(seconds) < LEAST_STEPS or (
        sum(seconds) < ROW_SECONDS and len(seconds) < MOST_STEPS
    ):
        start = time.perf_counter()
        params, opt_state = jax.block_until_ready(program(params, opt_state, x, y))
        seconds.append(time.perf_counter() - start)
    skipped = int(jamp.metrics(opt_state)["skipped_steps"])
    middle = statistics.median(seconds[1:])
    return Row(model, precision, middle, None, peak(program), skipped, len(seconds))


def peak(program: jax.stages.Compiled) -> int:
    """Bytes that a program holds at most, by its compiler's own account."""
    sizes: Any = program.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return held + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes


def fitting(model: Model, rate: float, memory: float) -> tuple[int, int]:
    """The largest width and batch whose float32 step fits into time and memory."""
    sizes = [(width, batch) for width in WIDTHS for batch in BATCHES]
    fit = [
        size
        for size in sizes
        if model.flops(*size) <= FLOAT32_STEP * rate
        and model.memory(*size) <= SHARE * memory
    ]
    return max(fit or sizes[:1], key=lambda size: model.flops(*size))


def flops_per_second(
    device: _targets.Device, size: int = 2048, rounds: int = 3
) -> float:
    """Of float32 products."""
    x = jax.device_put(jnp.ones((size, size)), device)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    start = time.perf_counter()
    jax.block_until_ready([product(x, x) for _ in range(rounds)])
    return rounds * 2 * size**3 / (time.perf_counter() - start)


def advise(device: _targets.Device, rows: Sequence[Row]) -> str:
    if device.platform == "cpu" and not _targets.units(device):
        return CPU
    means: dict[str, float] = {}
    for name in PRECISIONS:
        ratios = [row.ratio for row in rows if row.precision == name and row.ratio]
        if len(ratios) == len(MODELS):
            means[name] = statistics.geometric_mean(ratios)
    if len(means) < 2:
        return TOO_LITTLE
    best = min(means, key=means.__getitem__)
    if best == FLOAT32:
        return CHOOSE_FLOAT32
    return CHOOSE.format(best, 1 / means[best], PRECISIONS[best].write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
