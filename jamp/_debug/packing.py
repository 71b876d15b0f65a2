"""The scalars of a step as one vector of bits, to copy and send in one piece.

Ten scalars of five dtypes become one uint32 vector in one small jitted call. It costs
less than ten copies, and changes no bit of inf, nan, float64 or bool.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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

# For each device: the device, and the names and dtypes of the values packed on it.
Contents = tuple[tuple[Hashable, tuple[tuple[str, np.dtype], ...]], ...]
OnHost = np.ndarray | bool | int | float | complex


class Packed(NamedTuple):
    """Values of one step, or of several steps with one more axis."""

    contents: Contents
    words: list[jax.Array]  # of each device: uint32 [words] or [steps, words]
    host: dict[str, OnHost]  # values that are not device arrays


def pack(
    caller: str, metrics: Mapping[str, object], names: Sequence[str], ndim: int
) -> Packed:
    """Checks the values, and copies those on devices: one call for each device.

    Args:
      caller: the beginning of a message.
      metrics: name -> value with `ndim` axes, 0 or 1.
      names: which of them, in this order.

    Raises:
      ValueError: a value has another number of axes, was donated, or is sharded.
      TypeError: a value is not a number or an array of numbers, or is traced.
    """
    groups: dict[Hashable, list[tuple[str, jax.Array]]] = {}
    host = {}
    for name in names:
        value: Any = metrics[name]
        if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
            value = value.__jax_array__()  # of an nnx.Variable
        if isinstance(value, jax.Array):
            device, value = _of_device(caller, name, value, ndim)
            groups.setdefault(device, []).append((name, value))
        else:
            host[name] = _of_host(caller, name, value, ndim)
    contents = tuple(
        (device, tuple((name, value.dtype) for name, value in group))
        for device, group in groups.items()
    )
    with _without_mesh():
        words = [_pack([value for _, value in group]) for group in groups.values()]
    if any(map(is_traced, words)):
        raise TypeError(OUTSIDE)
    return Packed(contents, words, host)


def stack(rows: Sequence[jax.Array]) -> jax.Array:
    """Vectors [words] of several steps as one array [steps, words]."""
    with _without_mesh():
        return _stack(rows)


def unpack(contents: Contents, words: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """From uint32 [steps, words] of each device to name -> [steps], in its dtype."""
    columns = {}
    for (_, group), bits in zip(contents, words, strict=True):
        start = 0
        for name, dtype in group:
            end = start + _words_in(dtype)
            part = np.ascontiguousarray(bits[:, start:end])
            if dtype == np.bool_:
                part = part.astype(np.bool_)
            elif dtype.itemsize < 4:
                part = part.astype(f"uint{8 * dtype.itemsize}")
            columns[name], start = part.view(dtype)[:, 0], end
    return columns


def _of_device(
    caller: str, name: str, value: jax.Array, ndim: int
) -> tuple[Hashable, jax.Array]:
    """A device, and the value as an array on this device only."""
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
    devices = value.sharding.device_set
    if len(devices) > 1:
        if not value.is_fully_replicated:
            raise ValueError(
                f"{caller}: {name!r} is spread over devices, as {value.sharding}; "
                "return it replicated from the jitted step."
            )
        value = value.addressable_data(0)
        devices = value.sharding.device_set
    (device,) = devices
    return device, value


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
    if not _words_in(dtype):
        raise TypeError(
            f"{caller}: {name!r} must hold numbers or bools; got dtype {dtype}."
        )


@functools.lru_cache
def _words_in(dtype: np.dtype) -> int:
    """How many 32-bit words hold a number or bool; 0 for other dtypes."""
    is_number = jnp.issubdtype(dtype, jnp.number)
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    if dtype != jnp.bool_ and not (is_number and info(dtype).bits >= 8):
        return 0
    return max(dtype.itemsize // 4, 1)


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    """Lets jit accept arrays on one device, whatever mesh `jax.set_mesh` has set."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    try:
        context = jax.set_mesh(NO_MESH)
    except ValueError:  # inside a trace
        raise TypeError(OUTSIDE) from None
    with context:
        yield


@jax.jit
def _pack(values: Sequence[jax.Array]) -> jax.Array:
    def words(x):
        if jnp.iscomplexobj(x):
            return jnp.concatenate([words(x.real), words(x.imag)], axis=-1)
        if x.dtype == jnp.bool_:
            return x.astype(jnp.uint32)[..., None]
        if x.dtype.itemsize < 4:
            bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
            return bits.astype(jnp.uint32)[..., None]
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # of float64: [..., 2]
        return bits[..., None] if x.dtype.itemsize == 4 else bits

    return jnp.concatenate([words(value) for value in values], axis=-1)


@jax.jit
def _stack(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(rows)
