"""The package as a whole: public names, docstrings and the reference.

`python -m tests.test_package` writes the signatures at the head of the reference anew.
"""

import doctest
import importlib
import inspect
import operator
import pkgutil
import re
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import jamp

from . import bad_input
from .marks import cover, walk

PACKAGE = Path(jamp.__file__).parent
MODULES = ["jamp"]
MODULES += [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "jamp.")]
PAGE = PACKAGE.parent / "docs" / "api.md"
REFERENCE = re.findall(r"^::: jamp\.(\S+)$", PAGE.read_text(), re.MULTILINE)
START, END = "<!-- signatures: begin -->\n", "<!-- signatures: end -->\n"
MADE_BY_JAMP = {"marks", "layout"}  # fields of a report, which users do not make
PUBLIC = [name for name in dir(jamp) if not name.startswith("_")]


def methods_of(value):
    """The public methods that jamp itself defines."""
    if not inspect.isclass(value):
        return
    for name, function in inspect.getmembers(value, inspect.isroutine):
        module = getattr(function, "__module__", None) or ""
        if not name.startswith("_") and module.startswith("jamp"):
            yield function


def test_the_export_list_is_short():
    assert 0 < len(PUBLIC) <= 30


@walk("name", PUBLIC)
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


@walk("name", [n for n in PUBLIC if n not in ("debug", "linen", "nnx", "sharding")])
def test_public_names_are_in_the_reference(name):
    assert f"::: jamp.{name}\n" in PAGE.read_text()


def test_the_reference_has_all_methods_of_grad_scaler():
    named = PAGE.read_text().partition("::: jamp.GradScaler\n")[2].partition(":::")[0]
    for method in methods_of(jamp.GradScaler):
        own = method.__name__ in vars(jamp.GradScaler)
        assert own or re.search(rf"\b{method.__name__}\b", named), method


def signatures():
    """The names of the reference with their arguments, methods below their class.

    A class that jamp makes, such as a report, has no arguments here.
    """
    lines = []
    for name in REFERENCE:
        value = operator.attrgetter(name)(jamp)
        called = value.__init__ if inspect.isclass(value) else value
        made = "Attributes:" in inspect.getdoc(value)
        lines.append(f"jamp.{name}\n" if made else signature(f"jamp.{name}", called))
        lines += [signature(f"    .{m.__name__}", m) for m in methods_of(value)]
    return "```text\n" + "".join(lines) + "```\n"


def signature(name, function):
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    bare = bare[1:] if bare and bare[0].name == "self" else bare
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    text = re.sub(r"<class '(?:jax\.numpy\.)?(\w+)'>", r"\1", text)
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
    indent = " " * (len(name) - len(name.lstrip()) + 8)
    return textwrap.fill(name + text, 88, subsequent_indent=indent) + "\n"


def test_the_reference_shows_the_signatures():
    shown = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert shown == signatures(), "run python -m tests.test_package"


@walk("name", REFERENCE)
def test_a_public_name_says_where_it_is_imported_from(name):
    namespace = ".".join(["jamp", *name.split(".")[:-1]])
    assert operator.attrgetter(name)(jamp).__module__ == namespace


@walk("name", REFERENCE)
def test_the_reference_has_an_example_and_every_argument(name):
    value = operator.attrgetter(name)(jamp)
    assert ">>>" in inspect.getdoc(value)
    for called in [value, *methods_of(value)]:
        text = inspect.getdoc(called)
        arguments = {*inspect.signature(called).parameters}
        for argument in arguments - {"self", "args", "kwargs"} - MADE_BY_JAMP:
            assert re.search(rf"\b{argument}\b", text), (called, argument)


@walk("name", REFERENCE)
def test_the_reference_has_no_markup_by_chance(name):
    value = operator.attrgetter(name)(jamp)
    for called in [value, *methods_of(value)]:
        for part in re.split(r"\n\s*\n|\n(?=\s*\w+: )", inspect.getdoc(called)):
            example = part.lstrip().startswith(">>>")
            prose = "" if example else re.sub("`[^`]*`", "", part)
            assert not re.match(r"\s*\w+: +>", prose), f"a quotation: {part}"
            assert len(re.findall(r"\w\*\*", prose)) < 2, f"bold between powers: {part}"


@walk("name", REFERENCE)
def test_the_reference_names_the_errors(name):
    jamps = [case for case in bad_input.CASES if "positional arg" not in case.argument]
    raising = {case.name for case in jamps}
    value = operator.attrgetter(name)(jamp)
    for called in [value, *methods_of(value)]:
        own = "" if called is value else f".{called.__name__}"
        if f"jamp.{name}{own}" in raising:
            text = inspect.getdoc(called)
            assert re.search(r"Raises:|Error", text), f"{name}{own} raises"


COSTLY = """
jamp.calibrate jamp.find_loss_scale jamp.linen.dot_product_attention
jamp.nnx.dot_product_attention jamp.linen.with_policy jamp.sharding.error_feedback
jamp.ScaledFloat16 jamp.GradScaler jamp.Float8 jamp.debug.Calibration
jamp.debug.GradHistogram
""".split()


def examples():
    """The examples of all docstrings, with those that take longest at the end."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert all(hasattr(jamp, name) for name in PUBLIC)  # some by need
    tests = [t for n in MODULES for t in finder.find(importlib.import_module(n))]
    tests.sort(key=lambda test: test.name in COSTLY)
    return [pytest.param(t, id=t.name) for t in tests if t.examples]


@pytest.mark.every_release
@cover(quick=len(examples()) - len(COSTLY))
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


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(head + START + signatures() + END + rest.partition(END)[2])
