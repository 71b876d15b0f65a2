"""Float16 products whose cotangents are scaled, each by its own power of two.

A cotangent has the dtype of its primal, so these products return float32, and their
backward products get a float32 cotangent:

    s = a power of two that brings max |dy| near float16's largest number
    dx, dw = float16(dy / s) @ w.T * s, x.T @ float16(dy / s) * s

with sums in float32. No loss scale is needed as long as nothing else is float16, so
functions that the tables lower as a whole follow the rows of their primitives.

In code that is already a derivative (`jax.grad` inside the region), it is not known
which input is a cotangent, so both are scaled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .. import _compat
from .._compat import array_dtype
from .._jaxprs import read
from .contraction import Contraction
from .decision import CASTABLE, FLOAT32_DTYPE, Op, Recipe, Value
from .derivatives import Inputs, Product, copied, run
from .low_precision import FLOAT16, Scaled, inverses, quantized, sharded_as
from .products import is_of_vectors
from .trace import AutocastTrace
from .traits import PRODUCTS


@dataclasses.dataclass(frozen=True)
class ScaledFloat16(Recipe):
    """Products in float16 that need no loss scale: for `autocast`, or in its rules.

    The cotangent of each product is scaled by a power of two that its own largest
    number requires. Products return float32, and what is computed between them is
    float32, which costs memory: see `docs/float8.md`.

    Examples:
      >>> import jamp, jax, jax.numpy as jnp
      >>> def loss(w):
      ...     with jamp.autocast(jamp.ScaledFloat16()):
      ...         return jnp.mean(jnp.ones((4, 8)) @ w) * 1e-18
      >>> grad = jax.grad(loss)(jnp.ones((8, 2)))
      >>> grad.dtype, float(grad[0, 0]) > 4e-19  # float16 ends at 6e-8
      (dtype('float32'), True)

    PyTorch: no counterpart.
    """

    name = "scaled float16"
    dtype = FLOAT16
    products = PRODUCTS
    is_wide = True

    def _problem(self, op: Op) -> str:
        for dtype in map(array_dtype, op.args[:2]):
            if dtype not in CASTABLE:
                return f"{dtype} input"
        return "a product of two vectors" if is_of_vectors(op) else ""

    def _run(self, trace: AutocastTrace, op: Op) -> jax.Array:
        # A derivative's product may be the gradient of a weight, without the weight.
        may_differ = op.is_baked or not all(op.activations)
        has_entries = op.name == "dot_general" and may_differ
        over = Contraction.of_op(op) if has_entries else None
        product = ScaledProduct.of(op, over)
        left, right, *others = op.args

        def operand(side: int, x: Value) -> Scaled:
            """An input in float16, and scaled if it may be a cotangent."""
            if op.is_baked:
                axes = over and over[side].of_an_entry
                return copied(trace, x, FLOAT16, axes)
            return Scaled(trace.cast(x, FLOAT16))

        pair = operand(0, left), operand(1, right)
        return run(trace, op, product, Inputs(pair, others=tuple(others)))


@dataclasses.dataclass(frozen=True)
class ScaledProduct(Product):
    """A product of float16 inputs that is summed and returned in float32."""

    over: Contraction | None  # if each product of a batch has a scale

    name = "scaled float16 product"

    def bind(self, *args: Value) -> jax.Array:
        params = dict(self.params) | {"preferred_element_type": FLOAT32_DTYPE}
        return self.primitive.bind(*args, **params)

    def forward(self, inputs: Inputs) -> jax.Array:
        out = self.bind(*(x.values for x in inputs.pair), *inputs.others)
        return unscaled(out, self.inverses(*inputs.pair))

    def gradients(self, kept: Inputs, cotangent: jax.Array) -> Sequence[jax.Array]:
        n = len(self.over.batch_of_result) if self.over else 0
        axes = tuple(range(n, cotangent.ndim)) if n else None
        scaled = quantized(cotangent, dtype=FLOAT16, axes=axes)
        return [self.gradient(side, scaled, kept) for side in (0, 1)]

    def gradient(self, side: int, cotangent: Scaled, kept: Inputs) -> jax.Array:
        """The gradient of the left or the right input, in float32."""
        other, others = kept.pair[1 - side], kept.others

        def transposed(cotangent, other, *others):
            def linear(x):
                pair = (x, other) if side == 0 else (other, x)
                return self.bind(*pair, *others)

            return jax.linear_transpose(linear, wide[side])(cotangent)[0]

        # The transpose is read off a float32 product, where all dtypes agree.
        in_float32 = {"dtype": FLOAT32_DTYPE, "weak_type": False}
        given: list[Any] = [jax.typeof(x.values) for x in (*kept.pair, cotangent)]
        *wide, of_cotangent = (aval.update(**in_float32) for aval in given)
        avals = of_cotangent, wide[1 - side], *map(jax.typeof, others)
        jaxpr = jax.make_jaxpr(transposed)(*avals)
        out = evaluated(jaxpr, [cotangent.values, other.values, *others])
        pair = (cotangent, other) if side == 0 else (other, cotangent)
        return unscaled(out, self.inverses(*pair, of=side))

    def inverses(
        self, left: Scaled, right: Scaled, of: int | None = None
    ) -> list[jax.Array]:
        """The inverse scales of a product, or of the one that is a gradient.

        Args:
          of: the input that it is the gradient of.
        """
        if self.over is None:
            return [x.inverse for x in (left, right) if x.inverse is not None]
        if of is None:
            return inverses(left, right, self.over)
        over, order = self.over.gradient(of)
        undone = inverses(left, right, over)
        return [lax.transpose(x, order) if x.ndim else x for x in undone]


def unscaled(out: jax.Array, inverses: list[jax.Array]) -> jax.Array:
    """A result times both inputs' powers of two, whose product may be out of range.

    The smaller one comes first: the other one could not save what it flushes to zero.
    """
    inverses = [sharded_as(out, x) for x in inverses]
    if len(inverses) == 2:
        inverses = [lax.min(*inverses), lax.max(*inverses)]
    for inverse in inverses:
        out = out * inverse
    return out


def evaluated(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> jax.Array:
    """The one result of a jaxpr that moves float16 values and multiplies them."""

    def results(eqn: JaxprEqn, inputs: list[Any]) -> list[jax.Array]:
        if eqn.primitive.name in PRODUCTS:
            wide = eqn.params | {"preferred_element_type": FLOAT32_DTYPE}
            eqn = eqn.replace(params=wide)
        return _compat.bind_eqn(eqn, inputs)

    return read(jaxpr, args, results)[0]
