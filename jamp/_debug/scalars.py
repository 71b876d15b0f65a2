"""The scalars of a `History` on their way from the devices to the host.

Those of one device and dtype become one vector: ten scalars of three dtypes are copied
in one small jitted call and sent in three pieces.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import is_traced

OUTSIDE = (
    "History collects outside of jit: return the metrics from the jitted step, and "
    "append them outside."
)
NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())

OnHost = np.ndarray | bool | int | float | complex


class Group(NamedTuple):
    """The values of one dtype on one device."""

    device: Hashable
    dtype: np.dtype
    names: tuple[str, ...]


class Block(NamedTuple):
    """Values of one step, or of several that are copied together."""

    groups: tuple[Group, ...]
    arrays: list[list[Any]]  # of each group, to be concatenated: [names], [n, names]
    host: Mapping[str, Any]  # values that are not device arrays
    steps: int = 1

    def send(self) -> None:
        """Begins the copy."""
        # An intended transfer: a user's guard against implicit ones must allow it.
        with jax.transfer_guard_device_to_host("allow"):
            for array in (array for group in self.arrays for array in group):
                array.copy_to_host_async()

    def is_ready(self) -> bool:
        return all(array.is_ready() for group in self.arrays for array in group)

    def columns(self) -> dict[str, np.ndarray]:
        """The values by name, [steps], each in its dtype. Waits for the copy."""
        columns = {name: np.array(values) for name, values in self.host.items()}
        for group, arrays in zip(self.groups, self.arrays, strict=True):
            rows = [np.atleast_2d(rows) for rows in jax.device_get(arrays)]
            columns |= zip(group.names, np.concatenate(rows).T, strict=True)
        return columns


def on_devices(
    caller: str, metrics: Mapping[str, object], names: Sequence[str], steps: int | None
) -> Block:
    """Checks the values, and copies those on devices: one call for each device.

    Args:
      caller: the beginning of a message.
      metrics: name -> value [], or [steps].
      names: which of them, in this order.
      steps: their number, or None for the scalars of one step.

    Raises:
      ValueError: a value has another number of axes, was donated, or is sharded.
      TypeError: a value is not a number or an array of numbers, or is traced.
    """
    found: dict[tuple[Hashable, np.dtype], dict[str, jax.Array]] = {}
    host, ndim = {}, 0 if steps is None else 1
    for name in names:
        value: Any = metrics[name]
        if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
            value = value.__jax_array__()  # of an nnx.Variable
        if isinstance(value, jax.Array):
            value = _of_device(caller, name, value, ndim)
            (device,) = value.sharding.device_set
            found.setdefault((device, value.dtype), {})[name] = value
        else:
            host[name] = _of_host(caller, name, value, ndim)
    groups = tuple(Group(*at, tuple(values)) for at, values in found.items())
    arrays: list[list[Any]] = [[] for _ in groups]
    for device in dict.fromkeys(group.device for group in groups):
        here = [i for i, group in enumerate(groups) if group.device == device]
        given = [list(found[groups[i][:2]].values()) for i in here]
        for i, array in zip(here, _stacked(given, -1), strict=True):
            arrays[i].append(array)
    return Block(groups, arrays, host, 1 if steps is None else steps)


def block_of(rows: Sequence[Block], stacked: bool) -> Block:
    """Blocks of one step, with the same groups, as one.

    Args:
      stacked: whether to send one array per group, which compiles for their number.
    """
    groups = rows[0].groups
    arrays = [[row.arrays[i][0] for row in rows] for i in range(len(groups))]
    if stacked:
        arrays = [_stacked([group], 0) for group in arrays]
    host = {name: [row.host[name] for row in rows] for name in rows[0].host}
    return Block(groups, arrays, host, len(rows))


def _of_device(caller: str, name: str, value: jax.Array, ndim: int) -> jax.Array:
    """The value, on one device only."""
    if is_traced(value):
        raise TypeError(f"{caller}: {name!r} is traced. {OUTSIDE}")
    if value.ndim != ndim:
        raise _shape_error(caller, name, value.shape, ndim)
    _check_dtype(caller, name, value.dtype)
    if value.is_deleted():
        raise ValueError(
            f"{caller}: the buffer of {name!r} was donated to a later step and is "
            "gone. Append a step's metrics before the next step runs."
        )
    if len(value.sharding.device_set) == 1:
        return value
    if not value.is_fully_replicated:
        raise ValueError(
            f"{caller}: {name!r} is spread over devices, as {value.sharding}; "
            "return it replicated from the jitted step."
        )
    return value.addressable_data(0)


def _of_host(caller: str, name: str, value: object, ndim: int) -> OnHost:
    if isinstance(value, list | tuple | np.ndarray | np.generic):
        value = np.array(value)  # a copy, because the caller may still write to it
        _check_dtype(caller, name, value.dtype)
    elif not isinstance(value, bool | int | float | complex):
        raise TypeError(
            f"{caller}: {name!r} must be a number or an array; got {value!r} of type "
            f"{type(value).__name__}."
        )
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{caller}: {name!r} is an integer of more than 64 bits.")
    if np.ndim(value) != ndim:
        raise _shape_error(caller, name, np.shape(value), ndim)
    return value


def _shape_error(
    caller: str, name: str, shape: tuple[int, ...], ndim: int
) -> ValueError:
    want, advice = (
        ("[steps]", "The scalars of one step go to append.")
        if ndim
        else ("[]", "Log its mean, for example; several steps at once go to extend.")
    )
    return ValueError(
        f"{caller}: {name!r} must have shape {want}; got {shape}. {advice}"
    )


def _check_dtype(caller: str, name: str, dtype: np.dtype) -> None:
    if not _is_number(dtype):
        raise TypeError(
            f"{caller}: {name!r} must hold numbers or bools; got dtype {dtype}."
        )


@functools.lru_cache
def _is_number(dtype: np.dtype) -> bool:
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number)


def _stacked(groups: list[list[jax.Array]], axis: int) -> list[jax.Array]:
    """New arrays on the device of those given, one for each group."""
    with _without_mesh():
        arrays = _stack(groups, axis)
    if any(map(is_traced, arrays)):
        raise TypeError(OUTSIDE)
    if any(a.dtype != group[0].dtype for a, group in zip(arrays, groups, strict=True)):
        # A region's rule has cast them. Without one, autocast need not run on this JAX.
        from .._autocast.region import autocast

        with autocast(enabled=False):
            return _stacked(groups, axis)
    return arrays


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    """Lets jit take arrays on one device inside `jax.set_mesh`, and return nans."""
    with contextlib.ExitStack() as stack, jax.debug_nans(False), jax.debug_infs(False):
        if not jax.sharding.get_abstract_mesh().empty:
            try:
                stack.enter_context(jax.set_mesh(NO_MESH))
            except ValueError:  # inside a trace
                raise TypeError(OUTSIDE) from None
        yield


@functools.partial(jax.jit, static_argnums=1)
def _stack(groups: list[list[jax.Array]], axis: int) -> list[jax.Array]:
    # `lax` keeps 64 bits outside of x64 mode as well.
    return [
        lax.concatenate(
            [lax.expand_dims(x, [axis]) for x in group], axis % (x.ndim + 1)
        )
        for group in groups
        for x in group[:1]
    ]
