"""Every step of a plan, against the bare optimizer on gradients NumPy unscaled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jamp

from .oracle import FACTORS, UNFUSED, Scaling, check_bits, scaling_of, trajectory
from .plans import (
    Plan,
    apply,
    bare_state,
    bare_step,
    draw_grads,
    scaled_state,
    unscaled,
    with_float0,
)


def check_plan(plan: Plan, rng: np.random.Generator, cases: int) -> None:
    """Runs cases that each have parameters, scales and gradients."""
    with plan.settings():
        check_cases(plan, rng, cases)


def check_cases(plan: Plan, rng: np.random.Generator, cases: int) -> None:
    tx = plan.transformation()
    draw = lambda s: (rng.normal(size=(cases, *s.shape)) * 2).astype(s.dtype)
    params = jax.tree.map(draw, plan.specs)
    grads, found = draw_grads(plan, rng, cases)
    numbers = dict(plan.numbers)
    if plan.outer == "injected":  # which keeps them as float32 arrays
        numbers |= {name: np.float32(numbers[name]) for name in FACTORS}
    low, high = plan.numbers["min_scale"], plan.numbers["max_scale"]
    scales = np.clip(2.0 ** rng.uniform(4, 20, cases), low, high).astype(np.float32)
    if plan.outer in ("static", "off"):
        numbers["min_scale"] = 0.0
        scales[:] = 1.0 if plan.outer == "off" else plan.numbers["init_scale"]
    trackers = rng.integers(0, 6, cases).astype(np.int32)

    def begin(params, scale, tracker):
        params = plan.wrap(params)
        state = optax.tree.set(
            tx.init(params), loss_scale=scale, growth_tracker=tracker
        )
        return params, state

    def step(params, state, grads):
        return jamp.step(tx, with_float0(plan, grads), state, params)

    def two_calls(params, state, grads):
        updates, state = tx.update(with_float0(plan, grads), state, params)
        return jax.tree.map(apply, params, updates), state

    def run_case(case):
        params, scale, tracker, grads = case
        carry = begin(params, scale, tracker)

        def body(carry, grads):
            after = step(*carry, grads)
            return after, (carry, after, two_calls(*carry, grads))

        return lax.scan(body, carry, grads)[1]

    run = jax.jit(lambda xs: lax.map(run_case, xs), compiler_options=UNFUSED)
    rows = run((params, scales, trackers, grads))
    before, after, by_two_calls = jax.tree.map(np.asarray, rows)

    expected = [
        trajectory(
            Scaling(scales[case], int(trackers[case])),
            found[case],
            numbers | {"fixed": plan.outer == "static"},
        )
        for case in range(cases)
    ]
    if plan.outer != "off":
        got = scaling_of(scaled_state(after[1]))
        for field, values in zip(Scaling._fields, got, strict=True):
            want = np.stack([getattr(case, field) for case in expected])
            check_bits(f"scaling, {field}", values, want.astype(values.dtype))
    # A skipped `jamp.step` holds the count of `inject_hyperparams` too.
    inside = lambda tree: tree[1].inner_state if plan.outer == "injected" else tree[1]
    pairs = [(tree[0], inside(tree)) for tree in (by_two_calls, after)]
    check_bits("update and apply_updates", *pairs)

    reference = jax.jit(
        lambda xs: lax.map(
            lambda case: lax.map(
                lambda x: bare_step(plan, with_float0(plan, x[0]), x[1], x[2]), case
            ),
            xs,
        ),
        compiler_options=UNFUSED,
    )
    old_scales = scaled_state(before[1]).loss_scale
    held = (before[0], bare_state(plan, before[1]))
    with jax.debug_nans(False):  # the oracle runs bad steps too, and drops them
        clean = unscaled(plan, grads, old_scales)
        moved = jax.tree.map(np.asarray, reference((clean, held[1], held[0])))
    pick = lambda a, b: np.where(found.reshape(found.shape + (1,) * (a.ndim - 2)), a, b)
    want = jax.tree.map(pick, held, moved)
    check_bits("parameters", after[0], want[0])
    check_bits("inner state", bare_state(plan, after[1]), want[1])
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
    if plan.replay == "eager":
        check_eagerly(plan, step, *map(first, (grads, before, after, want)))
    elif plan.replay == "donated":
        carry = begin(*first((params, scales, trackers)))
        check_donated(plan, step, carry, first(grads), first(after))


def check_eagerly(
    plan: Plan, step: Any, grads: Any, before: Any, after: Any, want: Any
) -> None:
    """The first steps of a case op by op, beside the bare optimizer op by op."""
    for n in range(min(plan.steps, 3)):
        at = lambda tree, n=n: jax.tree.map(lambda leaf: leaf[n], tree)
        params, state = on_device(at(before))
        scale = np.asarray(scaled_state(state).loss_scale)
        clean = on_device(unscaled(plan, at(grads), scale))
        got = step(params, state, on_device(at(grads)))
        scaling = scaling_of(scaled_state(got[1]))
        check_bits(
            f"eager scaling, step {n}", scaling, scaling_of(at(scaled_state(after[1])))
        )
        if scaling.found_inf:
            expected = at(want)
        else:
            clean = with_float0(plan, clean)
            expected = bare_step(plan, clean, bare_state(plan, state), params)
        got = got[0], bare_state(plan, got[1])
        check_bits(f"eager, step {n}", got, expected)


def check_donated(plan: Plan, step: Any, carry: Any, grads: Any, after: Any) -> None:
    """A case as users run it: one jitted step with default options, donated buffers.

    XLA fuses it freely, so the numbers of finite steps are not compared here.
    """
    traces = []

    def counted(params, state, grads):
        traces.append(1)
        return step(params, state, grads)

    jitted = jax.jit(counted, donate_argnums=(0, 1))
    carry = jax.tree.map(jnp.array, carry)  # no buffer twice
    types = types_of(carry)
    for n in range(plan.steps):
        at = lambda tree, n=n: jax.tree.map(lambda leaf: leaf[n], tree)
        held = jax.tree.map(np.array, (carry[0], bare_state(plan, carry[1])))
        carry = jitted(*carry, on_device(at(grads)))
        scaling = scaling_of(scaled_state(carry[1]))
        want = scaling_of(scaled_state(at(after)[1]))
        check_bits(f"donated scaling, step {n}", scaling, want)
        assert types_of(carry) == types, f"step {n} changes types"
        if scaling.found_inf:
            got = carry[0], bare_state(plan, carry[1])
            check_bits(f"donated, skipped step {n}", got, held)
    assert len(traces) == 1, f"{len(traces)} traces"


def types_of(tree: Any) -> Any:
    """Structure, shapes, dtypes and weak types."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jax.typeof(leaf) for leaf in leaves]


def on_device(tree: Any) -> Any:
    """Puts arrays on the device. A nan put there is not the result of a computation."""
    with jax.debug_nans(False):
        return jax.tree.map(jnp.array, tree)
