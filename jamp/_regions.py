"""What stays in float32 under a policy: norms, softmax and losses.

A norm of Flax is recognized by its class, and gets other casts than the modules around
it. A function (softmax, a loss, a norm of Equinox or Haiku) is recognized by an
autocast region whose table holds these functions and nothing else, so that all other
ops run in what the policy's casts give them. Being the inner region, it also turns off
an autocast region around the model.
"""

import contextlib
import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from ._autocast import enter
from ._op_rules import KEPT
from ._rules import (
    CASTABLE,
    REGION,
    Action,
    Settings,
    UserRule,
    find,
    loaded,
    resolve,
    source_of,
)

FLOAT32_FOR = tuple(KEPT)
# Norms that torch's lists do not have.
OTHER_NORMS = ("flax.linen.InstanceNorm.__call__", "flax.nnx.InstanceNorm.__call__")


def check_float32_for(names: Any) -> frozenset[str]:
    """The names as a set.

    Raises:
      TypeError: a string, or no collection.
      ValueError: an unknown name.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(
            f"float32_for must be a tuple of names, such as {FLOAT32_FOR}; got "
            f"{names!r}."
        )
    for name in names:
        if name not in KEPT:
            near = difflib.get_close_matches(str(name), KEPT, n=1)
            raise ValueError(
                f"float32_for: unknown name {name!r}"
                + (f", did you mean {near[0]!r}?" if near else ".")
                + f" There are {', '.join(map(repr, KEPT))}."
            )
    return frozenset(names)


def float32_region(
    dtype: Any, names: Collection[str]
) -> Callable[[], contextlib.AbstractContextManager]:
    """Makes the region for a computation in `dtype` that keeps some functions."""
    functions = check_float32_for(names)

    def region():
        rules = ()
        if dtype in CASTABLE[:2] and functions:
            rules = rules_for(functions, loaded())
        if rules:
            return enter(Settings(dtype, rules, listed=False))
        return contextlib.nullcontext() if REGION.value is None else enter(None)

    return region


@functools.lru_cache
def rules_for(names: frozenset[str], modules: frozenset[str]) -> tuple[UserRule, ...]:
    rules = []
    for path, name in ((path, n) for n in sorted(names) for path in KEPT[n]):
        if (code := resolve(path, modules)) is not None:
            # What follows a norm or softmax gets half precision, if its input was.
            inside = name == "norms" or path == "jax.nn.softmax"
            action = Action(None, jnp.dtype("float32"), marks=inside)
            rules.append(UserRule(path, (code, source_of(code)), action))
    return tuple(rules)


def is_norm(module: Any) -> bool:
    """Whether a module is a norm of Flax, Equinox or Haiku, or derives from one."""
    return isinstance(module, norm_classes(loaded()))


@functools.lru_cache
def norm_classes(modules: frozenset[str]) -> tuple[type, ...]:
    paths = (path.removesuffix(".__call__") for path in (*KEPT["norms"], *OTHER_NORMS))
    found = (find(path, modules) for path in paths)
    return tuple(value for value in found if isinstance(value, type))


def is_state(node: Any) -> bool:
    """Whether a node is Equinox's state, such as the averages of a BatchNorm."""
    state = find("equinox.nn.State", loaded())
    return state is not None and isinstance(node, state)


FLAX = (nn.Module, nnx.Module)


def is_flax(function: Any) -> bool:
    """Whether something is a Flax module, whose state would be lost in a cast copy."""
    owner = getattr(function, "__self__", None)  # of a bound method
    return isinstance(function, FLAX) or isinstance(owner, FLAX)
