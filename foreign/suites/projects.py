"""Which tests of which project run, and how a checkout of another release is found."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

WRONG_RELEASE = """--source {source}: this is a checkout of {suite} {found}, and \
{installed} is installed. Check out the tag of {installed}."""

NO_RELEASE = """--source {source}: there is no {file} with a version, so this is \
not a checkout of {suite}. Give the folder of the checkout."""

NO_FILE = """--select {glob}: there is no such file in {tests}. Give a path in that \
folder, or a pattern, such as "nn_test.py" or "linen/*_test.py::test_dense"."""


class Task(NamedTuple):
    """The tests of one file.

    Attributes:
      file: its path in the folder of tests.
      pattern: what the names of the tests must contain.
      size: of the sample, or None.
    """

    file: str
    pattern: str = ""
    size: int | None = None


class Suite(NamedTuple):
    """One project.

    Attributes:
      tests: where its tests are in the checkout.
      release: the file of the checkout that has its version, and what precedes it.
      files: patterns of the files that run by default, the most telling ones first. A
        number is the size of the sample that is taken of each of these files.
      counts: whether its tests count compilations, which a cache on disk would change.
    """

    tests: str
    release: tuple[str, str]
    files: dict[str, int | None]
    counts: bool = False


SUITES = {
    "jax": Suite(
        "tests",
        ("jax/version.py", "_version"),
        {
            "custom_api_test.py": None,
            "mutable_array_test.py": None,
            "lax_control_flow_test.py": None,
            "api_test.py": None,
            "hijax_test.py": None,
            "checkify_test.py": None,
            "name_stack_test.py": None,
            "shard_map_test.py": None,
            "nn_test.py": None,
            "random_test.py": None,
            "lax_numpy_test.py": 300,
            "linalg_test.py": 150,
        },
        counts=True,
    ),
    "flax": Suite(
        "tests",
        ("flax/version.py", "__version__"),
        {"nnx/**/*_test.py": None, "linen/*_test.py": None},
    ),
    "equinox": Suite(
        "tests",
        ("pyproject.toml", "version"),
        {"test_*.py": None},
    ),
    "optax": Suite(
        "optax",
        ("optax/__init__.py", "__version__"),
        {"**/*_test.py": 40},
    ),
}


def check_release(name: str, source: Path, installed: str | None = None) -> str:
    """The version of the checkout.

    Raises:
      ValueError: it is not that of the installed library, or it is not found.
    """
    file, before = SUITES[name].release
    path = source / file
    text = path.read_text() if path.is_file() else ""
    found = re.search(rf'^{before} = ["\']([^"\']+)', text, re.MULTILINE)
    if found is None:
        raise ValueError(NO_RELEASE.format(source=source, file=file, suite=name))
    installed = installed or version(name)
    if found[1] != installed:
        raise ValueError(
            WRONG_RELEASE.format(
                source=source, suite=name, found=found[1], installed=installed
            )
        )
    return found[1]


def stage(suite: Suite, source: Path, folder: Path) -> Path:
    """Links the tests, and nothing else of the checkout, into a folder of their own.

    If they ran where they are, Python would import the checkout instead of the
    installed library. Tests that are next to the modules they test are picked out.
    """
    target = folder / ("tests" if suite.tests == "tests" else f"{suite.tests}_tests")
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    tests = (source / suite.tests).resolve()
    if suite.tests == "tests":
        folder.mkdir(parents=True, exist_ok=True)
        target.symlink_to(tests)
        return target
    for path in sorted(tests.rglob("*_test.py")):
        link = target / path.relative_to(tests)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return target


def environment(suite: Suite, root: Path) -> dict[str, str]:
    """The environment of the tests: Python finds jamp, and not the checkout."""
    hidden = {"JAX_COMPILATION_CACHE_DIR"} if suite.counts else ()
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": str(root)}


def tasks(
    suite: Suite, tests: Path, selected: Sequence[str], size: int | None
) -> Iterator[Task]:
    """What to run: the files that are selected, or those of the table.

    Args:
      selected: entries such as "nn_test.py" or "nn_test.py::testGelu".
      size: of the sample of each file, instead of the table's.
    """
    found = [entry.partition("::") for entry in selected]
    wanted = {file: (pattern, size) for file, _, pattern in found}
    wanted = wanted or {file: ("", size or n) for file, n in suite.files.items()}
    for glob, (pattern, n) in wanted.items():
        files = sorted(tests.glob(glob))
        if not files:
            raise ValueError(NO_FILE.format(glob=glob, tests=tests))
        for file in files:
            yield Task(str(file.relative_to(tests)), pattern, n)
