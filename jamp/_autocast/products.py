"""Matrix products and convolutions: which are lowered, and which return float32.

Four kinds of product are not among those that torch lowers:

    dot       of two vectors: torch promotes its inputs. So are those of a batch, which
              `vmap` makes of them
    outer     contracts nothing, as in `einsum("t,k->tk")`: a multiplication, which half
              precision does not speed up. Rotary angles are outer products, and float16
              cannot represent position 2049. So is what contracts sizes of 1 alone, as
              `t[:, None] @ k[None]` does, in a user's own code and without an input in
              half precision
    library   written by a library that has no layers: see `libraries.py`
    highest   its own call, or `jax.default_matmul_precision` inside the region, says
              HIGHEST or names an algorithm of float32, so the user wants float32. The
              default that held when the region was entered is for all products, and
              does not count
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import param
from .._tree import HALVES
from .call_stack import code_of
from .decision import (
    FLOAT32_DTYPE,
    Decision,
    Op,
    Reason,
    Settings,
    Source,
)
from .ops import FLOAT32, LOWER, PROMOTE

OUTER = Decision(PROMOTE, why=Reason("outer", Source.PRIMITIVE, "dot_general"))
ATTENTION = id(code_of(jax.nn.dot_product_attention))
HIGHEST = Decision(PROMOTE, why=Reason("highest", Source.PRIMITIVE, "dot_general"))


def for_product(
    op: Op, decision: Decision | None, settings: Settings
) -> Decision | None:
    """The decision for a product, which may have a recipe, or not be lowered."""
    if decision is not None and decision.precision is not None:
        note = f"precision {decision.precision.name}"
        return decision._replace(why=decision.why._replace(note=note))
    if decision is None or decision.row is not LOWER:
        return decision
    if op.name == "dot_general" and is_outer(op):
        return OUTER
    precision = param(op, "precision")
    if {None, lax.Precision.DEFAULT, settings.precision}.issuperset(both(precision)):
        op = op._replace(params=op.params | {"precision": None})
    elif is_highest(precision):
        given = op.avals or op.args
        if any(getattr(x, "dtype", None) == jnp.float32 for x in given):
            return HIGHEST
    return with_recipe(op, decision, settings)


def with_recipe(op: Op, decision: Decision, settings: Settings) -> Decision:
    """The decision with the first recipe for which a product qualifies, or with none.

    That of a rule is tried before that of the region. Its reason notes both.
    """
    recipes = [*filter(None, dict.fromkeys((decision.recipe, settings.recipe)))]
    if not recipes or settings.probe is not None:
        return decision._replace(recipe=None)
    notes, chosen = [], None
    for recipe in recipes:
        if recipe.is_wide and settings.linear:
            return decision._replace(row=FLOAT32, cast=FLOAT32_DTYPE, recipe=None)
        problem = recipe._problem(op)
        notes.append(f"no {recipe.name}: {problem}" if problem else recipe._note(op))
        if not problem:
            chosen = recipe
            break
    why = decision.why._replace(note=", ".join(notes))
    return decision._replace(recipe=chosen, why=why)


def is_outer(op: Op) -> bool:
    """Whether a product multiplies, and sums over nothing."""
    (contracting, _), _ = param(op, "dimension_numbers")
    if not contracting:
        return True
    sizes = np.shape(op.args[0])
    if {sizes[d] for d in contracting} != {1}:
        return False
    if not {*HALVES}.isdisjoint(map(array_dtype, op.args)):
        return False
    if (True, "transpose") in _compat.scopes():  # the gradient of a batch of one
        return False
    return not op.known.is_in_layer and not in_attention(op)


def in_attention(op: Op) -> bool:
    """Whether an op is part of JAX's attention."""
    return ATTENTION in op.known.keys


def is_highest(precision: object) -> bool:
    """Whether a product of float32 numbers is asked for without rounding."""
    if isinstance(precision, lax.DotAlgorithmPreset):
        name = precision.name
        return name.startswith(("F32", "TF32")) or name.endswith(("_X3", "_X6", "_X9"))
    return lax.Precision.HIGHEST in both(precision)


def both(precision: object) -> tuple[object, ...]:
    return precision if isinstance(precision, tuple) else (precision,)


def default_precision() -> object:
    """What `jax.default_matmul_precision` says, for all products."""
    name = jax.config.jax_default_matmul_precision  # pyright: ignore
    presets = lax.DotAlgorithmPreset.__members__
    return presets[name] if name in presets else name and lax.Precision(name)


def is_wide(op: Op) -> bool:
    """Whether a call asks half-precision inputs for a float32 result."""
    if param(op, "preferred_element_type") != jnp.float32:
        return False
    return {*HALVES}.issuperset(map(array_dtype, op.args))


def is_dot(op: Op) -> bool:
    """Whether an op is torch's `dot` of two vectors, or of those of each batch entry.

    A `vmap` over one of the two makes a product with a matrix of it.
    """
    if op.primitive.name != "dot_general":
        return False
    pairs = zip(*param(op, "dimension_numbers"), strict=True)
    used = [len(contracting) + len(batch) for contracting, batch in pairs]
    return used == [*map(np.ndim, op.args)]


def is_of_vectors(op: Op) -> bool:
    """Whether an op is a contraction of two vectors."""
    return op.name == "dot_general" and all(np.ndim(x) == 1 for x in op.args)
