"""Numbers that half precision does not hold, in functions that JAX jits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.marks import cover

from . import ways

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
WAYS = ("jit inside", "jit twice", "live")
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


@cover(quick=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WITH_NUMBER)
def test_a_number_stays_what_it_is(name, way):
    """A mask of -1e10 is -inf in float16: its array is widened, or it stays finite."""
    x = np.linspace(0, 2, 16, dtype=np.float32).reshape(4, 4)
    w = np.eye(4, dtype=np.float32)

    def with_all(x, w, around=lambda f: f):
        runs = [lambda x, w, n=n: WITH_NUMBER[name](x @ w, n) for n in NUMBERS]
        return [around(run)(x, w) for run in runs]

    expected, wrong = jax.jit(with_all)(x, w), []
    for half, dtype in HALVES.items():
        around = functools.partial(ways.WAYS[way], jamp.autocast(dtype))
        run = functools.partial(with_all, around=around)
        run = run if way == "live" else jax.jit(run)
        rows = zip(NUMBERS, run(*map(jnp.asarray, (x, w))), expected, strict=True)
        for number, y, exact in rows:
            if not np.allclose(y.astype(jnp.float32), exact, rtol=0.02):
                wrong.append((number, half, np.asarray(y)[0].tolist()))
    assert wrong == []


@pytest.mark.parametrize("way", ["live", "jit outside"])
def test_an_array_inside_of_a_function_is_as_it_is_cast_there(way):
    """Outside it is float32, as a weak array of the user's."""

    def slopes(h):
        weak = jnp.arange(h.shape[-1]) * 0.1
        with jamp.autocast(dtype=jnp.float16):
            product = h @ jnp.ones((4, 4))
            return jax.nn.leaky_relu(product, weak), product * weak

    run = jax.jit(slopes) if way == "jit outside" else slopes
    with jax.numpy_rank_promotion("allow"):
        inside, outside = run(jnp.ones((2, 4)))
    assert (inside.dtype, outside.dtype) == (jnp.float16, jnp.float32)
