"""What the device that a program is for can do.

A trace does not know what its program will be compiled for: that may be another device
than the local one, or several. So a form that depends on the platform is chosen when
the program is lowered. Questions that only a device can answer, such as which dtypes
its units multiply, are put to the default device.
"""

import functools
import warnings
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The least compute capability of an NVIDIA GPU whose tensor cores multiply in a dtype:
# CUDA C++ Programming Guide, "Compute Capabilities".
TENSOR_CORES = {"float16": (7, 0), "bfloat16": (8, 0), "float8": (8, 9)}
# TPUs multiply in bfloat16. These have units for float8 too.
FLOAT8_TPUS = {"TPU7x"}

MISSING = """autocast({asked}): {device} has no units for {name}. XLA converts the \
inputs of each product to another dtype, and so it costs more than it saves. Write \
{instead}."""
FLOAT16 = "jamp.autocast(jnp.float16), with a loss scale such as `jamp.GradScaler`"
BFLOAT16 = "jamp.autocast(jnp.bfloat16)"

_warned: set[str] = set()


class Device(Protocol):
    """What is used of a JAX device."""

    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    def memory_stats(self) -> dict[str, int] | None: ...


def default_dtype() -> np.dtype:
    """The dtype of `autocast()`: torch's default for the kind of device."""
    return jnp.dtype("float16" if jax.default_backend() == "gpu" else "bfloat16")


def options_for_few_runs() -> dict[str, bool | int | str] | None:
    """XLA's options for a program that runs some ten times: it is compiled sooner."""
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0} if is_cpu else None


def half_dtype() -> np.dtype:
    """The default device's half-precision dtype: bfloat16 on TPU, otherwise float16.

    Returns:
      A NumPy dtype.

    Examples:
      >>> import jamp
      >>> jamp.half_dtype()
      dtype('float16')

    PyTorch: no counterpart. Source: jmp.
    """
    on_tpu = default_device().platform == "tpu"
    return jnp.dtype("bfloat16" if on_tpu else "float16")


def default_device() -> Device:
    """The device on which JAX runs a program that names none."""
    chosen: Any = jax.config.jax_default_device  # pyright: ignore
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 numbers rounded to those of float16 or bfloat16, on every target.

    For GPUs XLA drops a cast to a narrower type and back. `reduce_precision` it keeps,
    but that makes float16's subnormals 0: they are multiples of one number. A tangent
    has to be rounded by linear ops, so for float16 a barrier stands between two casts.
    For a TPU, where it would be a kernel, XLA keeps both casts without it.
    """
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != jnp.float16:  # its subnormals are float32's
        return normal
    least = np.float32(info.smallest_subnormal)
    multiple = lax.round(x / least, lax.RoundingMethod.TO_NEAREST_EVEN) * least
    return lax.select(lax.abs(x) < np.float32(info.smallest_normal), multiple, normal)


@rounded.defjvp
def _(dtype, primals, tangents):
    (x,), (tangent,), info = primals, tangents, jnp.finfo(dtype)
    if dtype != jnp.float16:
        return rounded(x, dtype), lax.reduce_precision(tangent, info.nexp, info.nmant)
    narrow = kept_apart(lax.convert_element_type(tangent, dtype))
    return rounded(x, dtype), lax.convert_element_type(narrow, jnp.float32)


@jax.jit  # traced once for each shape, and transposed once
def kept_apart(x: jax.Array) -> jax.Array:
    """`x`, so that XLA does not drop the casts before and after it."""
    same = lambda x: x
    return lax.platform_dependent(x, tpu=same, default=lax.optimization_barrier)


def units(device: Device) -> frozenset[str] | None:
    """Of "float16", "bfloat16" and "float8", those that a device's units multiply in.

    Returns:
      None where that is not known here, as for AMD's GPUs. A CPU has no such units.
    """
    if device.platform == "cpu":
        return frozenset()
    if device.platform == "tpu":
        has_float8 = device.device_kind in FLOAT8_TPUS
        return frozenset({"bfloat16", "float8"} if has_float8 else {"bfloat16"})
    major, _, minor = getattr(device, "compute_capability", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    capability = int(major), int(minor)
    return frozenset(
        name for name, least in TENSOR_CORES.items() if capability >= least
    )


def warn_if_missing(name: str) -> None:
    """Warns, once for each dtype, that the default device has no units for it.

    A CPU has units for none of them. People try programs there, and expect no speed.

    Args:
      name: "bfloat16" or "float8"; with any other name nothing happens.
    """
    if name not in ("bfloat16", "float8") or name in _warned:
        return
    device = default_device()
    has = None if device.platform == "cpu" else units(device)
    if has is None or name in has:
        return
    _warned.add(name)
    text = MISSING.format(
        asked='"float8"' if name == "float8" else "jnp.bfloat16",
        device=described(device),
        name=name,
        instead=BFLOAT16 if "bfloat16" in has else FLOAT16,
    )
    warnings.warn(text, stacklevel=2)


def described(device: Device) -> str:
    """A device's kind, with the compute capability of an NVIDIA GPU."""
    capability = getattr(device, "compute_capability", None)
    suffix = f" (compute capability {capability})" if capability else ""
    return f"{device.device_kind}{suffix}"


def said_of_units(device: Device) -> str:
    """Which of the three dtypes a device's units multiply in, in words."""
    has = units(device)
    if has is None:
        return "it is not known here which dtypes its units multiply in"
    names = [name for name in TENSOR_CORES if name in has]
    return f"its units multiply in {', '.join(names) or 'float32 alone'}"
