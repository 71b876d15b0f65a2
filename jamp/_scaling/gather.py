"""Parameters inside `shard_map`: whole on each device, gradients averaged back.

Under plain jit, XLA places the reduction of the gradients right after the op that makes
them: a matrix product that autocast runs in float16 is reduced in float16. Inside
`jax.shard_map` the choice is yours, and you make it with `gather`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from .._checks import floating, positive
from .._tree import KeyPath, PyTree, T, dtype_of, is_inexact
from . import eight_bits
from .mesh import Entry, mapped, names


class How(NamedTuple):
    dims: tuple[tuple[str, ...], ...]  # of each dimension: the axes to gather over
    axes: tuple[str, ...]
    param_dtype: np.dtype | None
    reduce_dtype: np.dtype | None
    block: int  # that share a scale, in eight bits

    def not_split(self) -> tuple[str, ...]:
        """The axes that no dimension is sharded over: all devices along them agree."""
        return tuple(a for a in self.axes if not any(a in dim for dim in self.dims))


def gather(
    params: T,
    axis_name: str | Sequence[str],
    specs: PyTree = None,
    *,
    param_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    block: int = 256,
) -> T:
    """Whole parameters, whose gradients are averaged over devices and sharded again.

    Call it in the loss function inside `jax.shard_map` (or `pmap`), on the parameters
    that came in. Each device then computes the loss of its own part of the batch, and
    the gradient is the mean of these losses' gradients over `axis_name`. An overflow in
    `reduce_dtype` is an inf on all devices, and the loss scale skips the step.

    Differentiate the device's own loss, not its `pmean`: `gather` takes the mean, which
    would be taken twice. And use parameters only through the result of `gather`: JAX
    sums the gradient of a parameter that is used directly. Only reverse mode works
    (`jax.grad`, `jax.vjp`), and not twice.

    A parameter that `specs` shards over `axis_name` is gathered in the forward pass,
    and its gradient comes back sharded (`all_gather`, `reduce_scatter`): fully sharded
    data parallel. Any other parameter must be the same on all devices, and its gradient
    comes back whole (`all_reduce`): data parallel.

    If you call it on the parameters of one layer at a time, under `jax.checkpoint`, no
    device holds more than one layer's whole parameters.

    Args:
      params: pytree of parameters. Leaves that are not floating or complex pass.
      axis_name: mapped axis or axes over which the batch is sharded.
      specs: the `PartitionSpec`s of the parameters, a tree or one for all, as in the
        `in_specs` of `shard_map`. With None, nothing is sharded.
      param_dtype: floating dtype that floating parameters are gathered and used in.
        None: their own.
      reduce_dtype: floating dtype of 16 bits or more that gradients are reduced in, or
        int8 or float8_e4m3fn: they are sent in eight bits and summed in float32. None:
        the dtype of the incoming gradients, which is that of the result. They come back
        in the dtype of the parameters. Complex gradients keep their dtype.
      block: in eight bits, the most numbers that share a scale. A small array has
        smaller blocks.

    Returns:
      A tree of the structure of `params`.

    Raises:
      TypeError: an argument is not of the kind above.
      ValueError: `axis_name` is not mapped here, `block` is below 1, or `specs` does
        not match `params` or names an axis to gather over before one that stays
        sharded.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> from jax.sharding import PartitionSpec as P
      >>> def local_gradient(w, x):
      ...     def loss_fn(w):
      ...         w = jamp.sharding.gather(w, "data", reduce_dtype=jnp.float16)
      ...         return jnp.mean(x * w)
      ...     return jax.grad(loss_fn)(w)
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
      >>> gradient = jax.jit(jax.shard_map(
      ...     local_gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
      ... ))
      >>> print(gradient(jnp.float32(2.0), jnp.full(8, 3.0)))
      3.0

    PyTorch: DistributedDataParallel with `fp16_compress_hook`; `fully_shard` with
    `MixedPrecisionPolicy(param_dtype, reduce_dtype)`. Eight bits have no counterpart in
    torch; they are the quantized gradients (qgZ) of ZeRO++.

    References:
      Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model
      Training, 2023, section 3.3 (arXiv 2306.10209).
    """
    param_dtype = floating("param_dtype", param_dtype)
    reduce_dtype = eight_bits.reduction_dtype("reduce_dtype", reduce_dtype)
    block = positive("block", block)
    is_spec = lambda node: node is None or isinstance(node, PartitionSpec)
    try:
        specs = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            "specs must be one PartitionSpec, or a tree of them whose leaves match "
            f"parts of params; got {specs!r}: {error}"
        ) from None
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise TypeError(f"specs must be PartitionSpecs or None; got {spec!r}.")
    axes = mapped(axis_name, "gather", ", in the loss function")

    def gather_leaf(path: KeyPath, spec: PartitionSpec | None, param: PyTree) -> PyTree:
        if param is None or not is_inexact(param):
            return param
        spec = PartitionSpec() if spec is None else spec
        where = jax.tree_util.keystr(path) or "the parameter"
        dims = tuple(last_of(entry, axes, where) for entry in spec)
        try:
            return _gather(How(dims, axes, param_dtype, reduce_dtype, block), param)
        except ValueError as error:
            raise ValueError(
                f"gather of {where}, of shape {jnp.shape(param)} on each device and "
                f"split by {spec}: {error} Pass the in_specs of shard_map as specs."
            ) from error

    return jax.tree_util.tree_map_with_path(gather_leaf, specs, params, is_leaf=is_spec)


def last_of(entry: Entry, axes: tuple[str, ...], where: str) -> tuple[str, ...]:
    # The first axis of an entry splits into large blocks, the last one splits those.
    own = names(entry)
    chosen = tuple(name for name in own if name in axes)
    if chosen != own[len(own) - len(chosen) :]:
        raise ValueError(
            f"gather of {where}: specs splits a dimension over {own}, of which "
            f"{chosen} cannot be gathered before the rest; gather over all of them, or "
            "over the last ones first."
        )
    return chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: How, param: jax.Array) -> jax.Array:
    is_floating = jnp.issubdtype(dtype_of(param), jnp.floating)
    if how.param_dtype is not None and is_floating:
        param = lax.convert_element_type(param, how.param_dtype)
    for dim, split_over in enumerate(how.dims):
        if split_over:
            param = lax.all_gather(param, split_over, axis=dim, tiled=True)
    rest = how.not_split()
    return lax.pcast(param, rest, to="varying") if rest else param


def _gather_forward(how: How, param: jax.Array) -> tuple[PyTree, jax.Array]:
    return _gather(how, param), jnp.zeros([], dtype_of(param))


def _gather_backward(how: How, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    is_floating = jnp.issubdtype(dtype_of(grad), jnp.floating)
    if eight_bits.is_eight_bits(how.reduce_dtype) and is_floating and grad.size:
        # Cast first: eight bits clip and round, and could make an overflow finite.
        grad = lax.convert_element_type(grad, dtype_of(like))
        grad = _in_eight_bits(how, how.reduce_dtype, grad)
        return (eight_bits.clipped_to(grad, dtype_of(like)),)
    if how.reduce_dtype is not None and is_floating and grad.size:
        grad = lax.convert_element_type(grad, how.reduce_dtype)
    # Divided first, as in torch: a mean overflows only where a gradient does.
    grad = grad / lax.axis_size(how.axes)
    for dim, split_over in enumerate(how.dims):
        if split_over:
            grad = lax.psum_scatter(grad, split_over, scatter_dimension=dim, tiled=True)
    rest = how.not_split()
    grad = lax.psum(grad, rest) if rest else grad
    return (lax.convert_element_type(grad, dtype_of(like)),)


def _in_eight_bits(how: How, dtype: np.dtype, grad: jax.Array) -> jax.Array:
    """The mean over all axes: float32, sharded like the parameter."""
    for dim, over in enumerate(how.dims):
        if over:
            grad = eight_bits.scatter_along(grad, dim, over, dtype, how.block)
    rest = how.not_split()
    if not rest:
        return grad
    rows = eight_bits.to_rows(grad, lax.axis_size(rest), how.block)
    means = eight_bits.average([rows], rest, dtype)
    return eight_bits.from_rows(means.rows[0], grad.shape)


_gather.defvjp(_gather_forward, _gather_backward)
