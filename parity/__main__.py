"""`python -m parity`: runs every case, compares, writes the report and the picture."""

import argparse
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from . import golden, jamp_side, ops, report, torch_side
from .cases import CASES, FIRST_OF_KIND, LONG_RUN, overflows
from .trajectory import bits, compare

try:
    from rich.progress import track
except ImportError:

    def track(sequence: Iterable[Any], description: str) -> Iterable[Any]:
        """Stands in for rich's progress bar."""
        print(description)
        return sequence


def _versions() -> str:
    names = ("torch", "jax", "jaxlib", "flax", "optax", "numpy")
    return ", ".join(
        [f"{name} {version(name)}" for name in names]
        + [f"Python {platform.python_version()}"]
    )


def _compare_ops() -> list[ops.Result]:
    return [ops.compare(op) for op in track(ops.LISTED + ops.UNLISTED, "autocast")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if anything differs from torch or the golden file."""
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--write-golden", action="store_true", help="replace parity/golden.npz"
    )
    parser.add_argument(
        "--ops", action="store_true", help="print the section on autocast alone"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.device == "cuda" and options.write_golden:
        parser.error("--write-golden: the golden file is made on the CPU")

    if options.ops:
        results = _compare_ops()
        print(report.ops(results))
        return 0 if all(result.expected for result in results) else 1

    start = time.perf_counter()
    torch_runs, pictured, comparisons = [], {}, []
    for case in track(CASES, "torch and jamp"):
        expected = torch_side.run(case, options.device)
        scanned = jamp_side.run_nnx(case)
        runs = {"GradScaler, nnx.scan": scanned}
        if case in FIRST_OF_KIND:
            runs["GradScaler, step by step"] = jamp_side.run_nnx(
                case, step_by_step=True
            )
        if jamp_side.fits_optax(case):
            runs["dynamic_loss_scale, lax.scan"] = jamp_side.run_optax(case)
        comparisons += [compare(case, p, expected, found) for p, found in runs.items()]
        torch_runs.append(expected)
        pictured[case.name] = (case, expected, scanned)

    print(f"long run of {LONG_RUN.steps:,} steps")
    found_inf = overflows(LONG_RUN)
    long_torch = torch_side.run_scale(LONG_RUN, found_inf, options.device)
    long_jamp = jamp_side.run_scale(LONG_RUN, found_inf)
    long_bits = [bits(scales) for scales, _ in (long_torch, long_jamp)]
    long_mismatches = {
        "scale": int(np.count_nonzero(long_bits[0] != long_bits[1])),
        "tracker": int(np.count_nonzero(long_torch[1] != long_jamp[1])),
    }

    # Autocast's section needs no GPU, and its values are those of the CPU.
    op_results = _compare_ops() if options.device == "cpu" else []

    made = golden.pack(torch_runs, long_torch, torch.__version__)
    if options.write_golden:
        golden.save(made)
    stale = golden.differences(golden.load(), made)

    suffix = "" if options.device == "cpu" else "-cuda"
    picture = golden.PATH.with_name(f"trajectories{suffix}.png")
    report.draw(picture, pictured, (long_torch[0], long_jamp[0]))
    text = report.text(
        comparisons,
        long_torch,
        long_mismatches,
        device=options.device,
        arguments="" if options.device == "cpu" else " --device cuda",
        picture=picture.name,
        ops=report.ops(op_results) if op_results else "",
        versions=_versions(),
        seconds=time.perf_counter() - start,
    )
    golden.PATH.with_name(f"report{suffix}.md").write_text(text, encoding="utf-8")
    print(text)
    if stale:
        print(f"parity/golden.npz differs from live torch in: {', '.join(stale)}")
    different = any(item.where for item in comparisons) or any(long_mismatches.values())
    different |= not all(result.expected for result in op_results)
    return 1 if different or stale else 0


if __name__ == "__main__":
    sys.exit(main())
