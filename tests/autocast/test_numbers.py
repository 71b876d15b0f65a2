"""Numbers and sums that half precision does not hold, in functions that JAX jits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
WAYS = {
    "eagerly": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
}
NUMBERS = [-1e10, 1e10, -70000.0, 65504.0, float(jnp.finfo(jnp.float32).min), 1e-3, -3]
# Functions of JAX that get a number with an array: each is jitted in JAX.
WITH_NUMBER = {
    "where": lambda h, n: jnp.where(h > 1, h, n),
    "where, turned": lambda h, n: jnp.where(h > 1, n, h),
    "maximum": lambda h, n: jnp.maximum(h, n),
    "minimum": lambda h, n: jnp.minimum(h, n),
    "clip": lambda h, n: jnp.clip(h, min(n, 0.0), max(n, 0.0)),
    "clip from below": lambda h, n: jnp.clip(h, n),
    "add": lambda h, n: h + n,
    "pad": lambda h, n: jnp.pad(h, 1, constant_values=n),
    "full_like": lambda h, n: jnp.full_like(h, n, jnp.float32),
}


@pytest.mark.parametrize("name", WITH_NUMBER)
def test_a_number_stays_what_it_is(name):
    """A mask of -1e10 is -inf in float16: its array is widened, or it stays finite."""
    x, w = jnp.linspace(0, 2, 16).reshape(4, 4), jnp.eye(4)
    wrong = []
    for number in NUMBERS:
        run = lambda x, w, n=number: WITH_NUMBER[name](x @ w, n)
        expected = run(x, w)
        for half, dtype in HALVES.items():
            for way, around in WAYS.items():
                found = jamp.autocast(dtype)(around(run))(x, w)
                close = np.allclose(found.astype(jnp.float32), expected, rtol=0.02)
                if not close:
                    wrong.append((number, half, way, np.asarray(found)[0].tolist()))
    assert wrong == []


N = 3000
ONES, ROWS = jnp.ones((N, 4)), jnp.zeros(N, jnp.int32)
SUMS = {
    "add": lambda h: jnp.zeros((2, 4), h.dtype).at[ROWS].add(h),
    "subtract": lambda h: jnp.zeros((2, 4), h.dtype).at[ROWS].subtract(h),
    "segment_sum": lambda h: jax.ops.segment_sum(h, ROWS, 2),
    "gradient of a gather": lambda h: jax.vjp(lambda h: h[ROWS], h[:2])[1](h)[0],
    "sum": lambda h: jnp.sum(h, 0),
    "cumsum": lambda h: jnp.cumsum(h, 0)[-1],
    "mean": lambda h: N * jnp.mean(h, 0),
    "product": lambda h: jnp.ones((1, N)).astype(h.dtype) @ h,
    "bincount": lambda h: jnp.bincount(ROWS, h[:, 0], length=2),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_many_is_that_of_float32(name):
    """In bfloat16, a sum of ones stops at 256, and in float16 at 2048."""
    expected = SUMS[name](ONES)
    wrong = []
    for half, dtype in HALVES.items():
        for way, around in WAYS.items():
            run = around(SUMS[name])
            found = jamp.autocast(dtype)(lambda w, run=run: run(ONES @ w))(jnp.eye(4))
            if not np.allclose(found.astype(jnp.float32), expected, rtol=0.01):
                wrong.append((half, way, np.asarray(found).tolist()))
    assert wrong == []
