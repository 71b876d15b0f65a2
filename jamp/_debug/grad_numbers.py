"""What the reports on gradients count: one pass over each gradient, on the device."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._scaling.rule import as_scale
from .._tree import PyTree
from .flat_call import is_array, path_name
from .report import only_when

FLOAT16_MAX = 65504.0
# Half of float16's smallest number: this number and smaller ones round to zero.
FLUSHED = 2.0**-25
SMALLEST_NORMAL = 2.0**-14
GET_SCALE = "jamp.loss_scale(opt_state) and scaler.get_scale() return it."
BIAS = 127  # of an exponent in the bits: 2**0 has 127


class Numbers(NamedTuple):
    columns: list[jax.Array]  # [leaves, ...], one for each kind of number
    scale: jax.Array  # float32 []
    paths: tuple[str, ...]
    sizes: tuple[int, ...]  # in elements
    real_sizes: tuple[int, ...]  # in real numbers


def numbers(
    caller: str,
    grads: PyTree,
    scale: ArrayLike,
    when: ArrayLike | None,
    *kinds: str,
) -> Numbers:
    """Checks the arguments of a report, and counts kinds of `COUNTED`.

    Where `when` is false, all numbers are 0.
    """
    try:
        factor = as_scale(f"{caller}: scale", scale)
    except TypeError as error:
        raise TypeError(f"{error} {GET_SCALE}") from None
    named = named_leaves(caller, grads)

    def count() -> list[jax.Array]:
        leaves = [real_parts(leaf) for _, leaf in named] or [jnp.zeros((1, 0))]
        columns = [[COUNTED[kind](x, factor) for x in leaves] for kind in kinds]
        return [jnp.stack(column)[: len(named)] for column in columns]

    paths = tuple(path for path, _ in named)
    sizes = tuple(jnp.size(leaf) for _, leaf in named)
    real = tuple(jnp.size(leaf) * (1 + jnp.iscomplexobj(leaf)) for _, leaf in named)
    return Numbers(only_when(when, count), factor, paths, sizes, real)


def real_parts(leaf: ArrayLike) -> jax.Array:
    """A gradient, or both parts of a complex one, on a new first axis."""
    x = jnp.asarray(leaf)
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x[None]


def magnitude_of(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x)


def exponent_of(x: jax.Array) -> jax.Array:
    """The exponent in the bits of float32, 255 for inf and nan, and -1 for zero.

    Magnitudes of float64 that are out of float32's range get its first or last one.
    """
    if x.dtype == jnp.float64:
        words = lax.bitcast_convert_type(x, jnp.uint32)
        low, high = words[..., 0], words[..., 1] & jnp.uint32(0x7FFFFFFF)
        wide = (high >> 20).astype(jnp.int32)
        exponent = jnp.clip(wide - (1023 - BIAS), 0, 254)
        exponent = jnp.where(wide == 2047, 255, exponent)
        return jnp.where((low | high) == 0, -1, exponent)
    bits = bits_of(x)
    return jnp.where(bits == 0, -1, bits >> 23)


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of |x| in float32, as int32: they have the order of the magnitudes.

    XLA's CPU backend treats subnormals as zeros. There LLVM must not make a comparison
    of numbers of one of bits with 0.
    """
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    else:  # the subnormals of float16 and below are normal in float32
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits & jnp.uint32(0x7FFFFFFF)).astype(jnp.int32)
    same = lambda x: x
    return lax.platform_dependent(bits, cpu=lax.optimization_barrier, default=same)


def flushed(x: jax.Array, scale: ArrayLike = 1.0) -> jax.Array:
    """How many elements float16 rounds to zero after a division by a scale."""
    limit = jnp.asarray(FLUSHED * jnp.asarray(scale, magnitude_of(x).dtype))
    if x.dtype == jnp.float64:
        return many((exponent_of(x) >= 0) & (jnp.abs(x) <= limit))
    bits = bits_of(x)
    return many((bits > 0) & (bits <= bits_of(limit)))


def subnormal(x: jax.Array) -> jax.Array:
    """How many elements float16 rounds to a subnormal number."""
    magnitude = magnitude_of(x)
    return many((magnitude > FLUSHED) & (magnitude < SMALLEST_NORMAL))


def largest(x: jax.Array) -> jax.Array:
    magnitude = magnitude_of(x)
    finite = jnp.where(jnp.isfinite(magnitude), magnitude, 0)
    return jnp.max(finite, initial=0).astype(jnp.float32)


def by_exponent(x: jax.Array) -> jax.Array:
    """How many finite elements have each exponent: uint32 [256], the last is 0."""
    exponent = exponent_of(x)
    counted = ((exponent >= 0) & (exponent < 255)).astype(jnp.uint32)
    mesh = jax.typeof(exponent).sharding.mesh
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    spec = jax.sharding.PartitionSpec()
    out = jax.sharding.NamedSharding(mesh, spec) if explicit else None
    return jnp.zeros(256, jnp.uint32).at[exponent].add(counted, out_sharding=out)


def many(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags, dtype=jnp.uint32)


# Of the parts of a gradient, and the loss scale. Only "inf" and "nan" count elements.
COUNTED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "inf": lambda x, _: many(jnp.isinf(x).any(axis=0)),
    "nan": lambda x, _: many(jnp.isnan(x).any(axis=0)),
    "nonfinite": lambda x, _: many(exponent_of(x) == 255),
    "zeros": lambda x, _: many(exponent_of(x) < 0),
    "flushed": lambda x, _: flushed(x),
    "flushed_unscaled": flushed,
    "subnormal": lambda x, _: subnormal(x),
    "largest": lambda x, _: largest(x),
    "exponents": lambda x, _: by_exponent(x),
}


def total(column: jax.Array) -> jax.Array:
    """The sum over all gradients, or the largest uint32."""
    half = lambda x: jnp.sum(x, axis=0, dtype=jnp.uint32)  # of 16 bits each
    low, high = half(column & 0xFFFF), half(column >> 16)
    high += low >> 16
    both = (high << 16) | (low & 0xFFFF)
    return jnp.where(high > 0xFFFF, jnp.uint32(2**32 - 1), both)


def named_leaves(caller: str, tree: PyTree) -> list[tuple[str, ArrayLike]]:
    """The floating and complex leaves of a tree of gradients, each with its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in leaves:
        if not is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{caller}: grads must be a pytree of arrays; got {leaf!r} of type "
                f"{type(leaf).__name__} at {path_name(path) or 'the root'}."
            )
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            named.append((path_name(path) or "the root", leaf))
    return named
