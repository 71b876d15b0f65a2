"""A matrix product in float8 with its derivative, which is in float8 too.

The residuals are float8 values and their scales (`rowwise_with_gw_hp` keeps the input
in half precision). Float8 values carry no tangents, so a second derivative would treat
them as constants and return wrong numbers. It raises an error or, where it is known
beforehand, runs in half precision.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import cotangent_sharding
from .float8 import E4M3, E5M2
from .float8_arithmetic import Axes, Scaled, multiplied, quantized

TWICE = """A float8 product has one derivative. A second one was asked for, which was \
not known when the product was traced: `jax.jit`, `scan` or `jax.checkpoint` is \
between the two derivatives.
Put the product under `jamp.autocast(jnp.bfloat16)`, or take both derivatives in one \
`jax.jit`."""


class Product(NamedTuple):
    """A `dot_general` with one contracting dimension and no batch dimensions."""

    contracted: tuple[int, int]  # the dimension of the left, of the right input
    ndims: tuple[int, int]
    weight: int  # which input is the weight: 0 or 1
    precision: Any  # of `dot_general`
    out_sharding: Any
    out: np.dtype
    half: np.dtype  # of the region
    recipe: str

    @property
    def is_rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    @property
    def dims(self) -> tuple[tuple[int], tuple[int]]:
        left, right = self.contracted
        return (left,), (right,)

    def free(self, side: int) -> tuple[int, ...]:
        return tuple(d for d in range(self.ndims[side]) if d != self.contracted[side])

    def contracting(self, side: int) -> Axes:
        """The axes of an input that share a scale in the product itself."""
        return self.dims[side] if self.is_rowwise else None

    def kept(self, side: int) -> Axes:
        """The axes that share a scale in the gradient of the other input."""
        return self.free(side) if self.recipe == "rowwise" else None

    def is_kept_in_half(self, side: int) -> bool:
        return self.recipe == "rowwise_with_gw_hp" and side != self.weight


class Inputs(NamedTuple):
    """What a product is computed from, and what its gradients are."""

    left: Scaled
    right: Scaled
    kept: tuple[Scaled | jax.Array, ...]  # of the left, of the right, for gradients


def forward(product: Product, left: Scaled, right: Scaled) -> jax.Array:
    return multiplied(
        left,
        right,
        product.dims,
        product.out,
        precision=product.precision,
        out_sharding=product.out_sharding,
    )


@functools.cache
def product_of(product: Product, dtypes: tuple[np.dtype, np.dtype]) -> Callable:
    """A function of two inputs and of what was made of them: see `Inputs`.

    It has a first derivative, in reverse mode.

    Args:
      dtypes: of the inputs, and so of their gradients.
    """

    @jax.custom_vjp
    def float8_product(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return forward(product, inputs.left, inputs.right)

    def fwd(left: jax.Array, right: jax.Array, inputs: Inputs):
        shardings = tuple(cotangent_sharding(x) for x in (left, right))
        kept = tuple(tied(x, left, right) for x in inputs.kept)
        return float8_product(left, right, inputs), (kept, Static(shardings))

    def bwd(residuals, cotangent: jax.Array):
        kept, shardings = residuals
        scales = [x.inverse for x in kept if isinstance(x, Scaled)]
        cotangent = once(TWICE)(cotangent, *scales)
        casts = functools.cache(lambda axes: cast(product, cotangent, axes))
        grads = (
            gradient(product, side, cotangent, casts, kept[1 - side], sharding)
            for side, sharding in enumerate(shardings.value)
        )
        return *map(lax.convert_element_type, grads, dtypes), None

    float8_product.defvjp(fwd, bwd)
    return float8_product


def cast(product: Product, cotangent: jax.Array, axes: Axes) -> Scaled:
    dtype = E4M3 if product.is_rowwise else E5M2
    return quantized(cotangent, dtype=dtype, axes=axes)


def gradient(
    product: Product,
    side: int,
    cotangent: jax.Array,
    casts: Callable[[Axes], Scaled],
    other: Scaled | jax.Array,
    sharding: jax.sharding.NamedSharding | None,
) -> jax.Array:
    """The gradient of the left or the right input, in the dtype of the cotangent.

    Args:
      casts: makes the cotangent float8, with a scale for all numbers along some axes.
      other: the other input, as it was kept.
    """
    n_left = product.ndims[0] - 1
    dims = range(n_left), range(n_left, cotangent.ndim)  # of the cotangent
    theirs, own = tuple(dims[1 - side]), product.free(side)
    contracted, at = product.free(1 - side), product.contracted[side]
    # The product has the cotangent's dimensions and the contracted one, in the order of
    # the operands: the cotangent is where the input was.
    order = np.argsort([*own, at] if side == 0 else [at, *own])
    sharding = untransposed(sharding, order)
    if isinstance(other, Scaled):
        axes = theirs if product.is_rowwise else None
        operands = (casts(axes), theirs), (other, contracted)
        (x, over_x), (y, over_y) = operands if side == 0 else operands[::-1]
        out = multiplied(
            x,
            y,
            (over_x, over_y),
            cotangent.dtype,
            precision=lax.Precision.HIGHEST,
            out_sharding=sharding,
        )
    else:
        operands = (lax.convert_element_type(cotangent, other.dtype), theirs)
        operands = operands, (other, contracted)
        (x, over_x), (y, over_y) = operands if side == 0 else operands[::-1]
        over = (over_x, over_y), ((), ())
        out = lax.dot_general(x, y, over, out_sharding=sharding)
        out = lax.convert_element_type(out, cotangent.dtype)
    return lax.transpose(out, order)


def untransposed(
    sharding: jax.sharding.NamedSharding | None, order: np.ndarray
) -> jax.sharding.NamedSharding | None:
    """The sharding of what becomes a gradient by `transpose(_, order)`."""
    if sharding is None:
        return None
    spec = [sharding.spec[i] for i in np.argsort(order)]
    return sharding.update(spec=jax.P(*spec))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """What is known when a function is traced."""

    value: Any


@functools.cache
def product_in_any_mode(product: Product) -> Callable:
    """The same for other derivatives: in forward mode, or of higher order.

    They run in half precision.
    """

    @jax.custom_jvp
    def float8_product(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return forward(product, inputs.left, inputs.right)

    @float8_product.defjvp
    def _(primals, tangents):
        (left, right, inputs), (dleft, dright, _) = primals, tangents

        def dot(x, y):
            x, y = (lax.convert_element_type(z, product.half) for z in (x, y))
            over = product.dims, ((), ())
            return lax.dot_general(x, y, over, out_sharding=product.out_sharding)

        tangent = dot(dleft, right) + dot(left, dright)
        tangent = lax.convert_element_type(tangent, product.out)
        return float8_product(left, right, inputs), tangent

    return float8_product


# Second derivatives.


def tied(
    kept: Scaled | jax.Array, left: jax.Array, right: jax.Array
) -> Scaled | jax.Array:
    """A residual, with a tangent if an input has one."""
    if not isinstance(kept, Scaled):
        return kept
    return kept._replace(inverse=tied_scale(kept.inverse, left, right))


@jax.custom_jvp
def tied_scale(inverse: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return inverse


@tied_scale.defjvp
def _(primals, tangents):
    zero = sum(jnp.sum(dx.astype(jnp.float32) * 0) for dx in tangents[1:])
    return tied_scale(*primals), jnp.broadcast_to(zero, primals[0].shape)


@functools.cache
def once(message: str) -> Callable[..., jax.Array]:
    """The identity of a cotangent, which cannot be differentiated.

    The other arguments are what else the derivative is made of.
    """

    @jax.custom_jvp
    def once(cotangent: jax.Array, *others: jax.Array) -> jax.Array:
        return cotangent

    @once.defjvp
    def _(primals, tangents):
        raise NotImplementedError(message)

    return once
