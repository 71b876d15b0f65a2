"""Subclasses of users' classes: a module with a policy is still the user's module.

A policy has to act when a method of a user's module is called and when a parameter is
read. So the object gets another class, made here: a subclass of its own class, with
these methods replaced. A wrapper would be a second object, with another class, other
attributes and other paths. With a subclass,

- `isinstance` stays true, and NNX's filters and overrides by class still match;
- attributes, dataclass fields, the paths of the state and the metadata of Variables are
  the same, because the object is the same;
- messages, `repr`, Flax's tables and name stacks show the user's class, by its name;
- modules with equal policies are equal, because the functions that make classes are
  cached;
- `pickle` works, although no module holds the class under its name: the metaclass
  pickles it as the call that made it. `deepcopy` does not copy classes.

Only `type(module) is Model` becomes false.
"""

import contextlib
import copyreg
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

C = TypeVar("C")

# Takes a module, a method's name and function, its arguments and keyword arguments.
MethodCall = Callable[..., object]


class Calls(threading.local):
    """What is known about the innermost call of a module in this thread, or None."""

    innermost: Any = None

    @contextlib.contextmanager
    def inside(self, call: object) -> Iterator[None]:
        outer, self.innermost = self.innermost, call
        try:
            yield
        finally:
            self.innermost = outer


def change_class(thing: C, cls: type[C]) -> None:
    """Gives an object a subclass of its class, even if Flax forbids writes."""
    object.__setattr__(thing, "__class__", cls)


def subclass(
    base: type[C], namespace: Mapping[str, object], rebuild: tuple[Callable, tuple]
) -> type[C]:
    """A class of the same name, pickled as the call `rebuild[0](*rebuild[1])`.

    Args:
      namespace: the attributes that it adds to `base`.
    """
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_jamp_rebuild": rebuild,
    }
    return pickled_meta(type(base))(base.__name__, (base,), {**namespace, **names})


@functools.cache
def pickled_meta(meta: type) -> type:
    """A metaclass whose classes are pickled as the calls that made them."""
    made = type(meta)(meta.__name__, (meta,), {})
    copyreg.pickle(made, lambda cls: cls._jamp_rebuild)
    return made


def methods_of(base: type, root: type) -> dict[str, Callable]:
    """The methods of a module class that its users call: public, and not Flax's own.

    Each is a function of the module, however it was decorated.
    """
    found = {}
    for name in dir(base):
        method = inspect.getattr_static(base, name)
        users = name == "__call__" or not (name.startswith("_") or hasattr(root, name))
        binds = callable(method) or isinstance(method, functools.partialmethod)
        other = isinstance(method, type | staticmethod) or hasattr(method, "nowrap")
        if users and binds and hasattr(method, "__get__") and not other:
            found[name] = method if inspect.isfunction(method) else unbound(method)
    return found


def unbound(method: Any) -> Callable:
    """A function of the module, for a method that is jitted or partial, for example."""

    def function(self, *args, **kwargs):
        return method.__get__(self, type(self))(*args, **kwargs)

    return functools.update_wrapper(function, method, updated=())


def replaced(name: str, function: Callable, call: MethodCall) -> Callable:
    """A method that looks like `function`, and calls `call` with it.

    Args:
      call: `call(module, name, function, args, kwargs)` is what the method returns.
    """

    def method(self, *args, **kwargs):
        return call(self, name, function, args, kwargs)

    return functools.update_wrapper(method, function, updated=())
