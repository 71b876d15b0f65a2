"""Which dtype a product is to run in, of those that were measured, and which rules say
so."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._autocast.float8 import NAME as FLOAT8
from .._autocast.float8 import RECIPES, Float8
from .._autocast.paths import PathPattern
from .product_errors import DIRECTIONS
from .table import percent

TENSORWISE = RECIPES[0]  # which rules and reports call "float8"
Errors = Mapping[str, tuple[float, float]]  # direction -> whole, worst slice


class Choice(NamedTuple):
    """A dtype or recipe, and why it is not the one before it."""

    name: str
    why: str = ""


def called(recipe: str) -> str:
    return FLOAT8 if recipe == TENSORWISE else recipe


def pays(recipe: str, k: int, n: int) -> bool:
    """Whether a product is large enough to be faster in float8: torchao's filters.

    >>> pays("tensorwise", 4096, 1024), pays("tensorwise", 1024, 4096)
    (False, True)
    >>> pays("rowwise", 1024, 4096), pays("rowwise", 4096, 14336)
    (False, True)
    """
    if recipe == TENSORWISE:
        return not (k <= 4096 and n <= 1024)
    return n > 2048 and k > 1024 and not (n <= 4096 and k <= 2048)


def chosen(
    errors: Mapping[str, Errors],
    sizes: Sequence[int],
    tolerance: float,
    skip_small: bool,
) -> Choice:
    """The first dtype or recipe whose errors are within the tolerance.

    Args:
      errors: by dtype or recipe, the one that is asked for first. What comes last
        before float32 is a dtype of half precision.
      sizes: rows, contracted numbers, columns.
    """
    why = []
    for name, found in errors.items():
        if name in RECIPES and skip_small and not pays(name, *sizes[1:]):
            why.append(f"{called(name)}: too small to pay")
        elif problem := beyond(found, tolerance):
            why.append(f"{called(name)}: {problem}")
        else:
            return Choice(called(name), "; ".join(why))
    return Choice("float32", "; ".join(why))


def beyond(errors: Errors, tolerance: float) -> str:
    """What errs by more than the tolerance, or ""."""
    for direction in DIRECTIONS:
        if direction in errors and not max(errors[direction]) <= tolerance:
            whole, worst = errors[direction]
            where = "" if whole > tolerance else " in the worst row or column"
            top = whole if where == "" else worst
            text = percent(round(top, 3)) if top < 1e6 else "all"
            return f"{direction} loses {text}{where}"
    return ""


def rules_of(
    wanted: Iterable[tuple[str, str, bool]], scopes: Iterable[str], mixed: set[str]
) -> dict[str, str]:
    """Regular expressions for scopes, each with the most careful dtype asked for there.

    Args:
      wanted: a scope; what a product of it is to run in; whether it could run in what
        was asked for at all, so that the region must be told otherwise.
      scopes: of all products.
      mixed: scopes with other ops, which belong in float32. No rule brings those into
        half precision.
    """
    careful = (FLOAT8, "rowwise", "rowwise_with_gw_hp", "bfloat16", "float16")
    order = {name: place for place, name in enumerate((*careful, "float32"))}
    scopes, names = sorted(set(scopes)), {}
    for scope, name, is_told in wanted:
        if scope and (is_told or name == "float32"):
            names[scope] = max(names.get(scope, name), name, key=order.__getitem__)
    halves = ("bfloat16", "float16")
    kept = {s: n for s, n in names.items() if not (n in halves and s in mixed)}
    return {pattern_of(scope, scopes): name for scope, name in sorted(kept.items())}


def pattern_of(scope: str, scopes: Sequence[str]) -> str:
    """A regular expression that finds one scope of several, wherever the model is.

    >>> pattern_of("Net/Dense_1", ["Net/Dense_1", "Net/Dense_10"])
    '(^|/)Net/Dense_1$'
    >>> pattern_of("head", ["head", "Net/head"])
    '^head$'
    """
    text = f"(^|/){re.escape(scope)}$"
    others = [other for other in scopes if PathPattern(text).search(other)]
    return text if others == [scope] else f"^{re.escape(scope)}$"


def as_rule(name: str) -> Any:
    """The value for `autocast(rules=...)` that a name stands for."""
    if name == FLOAT8:
        return FLOAT8
    return Float8(name) if name in RECIPES else jnp.dtype(name)
