"""Products that a recipe runs, with one derivative, in reverse mode, of its own.

A product is bound as a function of its two inputs and of what the recipe made of them.
Values in low precision carry no tangents, so a derivative that JAX takes of that
function would be wrong. There are three cases:

- One derivative in reverse mode is computed by the recipe.
- Derivatives in forward mode or of higher order, if they are known when the product is
  traced, are those of a product in half precision or float32.
- Others are errors: `jax.jit`, `scan` or `jax.checkpoint` is in between. Those of JAX
  about a `custom_vjp` do not help a user who wrote `x @ w`. So the inputs and the
  result pass through an identity that raises an error if a tangent of an input is
  computed, or if the result is transposed as if the product were linear. Cotangents of
  the inputs pass. A second derivative passes through another one (`once`).
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat
from .._jaxprs import param
from .decision import Op, Value
from .low_precision import Axes, Scaled, quantized
from .trace import AutocastTrace

NOT_IN_REVERSE = """A {} has one derivative, in reverse mode (`jax.grad`, `jax.vjp`). \
`jax.jvp` and `jax.linearize` work directly around the region, without `jax.jit`, \
`scan` or `jax.checkpoint` between them and the product. `jax.linear_transpose` does \
not, because the product rounds its inputs.
Put the product under `jamp.autocast(jnp.bfloat16)`."""
TWICE = """A {} has one derivative. A second one was asked for, which was not known \
when the product was traced: `jax.jit`, `scan` or `jax.checkpoint` is between the two \
derivatives.
Put the product under `jamp.autocast(jnp.bfloat16)`, or take both derivatives in one \
`jax.jit`."""


Pair = tuple[Scaled, Scaled]


class Inputs(NamedTuple):
    """What a product is computed from, and its gradients."""

    pair: Pair  # left and right
    kept: Pair | tuple[()] = ()  # for the gradients, where it differs
    others: tuple[Value, ...] = ()  # without a gradient: the sizes of ragged groups

    def residuals(self) -> Self:
        return self._replace(pair=self.kept or self.pair, kept=())


class Given(NamedTuple):
    """What an input was, which its gradient must fit."""

    aval: AbstractValue
    sharding: jax.sharding.NamedSharding | None  # of a cotangent, on explicit axes


@dataclasses.dataclass(frozen=True)
class Product:
    """A product and how its recipe runs it. Equal ones are traced and compiled once."""

    name: ClassVar[str]
    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    out: np.dtype  # of the result
    half: np.dtype  # in which it runs for derivatives that are not the recipe's

    @classmethod
    def of(cls, op: Op, *more: Any) -> Self:
        params, algorithms = op.params, lax.DotAlgorithmPreset | lax.DotAlgorithm
        if isinstance(param(op, "precision"), algorithms):
            # Some of them would sum in half precision.
            params = params | {"precision": None}
        return cls(op.primitive, tuple(sorted(params.items())), *more)

    def bind(self, *args: Value, dtype: np.dtype) -> jax.Array:
        """The product itself, with a result in a dtype."""
        params = dict(self.params) | {"preferred_element_type": dtype}
        return self.primitive.bind(*args, **params)

    def forward(self, inputs: Inputs) -> jax.Array:
        raise NotImplementedError

    def gradients(
        self, kept: Inputs, cotangent: jax.Array, given: Sequence[Given]
    ) -> Sequence[jax.Array]:
        """The gradients of both inputs, in any dtypes."""
        raise NotImplementedError


def run(trace: AutocastTrace, op: Op, product: Product, inputs: Inputs) -> jax.Array:
    if _compat.is_differentiated_once(trace.parent):
        function = in_reverse_mode(product)
    else:
        function = in_any_mode(product)
    leaves, tree = jax.tree.flatten(inputs)
    return trace.call(flat(function, tree), [*op.args[:2], *leaves], {})


def copied(trace: AutocastTrace, x: Value, dtype: np.dtype, axes: Axes) -> Scaled:
    """The copy of a value in a small format, which a region makes once."""
    x = trace.notes.source(x)  # libraries may make many copies of it
    key = "scaled", dtype, axes
    if (copy := trace.notes.copy(x, key)) is None:
        copy = trace.call(quantized, [x], {"dtype": dtype, "axes": axes})
        trace.notes.remember(x, key, copy)
    return copy


Function = Callable[[jax.Array, jax.Array, Inputs], jax.Array]


@functools.cache
def flat(function: Function, tree: Any) -> Callable[..., jax.Array]:
    """The function with the leaves of `Inputs` as arguments."""
    return lambda left, right, *leaves: function(left, right, tree.unflatten(leaves))


@functools.cache
def with_gradients(product: Product) -> Function:
    """A function of two inputs, and of what was made of them, with its gradients."""

    def forward(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return product.forward(inputs)

    forward.__name__ = product.name.replace(" ", "_")
    multiply = jax.custom_vjp(forward)

    def fwd(left: jax.Array, right: jax.Array, inputs: Inputs):
        given = [
            Given(jax.typeof(x), _compat.cotangent_sharding(x)) for x in (left, right)
        ]
        kept = tied(inputs.residuals(), left, right)
        return multiply(left, right, inputs), (kept, Static(tuple(given)))

    def bwd(residuals, cotangent: jax.Array):
        kept, given = residuals
        scales = [x.values if x.inverse is None else x.inverse for x in kept.pair]
        cotangent = once(TWICE.format(product.name))(cotangent, *scales)
        grads = product.gradients(kept, cotangent, given.value)
        dtypes = [x.aval.dtype for x in given.value]
        return *map(lax.convert_element_type, grads, dtypes), None

    multiply.defvjp(fwd, bwd)
    return multiply


@functools.cache
def in_any_mode(product: Product) -> Function:
    """The same for other derivatives: in forward mode, or of higher order."""

    def forward(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        return product.forward(inputs)

    forward.__name__ = product.name.replace(" ", "_")
    multiply = jax.custom_jvp(forward)

    @multiply.defjvp
    def _(primals, tangents):
        (left, right, inputs), (dleft, dright, _) = primals, tangents

        def exact(x, y):
            x, y = (lax.convert_element_type(z, product.half) for z in (x, y))
            return product.bind(x, y, *inputs.others, dtype=product.half)

        tangent = exact(dleft, right) + exact(left, dright)
        tangent = lax.convert_element_type(tangent, product.out)
        return multiply(left, right, inputs), tangent

    return multiply


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """What is known when a function is traced."""

    value: Any


# Second derivatives.


def tied(kept: Inputs, left: jax.Array, right: jax.Array) -> Inputs:
    """Residuals whose scales have a tangent if an input has one."""

    def tie(x: Scaled) -> Scaled:
        if x.inverse is None:
            return x
        return x._replace(inverse=tied_scale(x.inverse, left, right))

    return kept._replace(pair=(tie(kept.pair[0]), tie(kept.pair[1])))


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


# Forward mode, and transposition.


class Place(enum.Enum):
    """What passes through the identity."""

    INPUT = "input"
    TANGENT = "tangent"
    RESULT = "result"


@functools.cache
def in_reverse_mode(product: Product) -> Function:
    """The function with gradients, with errors for other derivatives."""
    message = NOT_IN_REVERSE.format(product.name)
    pass_on = functools.partial(passed_p.bind, message=message)

    def limited(left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
        left, right = (pass_on(x, place=Place.INPUT) for x in (left, right))
        out = with_gradients(product)(left, right, inputs)
        return pass_on(out, place=Place.RESULT)

    return limited


passed_p = Primitive("reverse_mode")


@passed_p.def_impl
def passed(x: Any, *, place: Place, message: str) -> Any:
    if place is Place.TANGENT:
        raise NotImplementedError(message)
    return x


@passed_p.def_abstract_eval
def aval_of(aval: Any, **params: Any) -> Any:
    return aval


def differentiated(primals: Any, tangents: Any, *, place: Place, message: str) -> Any:
    (x,), (dx,) = primals, tangents
    out = passed_p.bind(x, place=place, message=message)
    if place is Place.RESULT:
        return out, dx
    return out, passed_p.bind(dx, place=Place.TANGENT, message=message)


def transposed(cotangent: Any, x: Any, *, place: Place, message: str) -> Any:
    if place is not Place.TANGENT:
        raise NotImplementedError(message)
    return [cotangent]


def batched(args: Any, dims: Any, *, place: Place, message: str) -> Any:
    if place is Place.TANGENT:
        raise NotImplementedError(message)
    return passed_p.bind(*args, place=place, message=message), dims[0]


ad.primitive_jvps[passed_p] = differentiated
ad.primitive_transposes[passed_p] = transposed
batching.primitive_batchers[passed_p] = batched
mlir.register_lowering(passed_p, mlir.lower_fun(passed, multiple_results=False))
