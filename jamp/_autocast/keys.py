"""What a key of a rule stands for: a function, and what tells it apart from others.

JAX records for each op which code ran, and not on which object. So a module class is
known by the code of the `__call__` that is written in it, and a function by its own
code. A key whose code others run too would match them as well, and is refused.
"""

import functools
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from .call_stack import code_of, unwrapped

SHARED_CODE = """a function is known by its code, and {}. Put the ops into `with \
jax.named_scope("name"):` and make "name" the key, or define a separate function with \
`def` that gets everything it needs as arguments."""

SHARED_CALL = """a module class is known by the code of its `__call__`, and {}. Make \
a module path the key, or the class that the code is written in if all modules that \
run it are meant. A class of your own can have one that it alone runs: `def \
__call__(self, x): return super().__call__(x)`."""

CALL = "__call__"


class Function:
    """A function that is a key: one object for each code object.

    So that equal tables are compared by identity. Code objects themselves are equal if
    the same text is at the same line of two files.
    """

    def __init__(self, code: CodeType):
        self.code, self.id = code, id(code)  # an op has many codes: compared by id
        self.source = source_of(code)


_functions = weakref.WeakValueDictionary[int, Function]()


def function_of(code: CodeType) -> Function:
    known = _functions.get(id(code))
    return _functions.setdefault(id(code), known or Function(code))


def source_of(code: CodeType) -> str:
    """Where a code is from, as JAX records it with the jaxpr of a jitted function."""
    return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"


def problem_with(key: Any) -> str:
    """What prevents a key from being a function that can be told apart, or ""."""
    function = key.__call__ if isinstance(key, type) else key
    is_function = isinstance(unwrapped(function)[-1], FunctionType)
    if isinstance(key, type):
        shared = call_shared_by(key) if is_function else f"{key.__name__} has none"
        return SHARED_CALL.format(shared) if shared else ""
    if not is_function:
        return f"a key of type {type(key).__name__} is not one of the three kinds."
    shared = shared_by(key)
    return SHARED_CODE.format(shared) if shared else ""


def call_shared_by(cls: type) -> str:
    """How a module class shares the code of its `__call__` with others, or ""."""
    name = cls.__name__
    owner = next((base for base in cls.__mro__ if CALL in vars(base)), None)
    if owner is None:
        return f"{name} has none"  # what `cls.__call__` finds is of the metaclass
    if owner is not cls:
        return f"{name} inherits that of {owner.__name__}"
    own = unwrapped(cls.__call__)[-1]
    scope, _, written = own.__code__.co_qualname.rpartition(".")
    if scope != cls.__qualname__ or written not in vars(cls):
        return f"that of {name} is the function {own.__code__.co_qualname}"
    if "<locals>" in cls.__qualname__:
        methods = [unwrapped(value)[-1] for value in vars(cls).values()]
        holds = any(held_by(f) for f in methods if isinstance(f, FunctionType))
        if holds or has_twin(cls, own.__code__):
            return f"each class that `class {name}` makes here has the same code"
    return ""


def has_twin(cls: type, code: CodeType) -> bool:
    """Whether the same statement made a class with other bases."""
    for other in below(object):
        if CALL in vars(other) and other.__bases__ != cls.__bases__:
            if code_of(getattr(other, CALL, None)) is code:
                return True
    return False


def below(cls: type) -> Iterator[type]:
    """The class and all classes that are derived from it."""
    yield cls
    for derived in type.__subclasses__(cls):
        yield from below(derived)


def shared_by(function: Any) -> str:
    """How a function shares its code with others, or ""."""
    chain = unwrapped(function)
    own = chain[-1]
    for wrapper in chain:
        if isinstance(wrapper, functools.partial):
            return f"a partial shares that of {own.__qualname__}"
        owner = getattr(wrapper, "__self__", None)
        if not isinstance(wrapper, MethodType) or owner is None:
            continue
        if not isinstance(owner, type):
            return f"the method of an object shares that of {own.__qualname__}"
        if own.__name__ not in vars(owner):
            return f"that of {owner.__name__} is that of {own.__qualname__}"
    if own.__name__ == "<lambda>":
        return "a lambda may share that of another one on its line"
    is_local = own.__qualname__.rpartition(".")[0].endswith("<locals>")
    if held_by(own) or (is_local and (own.__defaults__ or own.__kwdefaults__)):
        return f"each function that `def {own.__name__}` makes here has the same code"
    return ""


def held_by(function: FunctionType) -> set[str]:
    """The variables of functions around it that a function holds."""
    return set(function.__code__.co_freevars) - {"__class__"}
