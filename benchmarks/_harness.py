"""What the benchmarks share: arguments, turns, tables and files.

Rows of one table take turns in one process, in an order that changes from round to
round. A ratio is a row's time over its baseline's in the same round, as the median over
rounds.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# On a CPU, glibc's malloc returns large buffers to the system at each step, and
# faulting them in again costs more than the work to measure. Its mmap threshold cannot
# exceed 32 MB, so mmap is off.
RAISED_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**27),
}
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "torch")


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument(
        "--small", action="store_true", help="a run of seconds, to try the code"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--default-malloc", action="store_true", help="glibc's default malloc"
    )
    return parser


def parse_sizes(
    parser: argparse.ArgumentParser, sizes: Mapping[str, Mapping[str, int]]
) -> argparse.Namespace:
    """The arguments, with an option for each size.

    Args:
      sizes: the defaults by name, for "cpu", "gpu" and "small".
    """
    for name in sizes["cpu"]:
        parser.add_argument(f"--{name}", type=int)
    known, _ = parser.parse_known_args()
    parser.set_defaults(**sizes["small" if known.small else known.device])
    return parser.parse_args()


def prepare(args: argparse.Namespace, module: str) -> None:
    """Call this before JAX computes. May restart the program with malloc set up."""
    raised = all(os.environ.get(k) == v for k, v in RAISED_MALLOC.items())
    if args.device == "cpu" and not args.default_malloc and not raised:
        os.environ.update(RAISED_MALLOC)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    platform = {"cpu": "cpu", "gpu": "cuda"}[args.device]
    os.environ["JAX_PLATFORMS"] = platform
    if "jax" in sys.modules:  # it has already read the environment
        sys.modules["jax"].config.update("jax_platforms", platform)


def versions() -> dict[str, str]:
    """Versions of Python and the libraries; "" for a library that is not installed."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def describe(device: str = "") -> dict[str, str]:
    """The machine and the versions that this runs on; without a device, JAX's."""
    if not device:
        import jax

        device = jax.devices()[0].device_kind
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "cpus": str(os.cpu_count()),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        **versions(),
    }


def print_heading(*facts: str) -> None:
    """Prints a line with the versions, the device and further notes."""
    run = describe()
    names = f"Python {run['python']}", f"JAX {run['jax']}"
    print(", ".join([*names, run["device"], *facts]))


def _module() -> str:
    path = Path(sys.argv[0])
    return f"{path.parent.name}.{path.stem}"


def flat(step: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """A training step whose state is a list of arrays.

    jmp's state cannot be rebuilt from the abstract arguments of a lowering.
    """
    import jax

    def flat_step(leaves, x, y):
        state, loss = step(jax.tree.unflatten(treedef, leaves), x, y)
        return jax.tree.leaves(state), loss

    return flat_step


def take_turns(
    rows: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each row by round. A row waits for its own work before it returns."""
    names = list(rows)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + warmup):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            rows[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Iterable[float], base: Iterable[float]) -> float:
    """The median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A Markdown table: a column of text, then columns of figures."""
    columns = list(columns)
    print(f"\n| {' | '.join(columns)} |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def save(path: Path | None, results: Any, device: str = "") -> None:
    """If a path was given, writes the figures and where they were measured."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"run": describe(device), "results": results}
        path.write_text(json.dumps(document, indent=2) + "\n")
