"""Mapped axes and sharded arrays: types that match, and one flag for all devices.

Under jit, XLA makes the flag: it reduces each array over the devices that hold its
parts, and may or may not combine those reductions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

from .._checks import axis_names
from .._tree import Flag

Entry = str | tuple[str, ...] | None  # of a PartitionSpec


def mapped(
    axis_name: str | Sequence[str], caller: str, where: str = ""
) -> tuple[str, ...]:
    axes = axis_names(axis_name)
    if not axes:
        raise TypeError(f"axis_name must name a mapped axis; got {axis_name!r}.")
    for axis in axes:
        if not is_mapped(axis):
            raise ValueError(
                f"axis_name {axis!r} is not a mapped axis here; call {caller} inside "
                f"jax.shard_map over a mesh with that axis{where}."
            )
    return axes


def is_mapped(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def on_all(finite: Flag, axis_name: str | Sequence[str] | None) -> Flag:
    """Whether a flag holds on all replicas of mapped axes: bool []."""
    if axis_name is None:
        return finite
    try:
        return lax.pmin(jnp.int32(finite), axis_name) == 1
    except NameError as error:
        names = axis_name if isinstance(axis_name, str) else ", ".join(axis_name)
        raise ValueError(
            f"axis_name {names!r} is not a mapped axis here. It is for shard_map and "
            "pmap. Under plain jit, leave it out: there, a sharded gradient is one "
            "array."
        ) from error


def on_every_replica(flag: jax.Array) -> jax.Array:
    """A flag that any replica raises for all, if JAX knows that they may differ."""
    axes = varying_axes(flag)
    return lax.pmax(jnp.int32(flag), axes) == 1 if axes else flag


def varying_axes(x: Any) -> tuple[str, ...]:
    """The axes of a `shard_map` over which a value may differ, as its type says."""
    manual = type_of(x).manual_axis_type  # None if `shard_map` does not check
    return () if manual is None else tuple(manual.varying)


def typed_as(x: jax.Array, like: Any) -> jax.Array:
    """The same value in the type of another one of its shape: an array, or a type.

    On a mesh of explicit axes it is split in the same way, and in a `shard_map` that
    checks types it varies over the same axes. In other programs it is `x`.
    """
    more = tuple(set(varying_axes(like)) - set(varying_axes(x)))
    x = lax.pcast(x, more, to="varying") if more else x
    wanted, given = type_of(like).sharding, type_of(x).sharding
    if wanted is None or wanted.mesh.empty:  # it is not on the mesh, as if it is whole
        wanted = given.update(spec=PartitionSpec(*[None] * jnp.ndim(x)))
    is_explicit = AxisType.Explicit in wanted.mesh.axis_types
    return jax.sharding.reshard(x, wanted) if is_explicit and wanted != given else x


def type_of(x: Any) -> Any:
    """The type of an array, with its sharding and varying axes, or a type itself."""
    is_type = isinstance(x, jax.ShapeDtypeStruct | ShapedArray)
    return x if is_type else jax.typeof(x)


def zeros_like(like: ArrayLike | jax.ShapeDtypeStruct) -> jax.Array:
    return typed_as(jnp.zeros(jnp.shape(like), type_of(like).dtype), like)


def may_be_split(array: ArrayLike) -> bool:
    """Whether devices may hold parts of an array of which its type says nothing."""
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty:  # `jit(in_shardings=...)` leaves it empty
        return jax.device_count() > 1
    axes = zip(sharding.mesh.axis_sizes, sharding.mesh.axis_types, strict=True)
    return any(size > 1 and kind == AxisType.Auto for size, kind in axes)


def names(entry: Entry) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)
