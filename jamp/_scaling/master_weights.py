"""float32 masters of half-precision parameters, in the optimizer's state.

The neighbors of a float16 number near 1 are 0.001 away, so adding an update of 0.0001
changes nothing, and training stalls. The optimizer inside sees and moves the float32
master. The parameter is the rounded master.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import flag
from .._tree import KeyPath, PyTree, check_leaves, dtype_of, is_half, path_text, widen
from .foreign_state import Owner, check_state
from .master_form import REMAINDER, keep, master_of, rounded
from .mesh import typed_as
from .state import MasterWeightsState, is_master, keeps_master_weights
from .transformation import (
    Unusable,
    as_transformation,
    check_gradients_match,
    is_hole,
)

NEEDS_BFLOAT16 = """remainder=True needs bfloat16: sixteen bits cannot hold what any \
other half-precision number lacks of a float32. Leave remainder out, or cast the \
parameters to bfloat16."""

# Not here: MultiSteps would mix the two forms.
OTHER_FORM = """master_weights's update: the state keeps masters in {}, and this \
optimizer in {}. Make the first step with jamp.step, which takes the state as it is."""

NO_MASTERS = """master_params: opt_state holds no master weights. Pass the state of an \
optimizer with jamp.master_weights; of a train state, its opt_state."""


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    remainder: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for a model whose parameters are float16 or bfloat16.

    Each half-precision parameter has a float32 master, and is that number rounded.
    `inner` gets float32 gradients and the masters as its parameters, and makes float32
    moments. The state holds the masters, or only the 16 bits that a bfloat16 parameter
    lacks of its master, from which each step computes the same numbers:

        remainder=False: master, a float32 copy of each parameter
        remainder=True:  master, an int16 array for each (bfloat16) parameter

    `jamp.master_params` reads the masters of both. The updates are float32 too. They
    are made so that after `optax.apply_updates` a parameter is its master rounded to
    nearest, every bit, after every step. For float16 that is
    `master.astype(jnp.float16)`. In bfloat16 a master half way between two neighbors
    goes to the one further from zero, where `astype` takes the even one. So the updates
    must reach the parameters unchanged: nothing may come after `master_weights` in an
    `optax.chain`. A float32 parameter has no master. One that `inner` freezes has one
    that never moves. To save it, freeze outside:
    `optax.multi_transform({"train": master_weights(adam), "freeze": set_to_zero()},
    labels)`.

    With loss scaling, write `dynamic_loss_scale(master_weights(inner))`: a skipped step
    holds the masters. `master_weights(dynamic_loss_scale(inner))` gives the same
    numbers.

    If other code changed a parameter since the last step (a checkpoint, a clipped
    weight), the change is kept. A copy is replaced by the parameter if that is neither
    the rounded copy nor a neighbor of that. A remainder stays: the new master is
    less than one bfloat16 from the new parameter, and rounds to it.

    A state of the other form goes on: `jamp.step` and `dynamic_loss_scale` make it
    their own form in the first step, bit for bit.

    Args:
      inner: the optimizer, with clipping and schedules.
      remainder: whether to keep 2 bytes for each parameter in place of 4; all
        half-precision parameters that move must be bfloat16.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `MasterWeightsState` as state.
      `update` needs `params`.

    Raises:
      TypeError: `inner` is not a gradient transformation, or `remainder` not a bool.
      ValueError: `inner` already keeps master weights, `params` is missing, the
        gradients do not match it, or a parameter cannot have a remainder.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> params = {"w": jnp.float16(1.0)}
      >>> tx = jamp.master_weights(optax.sgd(1e-4))
      >>> opt_state = tx.init(params)
      >>> for _ in range(10):
      ...     grads = {"w": jnp.float16(-1.0)}
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params["w"], opt_state.master["w"])  # sgd alone stays at 1
      1.001 1.0010002

    PyTorch: apex's `master_weights=True`; FSDP's float32 shards beside
    `MixedPrecision(param_dtype=torch.float16)`. For `remainder`, apex's
    `store_param_remainders=True`.

    References:
      Micikevicius et al., Mixed Precision Training, 2018, section 3.1
      (arXiv 1710.03740).
    """
    inner = as_transformation(inner)
    dtype = REMAINDER if flag("remainder", remainder) else jnp.dtype(jnp.float32)

    def init_fn(params: optax.Params) -> MasterWeightsState:
        check_leaves(params, "master_weights's init: the parameter")

        def first(path: KeyPath, param: ArrayLike) -> PyTree:
            if not is_half(param):
                return optax.MaskedNode()
            if dtype == REMAINDER and dtype_of(param) != jnp.bfloat16:
                raise ValueError(
                    f"master_weights's init: the parameter at {path_text(path)} is "
                    f"{dtype_of(param)}. {NEEDS_BFLOAT16}"
                )
            return jnp.asarray(param, jnp.float32)

        masters = jax.tree_util.tree_map_with_path(first, params)
        inner_state = inner.init(in_float32(masters, params))
        if keeps_master_weights(inner_state):
            raise ValueError(
                "master_weights: inner already keeps master weights; wrap it once."
            )
        return MasterWeightsState(kept(masters), inner_state)

    def kept(masters: optax.Params) -> optax.Params:
        return jax.tree.map(partial(keep, dtype=dtype), masters, is_leaf=is_hole)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        caller = "master_weights's update"
        check_state(state, MasterWeightsState, caller)
        if params is None:
            raise ValueError(
                f"{caller}: params must be the parameters to step; got None. Write "
                "tx.update(grads, opt_state, params)."
            )
        check_gradients_match(updates, params, caller, wrapped=True)
        other = jnp.dtype(jnp.float32) if dtype == REMAINDER else REMAINDER
        if any(dtype_of(leaf) == other for leaf in jax.tree.leaves(state.master)):
            raise ValueError(OTHER_FORM.format(other, dtype))
        if "grad" in extra_args:  # of line searches
            usable = lambda x: x if isinstance(x, Unusable) else widen(x)
            extra_args |= {"grad": jax.tree.map(usable, extra_args["grad"])}
        with Owner(caller, init_fn, params).explained(state):
            known = jax.tree.map(master_of, state.master, params, is_leaf=is_hole)
            lacks = lambda m, p: is_hole(m) and not is_hole(p) and is_half(p)
            lacking = jax.tree.map(lacks, known, params, is_leaf=is_hole)
            if any(jax.tree.leaves(lacking)):
                raise ValueError("a half-precision parameter has no float32 master.")
            full = in_float32(known, params)
            wide = widen(updates)
            updates, inner_state = inner.update(
                wide, state.inner_state, full, **extra_args
            )
        leaves, tree = jax.tree.flatten(updates, is_leaf=is_hole)
        masters, held = tree.flatten_up_to(known), tree.flatten_up_to(params)
        pairs = [move(*row) for row in zip(leaves, masters, held, strict=True)]
        updates = tree.unflatten(update for update, _ in pairs)
        moved = tree.unflatten(master for _, master in pairs)
        return updates, MasterWeightsState(kept(moved), inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def master_params(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """The float32 masters of the parameters, as `master_weights` moves them.

    Args:
      params: the parameters.
      opt_state: a state that holds that of `master_weights`, at any depth: float32
        copies or remainders.

    Returns:
      `params` with float32 in place of half precision: the masters, and the parameters
      themselves, widened, where there is none. Other leaves stay.

    Raises:
      ValueError: `opt_state` holds no master weights, or those of other parameters.

    Examples:
      An average of the masters, from which bfloat16 would lose most steps:

      >>> import jax.numpy as jnp, optax, jamp
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> tx = jamp.master_weights(optax.sgd(1e-3), remainder=True)
      >>> opt_state = tx.init(params)
      >>> ema = jamp.master_params(params, opt_state)
      >>> grads = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> params, opt_state = jamp.step(tx, grads, opt_state, params)
      >>> masters = jamp.master_params(params, opt_state)
      >>> ema = optax.incremental_update(masters, ema, step_size=0.1)
      >>> print(params["w"], masters["w"], ema["w"])
      [1 1] [0.999 0.999] [0.9999 0.9999]

    PyTorch: apex's `amp.master_params(optimizer)`.
    """
    nodes = filter(is_master, jax.tree.leaves(opt_state, is_leaf=is_master))
    trees = [node.master for node in nodes]
    if not trees:
        raise ValueError(NO_MASTERS)
    leaves = itertools.chain(*map(jax.tree_util.tree_leaves_with_path, trees))
    kept = {path_text(path): leaf for path, leaf in leaves}

    def master(path: KeyPath, param: ArrayLike) -> optax.Params:
        of = kept.pop(path_text(path), optax.MaskedNode())
        if not is_hole(of) and jnp.shape(of) != jnp.shape(param):
            raise ValueError(
                f"master_params: the master at {path_text(path)} has shape "
                f"{jnp.shape(of)} and the parameter has shape {jnp.shape(param)}."
            )
        return in_float32(master_of(of, param), param)

    masters = jax.tree_util.tree_map_with_path(master, params)
    if kept:
        raise ValueError(
            "master_params: opt_state holds masters of other parameters, at "
            f"{', '.join(list(kept)[:3])}."
        )
    return masters


def in_float32(masters: optax.Params, params: optax.Params) -> optax.Params:
    """The masters, and parameters without one in float32, as their gradients are."""

    def chosen(master: PyTree, param: PyTree) -> PyTree:
        return widen(param) if is_hole(master) else master

    return jax.tree.map(chosen, masters, params, is_leaf=is_hole)


def move(update: PyTree, master: PyTree, param: PyTree) -> tuple[PyTree, PyTree]:
    """The update that makes a parameter its moved, rounded master; and that master.

    `apply_updates` adds in float32 and rounds. That yields the rounded master, unless
    the parameter is thousands of times larger than its new value, so that float32
    cannot hold their difference. Then the master takes the value that the parameter
    gets, which is as far off as any sum of the two. Bits are compared, because XLA may
    drop the rounding of a number that it rounds and widens again. Around zero the
    update is not rounded: 0 plus -0 is 0, and a master too small for float16 would be
    lost.
    """
    if not is_hole(update) and dtype_of(update) == jax.dtypes.float0:
        update = jnp.zeros(jnp.shape(param), dtype_of(param))
    if is_hole(update) or is_hole(master):
        return update, master
    moved = computed_once(master + lax.convert_element_type(update, jnp.float32))
    wide = typed_as(lax.convert_element_type(param, jnp.float32), moved)
    nearest = rounded(moved, dtype_of(param))
    target = lax.convert_element_type(nearest, jnp.float32)
    target = jnp.where(target == 0, moved, target)
    update = jnp.where(wide == 0, target, target - wide)
    lands = lax.convert_element_type(wide + update, dtype_of(param))
    agrees = bits(lands) == bits(nearest)
    return update, jnp.where(
        agrees, moved, lax.convert_element_type(lands, jnp.float32)
    )


def computed_once(x: jax.Array) -> jax.Array:
    """`x`, so that all that depends on it uses the same bits.

    If XLA computed the sum of master and update once for the parameter and again for
    the remainder, with another last bit, the two could belong to different numbers:
    0x7fff goes with one parameter and 0x8000 with the next. A barrier forbids it. On
    GPUs it would cost a read and a write of the sum, and XLA computes the sum once
    without it: parameter and master are results of one kernel.
    """
    same = lambda x: x
    return lax.platform_dependent(
        x, cuda=same, rocm=same, default=lax.optimization_barrier
    )


def bits(x: jax.Array) -> jax.Array:
    width = jnp.finfo(x.dtype).bits
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
