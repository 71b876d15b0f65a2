"""`python -m foreign --suite ecosystem`: calls and programs, and the page."""

import argparse
import os
import pickle
import time

import jax

from . import compare, libraries, page, programs, reasons
from .libraries import Library
from .page import Section

# Programs run once: XLA compiles in a third of the time without LLVM's optimizations.
# By default it leaves out a cast to half precision and back, and so hides its rounding.
FLAGS = "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false"
if jax.__version_info__ < (0, 11):  # later ones abort at a flag that is gone
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"

NO_LIBRARY = "--select {}: there is no such library. Choose from: {}."


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 for what no reason covers, and for a stale reason."""
    os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    os.environ.setdefault("KERAS_BACKEND", "jax")
    every = [x.name for x in libraries.ALL]
    chosen = options.select or every
    if strangers := set(chosen) - set(every):
        said = ", ".join(sorted(strangers)), ", ".join(every)
        raise ValueError(NO_LIBRARY.format(*said))
    known: list[Section] = []
    for library in libraries.ALL:  # what the others gave is kept from run to run
        file = options.folder / "ecosystem" / f"{library.name}.pickle"
        if library.name in chosen:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pickle.dumps(section(library)))
        if file.exists():
            known.append(pickle.loads(file.read_bytes()))
    problems = [said for x in known if x.name in chosen for said in wrong(x)]
    if len(known) == len(libraries.ALL):
        page.write(options.page, known)
        if not any(x.missing for x in known):
            names = [row.name for each in known for row in each.rows]
            problems += reasons.unknown(names)
    for said in problems:
        print(said)
    done = sum(len(x.rows) for x in known if x.name in chosen)
    print(f"{done} calls, {len(problems)} problems")
    return 1 if problems else 0


def section(library: Library) -> Section:
    """Runs what a library has, and prints the figures of each call."""
    start = time.process_time()
    release, why = libraries.release(library), libraries.missing(library)
    rows, outcomes = [], []
    if not why:
        rows = [compare.compare(call) for call in libraries.calls(library)]
        every = libraries.programs(library)
        outcomes = [programs.measure(each, compare.DTYPES) for each in every]
    seconds = time.process_time() - start
    said = f"skipped, {why}" if why else f"{len(rows)} calls, {seconds:.0f} s"
    for row in rows:
        print(page.line([row]))
    print(f"{library.name} {release}: {said}", flush=True)
    return Section(library.name, release, why, rows, outcomes)


def wrong(section: Section) -> list[str]:
    """What no reason covers, and reasons that nothing needs, a sentence for each."""
    found = [
        f"{row.name}: {fault}: {said}"
        for row in section.rows
        for fault, said in reasons.unexplained(row).items()
    ]
    found += reasons.stale(section.rows)
    return found + [
        f"{x.name}: {x.raised or f'apart {x.apart}, noise {x.noise:.1e}'}"
        for x in section.outcomes
        if x.wrong
    ]
