"""Runs the tests of `tests/versions.txt` on each release of JAX that jamp promises.

CI runs the lowest and the newest one, the night and a new version of jamp all.

Each release has an environment in `.venv-versions` and one process, and as many run at
a time as there are cores. The table at the end counts tests and failures by release. A
test that ends the process is a failure, after which the others go on.

Usage: python scripts/versions.py [--write] [--all] [--optimized] [--pre]
  [RELEASE ...]

  RELEASE: as in the table, such as 0.11.1, or "lowest" or "newest", or 3.12 for all
    that run on this Python, 3.12-newest for its newest. A Python that is not on this
    machine is skipped with a word, and is an error if it was asked for.
  --write: write the table into the documentation.
  --all: all tests but those of files.
  --optimized: compile with XLA's default optimizations.
  --pre: with pre-releases of JAX and of its dependencies.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
HOME = Path(".venv-versions")
PAGE = ROOT / "docs" / "libraries.md"
START, END = "<!-- releases: begin -->\n", "<!-- releases: end -->\n"

NEWEST = "newest"
# By Python. The newest JAX is what the resolver finds on the day.
RELEASES = {
    "3.11": ["0.10.0", "0.10.1", "0.10.2"],
    "3.12": ["0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1", NEWEST],
    "3.13": [NEWEST],
}
LOWEST = "0.10.0"  # runs with the lowest Flax and optax that pyproject.toml allows

ON_EACH = ["-m", "not slow or every_release", "@tests/versions.txt"]
# The newest release also runs what meets JAX's inside.
ON_THE_NEWEST = [*ON_EACH, "@tests/inside.txt"]
LIMIT = 900  # seconds for a release, most of which take one or two minutes
# What a release computes is the same on another version of Python.
ON_ANOTHER_PYTHON = [*ON_EACH, "--deselect", "tests/torch"]
ALL = ["tests", "--ignore", "tests/lint"]

# What uv says when nothing can be downloaded.
NO_NETWORK = re.compile(
    r"dns error|error sending request|client error \(Connect\)|tunnel|max retries|"
    r"failed to establish a new connection|connection broken|"
    r"network (was|is) (disabled|unreachable)|No solution found.*offline",
    re.IGNORECASE | re.DOTALL,
)


class Release(NamedTuple):
    """A row of the table."""

    python: str
    jax: str
    is_newest: bool = False
    is_again: bool = False  # of a release that runs on another Python too

    @property
    def venv(self) -> Path:
        return HOME / f"{self.python}-{self.jax}"


class Result(NamedTuple):
    release: Release
    rows: int
    failures: int
    seconds: float
    said: str = ""  # what failed
    has_network: bool = True


class Failed(Exception):
    """A command failed, and this is what it printed."""


def output_of(*command: object, **options: object) -> str:
    """What a command prints.

    Raises:
      Failed: it fails.
    """
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, **options
    )
    if done.returncode:
        raise Failed(f"{done.stdout}{done.stderr}".strip())
    return done.stdout


def uv(*arguments: object, **options: object) -> str:
    """Runs uv with the indexes that pip is told to use."""
    indexes = {
        "UV_DEFAULT_INDEX": os.environ.get("PIP_INDEX_URL"),
        "UV_INDEX": os.environ.get("PIP_EXTRA_INDEX_URL"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    env = os.environ | {name: value for name, value in indexes.items() if value}
    tool = HOME / "tools" / "bin" / "python"
    return output_of(tool, "-m", "uv", "--quiet", *arguments, env=env, **options)


def make_tools() -> None:
    if not (ROOT / HOME / "tools" / "bin" / "uv").exists():
        output_of(sys.executable, "-m", "venv", HOME / "tools")
        output_of(HOME / "tools" / "bin" / "python", *"-m pip install -q uv".split())


def newest(python: str, flags: Sequence[str]) -> str:
    """The newest JAX for a version of Python."""
    arguments = "--no-deps", "--no-header", "--no-annotate", "--python-version", python
    found = uv("pip", "compile", "-", *arguments, *flags, input="jax\n")
    return found.strip().removeprefix("jax==")


def releases(names: Sequence[str], flags: Sequence[str]) -> list[Release]:
    """The releases of these names, or all, with the newest of the day."""
    rows, of_the_day = [], set()
    for python, versions in RELEASES.items():
        if NEWEST in versions:
            day = newest(python, flags)
            of_the_day.add(day)
            versions = dict.fromkeys(day if v == NEWEST else v for v in versions)
        rows += [Release(python, version) for version in versions]
    first = {row.jax: row for row in reversed(rows)}
    rows = [
        row._replace(is_newest=row.jax in of_the_day, is_again=row != first[row.jax])
        for row in rows
    ]
    called = {row: {row.python, row.jax} for row in rows}
    for row in rows:
        if row.jax in of_the_day:
            called[row] |= {NEWEST, f"{row.python}-{NEWEST}"}
        called[row] |= {"lowest"} if row.jax == LOWEST else set()
    if unknown := {*names}.difference(*called.values()):
        sys.exit(f"There is no release {', '.join(unknown)}; see RELEASES.")
    return [row for row in rows if not names or called[row] & {*names}]


def lowest_bounds() -> list[str]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    for dependency in dependencies:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", dependency), (
            f"no lower bound: {dependency}"
        )
    return [dependency.replace(">=", "==") for dependency in dependencies]


def install(release: Release, python: str, flags: Sequence[str]) -> None:
    """Makes the environment of a release; uv chooses jaxlib and all else."""
    if not (ROOT / release.venv / "bin" / "python").exists():
        uv("venv", "--clear", "--python", python, release.venv)
    pins = [f"jax=={release.jax}"]
    if release.jax == LOWEST:
        pins += [pin for pin in lowest_bounds() if not pin.startswith("jax==")]
    interpreter = release.venv / "bin" / "python"
    into = "--upgrade", "--python", interpreter
    uv("pip", "install", *into, "--editable", ".[test]", *pins, *flags)


def tested(
    release: Release, selection: Sequence[str], limit: float | None = None
) -> Result:
    """Runs the tests of a release in one process.

    If one of them ends that process, all run again in another one that pytest watches:
    there such a test is a failure, and the next one runs.
    """
    report, log = (ROOT / release.venv / name for name in ("report.xml", "log.txt"))
    report.unlink(missing_ok=True)
    pytest = ["-m", "pytest", "-q", f"--junitxml={report}", *selection]
    start = time.monotonic()
    for watched in ([], ["-n", "1"]):
        with open(log, "w") as file:
            try:
                status = subprocess.run(
                    ["scripts/cached-python", release.venv, *pytest, *watched],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                ).returncode
            except subprocess.TimeoutExpired:
                said = f"The tests do not end in {limit} seconds: {log} says how far."
                return Result(release, 0, 1, limit, said)
        if report.exists():
            break
    seconds = time.monotonic() - start
    text = log.read_text()
    cases = []
    if report.exists():
        cases = list(ElementTree.parse(report).iter("testcase"))
    rows = [case for case in cases if case.find("skipped") is None]
    failed = [
        case
        for case in rows
        if any(case.find(kind) is not None for kind in ("failure", "error"))
    ]
    failures = len(failed) or int(status != 0)
    said = "\n".join(text.splitlines()[-60:]) if failures else ""
    return Result(release, len(rows), failures, seconds, said)


def run(
    release: Release,
    python: str,
    selection: Sequence[str],
    flags: Sequence[str],
    limit: float | None = None,
) -> Result:
    try:
        install(release, python, flags)
    except Failed as failure:
        said = f"The environment cannot be made:\n{failure}"
        has_network = not NO_NETWORK.search(said)
        return Result(release, 0, 1, 0, said, has_network)
    return tested(release, selection, limit)


def table(results: Iterable[Result], has_seconds: bool = True) -> str:
    """The results, for people; on the page without the seconds of a machine."""
    header = ["JAX", "Python", "tests", "failures", "seconds"]
    rows = [
        [r.release.jax, r.release.python, r.rows, r.failures, round(r.seconds)]
        for r in results
    ]
    cut = len(header) if has_seconds else -1
    lines = [header[:cut], ["---"] * len(header[:cut]), *(row[:cut] for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def write(results: Iterable[Result]) -> None:
    """Writes the table into the page."""
    head, _, rest = PAGE.read_text().partition(START)
    written = table(results, has_seconds=False)
    PAGE.write_text(head + START + written + END + rest.partition(END)[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="*")
    for option in ("write", "all", "optimized", "pre"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    flags = ["--prerelease", "allow"] if args.pre else []
    try:
        make_tools()
        chosen = releases(args.release, flags)
    except Failed as failure:
        if not NO_NETWORK.search(str(failure)):
            raise
        print("Skipped: the releases of JAX cannot be installed here.")
        print(failure)
        return 0

    pythons = {}
    for python in dict.fromkeys(release.python for release in chosen):
        try:
            pythons[python] = output_of("scripts/find-python", python).strip()
        except Failed as failure:
            print(failure, flush=True)
            if python in args.release:
                return 1

    def run_one(release: Release) -> Result:
        selection = ON_THE_NEWEST if release.is_newest else ON_EACH
        selection = ON_ANOTHER_PYTHON if release.is_again else selection
        selection = ALL if args.all else selection
        optimized = ["--optimized"] if args.optimized else []
        python = pythons[release.python]
        limit = None if args.all else LIMIT
        result = run(release, python, [*optimized, *selection], flags, limit)
        print(f"\n== {release}\n{result.said}" if result.said else release, flush=True)
        return result

    here = [release for release in chosen if release.python in pythons]
    # The newest takes longest, so it starts first.
    order = sorted(here, key=lambda release: not release.is_newest)
    with ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(order, pool.map(run_one, order), strict=True))
    results = [done[release] for release in here]
    print(f"\n{table(results)}")
    if results and not any(result.has_network for result in results):
        print("Skipped: the releases of JAX cannot be installed here.")
        return 0
    failures = sum(result.failures for result in results)
    print(f"{sum(r.rows for r in results) - failures} passed, {failures} failed")
    if args.write:
        write(results)
    return int(failures > 0 or not results)


if __name__ == "__main__":
    sys.exit(main())
