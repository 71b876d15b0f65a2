"""What keeps norms, softmax, losses and random draws in float32 under a policy.

A norm of Flax is recognized by its class, and gets other casts than the modules around
it. A function (softmax, a loss, a norm of Equinox or Haiku) is recognized by an
autocast region whose table holds these functions and nothing else, so that all other
ops run in what the policy's casts give them. Being the inner region, it also turns off
an autocast region around the model.
"""

import contextlib
import functools
import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from .._autocast.casting import REGION
from .._autocast.decision import Action, Reason, Settings, Source, UserRule, UserRules
from .._autocast.ops import DRAW, FLOAT32_NORM, FUNCTIONS, KEPT
from .._autocast.region import enter
from .._autocast.rules import find, loaded, resolve, source_of
from .._tree import HALVES

NORMS = tuple(path.removesuffix(".__call__") for path in KEPT["norms"])
NORMS += ("flax.linen.InstanceNorm", "flax.nnx.InstanceNorm")  # not in torch's lists

# JAX's errors of two dtypes that must be one.
TWO_DTYPES = re.compile(r"(?s)(carry|branch|same dtypes).*float16")
CAST_ONE = """jamp: what has a policy gives back half precision, and JAX wants it to \
have the dtype of what it meets here: the start of a loop, another branch, a cache. \
Cast that one before (x.astype(h.dtype)), or the result (h.astype(x.dtype))."""


def float32_region(
    dtype: np.dtype, names: frozenset[str]
) -> contextlib.AbstractContextManager:
    """The region for a computation in `dtype` that keeps some functions."""
    rules = rules_for(names, loaded()) if dtype in HALVES else ()
    if rules:
        return enter(Settings(dtype, rules=rules, listed=False))
    return contextlib.nullcontext() if REGION.value is None else enter(None)


@functools.lru_cache
def rules_for(names: frozenset[str], modules: frozenset[str]) -> UserRules:
    rules = []
    for path, name in ((path, n) for n in sorted(names) for path in KEPT[n]):
        if (code := resolve(path, modules)) is not None:
            # What follows a norm or softmax gets half precision, if its input was.
            inside = name == "norms" or path == "jax.nn.softmax"
            table = FLOAT32_NORM if name == "norms" else None
            action = Action(None, jnp.dtype("float32"), marks=inside, table=table)
            rules.append(UserRule(path, (code, source_of(code)), action))
    for path in (path for path, row in FUNCTIONS.items() if row.kind is DRAW):
        if (code := resolve(path, modules)) is not None:
            why = Reason("draw", Source.FUNCTION, path)
            action = Action(None, jnp.dtype("float32"), why=why, table=DRAW)
            rules.append(UserRule(path, (code, source_of(code)), action))
    return UserRules(rules)


@contextlib.contextmanager
def advised() -> Iterator[None]:
    """Says what to do where JAX compares dtypes, and a policy's casts made them two."""
    try:
        yield
    except TypeError as error:
        if TWO_DTYPES.search(str(error)):
            error.add_note(CAST_ONE)
        raise


def norm_classes() -> tuple[type, ...]:
    """The norms of Flax, Equinox and Haiku, as far as they are imported."""
    return classes(NORMS, loaded())


def state_classes() -> tuple[type, ...]:
    """What holds state, such as the averages of a BatchNorm of Equinox."""
    return classes(("equinox.nn.State",), loaded())


@functools.lru_cache
def classes(paths: tuple[str, ...], modules: frozenset[str]) -> tuple[type, ...]:
    found = (find(path, modules) for path in paths)
    return tuple(value for value in found if isinstance(value, type))
