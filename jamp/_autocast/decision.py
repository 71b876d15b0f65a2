"""An op on its way through a region, and what is decided about it."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import CodeType
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.typing import ArrayLike

from .._tree import HALVES
from .call_stack import called_function, is_in_layer

FLOAT32_DTYPE = jnp.dtype("float32")
CASTABLE = (*HALVES, FLOAT32_DTYPE)

Dtypes = Sequence[np.dtype | None]
Params = dict[str, Any]  # of a primitive
# What may be an input of an op: a value of the trace, or a number of a jaxpr.
Value = ArrayLike
Values = Sequence[Value]
Result = Value | Values  # of an op, which may have several
Out = TypeVar("Out")  # what a function returns


class Source(enum.Enum):
    """Who says how an op runs."""

    PRIMITIVE = "primitive"
    FUNCTION = "function"
    USER = "user"
    JAMP = "jamp"


class Reason(NamedTuple):
    """Why an op runs as it does."""

    kind: str  # the table's word ("lower", "float32", ...), "policy" or "rules"
    source: Source
    name: str = ""  # of the primitive, the function, or what the user wrote
    note: str = ""  # of a product: its recipe, or why it does not qualify for one

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}" if self.name else self.kind
        text = f"rules[{self.name}]" if self.source is Source.USER else text
        return f"{text}; {self.note}" if self.note else text


NO_REASON = Reason("", Source.JAMP)


class Kind(enum.Enum):
    """What a row of a table says; `ops.py` explains each."""

    LOWER = "lower"
    FLOAT32 = "float32"
    PROMOTE = "promote"
    KEEP = "keep"
    STATISTIC = "statistic"
    FLOAT32_INSIDE = "float32_inside"
    ONE_OP = "one_op"


# The error for an input in half precision of the function of this name, or "".
Refuses = Callable[[str, Any], str]


class Decision(NamedTuple):
    """What a region does with an op, and why.

    The row decides that is looked up first: that of the user's rule, of the function
    that the op is part of, of the library that wrote it, or of its primitive.
    """

    row: Kind | None  # None: the user's, which says by itself what is done
    cast: np.dtype | None = None  # of all inputs; None: as the row says
    inside: bool = False  # results are half precision outside of the function
    why: Reason = NO_REASON
    recipe: "Recipe | None" = None  # of a product that is lowered, if it qualifies
    precision: lax.Precision | None = None  # of a product, instead of its own
    refuses: Refuses | None = None


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of the functions that an op comes from."""

    traceback: Any  # JAX's record of them, or None
    codes: tuple[CodeType, ...]  # innermost first
    keys: frozenset[object]  # the ids of the codes, and a jitted function's source
    is_exempt: bool  # parameters are made there
    function: Decision | None  # of the outermost that has a row: for all inside
    module: Decision | None  # of the module that they are in

    @functools.cached_property
    def called(self) -> CodeType | None:
        """The JAX function that code outside of JAX called for the op."""
        return called_function(self.codes)

    @functools.cached_property
    def is_in_layer(self) -> bool:
        """Whether the op comes from a library's layer, and not from a user's."""
        return is_in_layer(self.codes)


class Op(NamedTuple):
    """One op, first as it arrives and then with other inputs.

    It is live, or replayed from a jaxpr, or baked. `avals` are the abstract values that
    it was traced with, or that Python saw, where its inputs may have other floating
    dtypes by now.
    """

    primitive: Primitive
    args: Values
    params: Params
    avals: Sequence[AbstractValue] | None = None
    # For all ops of a function that it is part of, or that it stands for.
    within: Decision | None = None
    decision: Decision | None = None  # None: it has no row
    # Of code whose dtypes are fixed: a derivative, in which it may get a cotangent, its
    # function, or a jitted `shard_map`.
    is_baked: bool = False
    activations: tuple[bool, ...] = ()  # of each input of a product, if it is one
    known: Known = Known(None, (), frozenset(), False, None, None)

    @property
    def name(self) -> str:
        return self.primitive.name


class Recipe:
    """A way to run the products that a region lowers: its `dtype`, or a rule's value.

    Equal recipes are equal, and have equal hashes. They are public, and what only
    autocast asks of them has an underscore.
    """

    name: ClassVar[str]  # in reports and messages
    dtype: ClassVar[np.dtype]  # of a region: what runs without the recipe is cast to it
    products: ClassVar[frozenset[str]]  # the primitives that may run in it
    # Whether all results are float32, and what is computed from them stays float32.
    is_wide: ClassVar[bool]

    @property
    def _takes_activations(self) -> bool:
        """Whether a product of two activations runs in it too."""
        return self.is_wide

    def _note(self, op: Op) -> str:
        """What reports say of a product that runs in it."""
        return self.name

    def _problem(self, op: Op) -> str:
        """Why a product does not qualify, or ""."""
        raise NotImplementedError

    def _run(self, trace: Any, op: Op) -> jax.Array:
        """Runs a product that qualifies, with the derivative that belongs to it."""
        raise NotImplementedError


class UserRule(NamedTuple):
    """One row of `autocast(rules=...)`. Equal rows of two regions are equal."""

    name: str  # what the user wrote, for messages
    test: Hashable  # a primitive, a pattern for paths, or a Function
    decision: Decision


class UserRules(tuple[UserRule, ...]):
    """Rules whose hash is computed once: hashing a code object reads all of it.

    JAX asks for the hash of a region's settings whenever it looks into its caches.
    """

    def __init__(self, rules: Iterable[UserRule]) -> None:
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Settings(NamedTuple):
    """What a region was asked for. Hashable: jitted functions are cached by it."""

    dtype: np.dtype
    recipe: Recipe | None = None
    rules: tuple[UserRule, ...] = ()
    depth: int = 0  # how many other regions it is in
    is_policy: bool = False  # only the rules decide
    observed: bool = False  # each op's name stack has its reason, by number
    # Called with the trace, each op and its result; its return value replaces the
    # result. The region then runs in float32.
    probe: Hashable | None = None
    cached: bool = True  # a value is cast once, and not anew for each op
    precision: object = ...  # the default for products when the region was entered
    linear: bool = False  # in code that is linear in tangents: they are not scaled

    @property
    def tells_weights(self) -> bool:
        """Whether it matters what is a weight, and what an activation."""
        recipes = self.recipe, *(rule.decision.recipe for rule in self.rules)
        return self.probe is not None or any(recipes)
