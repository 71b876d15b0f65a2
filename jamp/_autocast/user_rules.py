"""The user's table of rules: how `rules` is read, and which ones decided nothing."""

import re
from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from .._checks import as_dtype, shown
from .call_stack import code_of
from .decision import (
    CASTABLE,
    FLOAT32_DTYPE,
    Action,
    Hit,
    Reason,
    Recipe,
    Source,
    UserRule,
)
from .float8 import as_recipe
from .keys import function_of, problem_with
from .ops import KEEP
from .paths import PathPattern

BAD_RULE = """autocast(rules={{{key!r}: ...}}): {problem}
A key is a JAX primitive (jax.lax.exp_p), a Python function (jax.nn.softmax), or a \
regular expression that is searched for in the module path ("lm_head"). A value is the \
dtype to run in: float16, bfloat16 or float32; jax.lax.Precision.HIGHEST for float32 \
with all digits; "float8", a jamp.Float8 or a jamp.ScaledFloat16 for the matrix \
products that qualify; or None to leave the op unchanged."""

UNMATCHED = """no op matched {}. A module path is searched for in the name stack, \
which Flax Linen, Haiku, jax.named_scope and the layers of eqx.nn write (as \
"eqx.nn.Linear"). For NNX and your own Equinox modules, use the class. \
jamp.nnx.named_scopes(model) makes an NNX model that writes paths. A function matches \
while it runs in the region."""
SHADOWED = "{} only matches ops that the earlier rule {} decides about: put it first."
NO_PRODUCT = "{} asks for {}, but does not match any matrix product."

Rules = Mapping[Any, DTypeLike | lax.Precision | Recipe | None]


def compile_rules(rules: Rules | None) -> tuple[UserRule, ...]:
    """Checks a user's table."""
    if rules is None:
        return ()
    if not isinstance(rules, Mapping):
        raise TypeError(f"autocast(rules=...) must be a dict; got {shown(rules)}.")
    return tuple(compile_rule(key, value) for key, value in rules.items())


def check_all_used(rules: tuple[UserRule, ...], hits: set[Hit]) -> None:
    """Raises ValueError for rules that decided about no op, and says why."""
    used = {hit.rule for hit in hits if hit.by == hit.rule}
    unmatched, problems = [], []
    for index in sorted({*range(len(rules))} - used):
        name = repr(rules[index].name)
        deciding = {hit.by for hit in hits if hit.rule == index}
        earlier = [repr(r.name) for i, r in enumerate(rules) if i in deciding]
        recipe = rules[index].action.recipe
        if None in deciding and recipe is not None:
            problems.append(NO_PRODUCT.format(name, recipe.name))
        elif earlier:
            problems.append(SHADOWED.format(name, " or ".join(earlier)))
        else:
            unmatched.append(name)
    if unmatched:
        problems.insert(0, UNMATCHED.format(", ".join(unmatched)))
    if problems:
        raise ValueError(" ".join(["autocast(rules=...):", *problems]))


def compile_rule(key: object, value: object) -> UserRule:
    def bad(problem: str) -> ValueError:
        return ValueError(BAD_RULE.format(key=key, problem=problem))

    name = getattr(key, "__name__", None) or key
    why = Reason("rules", Source.USER, repr(name))
    if value is None:
        action = Action(KEEP, why=why)
    elif (recipe := as_recipe(value)) is not None:
        action = Action(None, why=why, recipe=recipe)
    elif isinstance(value, lax.Precision):
        action = Action(None, FLOAT32_DTYPE, why=why, precision=value)
    else:
        try:
            dtype = as_dtype(value)
        except (TypeError, ValueError):
            raise bad(f"{value!r} is not a dtype.") from None
        if dtype not in CASTABLE:
            raise bad(f"ops cannot run in {dtype}.")
        action = Action(None, dtype, why=why)
    if isinstance(key, Primitive):
        return UserRule(key.name, key, action)
    if isinstance(key, str):
        try:
            return UserRule(key, PathPattern(key), action)
        except re.error as error:
            raise bad(f"the key is not a regular expression: {error}.") from None
    if problem := problem_with(key):
        raise bad(problem)
    code = code_of(key.__call__ if isinstance(key, type) else key)
    assert code is not None  # or there is a problem
    name = getattr(key, "__qualname__", code.co_name)
    return UserRule(name, function_of(code), action)
