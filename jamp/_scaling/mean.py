"""The mean of gradients over devices in any dtype: `pmean` with fewer bytes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._checks import positive
from .._tree import PyTree, T, check_leaves, dtype_of, is_inexact, path_text
from . import eight_bits
from .mesh import mapped, varying_axes

NOT_VARYING = """{caller}: the gradient at {at} does not vary over {axes}: JAX has \
already summed it there, in its own dtype. Take the gradient of parameters that vary: \
jax.lax.pcast(params, {axes!r}, to="varying"), before jax.grad. If they vary, the \
gradient comes from a state that is whole on each device, as acc_grads of \
optax.MultiSteps: give it a first axis of devices, jax.P({axes!r}) in in_specs and \
out_specs, and pass x[0] of it to the optimizer."""


def mean(
    grads: T,
    axis_name: str | Sequence[str],
    *,
    dtype: DTypeLike | None = None,
    block: int = 256,
) -> T:
    """The mean of gradients over devices: `jax.lax.pmean`, in another dtype.

    Use it to average by hand, inside `jax.shard_map` or `pmap`. All devices get the
    same bits.

    In int8 and float8_e4m3fn, gradients are sent in eight bits and summed in float32.
    At most `block` numbers share a scale, a power of two that takes one more byte:

        all_to_all of the bytes, mean in float32, cast again, all_gather of the bytes

    That is 1/4 of the bytes of float32, in two collectives for the whole tree. Each
    number is rounded twice. In int8, by at most 1/127 of the largest number in its
    block, except for the largest ones if clipping them makes the block's error smaller.
    In float8, by 1/16 of itself (or 4e-6 of the largest, if that is more). A block with
    an inf or nan is nan on all devices, so that loss scaling skips the step.

    In a `shard_map` that checks how values vary, differentiate parameters that vary
    (`jax.lax.pcast`): JAX itself sums the gradients of other parameters.

    Args:
      grads: pytree of gradients of this device. Leaves that are not floating or complex
        pass. Arrays never share a block, and a small array has small blocks.
      axis_name: mapped axis or axes to average over.
      dtype: floating dtype of 16 bits or more, int8, or float8_e4m3fn, in which
        floating gradients are exchanged. None: their own. Complex gradients keep
        their dtype.
      block: in eight bits, the most numbers that share a scale.

    Returns:
      A tree of the structure, shapes and dtypes of `grads`.

    Raises:
      TypeError: an argument is not of the kind above, or a leaf is not an array.
      ValueError: `axis_name` is not mapped here, JAX has already summed a gradient, or
        `block` is below 1.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> from jax.sharding import PartitionSpec as P
      >>> def average(grads):
      ...     return jamp.sharding.mean(grads, "data", dtype=jnp.int8)
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
      >>> averaged = jax.jit(jax.shard_map(
      ...     average, mesh=mesh, in_specs=P("data"), out_specs=P()
      ... ))
      >>> print(averaged({"w": jnp.full(jax.device_count() * 2, 3.0)}))
      {'w': Array([3., 3.], dtype=float32)}

    PyTorch: `fp16_compress_hook` and `bf16_compress_hook` of DistributedDataParallel.
    Eight bits have no counterpart in torch; they are the quantized gradients (qgZ) of
    ZeRO++.

    References:
      Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model
      Training, 2023, section 3.3 (arXiv 2306.10209).
    """
    known = eight_bits.reduction_dtype("dtype", dtype)
    block = positive("block", block)
    axes = mapped(axis_name, "mean")
    check_varying(grads, axes, "mean")
    if not eight_bits.is_eight_bits(known):
        return jax.tree.map(lambda leaf: pmean(leaf, axes, known), grads)
    leaves, tree = jax.tree.flatten(grads)
    sent = [jnp.asarray(leaf) for leaf in leaves if is_sent(leaf)]
    rows = [eight_bits.to_rows(x, lax.axis_size(axes), block) for x in sent]
    means = iter(eight_bits.average(rows, axes, known).rows if rows else ())

    def mean_of(leaf: ArrayLike) -> ArrayLike:
        if not is_sent(leaf):
            return pmean(leaf, axes)
        whole = eight_bits.from_rows(next(means), jnp.shape(leaf))
        return eight_bits.clipped_to(whole, dtype_of(leaf))

    return tree.unflatten(map(mean_of, leaves))


def is_sent(leaf: ArrayLike) -> bool:
    return jnp.issubdtype(dtype_of(leaf), jnp.floating) and jnp.size(leaf) > 0


def pmean(
    leaf: ArrayLike, axes: tuple[str, ...], dtype: np.dtype | None = None
) -> ArrayLike:
    if not is_inexact(leaf):
        return leaf
    own = dtype_of(leaf)
    if 0 in jnp.shape(leaf):  # JAX 0.11.2 ends the process in a psum of such and others
        return jnp.zeros(jnp.shape(leaf), own)
    if dtype is not None and jnp.issubdtype(own, jnp.floating):
        leaf = lax.convert_element_type(leaf, dtype)
    # Divided first, as in torch: a mean overflows only where a gradient does.
    summed = lax.psum(leaf / lax.axis_size(axes), axes)
    return lax.convert_element_type(summed, own)


def check_varying(grads: PyTree, axes: tuple[str, ...], caller: str) -> None:
    """Raises ValueError for a gradient that JAX has already summed over devices.

    That is known only where `shard_map` checks how values vary.
    """
    check_leaves(grads, f"{caller}: the gradient")
    known = [a for a in axes if a in varying_axes(lax.axis_index(a))]
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        same = tuple(a for a in known if a not in varying_axes(leaf))
        if same and is_inexact(leaf):
            at = path_text(path)
            raise ValueError(NOT_VARYING.format(caller=caller, at=at, axes=same))
