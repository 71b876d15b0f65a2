"""Products that have one derivative, in reverse mode: jamp's errors for the others.

A product with a rule of its own is a `custom_vjp`. JAX's errors about it do not help a
user who wrote `x @ w`. So its inputs and its result pass through an identity that

- raises an error if a tangent of an input is computed (`jax.jvp`, `jax.linearize`);
- lets the cotangents of the inputs pass, in reverse mode;
- raises an error if the result is transposed as if the product were linear.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NOT_IN_REVERSE = """{} has one derivative, in reverse mode (`jax.grad`, `jax.vjp`). \
`jax.jvp` and `jax.linearize` work directly around the region, without `jax.jit`, \
`scan` or `jax.checkpoint` between them and the product. `jax.linear_transpose` does \
not, because the product rounds its inputs.
Put the product under `jamp.autocast(jnp.bfloat16)`."""


class Place(enum.Enum):
    """What passes through the identity."""

    INPUT = "input"
    TANGENT = "tangent"
    RESULT = "result"


def in_reverse_mode(
    function: Callable[..., jax.Array], name: str
) -> Callable[..., jax.Array]:
    """A function of two inputs and others, with errors for other derivatives."""
    pass_on = functools.partial(passed_p.bind, message=NOT_IN_REVERSE.format(name))

    def limited(left: jax.Array, right: jax.Array, *others: Any) -> jax.Array:
        inputs = (pass_on(x, place=Place.INPUT) for x in (left, right))
        return pass_on(function(*inputs, *others), place=Place.RESULT)

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
