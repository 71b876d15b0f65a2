"""Matrix products and convolutions: which are lowered, and which return float32.

Four kinds of product are not among those that torch lowers:

    dot       of two vectors: torch promotes its inputs
    outer     contracts nothing, as in `einsum("t,k->tk")`: a multiplication, which half
              precision does not speed up. Rotary angles are outer products, and float16
              cannot represent position 2049. If both inputs are float32, as positions
              are, it may also contract one element with one: `t[:, None] @ k[None]`.
              In the code of a layer library that is a layer with one feature, which
              torch's `linear` lowers
    library   written by a library that has no layers: see `libraries.py`
    highest   its own call says `precision=HIGHEST`, or names an algorithm of float32,
              so the user wants float32. The default of `jax.default_matmul_precision`
              is for all products, and does not count
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import array_dtype, source_codes
from .._jaxprs import param
from .._tree import HALVES
from .call_stack import is_in_layer
from .decision import (
    FLOAT32_DTYPE,
    Action,
    Op,
    Reason,
    Settings,
    Source,
)
from .ops import LOWER, PROMOTE

OUTER = Action(PROMOTE, why=Reason("outer", Source.PRIMITIVE, "dot_general"))
HIGHEST = Action(PROMOTE, why=Reason("highest", Source.PRIMITIVE, "dot_general"))


def for_product(op: Op, action: Action | None, settings: Settings) -> Action | None:
    """The action for a product, which may have a recipe, or not be lowered."""
    if action is not None and action.precision is not None:
        note = f"precision {action.precision.name}"
        return action._replace(why=action.why._replace(note=note))
    if action is None or LOWER not in (action.kind, action.table):
        return action
    if op.name == "dot_general" and is_outer(op):
        return OUTER
    wide = any(getattr(x, "dtype", None) == jnp.float32 for x in op.given)
    if wide and is_highest(param(op, "precision")):
        return HIGHEST
    return with_recipe(op, action, settings)


def with_recipe(op: Op, action: Action, settings: Settings) -> Action:
    """The action with the first recipe for which a product qualifies, or with none.

    That of a rule is tried before that of the region. Its reason notes both.
    """
    recipes = [*filter(None, dict.fromkeys((action.recipe, settings.recipe)))]
    if not recipes or settings.probe is not None:
        return action._replace(recipe=None)
    notes, found = [], None
    for recipe in recipes:
        if recipe.is_wide and settings.linear:
            return action._replace(kind=None, dtype=FLOAT32_DTYPE, recipe=None)
        problem = recipe._problem(op)
        notes.append(f"no {recipe.name}: {problem}" if problem else recipe._note(op))
        if not problem:
            found = recipe
            break
    why = action.why._replace(note=", ".join(notes))
    return action._replace(recipe=found, why=why)


def is_outer(op: Op) -> bool:
    """Whether a product multiplies, and sums over nothing.

    In a derivative it sums over a batch, which may be one of one.
    """
    (contracting, _), _ = param(op, "dimension_numbers")
    if not contracting:
        return True
    sizes = [np.shape(op.args[0])[d] for d in contracting]
    if op.is_derived or any(size != 1 for size in sizes):
        return False
    in_float32 = all(array_dtype(x) == jnp.float32 for x in op.args)
    return in_float32 and not is_in_layer(source_codes())


def is_highest(precision: object) -> bool:
    """Whether a call asks for a product of float32 numbers without rounding."""
    if not is_own(precision):
        return False
    if isinstance(precision, lax.DotAlgorithmPreset):
        name = precision.name
        return name.startswith(("F32", "TF32")) or name.endswith(("_X3", "_X6", "_X9"))
    return lax.Precision.HIGHEST in both(precision)


def is_own(precision: object) -> bool:
    """Whether a call says how exactly it multiplies."""
    usual = None, lax.Precision.DEFAULT, default_precision()
    return any(p not in usual for p in both(precision))


def both(precision: object) -> tuple[object, ...]:
    return precision if isinstance(precision, tuple) else (precision,)


def default_precision() -> object:
    """What `jax.default_matmul_precision` says, for all products."""
    name = jax.config.jax_default_matmul_precision  # pyright: ignore
    presets = lax.DotAlgorithmPreset.__members__
    return presets[name] if name in presets else name and lax.Precision(name)


def is_wide(op: Op) -> bool:
    """Whether a call asks half-precision inputs for a float32 result."""
    halves = all(array_dtype(x) in HALVES for x in op.args)
    return halves and param(op, "preferred_element_type") == jnp.float32


def is_dot(op: Op) -> bool:
    """Whether an op is a contraction of two vectors, torch's `dot`."""
    if op.name != "dot_general":
        return False
    (contracting, _), _ = param(op, "dimension_numbers")
    return all(np.ndim(x) == len(contracting) == 1 for x in op.args)
