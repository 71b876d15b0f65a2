"""What other projects' own tests found: programs that ran outside of regions alone.

`python -m foreign` runs those tests. Each function here does what one of them
does, with arrays of its own; all failed in any region.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._autocast.decision import Settings
from jamp._autocast.region import enter
from tests.bits import check_near, nudged
from tests.marks import cover

pytestmark = [pytest.mark.usefixtures("standard_promotion")]

REGIONS = {
    "nothing": lambda: enter(Settings(jnp.dtype("float16"), is_policy=True)),
    "float16": lambda: jamp.autocast(jnp.float16),
}


def counted(x):
    """A jitted function counts its calls in a reference that it closes over."""
    calls = jax.new_ref(0.0)

    @jax.jit
    def square(x):
        calls[...] += 1
        return x * x

    return square(square(x)), calls[...]


def scanned_references(x):
    """A scan goes through the entries of one reference and sums into another."""
    entries, total = jax.new_ref(x), jax.new_ref(0.0)

    def add(_, entry):
        total[...] += entry[...]
        entry[...] = 2 * entry[...]
        return None, None

    lax.scan(add, None, entries)
    return entries[...], total[...]


def gradient_with_a_reference_that_is_read(x):
    factor = jax.new_ref(3.0)
    loss = lambda x, factor: jnp.sum(factor[...] * x)
    return jax.grad(loss)(x, factor), jax.jit(jax.grad(loss))(x * x, factor)


@functools.partial(jax.custom_vjp)
def tap(x, log):
    return x


def tap_backward(log, g):
    log[...] = jnp.sum(jnp.abs(g))
    return g, None


tap.defvjp(lambda x, log: (x, log), tap_backward)


def statistic_of_a_gradient(x):
    """The backward pass writes into a reference."""
    log = jax.new_ref(0.0)
    gradient = jax.grad(lambda x: jnp.sum(tap(x, log) ** 2))(x)
    return gradient, log[...]


def statistics_of_a_scan(x):
    log = jax.new_ref(0.0)

    @jax.jit
    def loss(x):
        step = lambda carry, _: (tap(jnp.sin(carry), log), None)
        return jnp.sum(lax.scan(step, x, None, length=3)[0])

    return jax.grad(loss)(x), log[...]


@jax.custom_vjp
def through_a_reference(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x
    return ref[...]


through_a_reference.defvjp(
    lambda x: (through_a_reference(x), None), lambda _, g: (2 * g,)
)


def reference_inside_of_a_custom_vjp(x):
    return through_a_reference(x[0]), jax.grad(jax.jit(through_a_reference))(x[0])


@jax.jit
def empty_reference(x):
    ref = jax.empty_ref(jax.ShapeDtypeStruct((), "float32"))
    ref[...] = jnp.max(x)
    value = ref[...]
    jax.free_ref(ref)
    return value


@jax.custom_vjp
def sine(x, y):
    return jnp.sin(x) * y


sine.defvjp(
    lambda x, y: (jnp.sin(x) * y, (jnp.cos(x), jnp.sin(x), y)),
    lambda saved, g: (saved[0] * saved[2] * g, saved[1] * g),
    optimize_remat=True,
)


def optimized_remat_of_a_map(x):
    gradient = jax.grad(jax.checkpoint(sine), argnums=(0, 1))
    return jax.vmap(gradient)(x, x), jax.jvp(
        lambda x: jnp.sum(jax.vmap(jax.grad(sine))(x, x)), [x], [x]
    )


def optimized_remat_in_a_branch(x):
    def loss(x):
        branches = (lambda x: sine(x, 2.0), lambda x: x)
        return lax.cond(x > 0, *branches, x) ** 2

    return jax.value_and_grad(jax.jit(jax.checkpoint(loss)))(jnp.abs(x[0]))


CASES = [
    counted,
    scanned_references,
    gradient_with_a_reference_that_is_read,
    statistic_of_a_gradient,
    statistics_of_a_scan,
    reference_inside_of_a_custom_vjp,
    empty_reference,
    optimized_remat_of_a_map,
    optimized_remat_in_a_branch,
]


X = np.random.default_rng(0).normal(size=4).astype(np.float32)


def run(case, region, x=X):
    with contextlib.nullcontext() if region is None else REGIONS[region]():
        return case(jnp.asarray(x))


@cover(quick=5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_region_that_decides_nothing_changes_nothing(case):
    got, want = run(case, "nothing"), run(case, None)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    check_near(got, want, [run(case, None, x) for x in nudged(X)])  # XLA fuses more


@cover(quick=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_runs_in_float16(case):
    nearby = [run(case, None, x) for x in nudged(X)]
    check_near(run(case, "float16"), run(case, None), nearby)


@pytest.mark.parametrize("region", REGIONS)
def test_a_reference_that_is_returned_is_refused_as_ever(region):
    """JAX says which rule was broken, not that a reference is no number."""

    @jax.custom_vjp
    def itself(ref):
        return ref

    itself.defvjp(lambda ref: (ref, None), lambda _, g: (g,))
    ref = jax.new_ref(1.0)
    with REGIONS[region](), pytest.raises(ValueError, match="returned a mutable array"):
        itself(ref)
