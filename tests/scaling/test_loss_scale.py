"""The pure arithmetic: update, scale, check and unscale."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jamp._scaling import arithmetic, rule
from jamp._scaling.rule import LossScaleConfig

from ..endurance.storms.oracle import Scaling, trajectory
from ..marks import walk

TINY = 2.0**-126


def follow(config, flags):
    """The states after each of a sequence of found_inf flags, in one scan."""

    def step(state, found_inf):
        state = rule.update(state, found_inf, config)
        return state, state

    _, states = jax.jit(lambda flags: jax.lax.scan(step, rule.init(config), flags))(
        jnp.asarray(flags, bool)
    )
    return jax.tree.map(np.asarray, states)


def by_oracle(config, flags):
    """The states by torch's kernel in NumPy, with the additions as documented."""
    start = Scaling(np.float32(config.init_scale), 0)
    return trajectory(start, np.array(flags), dataclasses.asdict(config))


def check_update(config, flags):
    states, expected = follow(config, flags), by_oracle(config, flags)
    np.testing.assert_array_equal(
        states.loss_scale.view(np.uint32), expected.scale.view(np.uint32)
    )
    np.testing.assert_array_equal(states.growth_tracker, expected.tracker)
    np.testing.assert_array_equal(states.hysteresis_tracker, expected.forgiven)


@pytest.mark.parametrize(
    "numbers",
    [
        {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
        {"growth_interval": 1, "hysteresis": 2, "min_scale": 100.0, "max_scale": 1e6},
    ],
    ids=["factors", "bounds"],
)
def test_some_updates_follow_the_rule(numbers):
    flags = np.random.default_rng(0).random(200) < 0.4
    check_update(LossScaleConfig(init_scale=2.0**10, **numbers), flags.tolist())


@pytest.mark.slow
@given(
    growth=st.floats(1.0000001, 16.0),
    backoff=st.floats(0.01, 0.999),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    bounds=st.sampled_from([(0.0, math.inf), (1.0, 2.0**24), (100.0, 1e6)]),
    flags=st.lists(st.booleans(), min_size=1, max_size=200),
)
def test_update_follows_the_rule(growth, backoff, interval, hysteresis, bounds, flags):
    config = LossScaleConfig(
        init_scale=2.0**10,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=bounds[0],
        max_scale=bounds[1],
    )
    flags = flags + [True] * (200 - len(flags))  # one shape, and a run of overflows
    check_update(config, flags)


@pytest.mark.gpu
def test_the_product_is_formed_in_float64():
    config = LossScaleConfig(init_scale=1.0, growth_factor=1.1, growth_interval=1)
    scales = follow(config, [False] * 500).loss_scale
    float32_products, scale = [], np.float32(1)
    for _ in range(500):
        scale = scale * np.float32(1.1)
        float32_products.append(scale)
    assert (
        np.mean(scales == np.array(float32_products)) < 0.1
    )  # a float32 product would show
    expected = by_oracle(config, [False] * 500)
    np.testing.assert_array_equal(scales, expected.scale)


def test_a_growth_that_would_overflow_is_not_taken():
    config = LossScaleConfig(init_scale=2.0**127, growth_interval=1)
    states = follow(config, [False, False, True])
    assert states.loss_scale.tolist() == [2.0**127, 2.0**127, 2.0**126]
    assert states.growth_tracker.tolist() == [0, 0, 0]


def test_the_scale_stops_at_the_smallest_normal_number():
    config = LossScaleConfig(init_scale=2.0**-124, backoff_factor=0.5)
    scales = follow(config, [True] * 6).loss_scale
    assert scales.tolist() == [2.0**-125] + [TINY] * 5


def test_a_tracker_past_the_interval_keeps_counting():
    state = rule.init(LossScaleConfig())._replace(growth_tracker=jnp.int32(7))
    short = LossScaleConfig(growth_interval=5)
    for _ in range(3):
        state = rule.update(state, jnp.bool_(False), short)
    assert state.growth_tracker == 10 and state.loss_scale == 2.0**16


def test_hysteresis_forgives_overflows_until_the_next_growth():
    config = LossScaleConfig(init_scale=16.0, hysteresis=3, growth_interval=2)
    flags = [True, False, True, True, True, False, False, True, True, True]
    scales = follow(config, flags).loss_scale.tolist()
    assert scales == [16, 16, 16, 8, 4, 4, 8, 8, 8, 4]


def test_update_under_vmap_and_cond():
    config = LossScaleConfig(growth_factor=1.1, growth_interval=1)
    states = jax.vmap(lambda _: rule.init(config))(jnp.arange(4))
    flags = jnp.array([True, False, True, False])
    states = jax.jit(jax.vmap(lambda s, f: rule.update(s, f, config)))(states, flags)
    grown = np.float32(65536 * 1.1)
    np.testing.assert_array_equal(states.loss_scale, [32768, grown, 32768, grown])


@walk("scale", [2.0**-126, 0.37, 3.7, 2.0**16, 2.0**64, 3.1e19])
@walk("jit", [jax.jit, lambda f: f])
def test_unscale_multiplies_by_the_rounded_inverse(scale, jit):
    scale = np.float32(scale)
    grads = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    result = jit(lambda g, s: arithmetic.unscale(g, arithmetic.invert(s)))(grads, scale)
    expected = grads * np.float32(1 / np.float64(scale))
    normal = np.abs(expected) >= TINY
    np.testing.assert_array_equal(np.asarray(result)[normal], expected[normal])


@walk("scale", [2.0**126, 1.7 * 2.0**126, 2.0**127, 3.4e38, 3.1e38])
def test_unscale_where_the_inverse_is_subnormal(scale):
    # XLA's CPU backend flushes a subnormal inverse to zero: updates would vanish.
    scale = np.float32(scale)
    grads = np.array([3e38, -1.7e38, 1e30], np.float32)
    result = jax.jit(lambda g, s: arithmetic.unscale(g, arithmetic.invert(s)))(
        grads, scale
    )
    expected = grads * np.float32(1 / np.float64(scale))  # NumPy keeps subnormals
    np.testing.assert_array_equal(result, expected)
    assert np.all(np.asarray(result) != 0)


def test_unscale_widens_halves_and_leaves_the_rest():
    tree = {
        "half": jnp.ones(2, jnp.float16) * 2,
        "brain": jnp.ones(2, jnp.bfloat16) * 2,
        "complex": jnp.array([2 + 4j], jnp.complex64),
        "empty": jnp.zeros((0, 3)),
        "int": jnp.arange(2),
        "bool": jnp.array([True]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "none": None,
        "masked": optax.MaskedNode(),
        "key": jax.random.key(0),
    }
    result = arithmetic.unscale(tree, arithmetic.invert(jnp.float32(4)))
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert result["half"].dtype == result["brain"].dtype == jnp.float32
    np.testing.assert_array_equal(result["half"], [0.5, 0.5])
    np.testing.assert_array_equal(result["complex"], [0.5 + 1j])
    assert result["complex"].dtype == jnp.complex64 and result["empty"].shape == (0, 3)
    for name in ("int", "bool", "float0", "key"):
        assert result[name] is tree[name]


def test_unscale_keeps_what_float16_would_flush():
    grads = jnp.float16(6e-5)
    result = arithmetic.unscale(grads, arithmetic.invert(jnp.float32(2**16)))
    assert grads / jnp.float16(2**15) / 2 == 0  # the control: float16 loses it
    assert result == jnp.float32(grads) / 2**16


def test_unscale_of_complex_does_not_mix_the_parts():
    grads = jnp.array([jnp.inf + 1j, 1 + 0j], jnp.complex64)
    result = np.asarray(arithmetic.unscale(grads, arithmetic.invert(jnp.float32(2))))
    assert result[0].real == np.inf and result[0].imag == 0.5


@walk("dtype", ["float16", "bfloat16", "float32", "complex64"])
@walk("bad", [np.inf, -np.inf, np.nan])
def test_all_finite_finds_one_bad_element(dtype, bad):
    good = jnp.ones((17, 3), dtype)
    tree = {"a": jnp.zeros(0), "b": good, "c": None, "i": jnp.arange(3)}
    assert arithmetic.all_finite(tree)
    assert not arithmetic.all_finite({**tree, "b": good.at[16, 2].set(bad)})


def test_all_finite_sees_the_imaginary_part():
    assert not arithmetic.all_finite(jnp.array([1 + 1j * jnp.inf], jnp.complex64))


def test_all_finite_of_the_largest_numbers_and_of_nothing():
    assert arithmetic.all_finite(jnp.array([65504.0], jnp.float16))
    assert arithmetic.all_finite(jnp.finfo(jnp.float32).max)
    assert arithmetic.all_finite({}) and arithmetic.all_finite(jnp.zeros((0, 4)))


@walk(
    "value, dtype",
    [
        (np.array(3, np.float16), jnp.float32),
        (np.array(3, jnp.bfloat16), jnp.float32),
        (np.array(3, np.float32), jnp.float32),
        (np.array(3, np.int32), jnp.float32),
        (3.0, jnp.float32),
        (np.ones(2, np.float16), jnp.float16),
        (np.ones((2, 1), jnp.bfloat16), jnp.bfloat16),
        (np.arange(2, dtype=np.int32), jnp.float32),
        (np.array(1j, np.complex64), jnp.complex64),
    ],
)
def test_scale_has_torchs_result_dtypes(value, dtype):
    value = value if isinstance(value, float) else jnp.asarray(value)
    result = arithmetic.scale(value, jnp.float32(2**10))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.asarray(value).astype(dtype) * 2**10)


def test_scale_and_unscale_of_float64():
    with jax.enable_x64(True):
        value = jnp.float64(1 / 3)
        assert arithmetic.scale(value, jnp.float32(4)) == 4 / 3
        inverse = arithmetic.invert(jnp.float32(3))
        expected = 1 / 3 * np.float64(np.float32(1 / 3))
        assert arithmetic.unscale(value, inverse) == expected


def test_numpy_and_jax_scalars_are_numbers():
    config = LossScaleConfig(np.float16(8), growth_interval=jnp.int32(3))
    assert config == LossScaleConfig(8.0, growth_interval=3)
    assert hash(config) == hash(LossScaleConfig(8.0, growth_interval=3))
