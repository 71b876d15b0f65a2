"""Where files are: each wing has its tests, and what several folders use is shared."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a folder may import of the others, besides jamp.
MAY_IMPORT = {
    "jamp": set(),
    "shared": set(),
    "examples": set(),
    "benchmarks": {"shared"},
    "parity": {"shared"},
    "foreign": {"shared"},
    "tests": {"shared"},
}
# What some tests may also import: the code that they test, and torch's results.
EXCEPTIONS = {
    "tests/torch/": "parity",
    "tests/lint/test_planted_places.py": "parity",
    "tests/test_foreign.py": "foreign",
    "tests/test_benchmarks.py": "benchmarks",
    "tests/test_measure.py": "benchmarks",
    "tests/autocast/test_own_attention.py": "benchmarks",
    "tests/test_compiled_targets.py": "benchmarks",
}
BESIDES_WINGS = {"torch", "endurance", "lint"}
FOLDERS = [path.parent for path in sorted((ROOT / "tests").glob("*/__init__.py"))]


def imports_of(path):
    """The names that a file imports from folders other than its own."""
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else ()
            module = [*above, *filter(None, [node.module])]
            names = [".".join([*module, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in MAY_IMPORT.keys() - {"jamp", here[0]}:
                yield name


def lies_in(name, module):
    return f"{name}.".startswith(f"{module}.")


def excepted(path, name):
    """The exception that allows an import, if one does."""
    file = path.relative_to(ROOT).as_posix()
    for start, module in EXCEPTIONS.items():
        if file.startswith(start) and lies_in(name, module):
            return start
    return None


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_what_it_may(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imports_of(path)
        if not any(lies_in(name, module) for module in MAY_IMPORT[folder])
        and not excepted(path, name)
    ]
    assert not wrong, "what several folders use belongs in shared/"


def test_each_exception_is_needed():
    paths = (ROOT / "tests").rglob("*.py")
    used = {excepted(path, name) for path in paths for name in imports_of(path)}
    assert used - {None} == EXCEPTIONS.keys()


def test_imports_are_seen(tmp_path, monkeypatch):
    (tmp_path / "tests" / "torch").mkdir(parents=True)
    path = tmp_path / "tests" / "torch" / "test_x.py"
    path.write_text(
        "import benchmarks.gpu, jamp\nfrom . import y\nfrom ..z import a\n"
        "from parity import golden as g, ops\ndef f(): from tests.marks import slow\n"
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert [*imports_of(path)] == ["benchmarks.gpu", "parity.golden", "parity.ops"]


def test_each_wing_has_its_tests():
    wings = {path.parent.name for path in (ROOT / "jamp").glob("_*/__init__.py")}
    tested = {folder.name for folder in FOLDERS} - BESIDES_WINGS
    assert {f"_{name}" for name in tested} == wings


@pytest.mark.parametrize("folder", [*FOLDERS, ROOT / "shared"], ids=lambda p: p.name)
def test_a_folder_says_what_it_holds(folder):
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_no_picture_lies_in_the_root():
    """Pages write pictures where they run, which is not here."""
    assert not [*ROOT.glob("*.png")]
