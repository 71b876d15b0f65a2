"""What happens when a Linen module that was given a policy is called.

That module is the root of the modules inside. A call takes these steps:

1. `RootCall.run` puts each parameter in a box that casts it when it is read, and has
   Flax call `intercept` for each method of each module inside.
2. `RootCall.inside` runs the method of the root, with casts of its inputs and results.
3. `intercept` is called for a module inside; `RootCall.call_module` finds its place and
   runs its method in the same way, or without casts.
4. Back in `run`, new parameters get the param dtype of the module that they belong to
   (`stored`), and `check_used` names the overrides that match no module.

`init` takes steps 2 and 3 twice: once without casts, which makes the parameters that
the plain module makes, and once with casts, which makes the rest of the state, such as
caches, in the dtypes of later calls.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.core import lift

from .._tree import PyTree, cast_floating
from .float32_region import COMPUTE_DTYPE
from .linen_box import boxed, without_boxes
from .module_call import ModuleCall
from .overrides import ROOT, Place, Plan, check_all_used, has_policy, place_of

CALLER = "jamp.linen.with_policy"

# They name parameters by their paths in the tree of variables.
BY_PATH = (nn.WeightNorm, nn.SpectralNorm)

Path = tuple[str, ...]
Seen = set[tuple[str, type]]  # the paths and classes of modules


class Active(NamedTuple):
    """A module that is being called."""

    root: "RootCall"
    module: nn.Module
    place: Place

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the module itself, or a copy that a transformation made."""
        same_class = issubclass(type(self.module), type(module))
        return same_class and self.module.path == module.path


class Calls(threading.local):
    innermost: Active | None = None


ACTIVE = Calls()


class RootCall:
    """One call of a module that was given a policy.

    Args:
      seen: the modules that any call came to; this one adds its own.
      module: the root.
      function: its method, as the user wrote it.
    """

    def __init__(
        self,
        plan: Plan,
        seen: Seen,
        module: nn.Module,
        method: str,
        function: Callable,
    ):
        self.plan, self.seen, self.path = plan, seen, module.path
        self.method, self.function = method, function
        self.initializing = module.is_initializing()
        self.casts = not self.initializing
        self.made: list[PyTree] = []  # the parameters that `init` makes without casts
        self.places: dict[str, Place] = {}  # the modules that were called
        if self.initializing and method == "__call__":
            seen.clear()  # of other models of the class
        self.place = place_of(plan, "", module, Place(plan.policy, ROOT))
        top = ACTIVE.innermost
        self.around = None if top is None else top.place

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> PyTree:
        lifted = nn.map_variables(
            self.inside,
            "params",
            trans_in_fn=self.boxed,
            trans_out_fn=self.stored,
            mutable=module.is_mutable_collection("params"),
            init=self.initializing,  # then it runs `inside` twice
        )
        with contextlib.ExitStack() as contexts:
            if self.around is None:  # otherwise the interceptor is already there
                contexts.enter_context(nn.intercept_methods(intercept))
            contexts.enter_context(self.active(module, self.place))
            compute_dtype = self.place.policy.compute_dtype  # for setup
            contexts.enter_context(COMPUTE_DTYPE(compute_dtype))
            out = lifted(module, *args, **kwargs)
        if self.method == "__call__":
            self.check_used(module)
        return out

    def inside(self, module: nn.Module, *args, **kwargs) -> PyTree:
        """Calls the method on the root, whose parameters are now in boxes."""
        bound = functools.partial(self.function, module)
        if not self.casts:  # makes the parameters, as the plain module does
            out = bound(*args, **kwargs)
            self.casts = True  # for the second time that `init` comes here
            return out
        call = ModuleCall(
            self.plan, module, self.method, self.place, self.around, ends=True
        )
        return call.run(bound, args, kwargs)

    def call_module(
        self,
        caller: Active,
        module: nn.Module,
        method: str,
        function: Callable,
        args: tuple,
        kwargs: dict,
    ) -> PyTree:
        outer = self.outer_place(module.path, caller)
        place = place_of(self.plan, self.name_of(module.path), module, outer)
        with self.active(module, place):
            if not self.casts:
                return function(*args, **kwargs)
            if method == "setup" or (method.startswith("_") and method != "__call__"):
                with COMPUTE_DTYPE(place.policy.compute_dtype):  # arguments stay
                    return function(*args, **kwargs)
            loops = method == "__call__" and is_scanned(module, caller.module)
            if isinstance(module, BY_PATH) and method == "__call__":
                function = functools.partial(with_open_boxes, module)
            ends = place != caller.place
            call = ModuleCall(
                self.plan, module, method, place, caller.place, ends, loops
            )
            return call.run(function, args, kwargs)

    @contextlib.contextmanager
    def active(self, module: nn.Module, place: Place) -> Iterator[None]:
        outer, name = ACTIVE.innermost, self.name_of(module.path)
        shared = outer is not None and outer.module.path == module.path
        if shared or name not in self.places:  # nn.share_scope: the inner one's
            self.places[name] = place
        # Each call of a transformation makes a class, which is not kept.
        self.seen.add((name, type(module) if self.initializing else object))
        ACTIVE.innermost = Active(self, module, place)
        try:
            yield
        finally:
            ACTIVE.innermost = outer

    def name_of(self, path: Path) -> str:
        """The path below the root, such as "encoder/Dense_0"."""
        depth = len(self.path)
        return "/".join(path[depth:] if path[:depth] == self.path else path)

    def outer_place(self, path: Path, caller: Active) -> Place:
        """The place of the module around another: the caller's, if that is around."""
        start, place = len(caller.module.path), caller.place
        if path[:start] != caller.module.path:  # made elsewhere and passed on
            start, place = len(self.path), self.places[""]
        for depth in range(start + 1, len(path)):
            name = self.name_of(path[:depth])
            found = self.places.get(name)  # None if it is still to be called
            place = found or place_of(self.plan, name, None, place)
        return place

    def boxed(self, variables: PyTree) -> PyTree:
        if self.initializing:
            self.made.append(variables)
        return boxed(variables)

    def stored(self, variables: PyTree) -> PyTree:
        """Parameters out of their boxes, in the dtypes that they are stored in."""
        # Flax comes here after the first time, with each scope, and after the second,
        # in which a weight norm has written again, with casts.
        if self.made:
            return self.made.pop(0)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: cast_floating(x, self.param_dtype(path)),
            without_boxes(variables),
        )

    def param_dtype(self, path: jax.tree_util.KeyPath) -> np.dtype:
        names = names_in(path)[1:]
        for depth in range(len(names), -1, -1):
            if (place := self.places.get("/".join(names[:depth]))) is not None:
                return place.policy.param_dtype
        return self.plan.policy.param_dtype

    def check_used(self, module: nn.Module) -> None:
        """Raises for an override that matches no module, as far as this call can tell.

        `init` calls all modules. Other calls may skip some, so they only compare paths,
        also with those of the variables and of the modules that were called before.
        """
        known = self.seen.copy()
        for tree in module.variables.values():
            for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
                names = names_in(path)
                known |= {("/".join(names[:i]), object) for i in range(len(names))}
        keys = [key for key, _ in self.plan.overrides]
        if not self.initializing:
            keys = [key for key in keys if isinstance(key, str)]
        check_all_used(CALLER, keys, known)


def names_in(path: jax.tree_util.KeyPath) -> list[str]:
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def intercept(
    function: Callable,
    args: tuple,
    kwargs: dict,
    context: nn.module.InterceptorContext,
) -> PyTree:
    module, method, top = context.module, context.method_name, ACTIVE.innermost
    if module.scope is None or top is None:
        return function(*args, **kwargs)
    if top.is_of(module):  # it calls itself, or is the copy of a transformation
        with top.root.active(module, top.place):
            return function(*args, **kwargs)
    if has_policy(module) or not hasattr(type(module), method):
        # It has its own policy, or a transformation made it to call a function.
        return function(*args, **kwargs)
    return top.root.call_module(top, module, method, function, args, kwargs)


def with_open_boxes(module: nn.Module, *args, **kwargs) -> PyTree:
    """Calls a module that names parameters by their paths in the tree of variables."""

    def run(module, *args, **kwargs):
        return module(*args, **kwargs)

    lifted = nn.map_variables(
        run,
        "params",
        trans_in_fn=nn.meta.unbox,
        mutable=module.is_initializing(),
    )
    return lifted(module, *args, **kwargs)


def is_scanned(module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module is one that `nn.scan` runs in its loop.

    After `nn.scan(Class)`, Flax names the class that the parent sees "ScanBlock". As a
    decorator of the method, `nn.scan` leaves a function that knows its transformation.
    """
    method = inspect.getattr_static(type(module), "__call__")
    while method is not None:
        if inspect.getclosurevars(method).nonlocals.get("transform") is lift.scan:
            return True
        method = getattr(method, "__wrapped__", None)
    made = parent._state.children.get(module.name or "")
    if module.path[:-1] != parent.path or not isinstance(made, nn.Module):
        return False
    transformations = type(made).__name__.removesuffix(type(module).__name__)
    return "scan" in transformations.lower()
