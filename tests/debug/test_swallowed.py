"""`find_nonfinite`: overflows that end in finite numbers, and those that should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jamp
from jamp import debug
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")
HALF, LOWEST = jnp.float16, jnp.finfo(jnp.float16).min
BIG = np.full((2, 8), 300.0, HALF)  # their squares overflow
SMALL = np.ones((2, 8), HALF)
WIDE = np.linspace(-2000.0, 2000.0, 16).astype(HALF).reshape(2, 8)


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def by_root(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


def by_power(x):
    return x * jnp.power(jnp.sum(jnp.square(x), -1, keepdims=True), -0.5)


def by_product(x):
    return x[0] / (x[0] @ x[1])


def by_convolution(x):
    return 1.0 / jnp.convolve(x[0], x[1])


def by_cast(x):
    return x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).astype(HALF))


def by_sum(x):
    many = jnp.tile(x, (1, 64))
    return many / jnp.sum(many, -1, keepdims=True)


def by_inverse(x):
    return x * jnp.reciprocal(jnp.cumsum(x * 100, -1))


def a_softmax_without_its_maximum(x):
    return jnp.exp(x / 25 - jnp.log(jnp.sum(jnp.exp(x / 25), -1, keepdims=True)))


def a_derivative_of_a_sigmoid(x):
    e = jnp.exp(x / 50)
    return e / (1 + e) ** 2


def clipped_by_norm(x):
    return x * jnp.minimum(1.0, 10 / jnp.sqrt(jnp.sum(x**2)))


def a_distance_that_is_large(x):
    return 1 / (1 + x**2)  # float16 holds this number


def in_float32(x):
    x = x.astype(jnp.float32) * 1e18
    return x * jax.lax.rsqrt(jnp.mean(x**2))


RAMP = np.arange(1, 9, dtype=HALF)


def largest(x):
    return jnp.argmax((x * RAMP) ** 2, axis=-1)


def nearest(x):
    return jnp.asarray(RAMP)[jnp.argmin((x[0] * RAMP[::-1]) ** 2)]


def three_largest(x):
    return jnp.take_along_axis(x * RAMP, jax.lax.top_k((x * RAMP) ** 2, 3)[1], -1)


def sorted_by_square(x):
    return jnp.argsort((x.T * RAMP[::-1, None]) ** 2, axis=0)


def sorted_with_it(x):
    return jax.lax.sort(((x * RAMP[::-1]) ** 2, x * RAMP), num_keys=1)[1]


def capped_norm(x):
    return jnp.minimum(jnp.sqrt(jnp.sum(x * x)), 3000)


def a_norm_below_a_threshold(x):
    return jnp.where(jnp.sqrt(jnp.sum(x * x)) > 3000, 0, x)


def capped_softplus(x):
    return jax.lax.clamp(HALF(0), jnp.log(1 + jnp.exp(x / 20)), HALF(20))


def two_that_are_compared(x):
    return jnp.where(x[0] * x[0] * 4 > x[1] * x[1], x[0], x[1])


def an_integer(x):
    return (x * x).astype(jnp.int32)


FAULTS = {  # the op that overflows, and the op that swallows it
    rms_norm: ("integer_pow", "rsqrt"),
    by_cast: ("convert_element_type", "rsqrt"),
    a_distance_that_is_large: ("integer_pow", "div"),
    sorted_with_it: ("integer_pow", "sort"),
    capped_norm: ("mul", "min"),
    a_norm_below_a_threshold: ("mul", "gt"),
    capped_softplus: ("exp", "clamp"),
    an_integer: ("mul", "convert_element_type"),
    by_root: ("mul", "div"),
    by_power: ("square", "pow"),
    by_product: ("dot_general", "div"),
    by_convolution: ("conv_general_dilated", "div"),
    by_sum: ("convert_element_type", "div"),
    by_inverse: ("cumsum", "integer_pow"),
    a_softmax_without_its_maximum: ("exp", "exp"),
    a_derivative_of_a_sigmoid: ("integer_pow", "div"),
    clipped_by_norm: ("integer_pow", "div"),
    in_float32: ("integer_pow", "rsqrt"),
    largest: ("integer_pow", "argmax"),
    nearest: ("integer_pow", "argmin"),
    three_largest: ("integer_pow", "top_k"),
    sorted_by_square: ("integer_pow", "sort"),
    two_that_are_compared: ("mul", "gt"),
}


@cover(quick=8)
@pytest.mark.parametrize("fn", FAULTS, ids=lambda fn: fn.__name__)
def test_an_overflow_that_is_swallowed_is_named(fn):
    report = debug.find_nonfinite(fn)(BIG)
    assert np.all(np.isfinite(fn(jnp.asarray(BIG))))
    row = report.to_dict()
    assert row["ops"] == row["results"] == row["bad_arguments"] == []
    (found,) = row["swallowed"]
    assert (found["primitive"], found["by"]["primitive"]) == FAULTS[fn]
    for op in (found, found["by"]):
        assert op["line"].startswith("test_swallowed.py:") and fn.__name__ in op["line"]
    assert report.found == [found["op"]] and found["arguments"] == ["x"]
    first, last = str(report).splitlines()
    assert first.startswith(f"inf made of finite numbers by {found['op']}")
    assert first.endswith(f"and swallowed by {found['by']['op']}")
    assert last == f"the result of {fn.__name__} is finite but wrong"
    assert debug.find_nonfinite(fn)(SMALL).to_dict() == {}


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def silu(x):
    return x / (1 + jnp.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.045 * x**3)))


def mish(x):
    return x * jnp.tanh(jnp.log(1 + jnp.exp(x)))


def gaussian(x):
    return jnp.exp(-(x**2)) + jnp.exp(-jnp.sqrt(x**2))


def capped_logits(x):
    return 30 * jnp.tanh(x @ x.T / 30)


def clamped_square(x):
    return jnp.minimum(x**2, 100.0) + jnp.clip(x * x * x, -1, 1) + jax.nn.relu(-(x * x))


def masked(x, value=-jnp.inf):
    return jax.nn.softmax(jnp.where(x > 0, x, value), axis=-1)


def masked_by_addition(x):
    mask = jnp.where(x > 0, jnp.zeros([], HALF), LOWEST)
    return jnp.sum(jax.nn.softmax(jnp.abs(x) * -1 + mask + mask, axis=-1))


def masked_by_full(x):
    return jax.nn.logsumexp(jnp.maximum(x, jnp.full(x.shape, -jnp.inf, HALF)), -1)


def running_maximum(x):
    def body(carry, row):
        best, total = carry
        new = jnp.maximum(best, row)
        return (new, total * jnp.exp(best - new) + jnp.exp(row - new)), None

    start = jnp.full(8, -jnp.inf, HALF), jnp.zeros(8, HALF)
    return jax.lax.scan(body, start, x)[0][1]


def log_of_zero_that_is_not_chosen(x):
    return jnp.where(x > 0, jnp.log(jnp.maximum(x, 0)), 0)


def entropy_of_zeros(x):
    logs = jnp.maximum(jnp.log(jnp.zeros_like(x)), -100)
    return logs + jnp.exp(jnp.log(jnp.zeros_like(x) * x))


def clipped_by_the_norm_of_zeros(x):
    return x * jnp.minimum(1, 1 / jnp.sum(jnp.zeros_like(x) * x))


def a_distance_to_nowhere(x):
    return jnp.sum(1 / jnp.where(x > 0, jnp.abs(x), jnp.inf))


def a_branch_that_is_not_chosen(x):
    return jnp.where(jnp.max(jnp.abs(x)) > 100, x, rms_norm(x))


def computed_for_nothing(x):
    rms_norm(x)
    return jnp.where(False, rms_norm(x), x)


def compared(x):
    return jnp.argmin(x * x, -1), jnp.sign(x**3), x**2 > 1, -(x**2) > x**2


def the_only_inf(x):
    places = jnp.argmax(x * jnp.where(x > 1900, 1000, 1), -1)
    return places, jnp.argsort(x + jnp.where(x > 1900, x * 1000, 0), -1)


def the_largest_of_masked_ones(x):
    logits = jnp.where(x > 0, x, -jnp.inf)
    mask = jnp.where(x > 1000, 0, x.astype(jnp.float32) * 0 - 1e9).astype(HALF)
    return (
        jnp.argmax((x + mask)[1:], -1),
        jax.lax.top_k(logits, 5)[1],
        jnp.argsort(logits, -1),
        jax.random.categorical(jax.random.key(0), logits[1:]),
    )


def a_norm_that_is_cut(x):
    norm, logarithm = jnp.sqrt(jnp.sum(x * x)), jnp.log(1 + jnp.exp(x))
    smaller = jnp.minimum(norm, 100), jnp.clip(-norm, -200, 200), norm > 1
    return *smaller, jnp.minimum(logarithm, 5), jnp.maximum(-logarithm, 1)


def a_small_integer(x):
    return jnp.clip(x * x, -127, 127).astype(jnp.int8), (x * x).astype(bool)


def dropped(x):
    return (x * x)[:, 8:], x[0, 0]


def an_inverse_square_of_bfloat16(x):
    return 1 / (x.astype(jnp.bfloat16) * 1e35) ** 2  # too small for bfloat16, as 0


FINE = [
    sigmoid,
    silu,
    clipped_by_the_norm_of_zeros,
    a_distance_to_nowhere,
    a_branch_that_is_not_chosen,
    computed_for_nothing,
    a_norm_that_is_cut,
    a_small_integer,
    dropped,
    jax.nn.sigmoid,
    jax.nn.gelu,
    jax.nn.softmax,
    jax.nn.log_softmax,
    jax.nn.softplus,
    functools.partial(jnp.linalg.norm, axis=-1),
    gelu,
    mish,
    gaussian,
    capped_logits,
    clamped_square,
    masked,
    functools.partial(masked, value=LOWEST),
    masked_by_addition,
    masked_by_full,
    running_maximum,
    log_of_zero_that_is_not_chosen,
    entropy_of_zeros,
    compared,
    the_only_inf,
    the_largest_of_masked_ones,
    an_inverse_square_of_bfloat16,
    jax.nn.standardize,
    jnp.var,
]


@cover(quick=12)
@pytest.mark.parametrize("fn", FINE, ids=lambda f: getattr(f, "__name__", "partial"))
def test_an_inf_with_the_right_result_is_no_fault(fn):
    report = debug.find_nonfinite(fn)(WIDE)
    assert report.to_dict().get("swallowed", []) == [], report


THREE = np.arange(3)


def norm_in_a_branch(x):
    return jax.lax.cond(x[0, 0] > 1, rms_norm, lambda x: x, x)


def norm_in_a_scan(x):
    return jax.lax.scan(lambda c, i: (rms_norm(c + i), i), x, jnp.zeros(3, HALF))[0]


def norm_of_a_scan(x):
    squares = jax.lax.scan(lambda c, _: (c, c * c), x, None, length=3)[1]
    return x * jax.lax.rsqrt(squares[2])


def norm_of_what_a_scan_carries(x):
    squares = lambda c, _: (c * c, jax.lax.rsqrt(c))
    return jax.lax.scan(squares, jnp.abs(x), None, length=4)[1]


def norm_in_a_while_loop(x):
    body = lambda s: (s[0] + 1, jnp.where(s[0] == 2, rms_norm(s[1]), s[1]))
    return jax.lax.while_loop(lambda s: s[0] < 5, body, (0, x))[1]


def norm_in_a_loop_with_masks(x):
    def body(state):
        i, x = state
        masked = jnp.exp(jnp.where(jnp.arange(8) <= i, x / 300, -jnp.inf))
        return i + 1, jnp.where(i == 2, rms_norm(x), x + 0 * masked)

    return jax.lax.while_loop(lambda s: s[0] < 5, body, (0, x))[1]


def norm_of_a_while_loop(x):
    body = lambda s: (s[0] + 1, s[1] * s[1])
    squares = jax.lax.while_loop(lambda s: s[0] < 1, body, (0, x))[1]
    return x * jax.lax.rsqrt(squares)


def norm_in_nested_loops(x):
    return jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, norm_in_a_scan(s[1])), (0, x)
    )[1]


def repeated(fn):
    def one_in_three(x, i):
        return jax.lax.scan(lambda x, j: (jnp.where(i == j, fn(x), x), None), x, THREE)

    return lambda x: jax.lax.scan(one_in_three, x, 1 + THREE)[0]


def a_branch_in_a_scan(x):
    choose = lambda x, i: (jax.lax.cond(i == 1, rms_norm, lambda x: x, x), None)
    return jax.lax.scan(choose, x, THREE)[0]


def a_while_loop_in_a_scan(x):
    return jax.lax.scan(lambda x, _: (norm_in_a_while_loop(x), None), x, THREE)[0]


def on_devices(fn):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


AROUND = {
    "jit": jax.jit(rms_norm),
    "jit of jit": jax.jit(lambda x: jax.jit(rms_norm)(x)),
    "remat": jax.checkpoint(rms_norm),
    "vmap": jax.vmap(rms_norm),
    "cond": norm_in_a_branch,
    "scan": norm_in_a_scan,
    "out of scan": norm_of_a_scan,
    "while": norm_in_a_while_loop,
    "scan of cond": a_branch_in_a_scan,
    "shard_map": lambda x: on_devices(rms_norm)(x),
    "grad": jax.grad(lambda x: jnp.sum(rms_norm(x).astype(jnp.float32))),
    "in the carry of scan": norm_of_what_a_scan_carries,
    "while with masks": norm_in_a_loop_with_masks,
    "out of while": norm_of_a_while_loop,
    "while of scan": norm_in_nested_loops,
    "scan of scan": repeated(rms_norm),
    "scan of scan of scan": repeated(repeated(rms_norm)),
    "scan of while": a_while_loop_in_a_scan,
    "shard_map of scan": lambda x: on_devices(norm_in_a_scan)(x),
    "pmap": lambda x: jax.pmap(rms_norm)(x[:, None]),
    "region": jamp.autocast(HALF)(
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    ),
}
LOOPS = {
    "scan": ["scan"],
    "out of scan": ["scan"],
    "in the carry of scan": ["scan"],
    "while": ["while"],
    "while with masks": ["while"],
    "out of while": ["while"],
    "while of scan": ["while", "scan"],
    "scan of scan": ["scan", "scan"],
    "scan of scan of scan": ["scan"] * 4,
    "scan of cond": ["scan"],
    "scan of while": ["scan", "while"],
    "shard_map of scan": ["scan"],
}


@cover(quick=10)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", AROUND)
def test_it_is_seen_through_every_construct(way, jit):
    find = debug.find_nonfinite(AROUND[way])
    find = jax.jit(find) if jit else find
    swallowed = find(BIG).to_dict()["swallowed"]
    assert [kind for kind, _ in swallowed[0]["loops"]] == LOOPS.get(way, [])
    assert swallowed[0]["arguments"] == ["x"]
    assert {op["primitive"] for op in swallowed} <= {"integer_pow", "mul"}
    assert swallowed[0]["by"]["primitive"] in ("rsqrt", "div")
    assert find(SMALL).to_dict() == {}


def test_what_reaches_a_result_is_listed_as_such():
    def fn(x):
        square = x * x
        return x * jax.lax.rsqrt(square), square

    row = debug.find_nonfinite(fn)(BIG).to_dict()
    assert row["swallowed"] == [] and row["results"] == ["1"]

    both = lambda x: (rms_norm(x), jnp.log(x - x))
    report = debug.find_nonfinite(both)(BIG)
    first, second = report.found
    assert first.startswith("log ") and second.startswith("integer_pow ")
    assert "reaches 1 of 2 results" in str(report) and "swallowed by" in str(report)


def test_the_module_is_named():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Norm(name="norm_2")(nn.Dense(8, name="dense")(x))

    params = jax.jit(Model().init)(jax.random.key(0), SMALL)
    find = jax.jit(debug.find_nonfinite(jamp.autocast(HALF)(Model().apply)))
    (op,) = find(params, 10 * BIG).to_dict()["swallowed"]
    assert op["path"] == op["by"]["path"] == "Model/norm_2"
    assert find(params, SMALL).to_dict() == {}


def test_a_skipped_step_has_no_swallowed_ones():
    """The overflow of a scaled gradient reaches the check, and in what the optimizer
    computes of it, an inf becomes 0."""
    import optax

    tx = jamp.dynamic_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    )
    params = {"w": np.ones((8, 4), np.float32)}

    def loss_fn(params, x):
        with jamp.autocast(HALF):
            return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    def step(params, state, x):
        _, grads = jamp.value_and_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    find = jax.jit(debug.find_nonfinite(step))
    report = find(params, jax.jit(tx.init)(params), BIG)
    row = report.to_dict()
    assert row["ops"] and row["swallowed"] == []


@cover()
@pytest.mark.parametrize("way", ["scan of cond", "scan of scan"])
def test_only_an_iteration_that_is_chosen_counts(way):
    (op,) = debug.find_nonfinite(AROUND[way])(BIG).to_dict()["swallowed"]
    assert op["times"] == 1 and op["loops"][-1] == ("scan", 1)


def test_stacked_reports_count_the_steps_that_swallow():
    find = debug.find_nonfinite(rms_norm)
    steps = np.stack([SMALL, BIG, SMALL])
    _, reports = jax.lax.scan(lambda _, x: (None, find(x)), None, steps)
    assert "something found in 1: 1." in str(reports)


def test_an_overflow_that_a_while_loop_moves_about_is_followed():
    """It goes to the other place and back: no iteration that is kept has it in both."""

    def fn(x):
        swap = lambda s: (s[0] + 1, s[2], s[1])
        start = 0, jnp.sum(x * x), x[0, 0]
        big = jax.lax.while_loop(lambda s: s[0] < 2, swap, start)[1]
        return x * jax.lax.rsqrt(big)

    (fault,) = debug.find_nonfinite(fn)(BIG).to_dict()["swallowed"]
    assert fault["by"]["primitive"] == "rsqrt"
    assert debug.find_nonfinite(fn)(SMALL).found == []
