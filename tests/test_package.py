"""The package as a whole: names, docstrings, imports, version switches."""

import ast
import doctest
import importlib
import inspect
import operator
import pkgutil
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import jamp

from . import bad_input

PACKAGE = Path(jamp.__file__).parent
MODULES = ["jamp"]
MODULES += [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "jamp.")]
REFERENCE = re.findall(
    r"^::: jamp\.(\S+)$", (PACKAGE.parent / "docs/api.md").read_text(), re.MULTILINE
)
MADE_BY_JAMP = {"marks", "layout"}  # fields of a report, which users do not make
PUBLIC = [name for name in dir(jamp) if not name.startswith("_")]

# What a file of jamp may import: its own wing, and the rows above its own. Within a
# wing, imports do not form a cycle, and their chains are short.
FLOORS = (
    {"_checks", "_tree", "_compat"},
    {"_autocast", "_scaling"},
    {"_policy", "_debug"},
    {"_stable"},
    {"debug", "linen", "nnx", "sharding"},
    {"__init__"},
    {"__main__"},
)
SHARED = {"_tree": {"_checks"}, "_checks": set(), "_compat": set()}
USES_COMPAT = {"_autocast", "_debug"}
FLOORS_IN_A_WING = 6
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


def methods_of(value):
    """The public methods that jamp itself defines."""
    if not inspect.isclass(value):
        return
    for name, function in inspect.getmembers(value, inspect.isroutine):
        module = getattr(function, "__module__", None) or ""
        if not name.startswith("_") and module.startswith("jamp"):
            yield function


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(name_of(p)))
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


@pytest.mark.parametrize("wing", WINGS, ids=lambda p: p.name)
def test_a_wing_has_few_floors(wing):
    below = {
        path.stem: {name for at, name in imports_of(path) if at == wing.name}
        for path in wing.glob("*.py")
    }

    def height(name, above=()):
        assert name not in above, f"imported in a circle: {[*above, name]}"
        return 1 + max((height(n, (*above, name)) for n in below[name]), default=0)

    heights = {name: height(name) for name in below}
    assert max(heights.values()) <= FLOORS_IN_A_WING, heights


@pytest.mark.parametrize("wing", WINGS, ids=lambda p: p.name)
def test_a_wing_says_what_it_may_import(wing):
    text = (wing / "__init__.py").read_text()
    said = set(re.findall(r"`(\w+)`", text[text.index("May import:") :].split(".")[0]))
    used = {at or name for path in wing.glob("*.py") for at, name in imports_of(path)}
    assert used - {wing.name} <= said


def test_the_folder_is_small():
    entries = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 15


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(name_of(p)))
def test_private_jax_and_version_switches_live_in_compat_alone(path):
    if path.stem != "_compat":
        assert not re.search(r"jax\._src|__version__\s*([<>]|[!=]=)", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(name_of(p)))
def test_modules_stay_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            most = 60 if isinstance(node, ast.FunctionDef) else 200
            assert lines_of_code(node) <= most, f"{node.name} is too long"


def lines_of_code(node):
    """Of a function or class, without the docstrings in it."""
    inner = (n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef))
    first = (n.body[0] for n in inner if ast.get_docstring(n) is not None)
    said = sum(line.end_lineno - line.lineno + 1 for line in first)
    return node.end_lineno - node.lineno + 1 - said


def test_the_export_list_is_short():
    assert 0 < len(PUBLIC) <= 28


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(jamp, name)
    documentation = inspect.getdoc(value)
    assert documentation
    if inspect.isclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("jamp"):
                assert inspect.getdoc(function), f"{name}.{method}"
    if inspect.isfunction(value):
        assert ">>>" in documentation, f"{name} has no example"


@pytest.mark.parametrize(
    "name",
    [n for n in PUBLIC if n not in ("debug", "linen", "nnx", "sharding")],
)
def test_public_names_are_in_the_reference(name):
    reference = PACKAGE.parent / "docs" / "api.md"
    assert f"::: jamp.{name}\n" in reference.read_text()


def test_the_reference_has_all_methods_of_grad_scaler():
    page = (PACKAGE.parent / "docs/api.md").read_text()
    named = page.partition("::: jamp.GradScaler\n")[2].partition(":::")[0]
    for method in methods_of(jamp.GradScaler):
        own = method.__name__ in vars(jamp.GradScaler)
        assert own or re.search(rf"\b{method.__name__}\b", named), method


@pytest.mark.parametrize("name", REFERENCE)
def test_a_public_name_says_where_it_is_imported_from(name):
    namespace = ".".join(["jamp", *name.split(".")[:-1]])
    assert operator.attrgetter(name)(jamp).__module__ == namespace


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_an_example_and_every_argument(name):
    value = operator.attrgetter(name)(jamp)
    assert ">>>" in inspect.getdoc(value)
    for called in [value, *methods_of(value)]:
        text = inspect.getdoc(called)
        arguments = {*inspect.signature(called).parameters}
        for argument in arguments - {"self", "args", "kwargs"} - MADE_BY_JAMP:
            assert re.search(rf"\b{argument}\b", text), (called, argument)


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_no_markup_by_chance(name):
    value = operator.attrgetter(name)(jamp)
    for called in [value, *methods_of(value)]:
        for part in re.split(r"\n\s*\n|\n(?=\s*\w+: )", inspect.getdoc(called)):
            example = part.lstrip().startswith(">>>")
            prose = "" if example else re.sub("`[^`]*`", "", part)
            assert not re.match(r"\s*\w+: +>", prose), f"a quotation: {part}"
            assert len(re.findall(r"\w\*\*", prose)) < 2, f"bold between powers: {part}"


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_names_the_errors(name):
    jamps = [case for case in bad_input.CASES if "positional arg" not in case.argument]
    raising = {case.name for case in jamps}
    value = operator.attrgetter(name)(jamp)
    for called in [value, *methods_of(value)]:
        own = "" if called is value else f".{called.__name__}"
        if f"jamp.{name}{own}" in raising:
            text = inspect.getdoc(called)
            assert re.search(r"Raises:|Error", text), f"{name}{own} raises"


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert all(hasattr(jamp, name) for name in PUBLIC)  # some by need
    tests = [t for n in MODULES for t in finder.find(importlib.import_module(n))]
    return [pytest.param(t, id=t.name) for t in tests if t.examples]


@pytest.mark.parametrize("example", examples())
def test_docstring_examples_run(example, standard_promotion):
    assert not doctest.DocTestRunner().run(example).failed


def test_examples_are_found():
    assert len(examples()) >= 10


def test_version_is_that_of_the_distribution():
    try:
        assert version("jamp-jax") == jamp.__version__
    except PackageNotFoundError:
        pytest.skip("jamp runs from the source tree")
