"""Which table decides about an op: rules, functions, libraries, primitives."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from types import CodeType

from jax.extend.core import Primitive

from .. import _compat
from .call_stack import is_library, resolve
from .decision import FLOAT32_DTYPE, Decision, Known, Reason, Recipe, Settings, Source
from .keys import Function, source_of
from .libraries import ALL_OPS, of_library
from .ops import EXEMPT, FUNCTIONS, KEEP, LOWER, PRIMITIVES, Kind, Row
from .traits import PASSED_THROUGH, PRODUCTS

# Every part of the paths that may be a module. Which are imported may change.
PREFIXES = frozenset(
    path.rsplit(".", depth)[0]
    for path in (*FUNCTIONS, *EXEMPT)
    for depth in range(1, path.count(".") + 1)
)
LOADED: dict[int, frozenset[str]] = {}  # the last answer, by the number of all modules


def loaded() -> frozenset[str]:
    """Which of them are fully imported: another thread may be importing one."""
    count = len(sys.modules)
    if (known := LOADED.get(count)) is not None:
        return known
    here = PREFIXES & sys.modules.keys()
    specs = {name: getattr(sys.modules[name], "__spec__", None) for name in here}
    unfinished = {n for n, s in specs.items() if getattr(s, "_initializing", False)}
    LOADED.clear()
    if not unfinished:
        LOADED[count] = frozenset(here)
    return frozenset(here - unfinished)


BY_PRIMITIVE = {
    name: Decision(row.kind, why=Reason(row.kind.value, Source.PRIMITIVE, name))
    for name, row in PRIMITIVES.items()
}
EXEMPTED = Decision(KEEP, why=Reason("keep", Source.JAMP, "parameter"))
POLICY = Decision(KEEP, why=Reason("policy", Source.JAMP))
# JAX refuses half precision that is written into a float32 cache.
BY_POLICY = {"dynamic_update_slice": POLICY._replace(row=Kind.PROMOTE)}


@functools.lru_cache
def functions_of(modules: frozenset[str]) -> dict[int | str, tuple[CodeType, Decision]]:
    """The functions of the tables by the code's id and by source, if imported.

    By id, because hashing a code reads all of it, and an op comes from a hundred codes.
    """
    rows = FUNCTIONS | dict.fromkeys(_compat.LOGADDEXPS, Row(Kind.ONE_OP))
    decisions = dict.fromkeys(EXEMPT, EXEMPTED) | {
        path: Decision(
            row.kind,
            why=Reason(row.kind.value, Source.FUNCTION, path),
            refuses=row.refuses,
        )
        for path, row in rows.items()
    }
    table: dict[int | str, tuple[CodeType, Decision]] = {}
    for path, decision in decisions.items():
        if (code := resolve(path, modules)) is not None:
            table[id(code)] = table[source_of(code)] = code, decision
    return table


def known_here(source: str | None = None) -> Known:
    """What is known where the current op is called, read once for each such place.

    Args:
      source: of a jitted function that the op stands for: its "name at file:line".
    """
    return _known(_compat.current_traceback(), source, loaded())


@functools.lru_cache(maxsize=1024)  # the layers of a loop have equal tracebacks
def _known(traceback: object, source: str | None, modules: frozenset[str]) -> Known:
    rows = functions_of(modules)
    if source is not None:  # the innermost
        known, row = _known(traceback, None, modules), rows.get(source)
        return dataclasses.replace(
            known,
            keys=known.keys | {source},
            function=known.function or (row and row[1]),
            # A user's jitted function has ops that say whose they are.
            module=known.module if is_library(source) else None,
        )
    codes = _compat.codes_of(traceback)
    keys = [*map(id, codes)]
    found = [rows[key][1] for key in keys if key in rows]
    row, library = found[-1] if found else None, of_library(codes)
    return Known(traceback, codes, frozenset(keys), EXEMPTED in found, row, library)


class Decider:
    """Decides about an op, and notes which of the user's rules were used.

    The first table that knows the op decides: code that makes parameters, the user's
    rules, the functions, the libraries, the primitives. Of a function whose products
    are lowered, a library's own are not. A decision about a function stands for all
    inside of it, but for rules that come first. A policy has rules alone.
    """

    def __init__(
        self,
        settings: Settings,
        path: Callable[[], str],  # makes the module path
        hits: set[int],
        around: frozenset[int],
    ):
        self.settings, self.path, self.hits = settings, path, hits
        self.around = around  # rules for functions that called what runs here
        # Those of a policy are for functions of libraries: nothing is traced apart.
        rules = () if settings.is_policy else settings.rules
        tests = ((i, rule.test) for i, rule in enumerate(rules))
        self.called = [(i, test) for i, test in tests if isinstance(test, Function)]
        for _, function in self.called:
            function.look()

    def __call__(
        self, primitive: Primitive, known: Known, within: Decision | None
    ) -> Decision | None:
        """The decision about an op, or None if no table knows it.

        Args:
          within: the decision about a function that counts as one op, for each op
            inside: it stands, unless a rule of the user's comes first.
        """
        if within is None and known.is_exempt:
            return EXEMPTED
        rules = self.settings.rules
        place = self.first_rule(primitive, known, within) if rules else None
        if place is None:
            return within or self.by_tables(primitive.name, known)
        rule = rules[place].decision
        if rule.recipe is not None:
            decision = within or self.by_tables(primitive.name, known, rule.recipe)
            is_product = primitive.name in rule.recipe.products
            if decision is None or decision.row is not LOWER or not is_product:
                return decision
            rule = decision._replace(recipe=rule.recipe, why=rule.why)
        self.hits.add(place)
        return rule

    def first_rule(
        self, primitive: Primitive, known: Known, within: Decision | None
    ) -> int | None:
        """The place of the first of the user's rules that matches an op."""
        for index, (_, test, decision) in enumerate(self.settings.rules):
            if decision is within:
                return index
            if isinstance(test, Function):
                called = not known.keys.isdisjoint(test.codes)
                matches = called or index in self.around
            elif isinstance(test, re.Pattern):
                matches = test.search(self.path()) is not None
            else:
                matches = test is primitive and primitive.name not in PASSED_THROUGH
            if matches:
                return index
        return None

    def running_here(self) -> frozenset[int]:
        """The rules for functions that are running here, for what is called here.

        JAX traces a function of `scan` or `checkpoint` apart from its callers, and
        does not record them for the ops inside.
        """
        if not self.called:
            return self.around
        keys = known_here().keys
        called = (i for i, key in self.called if not keys.isdisjoint(key.codes))
        return self.around.union(called)

    def by_tables(
        self, name: str, known: Known, recipe: Recipe | None = None
    ) -> Decision | None:
        """What the tables of functions, libraries and primitives say.

        Args:
          recipe: of a user's rule for the op.
        """
        decision, of_module = known.function, known.module
        if self.settings.is_policy:
            is_one = decision is not None and decision.row is Kind.ONE_OP
            return decision if is_one else BY_POLICY.get(name, POLICY)
        if decision is None or decision.row is LOWER:
            is_product = decision is not None or name in PRODUCTS
            if of_module and (is_product or of_module.why.name in ALL_OPS):
                return of_module
        decision = decision and self.for_all_inside(decision, recipe)
        return BY_PRIMITIVE.get(name) if decision is None else decision

    def for_all_inside(
        self, decision: Decision, recipe: Recipe | None
    ) -> Decision | None:
        """The decision about a function, for each op inside the function.

        None where only the products of a function are lowered, and not its other ops.
        """
        row, recipes = decision.row, (recipe, self.settings.recipe)
        is_wide = any(recipe.is_wide for recipe in recipes if recipe is not None)
        if row in (KEEP, Kind.ONE_OP, Kind.STATISTIC):
            return decision
        if is_wide and row is LOWER:
            return None
        dtype = self.settings.dtype if row is LOWER else FLOAT32_DTYPE
        # Such a result becomes half precision, and so does its cotangent.
        inside = row is Kind.FLOAT32_INSIDE and not is_wide
        return decision._replace(cast=dtype, inside=inside)
