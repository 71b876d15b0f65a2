"""`python -m parity`: runs and compares every case, and writes the report."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from . import (
    NAMES,
    NIGHTLY,
    devices,
    golden,
    part_named,
    report,
    runner,
    scale,
    spread,
)

LIBRARIES = ("torch", "torchao", "jax", "jaxlib", "flax", "optax", "numpy")


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument(
        "--device",
        choices=devices.NAMES,
        default=devices.CPU,
        help="where torch runs; with rehearsal, on a CPU in the place of CUDA",
    )
    parser.add_argument(
        "--write-golden",
        action="store_true",
        help="replace the golden file; with --only spread, widen its arrays",
    )
    parser.add_argument(
        "--only",
        choices=NAMES + NIGHTLY,
        nargs="+",
        help="print the sections of these parts and write no report",
    )
    parser.add_argument(
        "--nightly",
        action="store_true",
        help="run the parts that take long, and write no report",
    )
    parser.add_argument(
        "--case", default="", help="with --only: run cases whose names contain this"
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="how many cases run at a time (default: one per core; with cuda, one)",
    )
    options = parser.parse_args(arguments)
    if options.nightly and (options.only or options.write_golden):
        parser.error("--nightly runs parts of its own, and writes no golden file")
    if options.case and not options.only:
        parser.error("--case needs --only, since a report has all cases")
    if options.write_golden and (
        options.case or options.only not in (None, ["spread"])
    ):
        parser.error("--write-golden goes alone, or with --only spread")
    if options.device == devices.CUDA:
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no GPU here")
    if options.write_golden and options.device != devices.CPU:
        parser.error("--write-golden: the golden file is made on the CPU")
    if options.processes is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
        options.processes = 1 if options.device == devices.CUDA else cores
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if anything differs from torch or a golden file."""
    options = _arguments(arguments)
    names = options.only or (NIGHTLY if options.nightly else NAMES)
    parts = [part_named(name) for name in names]
    start = time.perf_counter()
    total = sum(options.case in name for part in parts for name in part.CASES)
    found = {part: {} for part in parts}
    seconds = dict.fromkeys(parts, 0.0)
    for done, ran in enumerate(
        runner.results(parts, options.case, options.device, options.processes), 1
    ):
        if sys.stderr.isatty():
            print(f"\r{done} of {total} cases", end="", file=sys.stderr)
        found[ran.part][ran.result.case] = ran.result
        seconds[ran.part] += ran.seconds
    results = {
        part: [found[part][name] for name in part.CASES if name in found[part]]
        for part in parts
    }
    every = [result for of_part in results.values() for result in of_part]
    wrong = [result for result in every if not result.as_expected]
    for result in wrong:
        print(f"differs: {result.where or result.case}")
    if options.only:
        print("\n\n".join(report.section(*item) for item in results.items()))
        print(f"{len(every)} cases, {len(wrong)} not as expected")
        if options.write_golden:
            golden.save(spread.widened(golden.load(), results[spread]))
            return 0
        return 1 if wrong or not every else 0

    if any(result.raised for result in every):
        print("no report was written, because a case raised an exception")
        return 1
    suffix = "" if options.device == devices.CPU else f"-{options.device}"
    stale = []
    title = report.NIGHTLY
    if not options.nightly:
        # On a GPU the sums of the other parts round differently.
        on_cpu = options.device == devices.CPU
        checked = results if on_cpu else {scale: results[scale]}
        stale = golden.check(checked, write=options.write_golden)
        title = report.TITLE
    flags = " --nightly" * options.nightly
    text = report.text(
        results,
        title=title,
        arguments=flags + f" --device {options.device}" * bool(suffix),
        device=f'on "{options.device}"',
        versions=_versions(),
        seconds=f"{time.perf_counter() - start:.0f}",
        by_part=", ".join(
            f"{part.__name__.rpartition('.')[2]} {took:.0f}"
            for part, took in seconds.items()
        ),
    )
    if not options.nightly:
        file = golden.PATH.with_name(f"report{suffix}.md")
        file.write_text(text, encoding="utf-8")
    print(text)
    if stale:
        print(f"differs from live torch: {', '.join(stale)}")
    return 1 if wrong or stale else 0


if __name__ == "__main__":
    sys.exit(main())
