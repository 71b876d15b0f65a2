"""What the benchmarks share: arguments, turns, tables and files.

Rows of one table are compiled in threads, then take turns in one process, in an order
that is drawn anew each round. A ratio is a row's time over its baseline's in the same
round, as the median over rounds, with the median's standard error. A ratio that is
within two errors of 1, or no further from it than the baseline's second row is, is
printed as level: the figures do not tell the two rows apart.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

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
THREADS = 4  # that compile
SEED = 0  # of the orders


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


def processor() -> str:
    """The model of the CPU, as Linux names it; elsewhere the kind of machine."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line for line in lines if line.startswith("model name")]
        if models:
            return models[0].partition(":")[2].strip()
    return platform.machine()


def describe(device: str = "") -> dict[str, str]:
    """The machine and the versions that this runs on; without a device, JAX's."""
    if not device:
        import jax

        device = jax.devices()[0].device_kind
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "processor": processor(),
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


def together(tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """The results of functions that run in threads, to trace and compile rows.

    XLA compiles without holding Python's lock.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {name: pool.submit(task) for name, task in tasks.items()}
        return {name: future.result() for name, future in futures.items()}


def take_turns(
    rows: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each row by round. A row waits for its own work before it returns.

    Each round has another order, so that no row always follows the same one.
    """
    orders = random.Random(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(rounds + warmup):
        for name in orders.sample(list(rows), len(rows)):
            start = time.perf_counter()
            rows[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Ratio(NamedTuple):
    """A row's time over its baseline's."""

    value: float
    error: float | None  # standard error; None if the rounds are not known

    def is_level(self, floor: float = 0.0) -> bool:
        """Whether the figures do not tell the two rows apart.

        Args:
          floor: how far from 1 the baseline's second row is.
        """
        return abs(self.value - 1) <= max(2 * (self.error or 0.0), floor)

    def text(self, floor: float = 0.0) -> str:
        if self.error is None:
            return f"{self.value:.2f}"
        if self == (1, 0):  # the baseline itself
            return "1"
        level = "level, " if self.is_level(floor) else ""
        return f"{level}{self.value:.3f} ± {self.error:.3f}"


def ratio(seconds: Iterable[float], base: Iterable[float]) -> Ratio:
    """The median of the ratios of the rounds."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    return Ratio(statistics.median(ratios), median_error(ratios))


def ratio_of_medians(seconds: Sequence[float], base: Sequence[float]) -> Ratio:
    """For rows of two processes, whose rounds do not belong together."""
    medians = statistics.median(seconds), statistics.median(base)
    relative = [
        median_error(row) / median
        for row, median in zip((seconds, base), medians, strict=True)
    ]
    value = medians[0] / medians[1]
    return Ratio(value, value * math.hypot(*relative))


def median_error(values: Sequence[float]) -> float:
    """The standard error of the median, whatever the values' distribution.

    Each of n values is below the true median with probability 1/2. So the true median
    lies below the k-th smallest with the probability that fewer than k of n coins show
    heads, `tail`, and above the k-th largest with the same. The distance of these two
    counts as that of a normal distribution's quantiles with such tails: 2 z standard
    errors. With k = (n + 1) / 2 - sqrt(n) the tails are about 2.5 % (Price and Bonett,
    2001). A few values far off do not move it.
    """
    n, ordered = len(values), sorted(values)
    if n < 2:
        return math.inf
    k = max(1, round((n + 1) / 2 - math.sqrt(n)))
    tail = sum(math.comb(n, heads) for heads in range(k)) / 2**n
    z = -statistics.NormalDist().inv_cdf(tail)
    return (ordered[n - k] - ordered[k - 1]) / (2 * z)


def figures(
    seconds: Sequence[float], base: Sequence[float] | None = None
) -> dict[str, Any]:
    """A row's times for the JSON, each round included, and the ratio to a baseline."""
    value, error = (None, None) if base is None else ratio(seconds, base)
    return {
        "milliseconds": 1e3 * statistics.median(seconds),
        "ratio": value,
        "error": error,
        "seconds": list(seconds),
    }


def ratio_cell(row: Mapping[str, Any], again: Mapping[str, Any] | None = None) -> str:
    """A row's ratio for a table.

    Args:
      again: the baseline's second row.
    """
    if row["ratio"] is None:
        return ""
    floor = abs(again["ratio"] - 1) if again and again["ratio"] else 0.0
    return Ratio(row["ratio"], row.get("error")).text(floor)


def markdown(
    columns: Iterable[str], rows: Iterable[Iterable[str]], text: int = 1
) -> str:
    """A table: some columns of text, then columns of figures."""
    columns = list(columns)
    rule = "|---" * text + "|---:" * (len(columns) - text) + "|"
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def grid(
    head: str,
    rows: Mapping[str, Any],
    columns: Mapping[str, Callable[[Any], str]],
) -> str:
    """A table with a line for each row: its name, and what each column says of it."""
    lines = (
        [name, *(of(row) for of in columns.values())] for name, row in rows.items()
    )
    return markdown([head, *columns], lines)


def number(
    key: str, form: str, unit: float = 1, said: str = ""
) -> Callable[[Mapping[str, Any]], str]:
    """A column of numbers in some unit; empty where a row does not have one."""

    def cell(row):
        value = row.get(key)
        if value is None:
            return ""
        return format(value if unit == 1 else value / unit, form) + said

    return cell


def percent(value: float, digits: int) -> str:
    return f"{100 * value:.{digits}f} %"


def about(*documents: Mapping[str, Any], notes: Iterable[str] = ()) -> str:
    """Where and when files of figures were measured, and with which versions."""
    said = dict.fromkeys(where_and_when(document["run"]) for document in documents)
    return " ".join([*said, *notes])


def where_and_when(run: Mapping[str, str]) -> str:
    where = run["device"]
    if "benchmarks.targets" in run.get("command", ""):
        where = "Compiled, not run"
    elif where == "cpu":
        where = f"{run['cpus']} cores of an {run['processor']}"
    found = f"Python {run['python']}, JAX {run['jax']}, Flax {run['flax']}"
    return f"{where}, {run['date']}, {found}, optax {run['optax']}."


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    print(f"\n{markdown(columns, rows)}", flush=True)


def save(path: Path | None, results: Any, device: str = "") -> None:
    """If a path was given, writes the figures and where they were measured."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"run": describe(device), "results": finite(results)}
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def finite(results: Any) -> Any:
    """The figures with None for what is not a finite number, as JSON has it."""
    if isinstance(results, Mapping):
        return {key: finite(value) for key, value in results.items()}
    if isinstance(results, list | tuple):
        return [finite(value) for value in results]
    is_number = isinstance(results, float)
    return None if is_number and not math.isfinite(results) else results
