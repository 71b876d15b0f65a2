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

from .._checks import is_traced
from .._tree import Flag, PyTree, check_leaves, dtype_of, widen
from . import arithmetic, rule, skip
from .arrivals import GIVEN, RETURNED, marked
from .check_gradients import check_gradients_match, is_hole
from .derivatives import at_scale, check_no_gradient_function, stays_finite
from .dtypes import as_made, as_wide_as, made_wide
from .mesh import is_mapped, on_all
from .rule import Kind, LossScaleConfig
from .skip import check_same
from .state import (
    DynamicLossScaleState,
    check_moved,
    check_not_scaled_yet,
    check_not_stacked,
    check_state,
    explained,
    keeps_master_weights,
    scalars_of,
    state_of,
)
from .transformation import (
    apply_updates,
    cast_update,
    no_update,
    without_float0,
)
from .unread import chosen, only, reads, traced

Step = tuple[optax.Updates, optax.OptState]
Given = tuple[optax.Updates, PyTree]  # the gradients, and those among the arguments


@dataclasses.dataclass(frozen=True, eq=False)
class LossScaled:
    """An optimizer behind a loss scale: `init_fn`, `update_fn`, and `step`."""

    inner: optax.GradientTransformationExtraArgs
    config: LossScaleConfig
    kind: Kind
    axis_name: tuple[str, ...] | None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init_fn, self.update_fn)

    def init_fn(self, params: optax.Params) -> DynamicLossScaleState:
        check_leaves(params, "dynamic_loss_scale's init: the parameter")
        inner_state = self.init_inner(params)
        check_not_scaled_yet(inner_state, "inner")
        return state_of(rule.init(self.config, self.kind), inner_state)

    def init_inner(self, params: optax.Params) -> optax.OptState:
        bare = self.kind is Kind.OFF
        return self.inner.init(params) if bare else made_wide(self.inner.init, params)

    def update_fn(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> Step:
        caller = "dynamic_loss_scale's update"
        if is_scaled := self.kind is not Kind.OFF:
            updates = marked(GIVEN, updates)
        scaled = Scaled(self, caller, updates, state, params, extra_args)

        def hold(like: Callable[[], Step]) -> Step:
            return jax.tree.map(no_update, like()[0]), scaled.old

        new = skip.run_or_hold(scaled.finite, scaled.both, hold)
        updates, inner_state = scaled.checked(new, hold)
        if is_scaled:
            updates = marked(RETURNED, updates)
        return updates, scaled.advanced(inner_state)

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
    ) -> Step:
        """`update_fn` and `apply_updates`, behind one choice: run or hold."""
        scaled = Scaled(self, "jamp.step", grads, state, params, extra_args)

        def run() -> Step:
            updates, inner_state = scaled.both()
            return apply_updates(params, updates), inner_state

        hold = lambda _: (params, scaled.old)
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
        self.by, self.caller, self.params = by, caller, params
        check_state(state, DynamicLossScaleState, caller)
        self.scalars = scalars_of(state)
        check_not_stacked(self.scalars._asdict(), caller)
        check_leaves(grads, f"{caller}: the gradient")
        if params is not None:
            check_leaves(params, f"{caller}: the parameter")
            check_gradients_match(grads, params, caller, wrapped=True)
        self.inverse = arithmetic.invert(self.scalars.loss_scale)
        functions = {}
        if by.kind is not Kind.OFF:
            check_no_gradient_function(extra_args, caller)
            functions = at_scale(extra_args, self.scalars.loss_scale, self.inverse)
        self.extra_args, self.differentiates = extra_args | functions, bool(functions)
        # An extra argument named `grad`, of line searches, is a gradient like these.
        given = grads, {k: v for k, v in extra_args.items() if k == "grad"}
        self.old = as_made(state.inner_state, by.init_inner, params)
        run = lambda given: self.run(given, self.old)
        if any(map(is_traced, jax.tree.leaves((given, self.inverse)))):
            used, run = traced(run, given)
            given = only(used, given)
            self.finite = self.all_finite(chosen(used, given))
        else:
            self.finite = self.all_finite(given)
            if not self.finite:
                self.finite = self.all_finite(chosen(reads(run, given), given))
        self.both = functools.partial(run, skip.harmless(self.finite, given))

    def all_finite(self, grads: PyTree) -> Flag:
        axes = self.by.axis_name
        if self.by.kind is not Kind.OFF:
            return arithmetic.all_finite(grads, axes)
        # Only what the scale of another run may cause, on the axes that there are.
        axes = tuple(filter(is_mapped, axes or ())) or None
        finite = arithmetic.all_finite(grads, axes)
        return jnp.logical_or(finite, self.scalars.loss_scale == 1)

    def checked(self, new: Step, hold: Callable[[Callable[[], Step]], Step]) -> Step:
        """A step's results, held if derivatives that it took itself overflowed."""
        if not self.differentiates:
            return new
        old = hold(lambda: new)
        fine = on_all(stays_finite(new, old), self.by.axis_name)
        self.finite = jnp.logical_and(self.finite, fine)
        return skip.select(fine, new, old)

    def run(self, given: Given, inner_state: optax.OptState) -> Step:
        """The inner optimizer's step, on gradients that this unscales first.

        Raises:
          ValueError: the state belongs to another optimizer.
          TypeError: the optimizer changes the type of its state.
        """
        params, init = self.params, self.by.init_inner
        grads, derivatives = self.unscaled(given)
        # Master weights must see the dtypes of the parameters, and be added unrounded.
        # A disabled optimizer does what it does alone.
        as_they_are = self.by.kind is Kind.OFF or keeps_master_weights(inner_state)
        with explained(self.caller, init, inner_state, params):
            updates, new = self.by.inner.update(
                grads,
                inner_state,
                params if as_they_are else widen(params),
                **self.extra_args | derivatives,
            )
        if params is not None:
            cast = without_float0 if as_they_are else cast_update
            updates = jax.tree_util.tree_map_with_path(
                cast, updates, params, is_leaf=is_hole
            )
        check_moved(self.caller, init, new, inner_state, params)
        if as_they_are:  # it may have put half parameters into the state
            new = as_wide_as(inner_state, new)
        with explained(self.caller, init, inner_state, params):
            check_same(new, inner_state, f"{self.caller}: the optimizer")
        return updates, new

    def unscaled(self, grads: PyTree) -> PyTree:
        """Gradients divided by the scale: float32, or in their dtypes if disabled."""
        wide = arithmetic.unscale(grads, self.inverse)
        if self.by.kind is not Kind.OFF:
            return wide
        narrow = lambda new, old: (
            new if new is old else lax.convert_element_type(new, dtype_of(old))
        )
        return jax.tree.map(narrow, wide, grads)

    def advanced(self, inner_state: optax.OptState) -> DynamicLossScaleState:
        """The next state."""
        found_inf, by = jnp.logical_not(self.finite), self.by
        scalars = rule.advance(self.scalars, found_inf, by.config, by.kind)
        return state_of(scalars, inner_state)


def loss_scaled(tx: object) -> LossScaled | None:
    """The loss scale that a transformation belongs to, or None."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, LossScaled) else None
