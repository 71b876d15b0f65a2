"""Matrix products in float8, forward and backward: which ones, and by which recipe.

The residuals are float8 values and their scales (`rowwise_with_gw_hp` keeps the input
in half precision).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._checks import FLOAT8_NAMES, brief, flag
from .._compat import array_dtype
from .._jaxprs import param
from .._targets import warn_if_missing
from .call_stack import resolve
from .casting import dtypes_of
from .contraction import Contraction, Dims
from .decision import CASTABLE, FLOAT32_DTYPE, Op, Recipe, Value
from .derivatives import Inputs, Product, copied, run
from .low_precision import (
    E4M3,
    E5M2,
    MULTIPLE,
    PADDED,
    Axes,
    Scaled,
    is_fit,
    is_padded,
    multiplied,
    quantized,
)
from .rules import loaded
from .trace import AutocastTrace

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# A layer whose weight is the left operand; in other layers it is the right one.
WEIGHT_ON_THE_LEFT = "equinox.nn.Linear.__call__"
NOT_A_CONTRACTION = {
    "conv_general_dilated": "a convolution",
    "ragged_dot_general": "ragged, of which a GPU makes one dense product",
}

FIXED = "in a derivative or a jitted shard_map"
BAD_RECIPE = "Float8(recipe={}): the recipe must be {}."


@dataclasses.dataclass(frozen=True)
class Float8(Recipe):
    """How matrix products run in float8: for `autocast`, or as a value of its rules.

    A product's inputs are quantized when it runs, each by the power of two that its
    largest number requires. A recipe keeps neither state nor history. The result and
    the gradients have the dtypes that `autocast(bfloat16)` gives them. The residuals of
    the backward pass are float8 (`"rowwise_with_gw_hp"`: the input in half precision).

    Args:
      recipe: torchao's names and meaning.

        - `"tensorwise"`: one scale for a whole array, or for each product of a batch,
          such as each expert's. E4M3, and E5M2 for gradients.
        - `"rowwise"`: a scale for each row that is contracted, all in E4M3. It handles
          rows of very different sizes, and costs a second quantization.
        - `"rowwise_with_gw_hp"`: `"rowwise"`, with the weight's gradient in bfloat16.
          If one input is an activation, the weight is the other one. If neither is, it
          is the right one (`x @ w`), and in `eqx.nn.Linear` the left one.
      activations: whether products of two activations run in float8 too, such as
        attention's. An activation is what is made from the result of a product in the
        region; all else counts as a weight.

    Raises:
      ValueError: the recipe is not one of these.
      TypeError: `activations` is not a bool.

    Examples:
      >>> import jamp, jax.numpy as jnp
      >>> x, w = jnp.ones((16, 32)), jnp.ones((32, 64))
      >>> with jamp.autocast(jamp.Float8()):  # or jamp.autocast("float8")
      ...     y = x @ w
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 32.0)
      >>> jamp.Float8("rowwise")
      Float8(recipe='rowwise')

    PyTorch: `torchao.float8.Float8LinearConfig.from_recipe_name(recipe)`, with
    `round_scales_to_power_of_2=True`.
    """

    recipe: str = "tensorwise"
    activations: bool = False

    name = FLOAT8_NAMES[0]
    dtype = jnp.dtype("bfloat16")
    products = frozenset({"dot_general"})
    is_wide = False

    def __post_init__(self) -> None:
        flag("Float8(activations=...)", self.activations)
        if self.recipe not in RECIPES:
            names = ", ".join(map(repr, RECIPES[:-1]))
            allowed = f"{names} or {RECIPES[-1]!r}"
            raise ValueError(BAD_RECIPE.format(brief(self.recipe), allowed))

    @property
    def _takes_activations(self) -> bool:
        return self.activations

    def __repr__(self) -> str:
        more = ", activations=True" if self.activations else ""
        return f"Float8(recipe={self.recipe!r}{more})"

    def _note(self, op: Op) -> str:
        sizes = sizes_of(op)
        fit = [n if is_fit(n) else n + -n % MULTIPLE for n in sizes]
        more = "" if fit == sizes else f", padded to {'x'.join(map(str, fit))}"
        return f"{self.name} {self.recipe}{more}"

    def _problem(self, op: Op) -> str:
        return FIXED if op.is_baked else unfit(op, self.activations)

    def _run(self, trace: AutocastTrace, op: Op) -> jax.Array:
        warn_if_missing(self.name)
        half, region = trace.settings.dtype, trace.settings.recipe
        is_wide = region is not None and region.is_wide  # nothing is in float16
        half, out = (self.dtype, FLOAT32_DTYPE) if is_wide else (half, half)
        product = product_for(op, out, self.recipe)
        copy = functools.partial(copied, trace, dtype=E4M3)
        lower = lambda x: Scaled(trace.cast(x, half))
        has_gradient = not _compat.is_eager(trace.parent)
        left, right = op.args
        inputs = product.inputs(left, right, copy, lower if has_gradient else None)
        return run(trace, op, product, inputs)


def as_recipe(value: object) -> Recipe | None:
    if isinstance(value, str) and value in FLOAT8_NAMES:
        return Float8()
    return value if isinstance(value, Recipe) else None


def unfit(op: Op, activations: bool) -> str:
    """Why a product does not run in float8, or ""."""
    if op.name in NOT_A_CONTRACTION:
        return NOT_A_CONTRACTION[op.name]
    if all(op.activations) and not activations:
        return "neither input is a weight"
    dtypes = [array_dtype(x) for x in op.args]
    others = [str(dtype) for dtype in dtypes if dtype not in CASTABLE]
    if others:
        return f"{others[0]} input"
    preferred = param(op, "preferred_element_type")
    if preferred is not None and preferred not in CASTABLE:
        return f"{preferred} result"
    if param(op, "precision") is not None:
        return "its own precision"
    sizes = sizes_of(op)
    if all(n != 0 and (is_fit(n) or is_padded(n)) for n in sizes):
        return ""
    text = "x".join(map(str, sizes))
    return f"{text}: each size must be a multiple of {MULTIPLE} or at least {PADDED}"


def sizes_of(op: Op) -> list[Any]:
    """Rows, contracted numbers and columns, which may be symbolic."""
    return [*Contraction.of_op(op).sizes(*map(np.shape, op.args))[1:]]


def weight_of(op: Op) -> int:
    """Which input of the product that is called here is the weight.

    If none is an activation, it is the right one, as in `x @ w`, or the left one in a
    layer that says so.
    """
    if any(op.activations) and not all(op.activations):
        return op.activations.index(False)
    left = resolve(WEIGHT_ON_THE_LEFT, loaded())
    return 0 if id(left) in op.known.keys else 1


def asked_for(op: Op, half: np.dtype) -> np.dtype:
    """The dtype of the result: half precision, or float32 if the call asks for it."""
    given = [*(array_dtype(x) for x in op.args), *dtypes_of(op.avals or ())]
    preferred = param(op, "preferred_element_type")
    wide = preferred == FLOAT32_DTYPE and FLOAT32_DTYPE not in given
    return FLOAT32_DTYPE if wide else half


def product_for(op: Op, half: np.dtype, recipe: str) -> "Float8Product":
    weight = weight_of(op) if recipe == "rowwise_with_gw_hp" else 1
    over, out = Contraction.of_op(op), asked_for(op, half)
    return Float8Product.of(op, over, out, recipe, weight)


@dataclasses.dataclass(frozen=True)
class Float8Product(Product):
    """A product of float8 inputs, with gradients from float8 too."""

    over: Contraction
    out: np.dtype  # of the result
    recipe: str
    weight: int  # which input is the weight: 0 or 1

    name = "float8 product"

    @property
    def is_rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    def shared(self, dims: Dims) -> Axes:
        """The axes of an input that share a scale, in a product over these."""
        return dims.contracted if self.is_rowwise else dims.of_an_entry

    def kept(self, dims: Dims) -> Axes:
        """The axes that share a scale in the gradient of the other input."""
        return dims.free if self.recipe == "rowwise" else dims.of_an_entry

    def is_kept_in_half(self, side: int) -> bool:
        return self.recipe == "rowwise_with_gw_hp" and side != self.weight

    def inputs(
        self,
        left: Value,
        right: Value,
        quantize: Callable[..., Scaled],
        lower: Callable[[Value], Scaled] | None,
    ) -> Inputs:
        """What the product is computed from.

        Args:
          quantize: makes the float8 copy of a value, with a scale along some `axes`.
          lower: makes one in half precision; None: no gradient is taken.
        """

        def for_gradients(side: int, x: Value, lower: Callable) -> Scaled:
            if self.is_kept_in_half(side):
                return lower(x)
            return quantize(x, axes=self.kept(self.over[side]))

        kept = ()
        if self.is_rowwise and lower is not None:
            kept = for_gradients(0, left, lower), for_gradients(1, right, lower)
        shared = [*map(self.shared, self.over)]
        pair = quantize(left, axes=shared[0]), quantize(right, axes=shared[1])
        return Inputs(pair, kept)

    def forward(self, inputs: Inputs) -> jax.Array:
        params = {n: v for n, v in self.params if n in ("precision", "out_sharding")}
        return multiplied(*inputs.pair, self.over, self.out, **params)

    def gradients(self, kept: Inputs, cotangent: jax.Array) -> Sequence[jax.Array]:
        dtype = E4M3 if self.is_rowwise else E5M2
        copies = functools.cache(
            lambda axes: quantized(cotangent, dtype=dtype, axes=axes)
        )
        return [self.gradient(side, cotangent, copies, kept.pair) for side in (0, 1)]

    def gradient(
        self,
        side: int,
        cotangent: jax.Array,
        copies: Callable[[Axes], Scaled],
        kept: tuple[Scaled, Scaled],
    ) -> jax.Array:
        """The gradient of the left or the right input, in the dtype of the cotangent.

        Args:
          copies: makes the cotangent float8, with a scale for all numbers along axes.
          kept: both inputs, as they were kept.
        """
        over, order = self.over.gradient(side)
        this, other = kept[side], kept[1 - side]
        if (sharding := _compat.cotangent_sharding(this.values)) is not None:
            spec = [sharding.spec[i] for i in np.argsort(order)]
            sharding = sharding.update(spec=jax.P(*spec))
        if other.inverse is None:
            x = lax.convert_element_type(cotangent, other.values.dtype)
            pair = (x, other.values) if side == 0 else (other.values, x)
            out = lax.dot_general(*pair, over.numbers, out_sharding=sharding)
            out = lax.convert_element_type(out, cotangent.dtype)
        else:
            x = copies(self.shared(over[side]))
            pair = (x, other) if side == 0 else (other, x)
            highest = {"precision": lax.Precision.HIGHEST, "out_sharding": sharding}
            out = multiplied(*pair, over, cotangent.dtype, **highest)
        return lax.transpose(out, order)
