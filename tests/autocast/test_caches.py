"""What autocast keeps of a jitted function is used again, and nothing else is held."""

import functools
import gc
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALF, FLOAT32 = jnp.float16, jnp.float32
REGION = jamp.autocast(dtype=HALF)


def array(*shape, dtype=FLOAT32):
    n = int(np.prod(shape))
    return jnp.asarray(np.linspace(-1, 2, n).reshape(shape), dtype)


def ends(is_gone):
    """Whether it is so when garbage is collected: of the young, which is quick, or all.

    What a test has made is young.
    """
    for generation in (1, 2):
        gc.collect(generation)
        if is_gone():
            return True
    return False


def test_each_program_is_compiled_once(caplog):
    def compiled():
        caplog.clear()
        with jax.log_compiles(), REGION:
            jax.nn.softmax(jnp.tanh(array(3, 7)) + array(7)).sum()
        return [r.message for r in caplog.records if r.message.startswith("Compiling")]

    assert len(compiled()) > 5
    assert [compiled() for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize("dtype", [HALF, "float8", jamp.ScaledFloat16()], ids=str)
def test_a_step_is_traced_once_and_runs_without_the_host(dtype):
    traces = []

    @jax.jit
    def step(w, x):
        def loss(w):
            traces.append(jamp.get_autocast_dtype())
            return jnp.mean(jax.nn.gelu(x @ w + w[0]).astype(FLOAT32))

        return w - jax.grad(jamp.autocast(dtype)(loss))(w)

    w, x = array(16, 16), array(16, 16)
    w = step(w, x)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            w = step(w, x)
    assert len(traces) == 1 and w.dtype == FLOAT32


def product_and_gradient():
    """A jitted function that is also called by the rule of another one."""

    @jax.jit
    def product(x, w):
        return x @ w

    @jax.custom_vjp
    def squared(x, w):
        return product(x, w) ** 2

    def fwd(x, w):
        y = product(x, w)
        return y**2, 2 * y @ w.T

    squared.defvjp(fwd, lambda dx, g: (g * dx, None))
    return product, jax.grad(lambda x, w: squared(x, w).sum())


def test_a_derivative_shares_no_program_with_the_code_beside_it():
    """Products of a jitted function run in float8, and those of a rule do not."""
    operands = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)

    def found(*places):
        functions = product_and_gradient()
        run = lambda x, w: [functions[place](x, w) for place in places]
        return jamp.autocast("float8")(jax.jit(run))(*operands)

    alone = found(0) + found(1)
    np.testing.assert_array_equal(found(0, 1), alone)
    np.testing.assert_array_equal(found(1, 0), alone[::-1])


def test_a_reference_inside_a_jitted_function_is_not_kept():
    @functools.partial(jax.jit, inline=True)
    def function(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[...]

    before = {id(x): x for x in jax.live_arrays()}

    def is_gone():
        alive = [x for x in jax.live_arrays() if id(x) not in before]
        return not any(x.size >= 1000 for x in alive)

    with REGION:
        function(array(1000))
    assert ends(is_gone)


@pytest.mark.parametrize("dtype", [HALF, FLOAT32])  # with casts, and without
def test_nothing_outlives_a_jitted_function(dtype):
    held = [array(64, 64)]
    functions = [jax.jit(lambda x: x + held[0])]
    with REGION:
        for _ in range(3):
            functions[0](array(1, 1, dtype=dtype))
    alive = weakref.ref(held.pop())
    functions.clear()
    assert ends(lambda: alive() is None)


def test_a_library_without_a_file_has_no_layers(monkeypatch):
    """Such as a directory of that name, which Python takes for a package."""
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    with REGION:
        assert (array(1, 4, dtype=HALF) @ array(4, 4) + array(1, 4)).dtype == FLOAT32
