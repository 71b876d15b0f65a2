"""Which module has which policy: that of `with_policy`, an override, or a norm's.

A policy governs the module that it is given to and all modules inside, up to a module
with another policy from an override or from `float32_for`. Where a policy's territory
ends, results are cast to its output dtype. In between they are not cast, so that no
value is widened between two layers.
"""

import difflib
import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax.numpy as jnp

from .._autocast.paths import path_pattern
from .._checks import shown
from .float32_region import norm_classes
from .policy import Policy, as_policy, check_float32_for

T = TypeVar("T")
Path = tuple[Hashable, ...]

NO_MODULE = """{}: the first argument must be a module; got {}.
Use jamp.linen.with_policy for Flax Linen, jamp.nnx.with_policy for NNX, and \
policy.wrap for functions."""

BAD_KEY = """{}: the key {}.
A key is a regular expression that is searched for in the module's path ("encoder/.*", \
"^lm_head$") or a module class (nn.LayerNorm)."""

UNUSED = """{}: overrides match no module: {}.
The nearest module paths are: {}."""


class Plan(NamedTuple):
    """The arguments of `with_policy`, hashable."""

    policy: Policy
    overrides: tuple[tuple[str | type, Policy], ...]
    float32_for: frozenset[str]


def make_plan(
    caller: str,
    module: object,
    base: type,
    policy: Policy | str,
    overrides: Mapping[str | type, Policy | str] | None,
    float32_for: Collection[str],
) -> Plan:
    if not isinstance(module, base):
        raise TypeError(NO_MODULE.format(caller, shown(module)))
    if has_policy(module):
        raise ValueError(
            f"{caller}: the module already has a policy; pass the plain module, and "
            "all overrides at once."
        )
    if not isinstance(overrides, Mapping | None):
        raise TypeError(
            f"{caller}: overrides must be a dict of module paths and policies; got "
            f"{type(overrides).__name__}."
        )
    whole, rows = as_policy(f"{caller}: policy", policy), []
    for key, value in (overrides or {}).items():
        where = f"{caller}: overrides[{key!r}]"
        if isinstance(key, str):
            try:
                path_pattern(key)
            except re.error as error:
                problem = f"is not a regular expression: {error}"
                raise ValueError(BAD_KEY.format(where, problem)) from None
        elif not isinstance(key, type):
            raise TypeError(BAD_KEY.format(where, "is neither a string nor a class"))
        rows.append((key, as_policy(where, value)))
    return Plan(whole, tuple(rows), check_float32_for(float32_for))


def has_policy(module: object) -> bool:
    return hasattr(type(module), "_jamp_plan")


def policy_of(plan: Plan, path: str, module: object, outer: Policy) -> Policy:
    """The policy of a module that is in another one."""
    for key, policy in plan.overrides:
        if matches(key, path, module):
            return policy
    full = jnp.dtype("float32")
    narrow = jnp.finfo(outer.compute_dtype).bits < 32
    if "norms" in plan.float32_for and narrow and isinstance(module, norm_classes()):
        return Policy(full, full, outer.compute_dtype)
    return outer


def joined(path: Path) -> str:
    return "/".join(map(str, path))


def nearest(path: Path, found: Mapping[Path, T]) -> T:
    """The entry of the longest prefix of a path that has one."""
    starts = (path[:depth] for depth in range(len(path), -1, -1))
    return next(found[start] for start in starts if start in found)


def matches(key: str | type, path: str, module: object) -> bool:
    """Whether an override is for this module, and not just for one around it."""
    if isinstance(key, type):
        return isinstance(module, key)
    found, around = path_pattern(key).search, path.rpartition("/")[0]
    return bool(found(path)) and (path == "" or not found(around))


def check_all_used(
    caller: str, keys: Iterable[str | type], modules: Collection[tuple[str, type]]
) -> None:
    """Raises ValueError if a key matches no path and class, with the nearest paths."""

    def is_used(key: str | type) -> bool:
        if isinstance(key, str):
            return any(path_pattern(key).search(path) for path, _ in modules)
        return any(issubclass(cls, key) for _, cls in modules)

    if unused := [key for key in keys if not is_used(key)]:
        known = sorted({path for path, _ in modules} - {""})
        near = [
            path
            for key in unused
            for path in difflib.get_close_matches(str(key), known, n=5, cutoff=0.0)
        ]
        names = ", ".join(map(repr, dict.fromkeys(near))) or "none"
        raise ValueError(UNUSED.format(caller, ", ".join(map(repr, unused)), names))
