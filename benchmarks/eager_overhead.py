"""What an op costs in Python inside an autocast region: eager, traced, and in torch.

    python -m benchmarks.eager_overhead

The table shows microseconds per op for a loop over 16 x 16 arrays, outside and inside a
float16 region, and the median of the differences. "Eager" ops run at once, each as a
separate program. "Traced" ops are written into a jaxpr by `jax.make_jaxpr`, a cost that
a jitted function pays once; the jaxpr of a jitted `jax.nn` function is already in JAX's
cache. torch's ops are eager, on the same device, and appear only where torch is
installed.

Inside the region an op gets float16 arrays, as it would after another layer, and
float32 weights. The region casts a weight once and keeps the cast, as torch does. The
last row is entering and leaving the region itself. The host waits once at the end of a
loop.
"""

import contextlib
import importlib.util
import statistics

import jax
import jax.numpy as jnp
from flax import linen as nn

import jamp
from benchmarks import _harness, tables

SIZES = {
    "cpu": {"ops": 50, "rounds": 20},
    "gpu": {"ops": 50, "rounds": 30},
    "small": {"ops": 3, "rounds": 2},
}
WIDTH = 16


def jax_ops():
    """Name -> a function of an array; and a function that makes arrays of a dtype."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (WIDTH, WIDTH))
    dense = nn.Dense(WIDTH)
    params = dense.init(keys[1], w)
    ops = {
        "x @ w": lambda x: x @ w,
        "x + x": lambda x: x + x,
        "jnp.tanh": jnp.tanh,
        "jax.nn.gelu": jax.nn.gelu,
        "jax.nn.softmax": jax.nn.softmax,
        "nn.Dense": lambda x: dense.apply(params, x),
    }

    def arrays(n, half):
        x = jax.random.normal(keys[2], (n, WIDTH, WIDTH))
        return list(x.astype(jnp.float16 if half else jnp.float32))

    return ops, arrays


def jax_rows(n):
    """(how, op, where) -> a function that runs a loop."""
    ops, arrays = jax_ops()
    rows = {}
    for where in ("outside", "inside"):
        inside = where == "inside"
        region = jamp.autocast(dtype=jnp.float16, enabled=inside)
        around = region if inside else contextlib.nullcontext()
        xs = arrays(n, inside)
        for name, op in ops.items():
            rows["eager", name, where] = eager(op, xs, around)
            rows["traced", name, where] = traced(op, xs, around)
        rows["eager", "the region", where] = enter_and_leave(around, n)
    return rows


def eager(op, xs, around):
    def row():
        with around:
            outs = [op(x) for x in xs]
        jax.block_until_ready(outs)

    return row


def traced(op, xs, around):
    def row():
        def function(xs):  # new, so JAX has not traced it yet
            with around:
                return [op(x) for x in xs]

        jax.make_jaxpr(function)(xs)

    return row


def enter_and_leave(around, n):
    def row():
        for _ in range(n):
            with around:
                pass

    return row


def torch_rows(n, device):
    import torch

    torch.set_num_threads(1)  # otherwise small ops wait for each other's threads
    device = {"cpu": "cpu", "gpu": "cuda"}[device]
    layer = torch.nn.Linear(WIDTH, WIDTH, device=device)
    ops = {
        "x @ w": lambda x: x @ layer.weight,
        "x + x": lambda x: x + x,
        "jnp.tanh": torch.tanh,
        "jax.nn.gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "jax.nn.softmax": lambda x: torch.softmax(x, -1),
        "nn.Dense": layer,
    }

    def loop(op, xs, around):
        def row():
            with around:
                outs = [op(x) for x in xs]
            if device == "cuda":
                torch.cuda.synchronize()
            return outs

        return row

    rows = {}
    for where in ("outside", "inside"):
        inside = where == "inside"
        region = torch.autocast(device, torch.float16)
        around = region if inside else contextlib.nullcontext()
        dtype = torch.float16 if inside else torch.float32
        x = torch.randn(n, WIDTH, WIDTH, device=device)
        xs = list(x.to(dtype).unbind())
        for name, op in ops.items():
            rows["torch", name, where] = loop(op, xs, around)
        rows["torch", "the region", where] = enter_and_leave(around, n)
    return rows


def summarize(seconds, n):
    """how -> op -> microseconds of an op."""
    table = {}
    for how, name, where in seconds:
        if where == "outside":
            pair = [seconds[how, name, w] for w in ("outside", "inside")]
            outside, inside = ([1e6 * turn / n for turn in one] for one in pair)
            table.setdefault(how, {})[name] = {
                "outside": statistics.median(outside),
                "inside": statistics.median(inside),
                "added": statistics.median(
                    b - a for a, b in zip(outside, inside, strict=True)
                ),
            }
    return table


def main():
    args = _harness.parse_sizes(_harness.parser(__doc__), SIZES)
    _harness.prepare(args, "benchmarks.eager_overhead")
    _harness.print_heading(f"{args.ops} ops a loop, {args.rounds} rounds")
    rows = jax_rows(args.ops)
    if importlib.util.find_spec("torch"):
        rows |= torch_rows(args.ops, args.device)
    else:
        print("torch is not installed.")
    table = summarize(_harness.take_turns(rows, args.rounds), args.ops)
    tables.show("ops", table, "eager")
    _harness.save(args.json, table)


if __name__ == "__main__":
    main()
