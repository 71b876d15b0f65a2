"""What JAX's releases may change is read in `_compat.py` and `_jaxprs.py` alone.

There the conformance run for each release (`make versions`) looks every name up. A
reader elsewhere would be seen by no check until a user's JAX has another name for it.
"""

import ast
import re

import pytest

from jamp._jaxprs import CALLS
from tests.lint.test_structure import FILES, PACKAGE, name_of
from tests.marks import walk

DOORS = {"_compat", "_jaxprs"}
# The fields of a jaxpr, which JAX has had in one class and in two.
OF_JAXPRS = {"jaxpr", "eqns", "consts", "make_user_context"}
ALLOWED = {
    "_state": "of a Flax module, in `linen_call.py`",
    **dict.fromkeys(("_fields", "_replace", "_asdict"), "of each NamedTuple"),
}


def own_names():
    """Names with an underscore that jamp itself defines."""
    for path in FILES:
        yield path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    yield node.attr


def holds_params(node):
    return isinstance(node, ast.Attribute) and node.attr == "params"


def names_of_params(tree):
    """The names that a file gives to the parameters of an equation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and "Params" in ast.unparse(
            node.annotation or node
        ):
            yield node.arg
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for left, right in pairs:
                if isinstance(right, ast.BinOp):
                    right = right.left
                if isinstance(left, ast.Name) and holds_params(right):
                    yield left.id


def text_of(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None


def readers(text, own):
    """The lines that read JAX's inside, and what they read."""
    tree = ast.parse(text)
    names = {*names_of_params(tree)}
    is_params = lambda node: holds_params(node) or getattr(node, "id", None) in names
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value, key) if is_params(value) and text_of(key):
                yield node.lineno, f"the parameter {text_of(key)!r}"
            case ast.Call(ast.Attribute(value, "get"), [key, *_]) if is_params(value):
                yield node.lineno, f"the parameter {text_of(key)!r}"
            case ast.Compare(key, [ast.In()], [value]) if is_params(value):
                yield node.lineno, f"whether there is a parameter {text_of(key)!r}"
            case ast.Attribute(value, name) if name.startswith("_"):
                is_self = getattr(value, "id", None) in ("self", "cls")
                if not (is_self or name.startswith("__") or name in own | {*ALLOWED}):
                    yield node.lineno, f"the private attribute {name!r}"
            case ast.Call(ast.Name("getattr" | "hasattr"), [of, name, *rest]):
                is_switch = bool(rest) or node.func.id == "hasattr"
                of_jax = re.fullmatch(r"(jax|jnp|lax)(\.\w+)*", ast.unparse(of))
                if is_switch and (of_jax or text_of(name) in OF_JAXPRS):
                    yield node.lineno, f"whether there is a {ast.unparse(name)}"
            case ast.Try(body, handlers):
                caught = " ".join(ast.unparse(h.type) for h in handlers if h.type)
                is_switch = "AttributeError" in caught or "ImportError" in caught
                if is_switch and "jax" in "".join(map(ast.unparse, body)):
                    yield node.lineno, f"JAX, and catches {caught}"
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
                calls = sorted(CALLS.intersection(map(text_of, parts)))
                if len(calls) > 1:
                    yield node.lineno, f"which primitives call a function: {calls}"


OWN = {*own_names()} - {"_weakref"}  # which a trace sets too


@walk("path", FILES, ids=lambda path: "/".join(name_of(path)))
def test_the_inside_of_jax_is_read_through_its_doors(path):
    # `traits.py` says what primitives do, by their names, and a test checks the names.
    if path.stem not in DOORS | {"traits"}:
        assert not [*readers(path.read_text(), OWN)]


# What stood in jamp before there was a door, and what others may write.
SEEN = {
    'MARKED: Any = getattr(jax, "make_user_context", lambda x: None)(False)': 1,
    'RUN_ONCE = ("jit", "pjit", "shard_map", "checkpoint", "remat2")': 1,
    "name, of = eqn.primitive.name, eqn.params\n"
    'carry = of["num_consts"], of["num_consts"] + of["num_carry"]': 3,
    'jaxpr = eqn.params["jaxpr"]': 1,
    'params = op.params | {"precision": None}\n'
    'if "precision" in params or params.get("precision"): pass': 2,
    'def f(params: Params): return params["new_dtype"]': 1,
    'opened = getattr(jaxpr, "jaxpr", jaxpr)': 1,
    "reference = parent._weakref": 1,
    "try:\n    from jax import shard_map\nexcept ImportError:\n    shard_map = None": 1,
    'if hasattr(jax, "shard_map"): pass': 1,
    'x = params["w"]': 0,
    "self._notes = other._replace(_a=1)._fields": 0,
    'dtype = getattr(x, "dtype", None)': 0,
    "try:\n    import matplotlib\nexcept ImportError:\n    pass": 0,
}


@pytest.mark.parametrize("text", SEEN)
def test_a_reader_is_seen(text):
    assert len([*readers(text, OWN)]) == SEEN[text]


def test_the_doors_are_there():
    assert all((PACKAGE / f"{name}.py").exists() for name in DOORS)
