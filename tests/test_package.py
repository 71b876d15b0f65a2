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
MODULES += [f"jamp.{module.name}" for module in pkgutil.iter_modules([str(PACKAGE)])]
REFERENCE = re.findall(
    r"^::: jamp\.(\S+)$", (PACKAGE.parent / "docs/api.md").read_text(), re.MULTILINE
)
MADE_BY_JAMP = {"marks", "layout"}  # fields of a report, which users do not make
PUBLIC = [name for name in vars(jamp) if not name.startswith("_")]

# Imports point one way: a module may import from the layers before its own.
LAYERS = [
    {
        "_compat",
        "_exponents",
        "_finiteness",
        "_op_rules",
        "_paths",
        "_table",
        "_tree",
        "_types",
    },
    {
        "_arguments",
        "_call",
        "_iteration",
        "_match",
        "_mesh",
        "_packing",
        "_refused",
        "_report",
        "_skip",
        "_sources",
    },
    {"_advice", "_draws", "_loss_scale", "_provenance", "_rules"},
    {"_grad_reports", "_health", "_history", "_state"},
    {
        "_epilogue",
        "_left_alone",
        "_nested",
        "_nnx_grads",
        "_plots",
        "_products",
        "_step",
        "_writes",
    },
    {"_marks", "_walk"},
    {"_blame", "_recorder", "_residuals"},
    {"_explanation"},
    {"_custom", "_thunks"},
    {"_optax", "_grad_scaler", "_trace"},
    {"_autocast", "_scaled_grad", "_master_weights"},
    {"_check", "_explain", "_nonfinite", "_regions"},
    {"_policy"},
    {"_overrides"},
    {"_linen_box"},
    {"_linen_policy", "_nnx_policy"},
    {"linen", "nnx", "debug", "sharding", "_stable"},
    {"__init__"},
]


def imports_of(path):
    """Names of the jamp modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else [a.name for a in node.names]


def methods_of(value):
    """The public methods that jamp itself defines."""
    if not inspect.isclass(value):
        return
    for name, function in inspect.getmembers(value, inspect.isroutine):
        module = getattr(function, "__module__", None) or ""
        if not name.startswith("_") and module.startswith("jamp"):
            yield function


def layer_of(name):
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_imports_point_one_way(path):
    for name in imports_of(path):
        assert layer_of(name) < layer_of(path.stem), f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_private_jax_and_version_switches_live_in_compat_alone(path):
    if path.stem != "_compat":
        assert not re.search(r"jax\._src|__version__\s*([<>]|[!=]=)", path.read_text())


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_modules_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_export_list_is_short():
    assert 0 < len(PUBLIC) <= 24


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
def test_the_reference_names_the_errors(name):
    jamps = [case for case in bad_input.CASES if "positional arg" not in case.argument]
    raising = {case.name for case in jamps}
    value = operator.attrgetter(name)(jamp)
    for called in [value, *methods_of(value)]:
        own = "" if called is value else f".{called.__name__}"
        if f"jamp.{name}{own}" in raising:
            text = inspect.getdoc(called)
            assert re.search(r"Raises:|Error", text), f"{name}{own} raises"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name, standard_promotion):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert not failed


def test_examples_are_found():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [t for n in MODULES for t in finder.find(importlib.import_module(n))]
    assert sum(bool(test.examples) for test in tests) >= 10


def test_version_is_that_of_the_distribution():
    try:
        assert version("jamp-jax") == jamp.__version__
    except PackageNotFoundError:
        pytest.skip("jamp runs from the source tree")
