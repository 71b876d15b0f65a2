"""Imports the code of other projects from their checkouts."""

import __future__

import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

# Modules that their files use to read data sets, draw charts and download weights. None
# of them computes: if a model needs a module for its numbers, it must be installed.
INPUT_ONLY = frozenset(
    """
    ale_py brax datasets env_utils grain gymnasium huggingface_hub kagglehub navix
    pandas safetensors seaborn
    sentencepiece tensorboard tensorflow tensorflow_datasets tensorflow_text torch
    tiktoken tokenizers torchvision tqdm transformers
    """.split()
)


def anything(name: str) -> mock.MagicMock:
    """The value of any attribute of such a module."""
    value = mock.MagicMock(name=name)
    value.__version__ = "9"  # clu compares it
    return value


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces modules that are needed only to read data."""

    def find_spec(self, fullname, path=None, target=None):
        """A spec for each of them, whether it is installed or not."""
        if fullname.partition(".")[0] not in INPUT_ONLY:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__dict__["__version__"] = "0"
        module.__dict__["__getattr__"] = anything
        return module

    def exec_module(self, module):
        """There is nothing to run."""


class Checkouts:
    """The folder that holds the projects; imports from there."""

    def __init__(self, folder: Path):
        self.folder = folder

    def modules(self, project: str, *names: str) -> list[Any]:
        """Modules of one folder of a project, such as "flax/examples/wmt"."""
        folder = self.folder / project
        if not folder.is_dir():
            raise FileNotFoundError(f"--source: there is no folder {folder}")
        with imports_from(folder):
            return [importlib.import_module(name) for name in names]

    def commit(self, project: str) -> str:
        """The commit of a checkout, or nothing if it is not a repository."""
        command = ["git", "-C", str(self.folder / project), "rev-parse"]
        command += ["--short=10", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
        return f"at {done.stdout.strip()}" if done.returncode == 0 else ""

    def notebook(self, path: str, **constants: Any) -> Any:
        """The imports and classes in a notebook's cells, with values that they use."""
        notebook = json.loads((self.folder / path).read_text())
        cells = [c["source"] for c in notebook["cells"] if c["cell_type"] == "code"]
        tree = ast.Module([], [])
        for cell in cells:
            kept = ast.Import | ast.ImportFrom | ast.ClassDef
            body = ast.parse("".join(cell)).body
            tree.body += [node for node in body if isinstance(node, kept)]
        module = ModuleType(Path(path).stem)
        module.__dict__.update(constants)
        sys.modules[module.__name__] = module  # where dataclasses look up their names
        with imports_from(self.folder):
            # BERT's annotations have `jax.random.PRNGKey | None`, which raises.
            lazily = __future__.annotations.compiler_flag
            exec(compile(tree, path, "exec", lazily), module.__dict__)
        return module


@contextlib.contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """Imports from a folder first, and forgets its modules afterwards.

    Flax's examples all have a `models.py` and a `train.py`.
    """
    before, finder = set(sys.modules), Absent()
    installed = {
        name: sys.modules.pop(name)
        for name in [*sys.modules]
        if name.partition(".")[0] in INPUT_ONLY
    }
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name.partition(".")[0] in INPUT_ONLY or file.startswith(str(folder)):
                del sys.modules[name]
        for name in [n for n in sys.modules if n.partition(".")[0] in INPUT_ONLY]:
            del sys.modules[name]
        sys.modules.update(installed)
