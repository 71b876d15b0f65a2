"""The structure of the package: who imports what, and from where."""

import ast
import re
from pathlib import Path

from tests.marks import walk

PACKAGE = Path(__file__).parents[2] / "jamp"

# What a file of jamp may import: its own wing, and the rows above its own. Within a
# wing, imports do not form a cycle.
FLOORS = (
    {"_checks", "_tree", "_compat", "_jaxprs", "_targets"},
    {"_autocast", "_scaling"},
    {"_policy", "_debug"},
    {"_stable"},
    {"debug", "linen", "nnx", "sharding"},
    {"__init__"},
    {"__main__"},
)
SHARED = {name: set() for name in FLOORS[0]} | {
    "_tree": {"_checks"},
    "_checks": {"_targets"},
}
USES_COMPAT = {"_autocast", "_debug"}
FILES = sorted(PACKAGE.rglob("*.py"))
WINGS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def name_of(path):
    """A file in jamp, as ("", "_tree") or ("_scaling", "state")."""
    *wing, name = path.relative_to(PACKAGE).with_suffix("").parts
    return "".join(wing), name


def imports_of(path):
    """The files of jamp that a file imports, by name."""
    wing, _ = name_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            here = wing if node.level == 1 else ""
            at, _, name = (node.module or "").rpartition(".")
            names = [name] if name else [alias.name for alias in node.names]
            for name in names:
                if (PACKAGE / here / at / name).is_dir():
                    names = [alias.name for alias in node.names]
                    yield from ((name, inner) for inner in names)
                else:
                    yield here or at, name


def floor_of(wing, name):
    return next(index for index, row in enumerate(FLOORS) if (wing or name) in row)


@walk("path", FILES, ids=lambda path: "/".join(name_of(path)))
def test_imports_point_one_way(path):
    wing, name = name_of(path)
    for other in imports_of(path):
        assert (PACKAGE / other[0] / f"{other[1]}.py").exists(), other
        if not wing and name in SHARED:
            assert not other[0] and other[1] in SHARED[name], other
        elif not wing or other[0] != wing:
            assert floor_of(*other) < floor_of(wing, name), other
        if other == ("", "_compat"):
            assert wing in USES_COMPAT


@walk("wing", WINGS, ids=lambda wing: wing.name)
def test_no_file_of_a_wing_imports_itself(wing):
    below = {
        path.stem: {name for at, name in imports_of(path) if at == wing.name}
        for path in wing.glob("*.py")
    }

    while below:
        done = {name for name in below if below[name].isdisjoint(below)}
        assert done, f"imported in a circle: {below}"
        below = {name: below[name] for name in below.keys() - done}


@walk("wing", WINGS, ids=lambda wing: wing.name)
def test_a_wing_says_what_it_may_import(wing):
    text = (wing / "__init__.py").read_text()
    said = set(re.findall(r"`(\w+)`", text[text.index("May import:") :].split(".")[0]))
    used = {at or name for path in wing.glob("*.py") for at, name in imports_of(path)}
    assert used - {wing.name} <= said


def test_the_folder_is_small():
    entries = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 18


@walk("path", FILES, ids=lambda path: "/".join(name_of(path)))
def test_private_jax_and_version_switches_live_in_compat_alone(path):
    if path.stem != "_compat":
        assert not re.search(r"jax\._src|__version__\s*([<>]|[!=]=)", path.read_text())


@walk("path", FILES, ids=lambda path: "/".join(name_of(path)))
def test_targets_alone_asks_what_the_device_can_do(path):
    """Elsewhere the answer would be that of the machine that traces."""
    if path.stem not in ("_targets", "__main__"):
        assert not re.search(r"default_backend|local_devices\(", path.read_text())
