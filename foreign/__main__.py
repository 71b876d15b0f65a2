"""`python -m foreign`: other projects' tests, in jamp's regions.

Each test runs plain, in a region that decides nothing, where a test that passes plain
must pass too, except for the short list in `suites/inside.py`, and in
`jamp.autocast(jnp.float16)`. There values and dtypes differ, as they should, so only
crashes count, and a sentence of docs/sharp-edges.md must cover each
(`suites/edges.py`).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .suites import projects, records, report, result, running
from .suites.records import PASSED, PLAIN, WAYS

KEPT_IN = running.ROOT / "runs" / "foreign"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a file cannot be run or a result is unexpected."""
    options = parse(arguments)
    suite = projects.SUITES[options.suite]
    folder = options.folder / options.suite
    projects.check_release(options.suite, options.source)
    tests = projects.stage(suite, options.source, folder)
    tasks = list(projects.tasks(suite, tests, options.select, options.sample))
    deadline = time.time() + options.limit_seconds
    limits = running.Limits(options.test_seconds, deadline)
    environment = projects.environment(suite, running.ROOT)
    configuration = options.source.resolve() / "pyproject.toml"
    broken = []
    for task in tasks:
        if options.rerun:
            forget(folder, task, options.way or WAYS, options.rerun)
        for way in options.way or WAYS:
            said = running.run(
                tests, folder, task, way, limits, environment, configuration
            )
            if said is not None:
                broken.append(task.file)
                print(f"{task.file} cannot be run {way}:\n{said}")
                break
        print(report.line(result.file(folder, task.file)), flush=True)
    found = list(result.files(folder))
    print("\n".join(report.details(found)))
    wrong = any(file.differing() or result.uncovered(file) for file in found)
    return 1 if broken or wrong else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m foreign", description=__doc__)
    add = parser.add_argument
    add("--suite", choices=[*projects.SUITES], required=True)
    add("--source", type=Path, required=True, help="a checkout of the installed tag")
    add("--select", nargs="+", default=[], metavar="FILE[::PATTERN]")
    add("--sample", type=int, help="number of tests of each file, always the same ones")
    add("--way", choices=WAYS, nargs="+", help="by default all three")
    add("--rerun", choices=("failed", "all"), help="run these again")
    add("--limit-seconds", type=float, default=float("inf"), help="of all together")
    add("--test-seconds", type=float, default=120.0, help="limit of one plain test")
    add("--folder", type=Path, default=KEPT_IN, help="folder of the outcomes")
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"--source {options.source}: no such folder; give a checkout")
    return options


def forget(folder: Path, task: projects.Task, ways: Sequence[str], which: str) -> None:
    for way in ways:
        path = running.output(folder, task, way)
        tests = [
            x.test
            for x in records.read(path).values()
            if task.pattern in x.test
            and (which == "all" or (way != PLAIN and x.outcome != PASSED))
        ]
        if tests:
            records.forget(path, tests)


if __name__ == "__main__":
    sys.exit(main())
