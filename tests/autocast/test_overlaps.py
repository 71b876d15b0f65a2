"""Regions that are not closed in the reverse order: an error, and nothing is left.

A generator or a coroutine that holds a region open may be closed anywhere.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp import _compat
from tests.marks import cover

ONES = np.ones((4, 4), np.float32)
REGIONS = {
    "float16": lambda: jamp.autocast(jnp.float16),
    "off": lambda: jamp.autocast(enabled=False),
    "rules": lambda: jamp.autocast(jnp.float16, rules={"unused": jnp.float32}),
}


def refused():
    return pytest.raises(RuntimeError, match="not the innermost one")


def product():
    return jnp.matmul(ONES, ONES)


def check_clean():
    assert not jamp.is_autocast_enabled()
    assert product().dtype == jnp.float32
    assert jax.jit(product)().dtype == jnp.float32
    with jamp.autocast(jnp.bfloat16):
        assert product().dtype == jax.jit(product)().dtype == jnp.bfloat16
        with jamp.autocast(jnp.float16):
            assert product().dtype == jnp.float16
        assert product().dtype == jnp.bfloat16
    assert product().dtype == jnp.float32
    assert jax.grad(lambda x: jnp.sum(x @ x))(ONES).dtype == jnp.float32


@pytest.fixture(autouse=True)
def clean():
    """After each of these tests the thread is as it was."""
    names, trace = _compat.scopes(), _compat.current_trace()
    yield
    assert (_compat.scopes(), _compat.current_trace()) == (names, trace)
    check_clean()


def generator(region=None):
    with region or jamp.autocast(jnp.float16):
        yield product()


def started(region=None):
    held = generator(region)
    next(held)
    return held


@pytest.mark.parametrize("first", REGIONS)
@pytest.mark.parametrize("second", REGIONS)
def test_closed_in_the_order_in_which_they_were_entered(first, second):
    one, two = REGIONS[first](), REGIONS[second]()
    one.__enter__()
    two.__enter__()
    with refused():
        one.__exit__(None, None, None)
    assert product().dtype == jnp.float32  # both are closed
    with refused():
        two.__exit__(None, None, None)


def test_one_under_two_others():
    regions = [jamp.autocast(jnp.float16) for _ in range(4)]
    for region in regions:
        region.__enter__()
    with refused():
        regions[1].__exit__(None, None, None)
    assert product().dtype == jnp.float16  # of the first
    for region in regions[2:]:
        with refused():
            region.__exit__(None, None, None)
    regions[0].__exit__(None, None, None)


@pytest.mark.parametrize("name", REGIONS)
def test_a_generator_that_is_closed_in_another_region(name):
    held = started(REGIONS[name]())
    with refused(), jamp.autocast(jnp.bfloat16):
        held.close()
    held = started()
    with refused(), jamp.autocast(jnp.bfloat16):
        next(held, None)


def test_a_generator_whose_error_is_caught():
    """The region around is over, and says so at its end."""
    held = started()
    with refused(), jamp.autocast(jnp.bfloat16):
        with refused():
            held.close()
        assert product().dtype == jnp.float32


def test_two_coroutines():
    async def half(dtype):
        with jamp.autocast(dtype):
            await asyncio.sleep(0)  # the other one enters its region
            return product()

    async def both():
        tasks = half(jnp.float16), half(jnp.bfloat16)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = asyncio.run(both())
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
    assert all("no `await`" in str(error) for error in errors)


TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(ONES),
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x)))(ONES),
    "vmap": lambda f: jax.vmap(f)(ONES),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, ONES),
    "checkpoint": lambda f: jax.checkpoint(f)(ONES),
}


@cover(quick=3)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_entered_inside_of_a_transform_and_closed_outside(transform):
    held = []

    def function(x):
        held.append(started())
        return x + jnp.float32(1)

    TRANSFORMS[transform](function)
    with refused():
        held[0].close()


@cover(quick=3)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_entered_outside_and_closed_inside_of_a_transform(transform):
    def function(x):
        with refused():
            held.close()
        assert not jamp.is_autocast_enabled()
        return jnp.matmul(x, ONES)

    def run():
        out = TRANSFORMS[transform](function)
        check_clean()
        return out

    with ThreadPoolExecutor(1) as executor:  # JAX goes back to the region's trace
        held = executor.submit(started).result()
        out = executor.submit(run).result()
    assert jax.tree.leaves(out)[-1].dtype == jnp.float32


def test_an_error_of_the_user_is_not_replaced():
    held = started()
    with pytest.raises(ZeroDivisionError), jamp.autocast(jnp.bfloat16):
        with refused():
            held.close()
        raise ZeroDivisionError


def test_in_order_nothing_is_raised():
    held = started()
    with jamp.autocast(jnp.bfloat16):
        assert product().dtype == jnp.bfloat16
    held.close()
    for _ in generator():
        with jamp.autocast(jnp.bfloat16):
            assert product().dtype == jnp.bfloat16


def test_a_region_is_closed_by_its_own_thread():
    region, raised = jamp.autocast(jnp.float16), []

    def close():
        with pytest.raises(RuntimeError, match="belongs to one thread"):
            region.__exit__(None, None, None)
        raised.append(True)

    with region:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
        assert raised and jamp.get_autocast_dtype() == jnp.float16
