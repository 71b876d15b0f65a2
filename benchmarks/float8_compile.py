"""How long each float8 step takes to compile, and where one stands that does not end.

    python -m benchmarks.float8_compile --device gpu
    python -m benchmarks.float8_compile --device gpu --xla=--xla_gpu_autotune_level=0
    python -m benchmarks.float8_compile               # on the CPU, to try the code

The step is that of `benchmarks.float8_step` for a block of Llama. Each row is traced,
compiled and run once in a process of its own, beside the others. After 60 seconds the
stacks of those that have not ended are printed: Python's by `faulthandler`, the native
ones by gdb or eu-stack as far as these are installed, and what /proc says of each
thread. After 90 seconds they are killed. `--xla` passes flags to XLA.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import _harness
from benchmarks.float8_step import ROWS, SHAPES, builds
from benchmarks.model_sizes import Llama
from shared.processes import end_group, start_group

ROOT = Path(__file__).parents[1]
WIDTHS = {"gpu": 4096, "cpu": 256, "small": 32}
STACK_AFTER, LIMIT = 60.0, 90.0  # seconds
TOOL_LIMIT = 25  # seconds
TOOLS = (
    ("gdb", "-batch", "-ex", "thread apply all backtrace", "-p"),
    ("eu-stack", "-p"),
)
ANY_PROCESS, PR_SET_PTRACER = ctypes.c_ulong(-1), 0x59616D61
# The files of XLA that autotune, which then say what they try.
TALKING = "autotuner=1,autotuner_pass=1,gemm_fusion_autotuner=1,gemm_algorithm_picker=1"


def stacks(pid: int) -> str:
    """What each thread of a process does, and what could not be found out."""
    found = []
    for tool, *options in TOOLS:
        if shutil.which(tool) is None:
            found.append(f"{tool} is not installed")
            continue
        try:
            ran = subprocess.run(
                [tool, *options, str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TOOL_LIMIT,
            )
        except subprocess.TimeoutExpired:
            found.append(f"{tool} did not end in {TOOL_LIMIT} s")
            continue
        found.append(f"{tool}, exit {ran.returncode}:\n{ran.stdout}")
        if ran.returncode == 0:
            break
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        found.append(f"thread {task.name}: {', '.join(map(' '.join, facts(task)))}")
    return "\n".join(found)


def facts(task: Path) -> list[tuple[str, str]]:
    """Of a thread: its name, state, seconds of work, and where the kernel has it."""

    def read(name: str) -> str:
        try:
            return (task / name).read_text().strip().replace("\n", " / ")
        except OSError as error:  # it has ended, or we may not look
            return f"({error.strerror})"

    # The name, in parentheses, may hold spaces. State and times are 3, 14 and 15.
    fields = read("stat").rpartition(")")[2].split()
    is_there = len(fields) > 12
    ticks = sum(map(int, fields[11:13])) if is_there else 0
    return [
        (read("comm"), fields[0] if is_there else "ended"),
        (f"{ticks / os.sysconf('SC_CLK_TCK'):.1f}", "s of work"),
        *((name, read(name)) for name in ("wchan", "syscall", "stack", "children")),
    ]


def watch(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    stack_after: float = STACK_AFTER,
    limit: float = LIMIT,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, float | None]:
    """Runs commands beside each other. Name -> seconds; None for what was killed.

    What they print, and their stacks, go to `folder / name`.
    """
    start, running, seconds = time.monotonic(), {}, {}
    try:
        for name, argv in commands.items():
            with (folder / name).open("w") as log:
                running[name] = start_group(argv, log, ROOT, environment)
        have_stacks = False
        while len(seconds) < len(running) and time.monotonic() < start + limit:
            for name, process in running.items():
                if name not in seconds and process.poll() is not None:
                    seconds[name] = time.monotonic() - start
            left = {name: running[name].pid for name in running.keys() - seconds.keys()}
            if left and not have_stacks and time.monotonic() > start + stack_after:
                have_stacks = True
                with ThreadPoolExecutor(len(left)) as pool:
                    texts = pool.map(stacks, left.values())
                    for name, text in zip(left, texts, strict=True):
                        with (folder / name).open("a") as log:
                            log.write(f"\nafter {stack_after:.0f} s:\n{text}\n")
            time.sleep(0.1)
    finally:
        for process in running.values():
            end_group(process)
    return {name: seconds.get(name) for name in commands}


def compile_row(args: argparse.Namespace) -> None:
    """One row, in this process."""
    faulthandler.dump_traceback_later(STACK_AFTER - 5)
    if sys.platform == "linux":  # else only an ancestor may look at this process
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY_PROCESS)
    _harness.prepare(args, "benchmarks.float8_compile")
    import jax

    from benchmarks import models
    from benchmarks.train_step import Row

    kind = "small" if args.small else args.device
    batch, sequence = SHAPES[kind]
    size = Llama(batch, 1, WIDTHS[kind], sequence)
    data = jax.block_until_ready(models.make_batch(size))
    start = time.perf_counter()
    row = Row(builds()[args.row], size, args.device == "gpu", data)
    compiled = time.perf_counter() - start
    row()
    found = {"seconds": compiled, "loss": float(row.losses[0])}
    _harness.save(args.json, found)
    print(f"{args.row}: {found}")


def compile_all(args: argparse.Namespace) -> dict[str, Any]:
    """Row -> how it ended, and its seconds of tracing and compiling."""
    environment = dict(os.environ)
    flags = f"{os.environ.get('XLA_FLAGS', '')} {args.xla}".strip()
    environment |= {
        "XLA_FLAGS": flags,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / len(ROWS):.2f}",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": TALKING,
    }
    print(f"XLA_FLAGS={flags}", flush=True)
    own = [sys.executable, "-m", "benchmarks.float8_compile", "--device", args.device]
    own += ["--small"] * args.small
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = lambda row: folder / f"{row}.json"
        commands = {row: [*own, "--row", row, "--json", str(file(row))] for row in ROWS}
        ended = watch(commands, folder, environment=environment)
        results = {}
        for row, took in ended.items():
            print(f"\n{row}\n{(folder / row).read_text()}", flush=True)
            found = {"seconds": None, "loss": None, "outcome": "failed"}
            if took is None:
                found["outcome"] = f"killed after {LIMIT:.0f} s"
            elif file(row).exists():
                found |= json.loads(file(row).read_text())["results"]
                found["outcome"] = "compiled"
            results[row] = found
    return {"flags": args.xla or "none", "rows": results}


def main() -> int:
    parser = _harness.parser(__doc__)
    parser.add_argument("--xla", default="", help="flags for XLA: --xla=--xla_...")
    parser.add_argument("--row", choices=ROWS, help="this one, in this process")
    args = parser.parse_args()
    if args.row:
        compile_row(args)
        return 0
    results = compile_all(args)
    _harness.print_table(
        (f"with {results['flags']}", "outcome", "trace and compile", "first loss"),
        (
            (
                row,
                found["outcome"],
                "" if found["seconds"] is None else f"{found['seconds']:.1f} s",
                "" if found["loss"] is None else f"{found['loss']:.4f}",
            )
            for row, found in results["rows"].items()
        ),
    )
    _harness.save(args.json, results)
    return int(any(row["outcome"] != "compiled" for row in results["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
