"""float32 copies of half-precision parameters, in the optimizer's state.

The neighbors of a float16 number near 1 are 0.001 away, so adding an update of 0.0001
changes nothing, and training stalls. The optimizer inside sees and moves the copy. The
parameter is the rounded copy.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._tree import PyTree, check_leaves, dtype_of, is_half, widen
from .state import MasterWeightsState, check_state, explained, keeps_master_weights
from .traced import never_moved
from .transformation import as_transformation, check_gradients_match, is_hole


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for a model whose parameters are float16 or bfloat16.

    The state holds a float32 copy of each half-precision parameter. `inner` gets
    float32 gradients and the copies as its parameters, and makes float32 moments. The
    updates are float32 too. They are made so that after `optax.apply_updates`

        params == master.astype(params.dtype)   # every bit, after every step

    (Compiled by JAX 0.10 for a CPU, a parameter may in rare cases be the neighbor of
    that number for one step.) So the updates must reach the parameters unchanged:
    nothing may come after `master_weights` in an `optax.chain`. A float32 parameter has
    no copy, and neither has one that `inner` freezes with `optax.set_to_zero`.

    With loss scaling, write `dynamic_loss_scale(master_weights(inner))`: a skipped step
    holds the copies. `master_weights(dynamic_loss_scale(inner))` gives the same
    numbers.

    If other code changed a parameter since the last step (a checkpoint, a clipped
    weight), the change is kept: if the parameter is neither its rounded copy nor a
    neighbor of that, it replaces the copy.

    Args:
      inner: the optimizer, with clipping and schedules.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `MasterWeightsState` as state.
      `update` needs `params`.

    Raises:
      TypeError: `inner` is not a gradient transformation.
      ValueError: `inner` already keeps master weights, `params` is missing, or the
        gradients do not match it.

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
    `MixedPrecision(param_dtype=torch.float16)`.

    References:
      Micikevicius et al., Mixed Precision Training, 2018, section 3.1
      (arXiv 1710.03740).
    """
    inner = as_transformation(inner)

    def init_fn(params: optax.Params) -> MasterWeightsState:
        check_leaves(params, "master_weights's init: the parameter")
        frozen = frozen_by(inner, params)

        def copy_of(param: ArrayLike, is_frozen: bool) -> PyTree:
            if is_frozen or not is_half(param):
                return optax.MaskedNode()
            return jnp.asarray(param, jnp.float32)

        master = jax.tree.map(copy_of, params, frozen)
        inner_state = inner.init(in_float32(master, params))
        if keeps_master_weights(inner_state):
            raise ValueError(
                "master_weights: inner already keeps master weights; wrap it once."
            )
        return MasterWeightsState(master, inner_state)

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
        check_leaves(updates, f"{caller}: the gradient")
        check_leaves(params, f"{caller}: the parameter")
        check_gradients_match(updates, params, caller, wrapped=True)
        if "grad" in extra_args:  # of line searches
            extra_args = {**extra_args, "grad": widen(extra_args["grad"])}
        with explained(caller, init_fn, state, params):
            known = jax.tree.map(taken_over, state.master, params, is_leaf=is_hole)
            full = in_float32(known, params)
            wide = widen(updates)
            update = functools.partial(inner.update, **extra_args)
            check_copied(known, params, update, wide, state.inner_state, full)
            updates, inner_state = inner.update(
                wide, state.inner_state, full, **extra_args
            )
        leaves, tree = jax.tree.flatten(updates, is_leaf=is_hole)
        copies, held = tree.flatten_up_to(known), tree.flatten_up_to(params)
        pairs = [move(*row) for row in zip(leaves, copies, held, strict=True)]
        updates = tree.unflatten(update for update, _ in pairs)
        master = tree.unflatten(copy for _, copy in pairs)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def in_float32(master: optax.Params, params: optax.Params) -> optax.Params:
    """The parameters, with copies in place of those that have one."""

    def chosen(copy: PyTree, param: PyTree) -> PyTree:
        return param if is_hole(copy) else copy

    return jax.tree.map(chosen, master, params, is_leaf=is_hole)


def frozen_by(
    inner: optax.GradientTransformationExtraArgs, params: optax.Params
) -> PyTree:
    """For each parameter, whether the optimizer is known to never move it.

    An optimizer may need arguments, or mapped axes, that only a step has. It cannot be
    traced here, and each parameter gets its copy.
    """
    none = jax.tree.map(lambda _: False, params)
    shapes = jax.eval_shape(widen, params)
    is_mask = lambda node: isinstance(node, optax.MaskedState)
    try:
        state = jax.eval_shape(inner.init, shapes)
        if not any(map(is_mask, jax.tree.leaves(state, is_leaf=is_mask))):
            return none
        frozen = never_moved(inner.update, shapes, state, shapes)
    except Exception:
        return none
    return frozen if jax.tree.structure(frozen) == jax.tree.structure(params) else none


def check_copied(copies: optax.Params, params: optax.Params, *update: Any) -> None:
    """Raises ValueError if a half-precision parameter that moves has no copy."""

    def lacks(copy: PyTree, param: PyTree) -> bool:
        return is_hole(copy) and not is_hole(param) and is_half(param)

    lacking = jax.tree.map(lacks, copies, params, is_leaf=is_hole)
    if any(jax.tree.leaves(lacking)):
        frozen = never_moved(*update)
        if not all(jax.tree.leaves(jax.tree.map(operator.le, lacking, frozen))):
            raise ValueError("a half-precision parameter has no float32 copy.")


def taken_over(copy: PyTree, param: PyTree) -> PyTree:
    """The copy, or the parameter if that was changed since."""
    if is_hole(copy):
        return copy
    if not jnp.issubdtype(dtype_of(param), jnp.floating):
        raise ValueError(f"a parameter with a float32 copy is {dtype_of(param)}.")
    if dtype_of(copy) != jnp.float32:
        raise ValueError(
            f"master_weights's update: a copy in the state is {dtype_of(copy)}, not "
            "float32; pass the state that init made."
        )
    limits, wide = (
        jnp.finfo(dtype_of(param)),
        lax.convert_element_type(param, copy.dtype),
    )
    step = jnp.maximum(abs(wide) * float(limits.eps), float(limits.smallest_subnormal))
    return jnp.where(abs(copy - wide) <= step, copy, wide)


def move(update: PyTree, copy: PyTree, param: PyTree) -> tuple[PyTree, PyTree]:
    """The update that makes a parameter its moved, rounded copy; and the moved copy.

    `apply_updates` adds in float32 and rounds. That yields the rounded copy, unless the
    parameter is thousands of times larger than its new value, so that float32 cannot
    hold their difference. Then the copy takes the value that the parameter gets, which
    is as far off as any sum of the two. Bits are compared, because XLA may drop the
    rounding of a number that it rounds and widens again. Around zero the update is not
    rounded: 0 plus -0 is 0, and a copy too small for float16 would be lost.
    """
    if not is_hole(update) and dtype_of(update) == jax.dtypes.float0:
        update = jnp.zeros(jnp.shape(param), dtype_of(param))
    if is_hole(update) or is_hole(copy):
        return update, copy
    dtype = dtype_of(param)
    moved = copy + lax.convert_element_type(update, jnp.float32)
    # Computed once: XLA could recompute it for the parameter, with another last bit.
    moved = lax.optimization_barrier(moved)
    wide = lax.convert_element_type(param, jnp.float32)
    rounded = lax.convert_element_type(moved, dtype)
    target = lax.convert_element_type(rounded, jnp.float32)
    target = jnp.where(target == 0, moved, target)
    update = jnp.where(wide == 0, moved, target - wide)
    lands = lax.convert_element_type(wide + update, dtype)
    agrees = bits(lands) == bits(rounded)
    return update, jnp.where(
        agrees, moved, lax.convert_element_type(lands, jnp.float32)
    )


def bits(x: jax.Array) -> jax.Array:
    width = jnp.finfo(x.dtype).bits
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
