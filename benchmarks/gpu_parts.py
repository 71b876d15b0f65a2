"""What `benchmarks.gpu` runs: the parts, and which of them fit into a call.

A part has a worth, seconds that it is expected to take, and the memory that it needs. A
call gets the parts of most worth that fit. Checks run first, beside each other, as far
as their memory and their processes allow. Each timed part then runs alone.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import _harness

GRACE = 15  # seconds of a call that no part gets: for start, end and printing
LEAST_LIMIT = 120  # seconds that every part may take
DRY_SECONDS = 15
# For `--plan`: fifteen minutes in two calls, on a machine with an H100.
CALLS, CARD, CORES = (9, 6), 76, 16


class Part(NamedTuple):
    """One command: the arguments of `python -m`, on a GPU and in a dry run."""

    name: str
    worth: float
    seconds: float  # that it is expected to take
    memory: float  # GB of the card, for all its processes
    command: Sequence[str]
    dry: Sequence[str]
    timed: bool = False  # so nothing else may run on the GPU
    processes: int = 1  # that compute
    environment: Mapping[str, str] = {}  # on a GPU

    limit = property(lambda self: max(2 * self.seconds, LEAST_LIMIT))


def benchmark(
    name: str,
    worth: float,
    seconds: float,
    memory: float,
    module: str,
    *options: str,
    full: Sequence[str] = (),
    small: Sequence[str] = (),
    **other: Any,
) -> Part:
    """A benchmark with options for both runs, for the GPU run, and for the dry run."""
    command, small = (f"benchmarks.{module}", *options), (*small, "--small")
    gpu, cpu = (*command, *full, "--device", "gpu"), (*command, *small)
    return Part(name, worth, seconds, memory, gpu, cpu, **{"timed": True, **other})


def parity(name: str, worth: float, processes: int, quick_case: str) -> Part:
    """A part of the parity suite, and its cases for a dry run."""
    command = ("parity", "--only", name, "--processes")
    gpu = (*command, str(processes), "--device", "cuda")
    dry = (*command, "1", "--device", "rehearsal", "--case", quick_case)
    memory = 4 * processes
    return Part(f"parity-{name}", worth, 120, memory, gpu, dry, processes=processes)


def float8_compile(name: str, worth: float, flags: str) -> Part:
    """How float8 compiles with XLA's flags, of which a dry run has all at once."""
    own = (f"--xla={flags}",) if flags else ()
    both = (f"--xla={NO_TRITON} {NO_TUNING}",)
    return benchmark(name, worth, 90, 60, "float8_compile", full=own, small=both)


sizes = lambda parameters: ("--parameters", parameters)
train = lambda model: ("train_step", "--models", model)
torch = lambda model: ("torch_train_step", "--models", model)
LOSS_SCALE = ("loss_scale_overhead", "--donated")
PYTEST = ("pytest", "-p", "no:cacheprovider", "-q")
TESTS = (*PYTEST, "--optimized", "tests/test_gpu.py")
AT_ONCE = ("--at-once", "--continue-on-collection-errors")
QUICK_TESTS = ("-m", "not slow", "tests", "--ignore", "tests/lint")
QUICK = (*PYTEST, *AT_ONCE, "-n", "10", *QUICK_TESTS)
DRY_QUICK = (*PYTEST, "-n", "2", "-m", "not slow", "tests/test_hlo.py")
MEASURE = ("benchmarks.measure",)
DRY_MEASURE = (*PYTEST, "tests/test_measure.py", "-k", "a_cpu_is_measured")
FEW = ("--rows", "clipped,autocast + dynamic")
AMP = ("--rows", "AMP")
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
NO_TUNING = "--xla_gpu_autotune_level=0"
WITH_CPU = {"JAX_PLATFORMS": "cuda,cpu"}
# Timed with the flag that is tried first.
FLOAT8 = {"full": ("--widths", "4096"), "environment": {"XLA_FLAGS": NO_TRITON}}
# Each: name, worth, seconds, GB. The figures are from an H200, or estimated. Parity's
# planted faults and other libraries say nothing about a GPU.
PARTS = (
    Part("tests", 100, 90, 6, TESTS, TESTS),
    parity("behaviors", 95, 2, "bfloat16 after unscale_"),
    parity("training", 94, 2, "mlp, SGD"),
    parity("ops", 93, 5, "matmul"),
    parity("scale", 92, 4, "default: seed=0"),
    benchmark("train-gpt2", 90, 110, 66, *train("gpt2")),
    benchmark("torch-gpt2", 89, 75, 24, *torch("gpt2")),
    float8_compile("float8-compile-cublas", 85, NO_TRITON),
    float8_compile("float8-compile-untuned", 84, NO_TUNING),
    float8_compile("float8-compile", 83, ""),
    benchmark("train-vit", 80, 120, 42, *train("vit"), small=FEW),
    benchmark("train-resnet50", 79, 130, 32, *train("resnet50"), small=FEW),
    benchmark("float8", 78, 100, 32, "float8_step", **FLOAT8),
    Part("measure", 70, 110, 60, MEASURE, DRY_MEASURE, timed=True),
    Part(
        "quick-tests", 65, 240, 30, QUICK, DRY_QUICK, processes=10, environment=WITH_CPU
    ),
    benchmark("masters", 60, 40, 50, "master_weights", "--update"),
    benchmark("loss-scale", 59, 60, 30, *LOSS_SCALE, full=sizes("1e8,1e7")),
    benchmark("torch-vit", 55, 80, 40, *torch("vit"), small=AMP),
    benchmark("torch-resnet50", 54, 80, 40, *torch("resnet50"), small=AMP),
    benchmark("logging", 40, 60, 10, "logging_overhead"),
    benchmark("eager", 35, 60, 4, "eager_overhead"),
    benchmark("master-weights", 30, 60, 4, "master_weights", timed=False),
    benchmark("memory", 20, 30, 2, "memory", timed=False),
    benchmark("compile-time", 15, 200, 8, "compile_time"),
    benchmark("loss-scale-1b", 10, 120, 110, *LOSS_SCALE, full=sizes("1e6,1e9")),
)


def small(part: Part) -> Part:
    """The part of a dry run, whose times say nothing: it runs beside others."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    return part._replace(
        command=part.dry,
        seconds=DRY_SECONDS,
        memory=2,
        timed=False,
        processes=1,
        environment=flags,
    )


def together(parts: Sequence[Part], card: float, cores: int) -> int:
    """How many of some checks may run beside each other, whichever these are."""

    def fits(number: int) -> bool:
        most = lambda key: sum(heapq.nlargest(number, map(key, parts)))
        return most(lambda p: p.memory) <= card and most(lambda p: p.processes) <= cores

    return max((n for n in range(2, len(parts) + 1) if fits(n)), default=1)


def schedule(
    parts: Iterable[Part], card: float, cores: int
) -> Iterator[tuple[float, Part]]:
    """When each part starts: checks, the longest first, then timed parts by worth."""
    checks = sorted((p for p in parts if not p.timed), key=lambda p: -p.seconds)
    ends = [0.0] * together(checks, card, cores)
    for part in checks:
        yield ends[0], part
        heapq.heapreplace(ends, ends[0] + part.seconds)
    start = max(ends)
    for part in sorted((p for p in parts if p.timed), key=lambda p: -p.worth):
        yield start, part
        start += part.seconds


def choose(
    parts: Iterable[Part], seconds: float, card: float, cores: int
) -> list[tuple[float, Part]]:
    """The schedule of a call: of the parts by worth, each that fits with those before.

    Args:
      seconds: what is left of the call.
      card: the GPU's memory, in GB.
    """
    chosen: list[Part] = []
    for part in sorted(parts, key=lambda p: -p.worth):
        planned = schedule([*chosen, part], card, cores)
        if part.memory <= card and all(s + p.seconds <= seconds for s, p in planned):
            chosen.append(part)
    return list(schedule(chosen, card, cores))


PLAN = ("part", "starts at", "seconds", "GB", "processes")


def row_of(start: float, part: Part) -> tuple[str, ...]:
    at = f"{start // 60:.0f}:{start % 60:02.0f}"
    beside = "alone" if part.timed else str(part.processes)
    return part.name, at, f"{part.seconds:.0f}", f"{part.memory:g}", beside


def print_plan(parts: Sequence[Part]) -> None:
    """What calls run if each part passes and takes the time that is expected."""
    rows, left = [], list(parts)
    for number, minutes in enumerate(CALLS, 1):
        chosen = choose(left, 60 * minutes - GRACE, CARD, CORES)
        rows += [
            (f"{number}: {row[0]}", *row[1:]) for row in (row_of(*c) for c in chosen)
        ]
        left = [part for part in left if part not in [part for _, part in chosen]]
    rows += [(f"later: {part.name}", *row_of(0, part)[1:]) for part in left]
    print(f"{CARD} GB, {CORES} cores, calls of {' and '.join(map(str, CALLS))} minutes")
    _harness.print_table((f"call: {PLAN[0]}", *PLAN[1:]), rows)
