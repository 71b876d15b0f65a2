"""Which matrix products of a region run in float8, and how."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._compat import array_dtype
from .casting import CastingTrace, dtypes_of
from .decision import CASTABLE, FLOAT32_DTYPE, SCALED, Action, Op, Value
from .derivatives import in_reverse_mode
from .float8 import E4M3
from .float8_arithmetic import Axes, Scaled, quantized
from .float8_derivative import Inputs, Product, product_in_any_mode, product_of
from .products import is_own
from .rules import codes_at, loaded

# Layers whose weight is the left operand; in other layers it is the right one.
WEIGHT_ON_THE_LEFT = ("equinox.nn.Linear.__call__",)
MULTIPLE = 16  # each size must be a multiple of it


def with_float8(op: Op, action: Action, derived: bool, recipe: str | None) -> Action:
    """The action for a product that is lowered, with the reason why it is in float8,
    or why not.

    Args:
      derived: whether it is part of a derivative.
      recipe: of the region, which may scale what is not in float8.
    """
    problem = "in a derivative" if derived else unfit(op)
    if problem:
        why = action.why._replace(note=f"no float8: {problem}")
        recipe = SCALED if recipe == SCALED else None
        return action._replace(recipe=recipe, why=why)
    why = action.why._replace(note=f"float8 {action.recipe}")
    return action._replace(why=why)


def unfit(op: Op) -> str:
    """Why a product cannot run in float8, or ""."""
    (left, right), params = op.args, op.params
    contracting, batch = params["dimension_numbers"]
    if batch[0]:
        return "batch dimensions"
    if len(contracting[0]) != 1:
        return f"{len(contracting[0])} contracted dimensions"
    dtypes = [array_dtype(x) for x in op.args]
    others = [str(dtype) for dtype in dtypes if dtype not in CASTABLE]
    if others:
        return f"{others[0]} input"
    preferred = params.get("preferred_element_type")
    if preferred is not None and preferred not in CASTABLE:
        return f"{preferred} result"
    if is_own(params.get("precision")):
        return "its own precision"
    sizes = product_sizes(np.shape(left), np.shape(right), contracting)
    odd = [n for n in sizes if n == 0 or n % MULTIPLE]
    return f"{'x'.join(map(str, sizes))}, not multiples of {MULTIPLE}" if odd else ""


def product_sizes(
    left: tuple[int, ...],
    right: tuple[int, ...],
    contracting: tuple[Sequence[int], Sequence[int]],
) -> tuple[int, int, int]:
    """Rows, contracted numbers and columns of a product.

    >>> product_sizes((2, 8, 32), (32, 48), ((2,), (0,)))
    (16, 32, 48)
    """
    (i,), (j,) = contracting
    rows, columns = (
        math.prod(left) // (left[i] or 1),
        math.prod(right) // (right[j] or 1),
    )
    return rows, left[i], columns


def product_for(op: Op, half: np.dtype, recipe: str) -> Product:
    """The float8 form of a product that qualifies."""
    (i,), (j,) = op.params["dimension_numbers"][0]
    precision = op.params.get("precision")  # the default, which may be an algorithm
    is_level = isinstance(precision, tuple | lax.Precision)
    return Product(
        contracted=(i, j),
        ndims=(np.ndim(op.args[0]), np.ndim(op.args[1])),
        weight=weight_of() if recipe == "rowwise_with_gw_hp" else 1,
        precision=precision if is_level else None,
        out_sharding=op.params.get("out_sharding"),
        out=asked_for(op, half),
        half=half,
        recipe=recipe,
    )


def inputs_of(
    product: Product,
    left: Value,
    right: Value,
    quantize: Callable[[Value, Axes], Scaled],
    lower: Callable[[Value], Value],
) -> Inputs:
    """What a product is computed from.

    Args:
      quantize: makes the float8 copy of a value, with a scale along some axes.
      lower: casts a value to half precision.
    """
    kept = tuple(
        lower(x) if product.is_kept_in_half(side) else quantize(x, product.kept(side))
        for side, x in enumerate((left, right))
    )
    return forward_inputs(product, left, right, quantize)._replace(kept=kept)


def forward_inputs(
    product: Product,
    left: Value,
    right: Value,
    quantize: Callable[[Value, Axes], Scaled],
) -> Inputs:
    """The same where no gradient of the product is taken in float8."""
    scaled = quantize(left, product.contracting(0))
    return Inputs(scaled, quantize(right, product.contracting(1)), ())


def float8_product(trace: CastingTrace, op: Op, recipe: str) -> jax.Array:
    """Runs a product that qualifies in float8."""
    half = trace.settings.dtype
    left, right = op.args
    product = product_for(op, half, recipe)
    if trace.settings.recipe == SCALED:  # no part of its derivative is in float16
        half = jnp.dtype("bfloat16")
        product = product._replace(half=half, out=FLOAT32_DTYPE)
    quantize = functools.partial(in_float8, trace)
    trace.effects.touched = True
    dtypes = array_dtype(left), array_dtype(right)
    if _compat.is_differentiated_once(trace.parent):
        function = in_reverse_mode(product_of(product, dtypes), "A float8 product")
        lower = lambda x: trace.cast(x, half)
        inputs = inputs_of(product, left, right, quantize, lower)
    else:
        function = product_in_any_mode(product)
        inputs = forward_inputs(product, left, right, quantize)
    leaves, tree = jax.tree.flatten(inputs)
    return trace.call(flat(function, tree), [left, right, *leaves], {})


@functools.cache
def flat(function: Callable[..., jax.Array], tree: Any) -> Callable[..., jax.Array]:
    """The function with the leaves of `Inputs` as arguments."""
    return lambda left, right, *leaves: function(left, right, tree.unflatten(leaves))


def weight_of() -> int:
    """Which input of the product that is called here is the weight.

    The right one, as in `x @ w`; the left one in a layer that says so.
    """
    left = codes_at(WEIGHT_ON_THE_LEFT, loaded())
    return 1 if left.keys().isdisjoint(map(id, _compat.source_codes())) else 0


def asked_for(op: Op, half: np.dtype) -> np.dtype:
    """The dtype of the result: half precision, or float32 if the call asks for it."""
    given = [*(array_dtype(x) for x in op.args), *dtypes_of(op.avals or ())]
    preferred = op.params.get("preferred_element_type")
    wide = preferred == FLOAT32_DTYPE and FLOAT32_DTYPE not in given
    return FLOAT32_DTYPE if wide else half


def in_float8(trace: CastingTrace, x: Value, axes: Axes) -> Scaled:
    """The float8 copy of a value, which is made once."""
    notes = trace.notes
    x = notes.source(x)  # libraries may make many copies of it
    key = "float8", axes
    if (copy := notes.copy(x, key)) is None:
        copy = trace.call(quantized, [x], {"dtype": E4M3, "axes": axes})
        notes.remember(x, key, copy)
    return copy
