"""Finds the functions of a library whose text holds a product of matrices."""

import ast
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

# Ways to write a product, by the name of the function.
NAMES = frozenset(
    """
    batch_matmul conv conv_general_dilated conv_general_dilated_local conv_transpose
    conv_with_general_padding dot dot_general einsum inner matmul matvec ragged_dot
    ragged_dot_general tensordot vdot vecdot vecmat
    """.split()
)
MODULES = ("jax", "jnp", "lax")
ON_THE_HOST = ("math", "np", "numpy", "onp", "scipy", "torch")
MENTIONED = re.compile(rf"\s@=?\s|\b_?({'|'.join(NAMES)})\b")
SKIPPED = re.compile(r"(^|/)(\w*tests?|testing|examples?)(/|\.py)|_test\.py$")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Holder(NamedTuple):
    """A function that holds a product; its class and module are in its name."""

    name: str
    file: str
    qualname: str
    callers: dict[str, list[str]]  # of each function of its file: who mentions it


def holders(folder: str) -> Iterator[Holder]:
    """The functions of a library that hold a product, by the text of its files."""
    for at, _, files in sorted(os.walk(folder)):
        for file in sorted(files):
            path = os.path.join(at, file)
            relative = os.path.relpath(path, folder)
            if not file.endswith(".py") or SKIPPED.search(relative):
                continue
            with open(path, encoding="utf-8") as source:
                text = source.read()
            if MENTIONED.search(text):
                module = relative[:-3].replace(os.sep, ".")
                yield from held(ast.parse(text), path, module.removesuffix(".__init__"))


def held(tree: ast.Module, file: str, module: str) -> Iterator[Holder]:
    found = dict(functions(tree))
    names, here = NAMES, tree.body
    # `_dot = partial(jnp.dot, ...)` is another name for a product.
    for each in here:
        if isinstance(each, ast.Assign) and holds(each.value, names):
            names = names | {x.id for x in each.targets if isinstance(x, ast.Name)}
    holding = [name for name, node in found.items() if holds(node, names)]
    callers: dict[str, list[str]] = {name: [] for name in found}
    if holding:
        for caller, node in found.items():
            words = mentioned(node)
            for name in found:
                if name != caller and name.rpartition(".")[2] in words:
                    callers[name].append(caller)
    for name in holding:
        yield Holder(f"{module}.{name}", file, name, callers)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions of a module and methods of its classes, with all that is in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from functions(child, prefix)


def mentioned(node: ast.AST) -> set[str]:
    words = {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
    return words | {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def holds(node: ast.AST, names: frozenset[str]) -> bool:
    return any(is_product(each, names) for each in ast.walk(node))


def is_product(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return isinstance(node.op, ast.MatMult)
    if isinstance(node, ast.Attribute) and node.attr in names:  # perhaps not called
        return root(node) in MODULES
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in names - {"inner"}
    is_named = isinstance(function, ast.Attribute) and function.attr in names
    return is_named and root(function) not in ON_THE_HOST


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
