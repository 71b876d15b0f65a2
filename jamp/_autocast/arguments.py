"""The arguments of `autocast`, with its `rules`, and the errors of wrong ones."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from .._checks import (
    FLOAT8_NAMES,
    as_dtype,
    brief,
    did_you_mean,
    dtype_or_none,
    shown,
)
from .._targets import default_dtype
from .._tree import HALVES
from .call_stack import unwrapped
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Decision,
    Dtypes,
    Reason,
    Recipe,
    Source,
    UserRule,
)
from .float8 import as_recipe
from .keys import function_of, problem_with
from .ops import KEEP
from .paths import path_pattern

BAD_DTYPE = """autocast(dtype={}): the dtype must be float16 or bfloat16 (or \
"float8", a jamp.Float8 or a jamp.ScaledFloat16).
autocast takes no device: write `with jamp.autocast(dtype=jnp.float16):`. To run in \
float32, write `enabled=False`."""

NO_DEVICE = """autocast takes no device: write `with \
jamp.autocast(dtype=jnp.float16):`. It works wherever JAX runs."""

NO_PARENTHESES = """autocast(dtype={0}): the dtype is a {1}. To decorate it, write \
`@jamp.autocast()` with parentheses, or `@jamp.autocast(jnp.float16)`."""

BAD_INPUTS = """autocast(cast_inputs={}): the dtype must be float16, bfloat16 or \
float32."""

BAD_RULE = """autocast(rules={{{key!r}: ...}}): {problem}
A key is a JAX primitive (jax.lax.exp_p), a Python function (jax.nn.softmax), a module \
class (nn.LayerNorm), or a regular expression that is searched for in the module path \
("lm_head"). A value is the dtype to run in: float16, bfloat16 or float32; \
jax.lax.Precision.HIGHEST for float32 with all digits; "float8", a jamp.Float8 or a \
jamp.ScaledFloat16 for the matrix products that qualify; or None to leave the op \
unchanged."""

UNUSED = """autocast(rules=...): no op matched {}, or an earlier rule decides about \
all that do: put the narrower one first. A recipe is for matrix products alone. A \
module path is searched for in the name stack, which Flax Linen, Haiku, \
jax.named_scope and the layers of eqx.nn write (as "eqx.nn.Linear"). For NNX and your \
own Equinox modules, use the class. jamp.nnx.named_scopes(model) makes an NNX model \
that writes paths. A function matches while it runs in the region."""


def region_dtype(
    value: DTypeLike | Recipe | None, enabled: bool
) -> tuple[np.dtype, Recipe | None]:
    if (recipe := as_recipe(value)) is not None:
        return recipe.dtype, recipe
    given = dtype_or_none(value)
    if callable(value) and (given is None or given.kind == "O"):
        kind = "class" if isinstance(value, type) else "function"
        raise ValueError(NO_PARENTHESES.format(brief(value), kind))
    allowed = CASTABLE if enabled is False else HALVES
    dtype = default_dtype() if value is None else value
    return dtype_argument(dtype, allowed, BAD_DTYPE, FLOAT8_NAMES), None


def dtype_argument(
    value: object, allowed: Dtypes, message: str, recipes: Sequence[str] = ()
) -> np.dtype:
    """The dtype that a user gave, or ValueError with the message.

    Args:
      recipes: the names of recipes that the argument takes too.
    """
    try:
        dtype = as_dtype(value)
    except (TypeError, ValueError):
        hint = did_you_mean(value, [*allowed, *recipes])
        raise ValueError(message.format(brief(value)) + hint) from None
    if dtype not in allowed:
        raise ValueError(message.format(repr(str(dtype))))
    return dtype


# The table of rules.

Rules = Mapping[Any, DTypeLike | lax.Precision | Recipe | None]


def compile_rules(rules: Rules | None) -> tuple[UserRule, ...]:
    if rules is None:
        return ()
    if not isinstance(rules, Mapping):
        raise TypeError(f"autocast(rules=...) must be a dict; got {shown(rules)}.")
    compiled: list[UserRule] = []
    for rule in (compile_rule(key, value) for key, value in rules.items()):
        bases = (i for i, other in enumerate(compiled) if comes_before(rule, other))
        compiled.insert(next(bases, len(compiled)), rule)
    return tuple(compiled)


def comes_before(rule: UserRule, other: UserRule) -> bool:
    """Whether a rule is for a class derived from that of another: it decides first."""
    derived, base = (getattr(r.test, "cls", None) for r in (rule, other))
    if not isinstance(derived, type) or not isinstance(base, type):
        return False
    return derived is not base and issubclass(derived, base)


def check_all_used(rules: tuple[UserRule, ...], used: set[int]) -> None:
    """Raises ValueError for rules that decided about no op."""
    unused = [repr(rule.name) for i, rule in enumerate(rules) if i not in used]
    if unused:
        raise ValueError(UNUSED.format(", ".join(unused)))


def compile_rule(key: object, value: object) -> UserRule:
    def bad(problem: str) -> ValueError:
        return ValueError(BAD_RULE.format(key=key, problem=problem))

    name = getattr(key, "__name__", None) or key
    why = Reason("rules", Source.USER, repr(name))
    if value is None:
        decision = Decision(KEEP, why=why)
    elif (recipe := as_recipe(value)) is not None:
        decision = Decision(None, why=why, recipe=recipe)
    elif isinstance(value, lax.Precision):
        decision = Decision(None, FLOAT32_DTYPE, why=why, precision=value)
    else:
        try:
            dtype = as_dtype(value)
        except (TypeError, ValueError):
            hint = did_you_mean(value, [*CASTABLE, *FLOAT8_NAMES])
            raise bad(f"{value!r} is not a dtype.{hint}") from None
        if dtype not in CASTABLE:
            raise bad(f"ops cannot run in {dtype}.")
        decision = Decision(None, dtype, why=why)
    if isinstance(key, Primitive):
        return UserRule(key.name, key, decision)
    if isinstance(key, str):
        try:
            return UserRule(key, path_pattern(key), decision)
        except re.error as error:
            raise bad(f"the key is not a regular expression: {error}.") from None
    if problem := problem_with(key):
        raise bad(problem)
    name = getattr(key, "__qualname__", None) or unwrapped(key)[-1].__qualname__
    return UserRule(name, function_of(key), decision)
