"""The recipes of float8: their formats, and how many scales they use."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from .._checks import brief

E4M3 = jnp.dtype("float8_e4m3fn")
E5M2 = jnp.dtype("float8_e5m2")
FORMATS = (E4M3, E5M2)
NAME = "float8"  # what stands for `Float8()`
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")

BAD_RECIPE = "Float8(recipe={}): the recipe must be {}."


@dataclasses.dataclass(frozen=True)
class Float8:
    """How matrix products run in float8: for `autocast`, or as a value of its rules.

    A product's inputs are quantized when it runs, each by the power of two that its
    largest number requires. A recipe keeps neither state nor history. The result and
    the gradients have the dtypes that `autocast(bfloat16)` gives them. The residuals of
    the backward pass are float8 (`"rowwise_with_gw_hp"`: the input in half precision).

    Args:
      recipe: torchao's names and meaning.

        - `"tensorwise"`: one scale for a whole array. E4M3, and E5M2 for gradients.
        - `"rowwise"`: a scale for each row that is contracted, all in E4M3. It handles
          rows of very different sizes, and costs a second quantization.
        - `"rowwise_with_gw_hp"`: `"rowwise"`, with the weight's gradient in bfloat16.
          The weight is the right operand (`x @ w`); in `eqx.nn.Linear`, the left one.

    Raises:
      ValueError: the recipe is not one of these.

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

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            names = ", ".join(map(repr, RECIPES[:-1]))
            allowed = f"{names} or {RECIPES[-1]!r}"
            raise ValueError(BAD_RECIPE.format(brief(self.recipe), allowed))


def as_float8(value: object) -> Float8 | None:
    """The recipe that a user's value stands for, or None if it is something else."""
    if isinstance(value, Float8):
        return value
    return Float8() if isinstance(value, str) and value == NAME else None


def is_float8(dtype: np.dtype | None) -> bool:
    """Whether a dtype has one byte and a fraction.

    >>> is_float8(jnp.dtype(jnp.float8_e4m3fnuz)), is_float8(jnp.dtype(jnp.int8))
    (True, False)
    """
    return dtype is not None and dtype.itemsize == 1 and dtype.name.startswith("float8")
