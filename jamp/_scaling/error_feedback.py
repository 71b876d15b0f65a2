"""Means in eight bits whose rounding errors are added to the next step's gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._checks import axis_names, positive, shown
from .._tree import PyTree, check_leaves, dtype_of, path_text
from . import eight_bits
from .foreign_state import check_state
from .mean import check_varying, is_sent, pmean
from .mesh import is_mapped, mapped
from .transformation import is_hole

UPDATE = "error_feedback's update"
OTHER = """{}: the state must be that of one device, for these gradients; it has {}. \
Shard it over the devices, with P(axis_name) in the specs of shard_map, and start with \
a new one if the gradients or the number of devices changed."""


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`: what rounding lost and later steps will add.

    It is sharded over devices along the first dimension of each array, `P(axis_name)`
    in the specs of `shard_map`. Inside, a device sees its own part, and the dimension
    is 1.

    Attributes:
      own: float32 [devices, ...] for each gradient: what a device has not sent of it.
      means: float32 [devices, numbers] for each gradient: what was not sent of the
        means, in the part of the array that a device averages.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> tx = jamp.sharding.error_feedback("data", 8)
      >>> state = tx.init({"w": jnp.ones((4, 6))})
      >>> print(state.own["w"].shape, state.means["w"].shape)
      (8, 4, 6) (8, 3)

    PyTorch: `error_dict` of `PowerSGDState`.
    """

    own: PyTree
    means: PyTree


def error_feedback(
    axis_name: str | Sequence[str],
    devices: int,
    *,
    dtype: DTypeLike = jnp.int8,
    block: int = 256,
) -> optax.GradientTransformation:
    """`mean` in eight bits that adds what rounding lost to the next gradients.

    An error that is the same at every step adds up. Error feedback removes it: after n
    steps, the sum of the means is off by the rounding of one step, not of n.

        sent = cast(gradient + own)
        own = gradient + own - sent
        part = mean(sent) + means
        means = part - cast(part)    # then all_gather

    It takes the gradients of this device and returns their means, the same on all
    devices. Put it first in the chain, inside the loss scale: there gradients are
    unscaled, so that the scale may change, and a skipped step leaves the state alone.

        dynamic_loss_scale(optax.chain(error_feedback(...), adam), axis_name="data")

    The state takes 4 bytes for each gradient on each device, and half a byte more on 8
    devices. It fits one number of devices: a run that continues on another number
    starts with a new state. Gradients that `gather` averages have no error feedback:
    `gather` works in the backward pass, which has no state.

    Args:
      axis_name: mapped axis or axes to average over.
      devices: how many devices there are along these axes.
      dtype: int8 or float8_e4m3fn.
      block: the most numbers that share a scale; see `mean`.

    Returns:
      An `optax.GradientTransformation` with `ErrorFeedbackState` as state. `init` makes
      the state of all devices, or inside `shard_map` that of one.

    Raises:
      TypeError: an argument is not of the kind above, or a leaf is not an array.
      ValueError: `devices` is not the number of devices, `devices` or `block` is below
        1, `axis_name` is not mapped where `update` is called, JAX has already summed a
        gradient, or the state belongs to other gradients.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, jamp
      >>> from jax.sharding import PartitionSpec as P
      >>> count = jax.device_count()
      >>> feedback = jamp.sharding.error_feedback("data", count)
      >>> tx = optax.chain(feedback, optax.sgd(1.0))
      >>> params, grads = jnp.zeros(2), jnp.tile(jnp.array([1.0, 1 / 3]), count)
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((count,), ("data",), axis_types=auto)
      >>> places = (P("data"), P())  # of the states in the chain
      >>> step = jax.jit(jax.shard_map(
      ...     tx.update,
      ...     mesh=mesh,
      ...     in_specs=(P("data"), places),
      ...     out_specs=(P(), places),
      ... ))
      >>> opt_state = tx.init(params)
      >>> for _ in range(48):
      ...     updates, opt_state = step(grads, opt_state)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params.round(2))
      [-48. -16.]

    PyTorch: error feedback is `use_error_feedback=True` of `PowerSGDState`, whose hook
    approximates gradients by matrices of low rank.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes, 2019 (arXiv 1901.09847).
    """
    known = eight_bits.reduction_dtype("dtype", dtype)
    if not eight_bits.is_eight_bits(known):
        raise TypeError(f"dtype must be int8 or float8_e4m3fn; got {shown(dtype)}.")
    block = positive("block", block)
    count = positive("devices", devices)
    names = axis_names(axis_name)
    if not names:
        raise TypeError(f"axis_name must name a mapped axis; got {axis_name!r}.")

    feedback = Feedback(names, count, known, block)
    return optax.GradientTransformation(feedback.init, feedback.update)


class Feedback(NamedTuple):
    """The arguments of `error_feedback`, and its two functions."""

    names: tuple[str, ...]
    devices: int
    dtype: np.dtype
    block: int

    def init(self, params: optax.Params) -> ErrorFeedbackState:
        check_leaves(params, "error_feedback's init: the parameter")
        here = tuple(axis for axis in self.names if is_mapped(axis))

        def zeros(param: ArrayLike, shape: tuple[int, ...]) -> PyTree:
            if not is_sent(param):
                return optax.MaskedNode()
            made = jnp.zeros((1 if here else self.devices, *shape), jnp.float32)
            return lax.pcast(made, here, to="varying") if here else made

        def of_means(param: ArrayLike) -> PyTree:
            return zeros(param, (-(-jnp.size(param) // self.devices),))

        return ErrorFeedbackState(
            jax.tree.map(lambda p: zeros(p, jnp.shape(p)), params),
            jax.tree.map(of_means, params),
        )

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        del params
        axes = mapped(self.names, UPDATE)
        if lax.axis_size(axes) != self.devices:
            raise ValueError(
                f"{UPDATE}: devices must be {lax.axis_size(axes)}, the number of "
                f"devices along {axes}; got {self.devices}."
            )
        check_varying(updates, axes, UPDATE)
        leaves, tree = jax.tree.flatten(updates, is_leaf=is_hole)
        own, means = arrays_of(state, updates, leaves, tree, self.devices)
        sent = [i for i, x in enumerate(leaves) if not is_hole(x) and is_sent(x)]
        rows, carried = [], []
        for i in sent:
            wide = lax.convert_element_type(leaves[i], jnp.float32) + own[i][0]
            rows.append(eight_bits.to_rows(wide, self.devices, self.block))
            carried.append(eight_bits.blocked(means[i], self.block)[0])
        new = [x if is_hole(x) or is_sent(x) else pmean(x, axes) for x in leaves]
        found = eight_bits.average(rows, axes, self.dtype, carried) if sent else ()
        for i, whole, lost_here, lost_of_mean in zip(sent, *found, strict=True):
            shape, dtype = jnp.shape(leaves[i]), dtype_of(leaves[i])
            new[i] = eight_bits.clipped_to(eight_bits.from_rows(whole, shape), dtype)
            own[i] = eight_bits.from_rows(lost_here, shape)[None]
            means[i] = lost_of_mean.reshape(1, -1)[:, : means[i].shape[1]]
        kept = ErrorFeedbackState(tree.unflatten(own), tree.unflatten(means))
        return tree.unflatten(new), kept


def arrays_of(
    state: PyTree, grads: PyTree, leaves: list, tree: Any, devices: int
) -> tuple[list, list]:
    """The state's arrays in the order of the gradients' leaves.

    Raises:
      ValueError: the state is not that of one device, for these gradients.
    """
    check_state(state, ErrorFeedbackState, UPDATE)
    try:
        parts = tree.flatten_up_to(state.own), tree.flatten_up_to(state.means)
    except ValueError as error:
        raise ValueError(OTHER.format(UPDATE, f"another tree: {error}")) from error
    paths = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_hole)
    for (path, _), leaf, *found in zip(paths, leaves, *parts, strict=True):
        if is_hole(leaf) or not is_sent(leaf):
            continue
        expected = (1, *jnp.shape(leaf)), (1, -(-jnp.size(leaf) // devices))
        shapes = tuple(None if is_hole(x) else jnp.shape(x) for x in found)
        if shapes != expected:
            at = path_text(path)
            told = f"shapes {shapes} at {at}, not {expected}"
            raise ValueError(OTHER.format(UPDATE, told))
    return parts
