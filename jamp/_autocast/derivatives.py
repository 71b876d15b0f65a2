"""Products that a recipe runs, with one derivative, in reverse mode, of its own.

A product is a `custom_vjp` of its two inputs and of what the recipe made of them. JAX
refuses its derivatives in forward mode. Values in low precision carry no tangents, so
a derivative of its gradients would be wrong, and is refused here.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .._jaxprs import param
from .decision import Op, Value
from .low_precision import Axes, Scaled, quantized
from .trace import AutocastTrace

TWICE = """A {} has one derivative, and a second one was asked for. Put the product \
under `jamp.autocast(jnp.bfloat16)`."""


Pair = tuple[Scaled, Scaled]


class Inputs(NamedTuple):
    """What a product is computed from, and its gradients."""

    pair: Pair  # left and right
    kept: Pair | tuple[()] = ()  # for the gradients, where it differs
    others: tuple[Value, ...] = ()  # without a gradient: the sizes of ragged groups

    def residuals(self) -> Self:
        return self._replace(pair=self.kept or self.pair, kept=())


@dataclasses.dataclass(frozen=True)
class Product:
    """A product and how its recipe runs it. Equal ones are traced and compiled once."""

    name: ClassVar[str]
    primitive: Primitive
    params: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, op: Op, *more: Any) -> Self:
        params, algorithms = op.params, lax.DotAlgorithmPreset | lax.DotAlgorithm
        if isinstance(param(op, "precision"), algorithms):
            # Some of them would sum in half precision.
            params = params | {"precision": None}
        return cls(op.primitive, tuple(sorted(params.items())), *more)

    def forward(self, inputs: Inputs) -> jax.Array:
        raise NotImplementedError

    def gradients(self, kept: Inputs, cotangent: jax.Array) -> Sequence[jax.Array]:
        """The gradients of both inputs, in any dtypes."""
        raise NotImplementedError


def run(trace: AutocastTrace, op: Op, product: Product, inputs: Inputs) -> jax.Array:
    leaves, tree = jax.tree.flatten(inputs)
    params = {"product": product, "tree": tree}
    return trace.call(of_leaves, [*op.args[:2], *leaves], params)


def of_leaves(
    left: jax.Array, right: jax.Array, *leaves: Value, product: Product, tree: Any
) -> jax.Array:
    return with_gradients(product, left, right, tree.unflatten(leaves))


def copied(trace: AutocastTrace, x: Value, dtype: np.dtype, axes: Axes) -> Scaled:
    """The copy of a value in a small format, which a region makes once."""
    x = trace.notes.source(x)  # libraries may make many copies of it
    key = "scaled", dtype, axes
    if (copy := trace.notes.copy(x, key)) is None:
        copy = trace.call(quantized, [x], {"dtype": dtype, "axes": axes})
        trace.notes.remember(x, key, copy)
    return copy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradients(
    product: Product, left: jax.Array, right: jax.Array, inputs: Inputs
) -> jax.Array:
    """A product of two inputs, from what was made of them, with its gradients."""
    return product.forward(inputs)


def fwd(product: Product, left: jax.Array, right: jax.Array, inputs: Inputs):
    # They hold no numbers, but their dtype, and a tangent if the inputs have one.
    empty = [lax.slice_in_dim(x, 0, 0) for x in (left, right)]
    out = with_gradients(product, left, right, inputs)
    return out, (inputs.residuals(), empty)


def bwd(product: Product, residuals: tuple[Inputs, Any], cotangent: jax.Array):
    kept, empty = residuals
    grads = product.gradients(kept, once(product.name, cotangent, *empty))
    dtypes = [x.dtype for x in empty]
    return *map(lax.convert_element_type, grads, dtypes), None


with_gradients.defvjp(fwd, bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once(name: str, cotangent: jax.Array, *inputs: jax.Array) -> jax.Array:
    """The cotangent of a product, which together with its inputs has no derivative."""
    return cotangent


@once.defjvp
def _(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(TWICE.format(name))
