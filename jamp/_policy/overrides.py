"""Which module has which policy, and what that does to a call of the module.

A policy governs the module that it is given to and all modules inside, up to one that
an override, or `float32_for`, gives another policy. On the way into a module its inputs
are cast to the compute dtype, and so are parameters when they are read. Where one
policy's territory ends, results are cast to its output dtype; in between they are left,
so that nothing is widened between two layers.
"""

import contextlib
import copyreg
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import lift

from .._autocast.paths import PathPattern
from .._checks import shown
from .._tree import cast_floating
from .float32_for import check_float32_for
from .float32_region import advised, float32_region, norm_classes
from .policy import Policy, get_policy

# What parameters are cast to when they are read, or None. JAX keys its caches by it.
COMPUTE_DTYPE = jax.make_user_context(None)

ROOT, NORM = -1, -2

# They write the parameters of the layer inside, from what they read there.
WRITERS = (nnx.WeightNorm, nnx.SpectralNorm)

STATEFUL = (nnx.Pytree, nnx.Variable)  # of which a cast copy would be of no use

NO_MODULE = """{}: what is given must be a module; got {}.
For Flax Linen there is jamp.linen.with_policy, for NNX jamp.nnx.with_policy, for \
functions policy.wrap."""

BAD_KEY = """{}: overrides[{!r}]: {}
A key is a regular expression that is searched for in the module's path ("encoder/.*", \
"^lm_head$") or a module class (nn.LayerNorm); a value is a policy or its string."""

UNUSED = """{}: overrides match no module: {}.
Module paths nearest to them: {}."""


class Plan(NamedTuple):
    """What `with_policy` was asked for. Hashable."""

    policy: Policy
    overrides: tuple[tuple[str | type, Policy], ...]
    float32_for: frozenset[str]


class Place(NamedTuple):
    """The policy of a module, and where it is from: an override's index, ROOT, NORM."""

    policy: Policy
    source: int


def make_plan(
    caller: str,
    module: Any,
    base: type,
    policy: Any,
    overrides: Any,
    float32_for: Collection[str],
) -> Plan:
    """Checks the arguments of `with_policy` for modules that derive from `base`."""
    if not isinstance(module, base):
        raise TypeError(NO_MODULE.format(caller, shown(module)))
    if hasattr(type(module), "_jamp_rebuild"):
        raise ValueError(
            f"{caller}: the module has a policy already; pass the plain module, and "
            "all overrides at once."
        )
    if not isinstance(policy, Policy | str):
        raise TypeError(
            f"{caller}: policy must be a jamp.Policy or a string for jamp.get_policy; "
            f"got {policy!r}."
        )
    if not isinstance(overrides, Mapping | None):
        raise TypeError(
            f"{caller}: overrides must be a dict of module paths and policies; got "
            f"{type(overrides).__name__}."
        )
    rows = []
    for key, value in (overrides or {}).items():
        if not isinstance(value, Policy | str):
            raise TypeError(BAD_KEY.format(caller, key, f"{value!r} is no policy."))
        if not isinstance(key, str | type):
            raise TypeError(
                BAD_KEY.format(caller, key, "neither a string nor a class.")
            )
        if isinstance(key, str):
            try:
                PathPattern(key)
            except re.error as error:
                problem = f"not a regular expression: {error}."
                raise ValueError(BAD_KEY.format(caller, key, problem)) from None
        rows.append((key, get_policy(value)))
    return Plan(get_policy(policy), tuple(rows), check_float32_for(float32_for))


def place_of(plan: Plan, path: str, module: Any, outer: Place, hits: set[int]) -> Place:
    """The place of a module that is called from another one; notes the overrides."""
    found = [i for i, (key, _) in enumerate(plan.overrides) if names(key, path, module)]
    hits.update(found)
    if found:
        return Place(plan.overrides[found[0]][1], found[0])
    policy, full = outer.policy, jnp.dtype("float32")
    narrow = jnp.finfo(policy.compute_dtype).bits < 32
    if "norms" in plan.float32_for and narrow and isinstance(module, norm_classes()):
        return Place(Policy(full, full, policy.compute_dtype), NORM)
    return outer


def names(key: str | type, path: str, module: Any) -> bool:
    """Whether an override is for this module, and not just for one around it."""
    if isinstance(key, type):
        return isinstance(module, key)
    around = path.rpartition("/")[0]
    pattern = pattern_of(key)
    return pattern.search(path) and (path == "" or not pattern.search(around))


pattern_of = functools.cache(PathPattern)


def check_all_used(
    caller: str, plan: Plan, hits: Collection[int], paths: Iterable[str]
) -> None:
    """Raises ValueError if an override matches nothing, with the nearest paths."""
    unused = [key for i, (key, _) in enumerate(plan.overrides) if i not in hits]
    if unused:
        known = sorted(set(paths) - {""})
        near = [
            path
            for key in unused
            for path in difflib.get_close_matches(str(key), known, n=5, cutoff=0.0)
        ]
        names = ", ".join(map(repr, dict.fromkeys(near))) or "none"
        raise ValueError(UNUSED.format(caller, ", ".join(map(repr, unused)), names))


class Call(NamedTuple):
    """A call of a module's method."""

    plan: Plan
    place: Place  # of the module
    caller: Place | None  # of the module that calls; None where no policy governs
    boundary: bool  # whether the policy ends at this module, so that results are cast
    module: Any
    method: str
    loops: bool = False  # whether this is a step of a loop over the module

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls the function as the policy wants it."""
        dtype = self.place.policy.compute_dtype
        carry, inputs = self.split_carry(args)
        inputs, kwargs = cast_floating((inputs, kwargs), dtype, STATEFUL)
        with contextlib.ExitStack() as contexts:
            reads = None if isinstance(self.module, WRITERS) else dtype
            contexts.enter_context(COMPUTE_DTYPE(reads))
            if self.caller is None:
                contexts.enter_context(advised())
            if self.caller is None or self.caller.policy.compute_dtype != dtype:
                functions = self.plan.float32_for - {"norms"}  # modules, here
                contexts.enter_context(float32_region(dtype, functions))
            out = function(*carry, *inputs, **kwargs)
        if carry:
            out = (restore(out[0], carry[0]), *out[1:])
        if self.boundary:
            out = cast_floating(out, self.place.policy.output_dtype, STATEFUL)
        return as_carried(out, args[0]) if self.loops else out

    def split_carry(self, args: tuple) -> tuple[tuple, tuple]:
        """A recurrent cell's carry, which keeps its dtype, and the other inputs."""
        is_cell = isinstance(self.module, nn.RNNCellBase | nnx.RNNCellBase)
        if is_cell and self.method == "__call__":
            return args[:1], args[1:]
        return (), args


def is_scanned(module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module is one that `nn.scan` runs in its loop.

    Flax names the class of what the parent sees after `nn.scan(Class)`: ScanBlock. As a
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


def as_carried(out: Any, carry: Any) -> Any:
    """The result of a step of a loop, with the carry in the dtypes that came in."""
    structure = jax.tree.structure(carry)
    if jax.tree.structure(out) == structure:
        return restore(out, carry)
    if isinstance(out, tuple) and out and jax.tree.structure(out[0]) == structure:
        return restore(out[0], carry), *out[1:]
    return out


def restore(tree: Any, like: Any) -> Any:
    """The arrays of a tree in the dtypes that those of another one have."""
    return jax.tree.map(lambda x, y: cast_floating(x, jnp.result_type(y)), tree, like)


def methods_of(base: type, root: type) -> dict[str, Callable]:
    """The methods of a module class that its users call: public, and not Flax's own.

    Each as a function of the module, whatever it was decorated with.
    """
    found = {}
    for name in dir(base):
        method = inspect.getattr_static(base, name)
        public = name == "__call__" or not name.startswith("_")
        inherited = name != "__call__" and hasattr(root, name)
        binds = callable(method) or isinstance(method, functools.partialmethod)
        if not (public and binds and hasattr(method, "__get__")) or inherited:
            continue
        if isinstance(method, type | staticmethod) or hasattr(method, "nowrap"):
            continue
        found[name] = method if inspect.isfunction(method) else unbound(method)
    return found


def unbound(method: Any) -> Callable:
    """A function of the module, for a method that is jitted, partial and the like."""

    def function(self, *args, **kwargs):
        return method.__get__(self, type(self))(*args, **kwargs)

    return functools.update_wrapper(function, method, updated=())


def subclass(base: type, namespace: dict[str, Any], rebuild: tuple) -> type:
    """A class of the same name, pickled as the call `rebuild[0](*rebuild[1])`.

    Args:
      namespace: what it adds to `base`.
    """
    namespace = namespace | {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_jamp_rebuild": rebuild,
    }
    return pickled_meta(type(base))(base.__name__, (base,), namespace)


@functools.cache
def pickled_meta(meta: type) -> type:
    if "_jamp_pickled" in vars(meta):
        return meta
    made = type(meta)(meta.__name__, (meta,), {"_jamp_pickled": True})
    copyreg.pickle(made, lambda cls: cls._jamp_rebuild)
    return made
