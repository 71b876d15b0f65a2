"""The dtype for each measured product, and the rules that ask for it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._autocast.float8 import RECIPES, Float8
from .._autocast.paths import PathPattern
from .product_errors import DIRECTIONS
from .table import percent

FLOAT8 = Float8.name
TENSORWISE = RECIPES[0]  # which rules and reports call "float8"
HALVES = ("bfloat16", "float16")
CAREFUL = (FLOAT8, *RECIPES[1:], *HALVES, "float32")  # more and more careful
Errors = Mapping[str, tuple[float, float]]  # direction -> whole, worst slice


class Wanted(NamedTuple):
    """The dtype or recipe that a product should run in."""

    scope: str  # the module path as rules see it
    name: str
    qualifies: bool  # for float8, if that is asked for; if not, the region decides


class Choice(NamedTuple):
    """A dtype or recipe, and why it is not an earlier one."""

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
      errors: by dtype or recipe, beginning with the one that is asked for. The last one
        before float32 is a half-precision dtype.
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
    """The error that exceeds the tolerance, as text, or ""."""
    for direction in DIRECTIONS:
        if direction in errors and not max(errors[direction]) <= tolerance:
            whole, worst = errors[direction]
            if not math.isfinite(worst):
                return f"{direction} overflows"
            if whole > tolerance:
                return f"{direction} loses {percent(round(whole, 3))}"
            lost = percent(round(worst, 3))
            return f"{direction} loses {lost} in the worst row or column"
    return ""


def agreed(wanted: Iterable[Wanted]) -> dict[str, str]:
    """For each scope, the most careful dtype that one of its products needs.

    Scopes whose products all run in the region's own dtypes have none.

    >>> agreed([Wanted("a", "float8", True), Wanted("a", "rowwise", True)])
    {'a': 'rowwise'}
    """
    names: dict[str, str] = {}
    for scope, name, qualifies in wanted:
        if scope and (qualifies or name == "float32"):
            names[scope] = max(names.get(scope, name), name, key=CAREFUL.index)
    return names


def rules_of(
    names: Mapping[str, str], scopes: Iterable[str], mixed: set[str]
) -> dict[str, str]:
    """Regular expressions for scopes, with what runs there.

    Args:
      names: by scope, from `agreed`.
      scopes: of all products.
      mixed: scopes with other ops that belong in float32. No rule brings these scopes
        into half precision.
    """
    scopes = sorted(set(scopes))
    return {
        pattern_of(scope, scopes): name
        for scope, name in sorted(names.items())
        if not (name in HALVES and scope in mixed)
    }


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
