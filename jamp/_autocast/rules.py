"""Which rule decides about an op: the user's table, then functions, then primitives."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType

from jax.extend.core import Primitive

from .call_stack import resolve
from .decision import FLOAT32_DTYPE, Action, Hit, Reason, Recipe, Settings, Source
from .keys import Function, source_of
from .libraries import MODULES, Places, of_library
from .ops import EXEMPT, FUNCTIONS, INTO, KEEP, LOWER, PRIMITIVES, Kind
from .paths import PathPattern
from .traits import PASSED_THROUGH, PRODUCTS, UPDATES


@functools.lru_cache
def functions_of(modules: frozenset[str]) -> dict[int | str, tuple[CodeType, Action]]:
    """`FUNCTIONS` by the code's id and by source, for the libraries that are imported.

    By id, because hashing a code reads all of it, and an op comes from a hundred codes.
    """
    table: dict[int | str, tuple[CodeType, Action]] = {}
    for path, row in FUNCTIONS.items():
        if (code := resolve(path, modules)) is not None:
            why = Reason(row.kind.value, Source.FUNCTION, path)
            action = Action(row.kind, why=why)
            table[id(code)] = table[source_of(code)] = code, action
    return table


places_of = functools.lru_cache(Places)


@functools.lru_cache
def codes_at(
    paths: tuple[str, ...], modules: frozenset[str]
) -> dict[int, CodeType | None]:
    """The codes of functions by their ids, for the libraries that are imported."""
    codes = [resolve(path, modules) for path in paths]
    return {id(code): code for code in codes}


# Every part of the paths that may be a module. Which are imported may change.
PREFIXES = frozenset(
    path.rsplit(".", depth)[0]
    for path in (*FUNCTIONS, *EXEMPT, *(f"{name}." for name in MODULES))
    for depth in range(1, path.count(".") + 1)
)


COMPLETE: set[str] = set()


def loaded() -> frozenset[str]:
    """Which of them are fully imported: another thread may be importing one."""
    found = PREFIXES & sys.modules.keys()
    for name in found - COMPLETE:
        spec = getattr(sys.modules[name], "__spec__", None)
        if not getattr(spec, "_initializing", False):
            COMPLETE.add(name)
    return frozenset(found & COMPLETE)


ACTIONS = {
    name: Action(row.kind, why=Reason(row.kind.value, Source.PRIMITIVE, name))
    for name, row in PRIMITIVES.items()
}
BY_POLICY = Reason("policy", Source.JAMP)
EXEMPTED = Action(KEEP, why=Reason("keep", Source.JAMP, "parameter"))
POLICY = Action(KEEP, why=BY_POLICY)
# Half precision that is written into a float32 cache, which JAX refuses.
POLICY_WRITE = Action(INTO, why=BY_POLICY)


class Decider:
    """Finds the rule for an op, and notes which of the user's rules were used."""

    def __init__(
        self, settings: Settings, hits: set[Hit], around: frozenset[int] = frozenset()
    ):
        self.settings, self.hits = settings, hits
        self.around = around  # rules for functions that called what runs here
        self.count = 0  # of the modules at the last `look`
        self.look()
        by_path = any(isinstance(r.test, PathPattern) for r in settings.rules)
        self.uses_paths = by_path or settings.probe is not None
        # Those of a policy are for functions of libraries: nothing is traced apart.
        keys = [rule.test for rule in settings.rules if settings.listed]
        self.called = [(i, k) for i, k in enumerate(keys) if isinstance(k, Function)]
        for _, key in self.called:
            key.look()

    def look(self) -> None:
        """Adds the functions of libraries that were imported since."""
        if (count := len(sys.modules)) == self.count:
            return
        self.modules = modules = loaded()
        self.functions, self.exempt = functions_of(modules), codes_at(EXEMPT, modules)
        self.places = places_of(modules)
        self.count = count if modules == PREFIXES & sys.modules.keys() else 0

    def __call__(
        self,
        primitive: Primitive,
        codes: tuple[CodeType, ...],
        path: Callable[[], str],
        source: str | None,
        within: Action | None,
    ) -> Action | None:
        """The action for an op, or None if no table knows it.

        Args:
          codes: the functions that the op comes from, innermost first.
          path: makes the module path.
          source: "name at file:line" of the function that a jitted op stands for.
          within: the action of a function that counts as one op, for each op inside:
            it stands, unless a rule of the user's comes first.
        """
        rules, ids = self.settings.rules, list(map(id, codes))
        own = None
        if within is None:
            self.look()
            if not self.exempt.keys().isdisjoint(ids):
                return EXEMPTED
        else:
            places = (i for i, rule in enumerate(rules) if rule.action is within)
            own = next(places, None)
        index = self.first(primitive, ids, path, source, own) if rules else None
        if within is not None and index in (None, own):
            return within
        recipe = None
        if index is not None and (recipe := rules[index].action.recipe) is None:
            self.hits.add(Hit(index, index))
            return rules[index].action
        action = within or self.listed(primitive, codes, ids, source, recipe)
        return self.with_recipe(primitive, index, action)

    def first(
        self,
        primitive: Primitive,
        ids: Sequence[int],
        path: Callable[[], str],
        source: str | None,
        own: int | None,
    ) -> int | None:
        """The place of the first of the user's rules that matches an op.

        Notes which later ones match it too, for the message about unused rules.

        Args:
          own: the place of a rule that matches, as is known already.
        """
        places = self.matching(primitive, ids, path, source)
        found = next(places, None)
        first = own if found is None or (own is not None and own < found) else found
        if first is None or not self.settings.listed:  # a policy's may be unused
            return first
        known = {hit.rule for hit in self.hits}
        if len(known) < len(self.settings.rules):
            later = {found, *places} - known - {None, first}
            self.hits |= {Hit(index, first) for index in later if index > first}
        return first

    def calling(self, codes: Callable[[], tuple[CodeType, ...]]) -> frozenset[int]:
        """The rules for functions that are running here, for what is called here.

        JAX traces a function of `scan` or `checkpoint` apart from its callers, and
        does not record them for the ops inside.
        """
        if not self.called:
            return self.around
        ids = list(map(id, codes()))
        found = (i for i, key in self.called if not key.codes.keys().isdisjoint(ids))
        return self.around.union(found)

    def matching(
        self,
        primitive: Primitive,
        ids: Sequence[int],
        path: Callable[[], str],
        source: str | None,
    ) -> Iterator[int]:
        """The places of the user's rules that match an op."""
        for index, (_, test, _) in enumerate(self.settings.rules):
            if isinstance(test, Function):
                called = not test.codes.keys().isdisjoint(ids)
                matches = called or test.source == source or index in self.around
            elif isinstance(test, PathPattern):
                matches = test.search(path())
            else:
                matches = test is primitive and primitive.name not in PASSED_THROUGH
            if matches:
                yield index

    def with_recipe(
        self, primitive: Primitive, index: int | None, action: Action | None
    ) -> Action | None:
        """An action with the recipe that the user's rule at a place asks for, if any.

        It is for products that the action lowers, or for functions around them.
        """
        if index is None:
            return action
        rule = self.settings.rules[index].action
        if (
            action is None
            or rule.recipe is None
            or not (
                LOWER in (action.kind, action.table)
                and primitive.name in (*rule.recipe.products, "jit")
            )
        ):
            self.hits.add(Hit(index, None))
            return action
        self.hits.add(Hit(index, index))
        return action._replace(recipe=rule.recipe, why=rule.why)

    def listed(
        self,
        primitive: Primitive,
        codes: tuple[CodeType, ...],
        ids: Sequence[int],
        source: str | None,
        recipe: Recipe | None,
    ) -> Action | None:
        """What the tables of functions and of primitives say.

        Args:
          recipe: of a user's rule for the op.
        """
        if not self.settings.listed:
            return POLICY_WRITE if primitive.name in UPDATES else POLICY
        functions, action = self.functions, None
        if not functions.keys().isdisjoint(ids):  # the outermost decides for all inside
            _, action = next(functions[i] for i in reversed(ids) if i in functions)
        elif source is not None:
            _, action = functions.get(source, (None, None))
        if action is None or action.kind is LOWER:
            is_product = action is not None or primitive.name in PRODUCTS
            own = of_library(codes, self.places, source, is_product)
            if own is not None:
                return own
        action = action and self.for_all_inside(action, recipe)
        return ACTIONS.get(primitive.name) if action is None else action

    def for_all_inside(self, action: Action, recipe: Recipe | None) -> Action | None:
        """A function's row as an action for each op inside the function.

        None where only the products of a function are lowered, and not its other ops.
        """
        kind, recipes = action.kind, (recipe, self.settings.recipe)
        is_wide = any(recipe.is_wide for recipe in recipes if recipe is not None)
        if kind in (KEEP, Kind.STATISTIC):
            return action
        if is_wide and kind is LOWER:
            return None
        dtype = self.settings.dtype if kind is LOWER else FLOAT32_DTYPE
        # A marked result becomes half precision, and so does its cotangent.
        marks = kind in (Kind.FLOAT32_INSIDE, Kind.FLOAT32_NORM) and not is_wide
        return Action(None, dtype, marks, action.why, kind)
