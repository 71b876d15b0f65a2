"""What code under a policy reads and keeps: the dtype of parameters, and float32.

A norm of Flax is recognized by its class, and gets other casts than the modules around
it. A function (softmax, a loss, a norm of Equinox or Haiku) is recognized by an
autocast region whose table holds only these functions, so that all other ops run in the
dtypes that the policy's casts give them. As the inner region, it also turns off an
autocast region around the model.

`import jamp` imports this file: JAX keys its caches by `COMPUTE_DTYPE`, and a context
that is made later makes JAX trace every jitted function again.
"""

import contextlib
import functools
import re
from collections.abc import Iterator

import jax
import numpy as np

from .._autocast.call_stack import find, resolve
from .._autocast.decision import (
    FLOAT32_DTYPE,
    Decision,
    Reason,
    Settings,
    Source,
    UserRule,
    UserRules,
)
from .._autocast.keys import Function
from .._autocast.ops import FLOAT32, FUNCTIONS, KEPT
from .._autocast.refused import as_coarse
from .._autocast.region import enter
from .._autocast.rules import loaded
from .._tree import HALVES

# The dtype that a module under a policy reads parameters in, or None.
COMPUTE_DTYPE = jax.make_user_context(None)

NORMS = tuple(path.removesuffix(".__call__") for path in KEPT["norms"])
NORMS += ("flax.linen.InstanceNorm", "flax.nnx.InstanceNorm")  # not in torch's lists

# JAX's errors about two dtypes that must be equal.
TWO_DTYPES = re.compile(r"(?s)(carry|branch|same dtypes).*float16")
CAST_ONE = """jamp: code under a policy returns half precision, and JAX requires the \
dtype of what it meets here: the start of a loop, another branch, a cache. Cast that \
value first (x.astype(h.dtype)), or cast the result (h.astype(x.dtype))."""


@contextlib.contextmanager
def float32_region(dtype: np.dtype, names: frozenset[str]) -> Iterator[None]:
    """The region for a computation in `dtype` that keeps some functions.

    It adds advice to JAX's error if the casts around it made two dtypes differ.
    """
    settings = None
    if dtype in HALVES:
        settings = Settings(dtype, rules=rules_for(names, loaded()), is_policy=True)
    try:
        with enter(settings):
            yield
    except TypeError as error:
        is_known = CAST_ONE in getattr(error, "__notes__", ())
        if TWO_DTYPES.search(str(error)) and not is_known:
            error.add_note(CAST_ONE)
        raise


@functools.lru_cache
def rules_for(names: frozenset[str], modules: frozenset[str]) -> UserRules:
    decisions = []
    for path, name in ((path, n) for n in sorted(names) for path in KEPT[n]):
        # Ops after a norm or softmax get half precision, if its input was.
        inside = name == "norms" or path == "jax.nn.softmax"
        decisions.append((path, Decision(FLOAT32, FLOAT32_DTYPE, inside)))
    for path, row in FUNCTIONS.items():
        if row.refuses is as_coarse:
            why = Reason("float32", Source.FUNCTION, path)
            decision = Decision(FLOAT32, FLOAT32_DTYPE, why=why, refuses=row.refuses)
            decisions.append((path, decision))
    return UserRules(
        [
            UserRule(path, Function(code), decision)
            for path, decision in decisions
            if (code := resolve(path, modules)) is not None
        ]
    )


def norm_classes() -> tuple[type, ...]:
    """The norms of Flax, Equinox and Haiku, as far as they are imported."""
    return norms_in(loaded())


@functools.lru_cache
def norms_in(modules: frozenset[str]) -> tuple[type, ...]:
    found = (find(path, modules) for path in NORMS)
    return tuple(value for value in found if isinstance(value, type))
