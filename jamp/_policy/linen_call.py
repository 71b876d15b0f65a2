"""What happens when a Linen module that was given a policy is called.

That module is the root of the modules inside. A call takes these steps:

1. `RootCall.run` puts each parameter in a box that casts it when it is read, and has
   Flax call `intercept` for each method of each module inside.
2. `RootCall.inside` runs the method of the root, with casts of its inputs and results.
3. `intercept` is called for a module inside, finds its policy, and runs its method in
   the same way, or without casts.
4. Back in `run`, new parameters get the param dtype of the module that they belong to
   (`stored`), and `check_used` names the overrides that match no module.

`init` takes steps 2 and 3 twice: once without casts, which makes the parameters that
the plain module makes, and once with casts, which makes the rest of the state, such as
caches, in the dtypes of later calls.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import linen as nn
from flax.core import meta

from .._tree import PyTree, cast_floating
from .float32_region import COMPUTE_DTYPE
from .module_call import ModuleCall
from .overrides import (
    Path,
    Plan,
    check_all_used,
    has_policy,
    joined,
    nearest,
    policy_of,
)
from .policy import Policy
from .surgery import Calls

CALLER = "jamp.linen.with_policy"

NAMES_PARAMETERS = nn.WeightNorm, nn.SpectralNorm
BY_PATH = """{}: {} does not run under a policy, because it names parameters by their \
paths in the tree of variables. Use jamp.autocast for this model."""

Seen = set[tuple[str, type]]  # the paths and classes of modules


class Active(NamedTuple):
    """A module that is being called."""

    root: "RootCall"
    module: nn.Module
    policy: Policy

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the module itself, or a copy that a transformation made."""
        same_class = issubclass(type(self.module), type(module))
        return same_class and self.module.path == module.path


ACTIVE = Calls()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastOnUse(meta.AxisMetadata):
    """A parameter, perhaps with a sharding annotation, that is cast when it is read.

    Flax uses such boxes for sharding annotations: a module that reads its parameter
    opens the box.
    """

    value: jax.Array | meta.AxisMetadata

    def unbox(self):
        dtype = COMPUTE_DTYPE.value
        value = meta.unbox(self.value)
        return value if dtype is None else cast_floating(value, dtype)

    def replace_boxed(self, val):
        return CastOnUse(meta.replace_boxed(self.value, val))

    def add_axis(self, index, params):
        return CastOnUse(meta.add_axis(self.value, index, params))

    def remove_axis(self, index, params):
        return CastOnUse(meta.remove_axis(self.value, index, params))

    # For code that reads self.variables["params"] instead of self.param(...).

    def __jax_array__(self):
        return self.unbox()

    def __getattr__(self, name):
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return getattr(self.unbox(), name)

    def __getitem__(self, index):
        return self.unbox()[index]


def boxed(variables: PyTree) -> PyTree:
    is_annotated = lambda x: isinstance(x, meta.AxisMetadata)
    return jax.tree.map(CastOnUse, variables, is_leaf=is_annotated)


def without_boxes(variables: PyTree) -> PyTree:
    is_box = lambda x: isinstance(x, CastOnUse)
    return jax.tree.map(
        lambda x: x.value if is_box(x) else x, variables, is_leaf=is_box
    )


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
        self.policies: dict[Path, Policy] = {}  # of the modules that were called
        if self.initializing and method == "__call__":
            seen.clear()  # of other models of the class
        self.policy = policy_of(plan, "", module, plan.policy)
        top = ACTIVE.innermost
        self.around = None if top is None else top.policy

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> PyTree:
        lifted = nn.map_variables(
            self.inside,
            "params",
            trans_in_fn=boxed,
            trans_out_fn=self.stored,
            mutable=module.is_mutable_collection("params"),
            init=self.initializing,  # then it runs `inside` twice
        )
        with contextlib.ExitStack() as contexts:
            if self.around is None:  # otherwise the interceptor is already there
                contexts.enter_context(nn.intercept_methods(intercept))
            contexts.enter_context(self.active(module, self.policy))
            contexts.enter_context(COMPUTE_DTYPE(self.policy.compute_dtype))  # of setup
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
            self.plan, module, self.method, self.policy, self.around, ends=True
        )
        return call.run(bound, args, kwargs)

    def active(
        self, module: nn.Module, policy: Policy
    ) -> contextlib.AbstractContextManager:
        if isinstance(module, NAMES_PARAMETERS):
            raise NotImplementedError(BY_PATH.format(CALLER, type(module).__name__))
        outer, path = ACTIVE.innermost, self.below(module.path)
        shared = outer is not None and outer.module.path == module.path
        if shared or path not in self.policies:  # nn.share_scope: the inner one's
            self.policies[path] = policy
        # Each call of a transformation makes a class, which is not kept.
        self.seen.add((joined(path), type(module) if self.initializing else object))
        return ACTIVE.inside(Active(self, module, policy))

    def below(self, path: Path) -> Path:
        """The path from the root, such as ("encoder", "Dense_0")."""
        depth = len(self.path)
        return path[depth:] if path[:depth] == self.path else path

    def policy_of(self, module: nn.Module) -> Policy:
        """The policy of a module inside, by its path and those of what is around it."""
        path, policy = self.below(module.path), self.policy
        for depth in range(1, len(path)):
            found = self.policies.get(path[:depth])  # None if it is still to be called
            name = joined(path[:depth])
            policy = found or policy_of(self.plan, name, None, policy)
        return policy_of(self.plan, joined(path), module, policy)

    def stored(self, variables: PyTree) -> PyTree:
        """Parameters out of their boxes, in the dtypes that they are stored in."""

        def cast(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
            policy = nearest(names_in(path)[1:], self.policies)
            return cast_floating(x, policy.param_dtype)

        return jax.tree_util.tree_map_with_path(cast, without_boxes(variables))

    def check_used(self, module: nn.Module) -> None:
        """Raises for an override that matches no module, as far as this call can tell.

        `init` calls all modules. Other calls may skip some, so they only compare paths,
        also with those of the variables and of the modules that were called before.
        """
        known = self.seen.copy()
        for tree in module.variables.values():
            for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
                names = names_in(path)
                known |= {(joined(names[:i]), object) for i in range(len(names))}
        keys = [key for key, _ in self.plan.overrides]
        if not self.initializing:
            keys = [key for key in keys if isinstance(key, str)]
        check_all_used(CALLER, keys, known)


def names_in(path: jax.tree_util.KeyPath) -> Path:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def intercept(
    function: Callable,
    args: tuple,
    kwargs: dict,
    context: nn.module.InterceptorContext,
) -> PyTree:
    module, method, caller = context.module, context.method_name, ACTIVE.innermost
    if module.scope is None or caller is None:
        return function(*args, **kwargs)
    root = caller.root
    if caller.is_of(module):  # it calls itself, or is the copy of a transformation
        with root.active(module, caller.policy):
            return function(*args, **kwargs)
    if has_policy(module) or not hasattr(type(module), method):
        # It has its own policy, or a transformation made it to call a function.
        return function(*args, **kwargs)
    policy = root.policy_of(module)
    with root.active(module, policy):
        if not root.casts:
            return function(*args, **kwargs)
        if method == "setup" or (method.startswith("_") and method != "__call__"):
            with COMPUTE_DTYPE(policy.compute_dtype):  # arguments stay
                return function(*args, **kwargs)
        ends = policy != caller.policy
        call = ModuleCall(root.plan, module, method, policy, caller.policy, ends)
        return call.run(function, args, kwargs)
