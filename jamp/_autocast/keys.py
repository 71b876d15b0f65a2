"""What a key of a rule stands for: a function or a module class, known by its code.

JAX records for each op which code ran, and not on which object. A function is known by
its own code, and a key whose code others run too is refused. A module class is known by
the code of its `__call__`. If it inherits that, as `nn.Conv` does, or shares it with
other classes, it is given one that calls it and that runs for this class alone. So it
is known wherever JAX traces it, also in `jit`, `scan` and `checkpoint`.
"""

import functools
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from .call_stack import code_of, unwrapped

SHARED_CODE = """a function is known by its code, and {}. Put the ops into `with \
jax.named_scope("name"):` and make "name" the key, or define a separate function with \
`def` that gets everything it needs as arguments."""

NO_CALL = """a module class is known by the code of its `__call__`, and {0} has none. \
Make the method that computes the key ({0}.method), or a module path, or a class that \
is called."""

CALL = "__call__"


class Function:
    """A key that is a function, or a module class with all that are derived from it.

    One object for each, so that equal tables are compared by identity. Code objects
    themselves are equal if the same text is at the same line of two files.
    """

    def __init__(self, key: CodeType | type):
        self.cls = key if isinstance(key, type) else None
        # By id, because an op has many. A jitted function is known by its source.
        self.codes: dict[int | str, CodeType] = {}
        if isinstance(key, CodeType):
            self.codes = {id(key): key, source_of(key): key}
        self.look()

    def look(self) -> None:
        """Adds the code of classes that were made since."""
        for cls in below(self.cls) if self.cls else ():
            if cls is self.cls or is_function(vars(cls).get(CALL)):
                code = own_call(cls)
                self.codes[id(code)] = code  # kept: a jaxpr may outlive the class


_keys = weakref.WeakValueDictionary[int, Function]()


def function_of(key: Any) -> Function:
    known: Any = key if isinstance(key, type) else code_of(key)
    return _keys.setdefault(id(known), _keys.get(id(known)) or Function(known))


def source_of(code: CodeType) -> str:
    """Where a code is from, as JAX records it with the jaxpr of a jitted function."""
    return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"


def problem_with(key: Any) -> str:
    """What prevents a key from being one that can be told apart, or ""."""
    if isinstance(key, type):
        # Without one, what `key.__call__` finds is of the metaclass.
        owners = (base for base in key.__mro__ if CALL in vars(base))
        has_call = is_function(getattr(next(owners, None), CALL, None))
        return "" if has_call else NO_CALL.format(key.__name__)
    if not is_function(key):
        return f"a key of type {type(key).__name__} is not one of these."
    shared = shared_by(key)
    return SHARED_CODE.format(shared) if shared else ""


def is_function(value: object) -> bool:
    return isinstance(unwrapped(value)[-1], FunctionType)


_own = weakref.WeakKeyDictionary[type, CodeType]()
_writing = threading.RLock()


def own_call(cls: type) -> CodeType:
    """The code that runs if an object of this class is called, and for no other class.

    Those derived from it may inherit it. A class without such a `__call__` gets one.
    """
    with _writing:
        functions = [f for f in unwrapped(getattr(cls, CALL)) if hasattr(f, "__code__")]
        known = _own.get(cls)
        if CALL in vars(cls) and any(f.__code__ is known for f in functions):
            return _own[cls]
        function = functions[-1]
        if not is_written_in(cls, function):
            function = forwarding(cls)
            setattr(cls, CALL, function)
        return _own.setdefault(cls, function.__code__)


def is_written_in(cls: type, function: FunctionType) -> bool:
    """Whether a function is a method in the text of one class.

    A class statement in a function may make many classes, which share their code.
    """
    scope, _, name = function.__code__.co_qualname.rpartition(".")
    return scope == cls.__qualname__ and name in vars(cls) and "<" not in scope


def forwarding(cls: type) -> FunctionType:
    """A `__call__` for a class that does what the one that it has or inherits does."""
    defined = vars(cls).get(CALL)

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        inherited: Any = super(cls, self)
        forward = defined.__get__(self, type(self)) if defined else inherited.__call__
        return forward(*args, **kwargs)

    code = call.__code__.replace(co_name=CALL)  # another object each time
    function = FunctionType(code, globals(), CALL, None, call.__closure__)
    functools.update_wrapper(function, getattr(cls, CALL))
    function.__module__ = cls.__module__  # where pickle looks for it
    function.__qualname__ = f"{cls.__qualname__}.{CALL}"
    return function


def below(cls: type) -> Iterator[type]:
    """The class and all classes that are derived from it."""
    yield cls
    for derived in type.__subclasses__(cls):
        yield from below(derived)


def shared_by(function: Any) -> str:
    """How a function shares its code with others, or ""."""
    chain = unwrapped(function)
    last = chain[-1]
    for wrapper in chain:
        if isinstance(wrapper, functools.partial):
            return f"a partial shares that of {last.__qualname__}"
        owner = getattr(wrapper, "__self__", None)
        if not isinstance(wrapper, MethodType) or owner is None:
            continue
        if not isinstance(owner, type):
            return f"the method of an object shares that of {last.__qualname__}"
        if last.__name__ not in vars(owner):
            return f"that of {owner.__name__} is that of {last.__qualname__}"
    if last.__name__ == "<lambda>":
        return "a lambda may share that of another one on its line"
    is_local = last.__qualname__.rpartition(".")[0].endswith("<locals>")
    held = {*last.__code__.co_freevars} - {"__class__"}  # of functions around it
    if held or (is_local and (last.__defaults__ or last.__kwdefaults__)):
        return f"each function that `def {last.__name__}` makes here has the same code"
    return ""
