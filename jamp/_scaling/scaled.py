"""An optimizer behind a loss scale, and one step of it.

A step checks the scaled gradients, unscales them, runs the optimizer on them or holds
everything, and moves the scale.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import is_traced
from .._tree import (
    KeyPath,
    PyTree,
    check_leaves,
    dtype_of,
    is_half,
    is_inexact,
    widen,
)
from . import arithmetic, rule, skip
from .apart import Apart
from .arrivals import current
from .derivatives import at_scale, check_no_gradient_function, stays_finite
from .match import check_gradients_match, check_update, is_hole
from .mesh import on_all
from .rule import LossScaleConfig
from .state import (
    DynamicLossScaleState,
    check_not_scaled_yet,
    check_not_stacked,
    check_state,
    explained,
    keeps_master_weights,
    scalars_of,
    state_of,
)
from .transformation import apply_updates
from .unread import chosen, only, reads

Step = tuple[optax.Updates, optax.OptState]


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaled:
    """An optimizer behind a loss scale: `init_fn`, `update_fn`, and `step`."""

    inner: optax.GradientTransformationExtraArgs
    config: LossScaleConfig
    is_dynamic: bool
    axis_name: tuple[str, ...] | None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init_fn, self.update_fn)

    def init_fn(self, params: optax.Params) -> DynamicLossScaleState:
        check_leaves(params, "dynamic_loss_scale's init: the parameter")
        inner_state = self.init_inner(params)
        check_not_scaled_yet(inner_state, "inner")
        return state_of(rule.init(self.config), inner_state)

    def init_inner(self, params: optax.Params) -> optax.OptState:
        if any(map(is_half, jax.tree.leaves(params))):
            if not keeps_master_weights(jax.eval_shape(self.inner.init, params)):
                params = widen(params)
        return self.inner.init(params)

    def update_fn(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> Step:
        caller = "dynamic_loss_scale's update"
        if (watch := current()) is not None:
            watch.arrive(updates)
        scaled = Scaled(self, caller, updates, state, params, extra_args)
        finite, grads, old = scaled.finite, scaled.grads, state.inner_state
        parts = scaled.parts

        def hold(like: Callable[[], Step]) -> Step:
            return jax.tree.map(_no_update, like()[0]), old

        if skip.way(finite) is skip.Way.BRANCH and parts and parts.is_free():
            new = functools.partial(parts.state, grads)
            new = skip.run_or_hold(finite, new, lambda like: old)
            made = parts.updates(skip.zeroed(finite, grads), new)
            none = jax.tree.map(_no_update, made)
            updates, inner_state = skip.select(finite, made, none), new
        else:
            updates, inner_state = skip.run_or_hold(finite, scaled.both, hold)
        updates, inner_state = scaled.checked((updates, inner_state), hold)
        if watch is not None:
            watch.leave(updates)
        return updates, scaled.advanced(inner_state)

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Step:
        """`update_fn` and `apply_updates`, behind one choice: run or hold."""
        scaled = Scaled(self, "jamp.step", grads, state, params, extra_args)

        def run() -> Step:
            updates, inner_state = scaled.both()
            return apply_updates(params, updates), inner_state

        hold = lambda _: (params, state.inner_state)
        new = scaled.checked(skip.run_or_hold(scaled.finite, run, hold), hold)
        return new[0], scaled.advanced(new[1])


class Scaled:
    """One step's scaled gradients, checked, with everything needed to use them.

    As torch never sees the gradient of a frozen parameter, a gradient that the
    optimizer does not read is not checked: the program of its update says which.
    """

    def __init__(
        self,
        by: LossScaled,
        caller: str,
        grads: optax.Updates,
        state: PyTree,
        params: optax.Params | None,
        extra_args: dict[str, object],
    ):
        self.by, self.caller, self.state, self.params = by, caller, state, params
        check_state(state, DynamicLossScaleState, caller)
        self.scalars = scalars_of(state)
        check_not_stacked(self.scalars._asdict(), caller)
        check_leaves(grads, f"{caller}: the gradient")
        if params is not None:
            check_leaves(params, f"{caller}: the parameter")
            check_gradients_match(grads, params, caller, wrapped=True)
        check_no_gradient_function(extra_args, caller)
        self.inverse = arithmetic.invert(self.scalars.loss_scale)
        functions = at_scale(extra_args, self.scalars.loss_scale, self.inverse)
        self.extra_args, self.differentiates = extra_args | functions, bool(functions)
        self.parts: Apart | None = None
        # An extra argument named `grad`, of line searches, is a gradient like these.
        given = grads, {k: v for k, v in extra_args.items() if k == "grad"}
        old, leaves = state.inner_state, jax.tree.leaves((given, self.inverse))
        if any(map(is_traced, leaves)):
            self.parts = Apart(self.run_inner, given, old)
            used = self.parts.reads()
            given = only(used, given)
            self.finite = arithmetic.all_finite(chosen(used, given), by.axis_name)
        else:
            self.finite = arithmetic.all_finite(given, by.axis_name)
            if not self.finite:
                used = reads(lambda given: self.run_inner(given, old), given)
                self.finite = arithmetic.all_finite(chosen(used, given), by.axis_name)
        self.grads = skip.harmless(self.finite, given)

    def both(self) -> Step:
        """The updates and the new state of the inner optimizer."""
        if self.parts is not None:
            return self.parts.both(self.grads)
        return self.run_inner(self.grads, self.state.inner_state)

    def checked(self, new: Step, hold: Callable[[Callable[[], Step]], Step]) -> Step:
        """A step's results, held if derivatives that it took itself overflowed."""
        if not self.differentiates:
            return new
        old = hold(lambda: new)
        fine = on_all(stays_finite(new, old), self.by.axis_name)
        self.finite = jnp.logical_and(self.finite, fine)
        return skip.select(fine, new, old)

    def run_inner(
        self, given: tuple[optax.Updates, PyTree], inner_state: optax.OptState
    ) -> Step:
        """The inner optimizer's step, on gradients that this unscales first."""
        params = self.params
        grads, derivatives = arithmetic.unscale(given, self.inverse)
        extra_args = self.extra_args | derivatives
        # Master weights must see the dtypes of the parameters, and be added unrounded.
        as_they_are = keeps_master_weights(inner_state)
        with explained(self.caller, self.by.init_inner, inner_state, params):
            updates, inner_state = self.by.inner.update(
                grads,
                inner_state,
                params if as_they_are else widen(params),
                **extra_args,
            )
        if params is not None and not as_they_are:
            updates = jax.tree_util.tree_map_with_path(
                _cast_update, updates, params, is_leaf=is_hole
            )
        return updates, inner_state

    def advanced(self, inner_state: optax.OptState) -> DynamicLossScaleState:
        """The next state."""
        advance = rule.advance if self.by.is_dynamic else rule.record
        found_inf = jnp.logical_not(self.finite)
        scalars = advance(self.scalars, found_inf, self.by.config)
        started = rule.started(scalars, self.scalars, self.by.config)
        return state_of(started, inner_state)


def loss_scaled(tx: object) -> LossScaled | None:
    """The loss scale that a transformation belongs to, or None."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, LossScaled) else None


def _cast_update(path: KeyPath, update: PyTree, param: PyTree) -> PyTree:
    """The update in the dtype of its parameter."""
    if is_hole(update):
        return update
    check_update(path, update, param, "dynamic_loss_scale")
    if dtype_of(update) == jax.dtypes.float0:
        return jnp.zeros(jnp.shape(param), dtype_of(param))
    return lax.convert_element_type(update, dtype_of(param))


def _no_update(like: ArrayLike) -> jax.Array:
    """An update that keeps a parameter's bits: adding 0 would turn -0 into 0."""
    zeros = jnp.zeros_like(like)
    return -zeros if is_inexact(like) else zeros
