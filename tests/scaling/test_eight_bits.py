"""Means over devices in eight bits: their error, their bytes, and their feedback."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import serialization
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from jamp._scaling import eight_bits
from shared.collectives import ARRAY, KINDS

from ..bits import check_rounded, check_same_bits
from ..marks import cover, walk

DEVICES = 8
INT8, FLOAT8 = jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")
BOUNDS = {INT8: 1.5e-2, FLOAT8: 4e-2}

pytestmark = [
    pytest.mark.devices(DEVICES),
    pytest.mark.usefixtures("standard_promotion"),
]
BOTH = pytest.mark.parametrize("dtype", [INT8, FLOAT8], ids=str)
encode = jax.jit(eight_bits.encode, static_argnames="dtype")
decode = jax.jit(eight_bits.decode, static_argnames="dtype")


def make_mesh(shape=(DEVICES,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def placed(tree, specs, mesh=None):
    """The tree with the shardings that a mapped function gives back."""
    place = functools.partial(NamedSharding, mesh or make_mesh())
    return jax.device_put(tree, jax.tree.map(place, specs))


def on_each(f, *, names=("data",), shape=(DEVICES,), out_specs=None, **kwargs):
    """Runs `f` on each device's row of the arguments; gives a row of results each."""

    def local(*args):
        own = jax.tree.map(lambda x: x[0], args)
        result = f(*own)
        return jax.tree.map(lambda x: x[None], result) if out_specs is None else result

    specs = P(names) if out_specs is None else out_specs
    return jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(shape, names),
            in_specs=P(names),
            out_specs=specs,
            **kwargs,
        )
    )


def mean_of(dtype, axis_name="data", **options):
    return functools.partial(
        jamp.sharding.mean, axis_name=axis_name, dtype=dtype, **options
    )


def averaged(grads, dtype, **options):
    """What each device gets: a row for each."""
    return on_each(mean_of(dtype, **options))(grads)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def bits(x):
    return np.asarray(x).view(np.uint8)


# --- the arithmetic of a block


@BOTH
@pytest.mark.parametrize("power", [-126, -119, -60, 0, 1, 60, 119])
def test_a_block_is_rounded_to_nearest_by_a_power_of_two(dtype, power):
    x = np.ldexp(normal(50, 33), power).astype(np.float32)
    x[:, 0] = np.ldexp(np.linspace(1, 4, 50), power)
    x[np.abs(x) < 2.0**-126] = 0.0  # XLA's CPU backend makes subnormals 0
    limit = eight_bits.EIGHT_BITS[dtype]
    largest = np.abs(x).max(1, keepdims=True).astype(np.float64)
    exponent = np.ceil(np.log2(largest / limit))
    exponent = np.maximum(exponent, -126)
    scaled = x / 2.0**exponent
    if dtype == INT8:
        codes = np.round(scaled)
        finer = np.clip(np.round(2 * scaled), -127, 127)
        squares = lambda lost: (lost**2).sum(1, keepdims=True)
        gains = squares(finer / 2 - scaled) < squares(codes - scaled)
        gains &= exponent > -126
        assert gains.any() or power < -119
        codes, exponent = np.where(gains, finer, codes), exponent - gains
    else:
        codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    sent = encode(x, dtype)
    assert sent.dtype == jnp.uint8 and sent.shape == (50, 34)
    np.testing.assert_array_equal(sent[:, -1:], exponent + 126)
    expected = codes * 2.0**exponent
    expected[np.abs(expected) < 2.0**-126] = 0.0
    np.testing.assert_array_equal(decode(sent, dtype), expected)


@cover()
@pytest.mark.parametrize("through", [jax.jit, lambda f: f], ids=["jit", "eager"])
@BOTH
def test_each_code_each_tie_and_what_is_next_to_them_are_rounded_as_a_cast_does(
    dtype, through
):
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.abs(codes) <= eight_bits.EIGHT_BITS[dtype]])
    ties = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, ties, np.nextafter(ties, 1e3), np.nextafter(ties, -1e3)])
    expected = np.round(x) if dtype == INT8 else x.astype(dtype).astype(np.float32)
    round_trip = lambda x: eight_bits.decode(eight_bits.encode(x, dtype), dtype)
    np.testing.assert_array_equal(through(round_trip)(x), expected)


@BOTH
def test_finite_numbers_stay_finite_and_zeros_zero(dtype):
    limits = np.finfo(np.float32)
    x = np.array(
        [
            [limits.max, -limits.max, 1.0],
            [0.0, -0.0, 0.0],
            [limits.smallest_normal, 0.0, -limits.smallest_normal],
            [127.0, 448.0, 0.5],
        ],
        np.float32,
    )
    back = np.asarray(decode(encode(x, dtype), dtype))
    assert np.all(np.isfinite(back))
    np.testing.assert_allclose(back[0, :2], x[0, :2], rtol=1 / 8)
    np.testing.assert_array_equal(back[1], 0.0)
    np.testing.assert_array_equal(back[2], x[2])


@BOTH
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbors_are_not(dtype, bad):
    x = np.ones((3, 8), np.float32)
    x[1, 5] = bad
    sent = encode(x, dtype)
    np.testing.assert_array_equal(sent[:, -1] == 255, [False, True, False])
    back = decode(sent, dtype)
    np.testing.assert_array_equal(
        np.isnan(back), [[False] * 8, [True] * 8, [False] * 8]
    )


@pytest.mark.parametrize("length, block", [(300, 256), (1, 256), (8, 3), (512, 256)])
def test_blocks_are_of_one_size_and_waste_little(length, block):
    x = np.arange(2 * length, dtype=np.float32).reshape(2, length)
    made = np.asarray(jax.jit(eight_bits.blocked, static_argnums=1)(x, block))
    _, count, size = made.shape
    assert size <= block and count * size < length + count
    np.testing.assert_array_equal(made.reshape(2, -1)[:, :length], x)
    assert not np.any(made.reshape(2, -1)[:, length:])


# --- the mean


def heavy_tailed():
    """Blocks with magnitudes between 1e-6 and 1e6."""
    sizes = np.repeat(10.0 ** np.linspace(-6, 6, 32), 256)
    return normal(DEVICES, 32 * 256) * sizes.astype(np.float32)


def tiny_beside_huge():
    x = normal(DEVICES, 16 * 256)
    x[:, :256] *= 1e-30
    x[:, -256:] *= 1e30
    return x


@cover()
@BOTH
@pytest.mark.parametrize("make", [heavy_tailed, tiny_beside_huge])
def test_each_block_is_right_whatever_its_neighbors_are(dtype, make):
    # A scale is the next power of two, so it is 1 to 2 times as coarse as necessary.
    grads = make()
    found = np.asarray(averaged(grads, dtype))[0].reshape(-1, 256)
    expected = grads.astype(np.float64).mean(0).reshape(-1, 256)
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b) < 2 * BOUNDS[dtype]


@cover()
@BOTH
def test_the_mean_is_as_near_as_promised_and_the_same_on_all_devices(dtype):
    grads = {
        f"times {s}": np.float32(s) * normal(DEVICES, 5000, seed=s) for s in (1, 3, 6)
    }
    grads["w"] = normal(DEVICES, 300, 130) / 1000
    found = jax.device_get(averaged(grads, dtype))
    for name, x in grads.items():
        assert distance(found[name][0], x.mean(0)) <= BOUNDS[dtype]
        assert all(
            np.array_equal(bits(row), bits(found[name][0])) for row in found[name]
        )
    assert distance(found["w"][0], grads["w"].mean(0)) > BOUNDS[dtype] / 10


@cover()
@BOTH
def test_what_eight_bits_can_hold_is_averaged_exactly(dtype):
    # Multiples of 8, so that the mean of 8 is an integer: below 128, or of 4 bits.
    most = {INT8: 12, FLOAT8: 1}[dtype]
    grads = np.random.default_rng(0).integers(-most, most + 1, (DEVICES, 1000)) * 8.0
    grads = (grads * 2.0**-20).astype(np.float32)
    expected = np.repeat(grads.mean(0, keepdims=True), DEVICES, 0)
    np.testing.assert_array_equal(averaged(grads, dtype), expected)


@cover()
@BOTH
@pytest.mark.parametrize("block", [7, 10**6, 1, 256])
@pytest.mark.parametrize(
    "shapes", [[(1,), (9,), ()], [(5,), (8,), (257,), (3, 1, 5)]], ids=["few", "more"]
)
def test_arrays_of_any_size(dtype, block, shapes):
    grads = {f"{s}": normal(DEVICES, *s, seed=math.prod(s)) for s in shapes}
    found = averaged(grads, dtype, block=block)
    for name, x in grads.items():
        assert found[name].shape == x.shape
        largest = np.abs(x).max()
        np.testing.assert_allclose(found[name][0], x.mean(0), atol=largest / 8)


@cover()
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@BOTH
def test_a_gradient_comes_back_in_its_dtype_and_no_further_than_it_reaches(dtype, kind):
    largest = float(jnp.finfo(kind).max)
    grads = np.full((DEVICES, 9), largest, jnp.dtype(kind))
    found = averaged(grads, dtype)
    assert found.dtype == kind and np.all(np.isfinite(np.asarray(found, np.float64)))
    np.testing.assert_allclose(np.asarray(found, np.float64), largest, rtol=1 / 8)


def test_what_is_not_floating_passes_and_complex_is_averaged_as_it_is():
    grads = {
        "z": normal(DEVICES, 3) + 1j * normal(DEVICES, 3, seed=1),
        "n": np.arange(DEVICES),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": np.zeros((DEVICES, 0, 3), np.float32),
        "w": normal(DEVICES, 300),
    }
    for dtype in (INT8, jnp.float16):
        found = averaged(grads, dtype)
        assert found["none"] is None and found["masked"] == optax.MaskedNode()
        np.testing.assert_array_equal(found["n"], grads["n"])
        check_rounded(found["z"][3], grads["z"].mean(0), DEVICES)
        assert found["empty"].shape == (DEVICES, 0, 3)


@pytest.mark.parametrize(
    "dtype, near",
    [(None, None), ("float32", None), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_wider_dtypes_are_pmean_in_them(dtype, near):
    grads = normal(DEVICES, 300)
    f = on_each(mean_of(dtype), out_specs=P())
    found = f(grads)
    assert found.dtype == jnp.float32
    if near:
        np.testing.assert_allclose(found, grads.mean(0), atol=near)
    else:
        check_rounded(found, grads.mean(0), DEVICES)
    sent = sent_by_dtype(compiled(f, grads))
    # XLA's CPU backend may add up bfloat16 in float32.
    assert set(sent) <= {"float16": {"f16"}, "bfloat16": {"bf16", "f32"}}.get(
        dtype, {"f32"}
    )


def test_a_mean_in_float16_divides_before_it_sums():
    found = averaged(np.full((DEVICES, 4), 2.0**14, np.float32), "float16")
    np.testing.assert_array_equal(found, 2.0**14)


@cover()
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), ("a",)])
def test_several_axes(axes, check_vma):
    grads = normal(DEVICES, 600)
    f = on_each(
        mean_of(INT8, axes), names=("a", "b"), shape=(4, 2), check_vma=check_vma
    )
    found = np.asarray(f(grads))
    expected = np.repeat(grads.mean(0, keepdims=True), DEVICES, 0)
    if axes == ("a",):
        expected = np.tile(grads.reshape(4, 2, -1).mean(0), (4, 1))
    assert distance(found, expected) < 2e-2
    groups = found[::2], found[1::2]  # devices that have averaged together
    if len(axes) == 2:
        groups = (found,)
    assert all(np.all(bits(rows) == bits(rows)[0]) for rows in groups)


def test_under_jit_scan_remat_and_vmap_and_one_trace(checking_leaks):
    traces = []

    @jax.checkpoint
    def rounds(x):
        traces.append(1)

        def body(total, scale):
            stacked = jax.vmap(mean_of(INT8))(jnp.stack([x * scale, x]))
            return total + stacked[0], None

        zeros = jnp.zeros_like(lax.pmean(x, "data"))
        return lax.scan(body, zeros, jnp.arange(1.0, 4.0))[0]

    f = on_each(rounds, out_specs=P())
    grads = normal(DEVICES, 300)
    x = jax.device_put(grads, NamedSharding(make_mesh(), P("data")))
    f(x), f(2 * x)
    assert len(traces) == 1
    with jax.transfer_guard("disallow"):
        found = jax.block_until_ready(f(x))
    assert distance(found, 6 * grads.mean(0)) < 2e-2


# --- bytes


def compiled(f, *args):
    return f.lower(*args).compile().as_text()


def sent_by_dtype(hlo):
    """Bytes that a device sends, by dtype of the HLO.

    On a ring of n devices, an all-gather, an all-to-all or a reduce-scatter sends
    (n - 1) / n of the whole array's bytes, and an all-reduce sends twice that. A
    collective's result is the whole array, except for a reduce-scatter's, which is 1/n.
    """
    share = (DEVICES - 1) / DEVICES
    weights = {"all-reduce": 2 * share, "reduce-scatter": DEVICES - 1}
    sent = collections.Counter()
    for result, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", hlo):
        for dtype, shape in ARRAY.findall(result):
            width = 1 if dtype == "pred" else int(re.search(r"\d+", dtype)[0]) // 8
            size = math.prod(int(n) for n in shape.split(",") if n)
            sent[dtype] += width * size * weights.get(kind, share)
    return sent


def model_gradients():
    """Arrays as models have them, large and small."""
    shapes = [(128, 512), (512,), (1000, 16), (16,)]
    return [jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32) for shape in shapes]


@cover()
@BOTH
def test_a_quarter_of_the_bytes_of_float32(dtype):
    grads = model_gradients()
    hlo, plain = (
        compiled(on_each(mean_of(d), out_specs=P()), grads) for d in (dtype, None)
    )
    in_float32, sent = sent_by_dtype(plain), sent_by_dtype(hlo)
    numbers = sum(math.prod(x.shape[1:]) for x in grads)
    assert in_float32 == {"f32": numbers * 4 * 2 * 7 / 8}
    assert set(sent) == {"u8"}
    assert 0.25 < sent["u8"] / in_float32["f32"] <= 0.27
    assert len(re.findall(rf" (?:{KINDS})(?:-start)?\(", hlo)) == 2


@cover()
@BOTH
@pytest.mark.parametrize("spec", [P("data"), P(), P(None, "data")], ids=str)
def test_gather_sends_a_quarter_and_stops_before_the_last_with_fsdp(dtype, spec):
    w = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    by_gather = functools.partial(gradient_by_gather, spec)
    bytes_of = lambda d: sent_by_dtype(compiled(by_gather(d), w, batch()))
    sent, in_float32 = bytes_of(dtype), bytes_of(None)
    if spec == P():
        assert set(sent) == {"u8"}
        assert 0.25 < sent["u8"] / in_float32["f32"] <= 0.27
    else:  # parameters are gathered in float32, gradients scattered: as many bytes
        gathered = 512 * 256 * 4 * 7 / 8
        assert in_float32["f32"] == 2 * gathered and sent["f32"] == gathered
        assert 0.25 < sent["u8"] / gathered <= 0.27


# --- gather


def batch():
    return jax.ShapeDtypeStruct((DEVICES, 512), jnp.float32)


def gradient_by_gather(spec, dtype, *, shape=(DEVICES,), names=("data",), **options):
    """The mean over devices of gradients of `sum(tanh(x @ w))`."""

    def local_gradient(w, x):
        def loss_fn(w):
            w = jamp.sharding.gather(w, names, spec, reduce_dtype=dtype, **options)
            return jnp.sum(jnp.tanh(x @ w))

        return jax.grad(loss_fn)(w)

    return jax.jit(
        jax.shard_map(
            local_gradient,
            mesh=make_mesh(shape, names),
            in_specs=(spec, P(names)),
            out_specs=spec,
        )
    )


LAYOUTS = [
    (P("data"), (8,), ("data",)),
    (P(), (8,), ("data",)),
    (P(None, "data"), (8,), ("data",)),
    (P("a"), (4, 2), ("a", "b")),
    (P(None, "b"), (4, 2), ("a", "b")),
    (P("b", "a"), (4, 2), ("a", "b")),
    (P(("b", "a")), (4, 2), ("a", "b")),
    (P(), (4, 2), ("a", "b")),
]


@cover()
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gather_averages_gradients_in_eight_bits(dtype, layout):
    spec, shape, names = layout
    w, x = normal(24, 40) / 5, normal(DEVICES * 2, 24)
    make = functools.partial(gradient_by_gather, spec, shape=shape, names=names)
    expected, found = make(None)(w, x), make(dtype)(w, x)
    rounds = 2 if len(spec) == 2 or spec in (P("a"), P(None, "b")) else 1
    assert found.shape == expected.shape and found.dtype == jnp.float32
    assert 1e-4 < distance(found, expected) <= 2 * math.sqrt(rounds) * BOUNDS[dtype]


def test_gather_in_a_region_of_autocast_and_under_checkpoint():
    w, x = normal(24, 40) / 5, normal(DEVICES * 2, 24)

    def local_gradient(w, x, dtype):
        @jax.checkpoint
        def layer(w, x):
            w = jamp.sharding.gather(w, "data", P("data"), reduce_dtype=dtype)
            return jnp.tanh(x @ w)

        def loss_fn(w):
            with jamp.autocast(dtype=jnp.float16):
                return jnp.sum(layer(w, x)).astype(jnp.float32)

        return jax.grad(loss_fn)(w)

    split = P("data")
    found, expected = (
        jax.jit(
            jax.shard_map(
                lambda w, x, d=dtype: local_gradient(w, x, d),
                mesh=make_mesh(),
                in_specs=split,
                out_specs=split,
            )
        )(w, x)
        for dtype in (INT8, None)
    )
    assert found.dtype == jnp.float32
    assert distance(found, expected) < 2 * BOUNDS[INT8]


def test_gather_leaves_empty_and_complex_parameters():
    params = {"z": jnp.ones(4, jnp.complex64), "empty": jnp.zeros((0, 3))}

    def local_gradient(params):
        def loss_fn(params):
            p = jamp.sharding.gather(params, "data", reduce_dtype=INT8)
            return jnp.sum(jnp.abs(p["z"]) ** 2) + jnp.sum(p["empty"])

        return jax.grad(loss_fn)(params)

    mapped = jax.shard_map(
        local_gradient, mesh=make_mesh(), in_specs=P(), out_specs=P()
    )
    found = jax.jit(mapped)(params)
    np.testing.assert_array_equal(found["z"], 2.0)
    assert found["empty"].shape == (0, 3)


# --- what is not finite


@cover(quick=2)
@BOTH
@pytest.mark.parametrize("bad", [np.inf, np.nan, None])
@pytest.mark.parametrize("device", [0, 5])
def test_an_inf_on_one_device_reaches_all(dtype, bad, device):
    grads = normal(DEVICES, 2, 300)
    if bad is not None:
        grads[device, 1, 299] = bad
    found = np.isnan(averaged(grads, dtype))
    assert found.any() == (bad is not None)
    assert np.all(found == found[0]) and not found[:, 0, :100].any()


@cover()
@pytest.mark.parametrize("by", ["mean", "FSDP", "gather"])
@BOTH
def test_an_inf_on_one_device_skips_the_step_on_all(dtype, by):
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0, axis_name="data")
    spec = P("data") if by == "FSDP" else P()

    def local_step(w, opt_state, x):
        def loss_fn(w):
            if by != "mean":
                w = jamp.sharding.gather(w, "data", spec, reduce_dtype=dtype)
            return jnp.sum(w * x)

        if by == "mean":
            own = lax.pcast(w, "data", to="varying")
            _, grads = jamp.value_and_grad(loss_fn, opt_state)(own)
            grads = jamp.sharding.mean(grads, "data", dtype=dtype)
        else:
            _, grads = jamp.value_and_grad(loss_fn, opt_state)(w)
        return jamp.step(tx, grads, opt_state, w)

    places = spec, P()
    step = jax.jit(
        jax.shard_map(
            local_step, mesh=make_mesh(), in_specs=(*places, P()), out_specs=places
        )
    )
    w = np.ones(16, np.float32)
    w, opt_state = placed((w, tx.init(w)), places)
    for bad in (False, True):
        x = np.ones(16, np.float32)
        x[13] = np.inf if bad else 1.0
        moved, opt_state = step(w, opt_state, x)
        assert opt_state.found_inf == bad
        np.testing.assert_array_equal(moved, w if bad else w - 1.0)
    assert jamp.loss_scale(opt_state) == 2.0


@pytest.mark.parametrize("axis_name", ["data", None])
def test_a_nan_that_one_device_alone_has_skips_the_step_on_all(axis_name):
    # Without `axis_name` each device checks only its own gradients, so the mean must
    # carry an overflow to all of them.
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=4.0, axis_name=axis_name)

    def found_inf(grads):
        w = jnp.ones(300)
        mean = jamp.sharding.mean(grads, "data", dtype=INT8)
        return jamp.step(tx, mean, tx.init(w), w)[1].found_inf

    f = on_each(found_inf, out_specs=P())
    grads = normal(DEVICES, 300)
    assert not f(grads)
    grads[6, 7] = np.nan
    assert f(grads)


# --- error feedback


def total_of(tx, rounds):
    """The sum of the means over rounds of gradients [rounds, ...], and the states."""

    def local(grads):
        def body(state, grads):
            mean, state = tx.update(grads, state)
            return state, mean

        state, means = lax.scan(body, tx.init(grads[0]), grads)
        return jnp.sum(means, 0), jax.tree.map(lambda x: x[0], state)

    specs = P("data")
    mapped = jax.shard_map(
        lambda grads: jax.tree.map(lambda x: x[None], local(grads[0])),
        mesh=make_mesh(),
        in_specs=specs,
        out_specs=specs,
    )
    return jax.jit(mapped)(rounds)


def stateless(dtype):
    return optax.stateless(
        lambda grads, params: jamp.sharding.mean(grads, "data", dtype=dtype)
    )


@cover()
@BOTH
@pytest.mark.parametrize("kind, fold", [("independent", 4), ("the same", 20)])
def test_feedback_makes_the_error_of_50_rounds_small(dtype, kind, fold):
    # A rounding error that is the same in all rounds adds up to 50 times itself, and
    # independent errors to 7 times. With feedback, only the last round's error remains.
    count = 50 if kind == "independent" else 1
    grads = np.broadcast_to(normal(DEVICES, count, 1500), (DEVICES, 50, 1500))
    expected = grads.astype(np.float64).mean(0).sum(0)
    plain, _ = total_of(stateless(dtype), grads)
    feedback = jamp.sharding.error_feedback("data", DEVICES, dtype=dtype)
    found, _ = total_of(feedback, grads)
    assert np.all(bits(found) == bits(found)[0])
    without, left = distance(plain[0], expected), distance(found[0], expected)
    assert without > fold * left


def test_a_round_trip_that_a_compiler_drops_is_seen(monkeypatch):
    encode, decode, before = eight_bits.encode, eight_bits.decode, {}

    def remembered(x, dtype):
        sent = encode(x, dtype)
        before[id(sent)] = sent, x
        return sent

    def dropped(sent, dtype):
        return before[id(sent)][1] if id(sent) in before else decode(sent, dtype)

    monkeypatch.setattr(eight_bits, "encode", remembered)
    monkeypatch.setattr(eight_bits, "decode", dropped)
    with pytest.raises(AssertionError, match=r"> \(4 \*"):
        test_feedback_makes_the_error_of_50_rounds_small(FLOAT8, "independent", 4)


def test_what_was_not_sent_is_in_the_state():
    grads = normal(DEVICES, 10, 1001) * np.linspace(0.1, 2, 10)[:, None]
    grads = grads.astype(np.float32)
    tx = jamp.sharding.error_feedback("data", DEVICES)
    sums, state = total_of(tx, grads)
    expected = grads.astype(np.float64).mean(0).sum(0)
    own = np.asarray(state.own, np.float64).mean(0)
    of_means = np.asarray(state.means).reshape(-1)[:1001]
    assert np.abs(own).max() > 1e-4 and np.abs(of_means).max() > 1e-4
    total = np.float32(sums[0] + own + of_means)
    check_rounded(total, expected, len(grads[0]), largest=np.abs(grads).max())
    assert distance(sums[0], expected) > 1e-4


@functools.cache
class Training:
    """Data parallel with feedback, and an inf in the batch of one device if asked."""

    def __init__(self, dtype=INT8, check_vma=True):
        feedback = jamp.sharding.error_feedback("data", DEVICES, dtype=dtype)
        self.tx = jamp.dynamic_loss_scale(
            optax.chain(feedback, optax.adam(1e-2)), init_scale=8.0, axis_name="data"
        )
        self.params = {"w": normal(20, 30) / 5, "b": np.zeros(30, np.float32)}
        state = jax.jit(self.tx.init)(self.params)
        is_feedback = lambda x: isinstance(x, jamp.sharding.ErrorFeedbackState)
        self.specs = jax.tree.map(
            lambda x: P("data") if is_feedback(x) else P(), state, is_leaf=is_feedback
        )
        self.params, self.state = placed((self.params, state), (P(), self.specs))
        self.traces = 0
        self.step = jax.jit(
            jax.shard_map(
                self.local_step,
                mesh=make_mesh(),
                in_specs=(P(), self.specs, P("data")),
                out_specs=(P(), self.specs),
                check_vma=check_vma,
            )
        )

    def local_step(self, params, opt_state, x):
        self.traces += 1
        own = lax.pcast(params, "data", to="varying")

        def loss_fn(params):
            with jamp.autocast(dtype=jnp.float16):
                return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - 0.5) ** 2)

        _, grads = jamp.value_and_grad(loss_fn, opt_state)(own)
        return jamp.step(self.tx, grads, opt_state, params)

    def batch(self, number):
        x = normal(DEVICES * 2, 20, seed=number)
        if number == 2:
            x[11, 3] = np.inf
        return x

    def run(self, params, state, numbers):
        for number in numbers:
            params, state = self.step(params, state, self.batch(number))
            jax.block_until_ready(state)
        return params, state


@cover()
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_skipped_step_leaves_the_residual_alone(check_vma):
    training = Training() if check_vma else Training(check_vma=False)
    params, before = training.run(training.params, training.state, [0, 1])
    held, after = training.run(params, before, [2])
    assert after.found_inf and not before.found_inf
    residual = before.inner_state[0]
    assert all(np.any(x) for x in jax.tree.leaves(residual))
    check_same_bits(held, params)
    check_same_bits(after.inner_state, before.inner_state)
    moved, last = training.run(held, after, [3])
    assert not last.found_inf and np.any(moved["w"] != held["w"])
    assert np.all(np.isfinite(last.inner_state[0].own["w"]))
    assert not np.array_equal(last.inner_state[0].own["w"], residual.own["w"])
    assert training.traces == 1


def through_msgpack(tree, folder):
    restored = serialization.from_bytes(tree, serialization.to_bytes(tree))
    return jax.device_put(restored, jax.tree.map(lambda x: x.sharding, tree))


def through_orbax(tree, folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", tree)


@cover()
@pytest.mark.parametrize("through", [through_msgpack, through_orbax])
def test_a_checkpoint_keeps_the_residual(through, tmp_path):
    training = Training()
    whole = training.run(training.params, training.state, range(6))
    half = training.run(training.params, training.state, range(3))
    restored = through(half, tmp_path)
    check_same_bits(restored, half)
    check_same_bits(training.run(*restored, range(3, 6)), whole)
    lost = half[1].inner_state[0]
    zeroed = (lost._replace(own=jax.tree.map(np.zeros_like, lost.own)),)
    state = half[1]._replace(inner_state=(*zeroed, *half[1].inner_state[1:]))
    forgetful, _ = training.run(half[0], state, range(3, 6))
    assert np.any(forgetful["w"] != whole[0]["w"])


def test_feedback_keeps_what_it_does_not_send():
    tx = jamp.sharding.error_feedback("data", DEVICES)
    grads = {
        "none": None,
        "masked": optax.MaskedNode(),
        "n": np.arange(DEVICES),
        "z": np.ones((DEVICES, 2), np.complex64),
        "w": normal(DEVICES, 5),
        "half": np.ones((DEVICES, 3), jnp.bfloat16),
    }

    def update(grads):
        state = tx.init(grads)
        assert state.own["masked"] == state.own["z"] == optax.MaskedNode()
        means, state = tx.update(grads, state)
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(grads))
        return means

    found = on_each(update)(grads)
    np.testing.assert_array_equal(found["n"], grads["n"])
    assert found["half"].dtype == jnp.bfloat16 and found["z"].dtype == jnp.complex64
    np.testing.assert_allclose(found["w"][2], grads["w"].mean(0), atol=0.1)


def test_feedback_in_pmap():
    tx = jamp.sharding.error_feedback("data", DEVICES)
    grads = {"w": normal(DEVICES, 40)}
    state = jax.pmap(tx.init, axis_name="data")(grads)
    means, state = jax.pmap(tx.update, axis_name="data")(grads, state)
    np.testing.assert_array_equal(means["w"], averaged(grads, INT8)["w"])
    assert state.own["w"].shape == (DEVICES, 1, 40)


# --- what is refused


def test_a_gradient_that_jax_has_summed_is_refused():
    w, x = jnp.ones(4), jnp.ones((DEVICES, 4))

    def local(average, w, x):
        return average(jax.grad(lambda w: jnp.sum(w * x))(w))

    tx = jamp.sharding.error_feedback("data", DEVICES)
    for average, caller in (
        (mean_of(INT8), "mean"),
        (mean_of(None), "mean"),
        (lambda g: tx.update(g, tx.init(g))[0], "error_feedback's update"),
    ):
        mapped = jax.shard_map(
            functools.partial(local, average),
            mesh=make_mesh(),
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
        match = rf"^{caller}: the gradient at the root does not vary over .'data',."
        with pytest.raises(ValueError, match=match):
            jax.jit(mapped)(w, x)


ACCUMULATED = {
    "feedback": lambda: optax.chain(
        jamp.sharding.error_feedback("data", DEVICES), optax.sgd(1.0)
    ),
    "mean": lambda: optax.chain(
        optax.stateless(lambda g, _: jamp.sharding.mean(g, "data", dtype=INT8)),
        optax.sgd(1.0),
    ),
}


@cover(quick=2)
@pytest.mark.parametrize("name", ACCUMULATED)
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
def test_sums_of_multi_steps_are_split_over_devices(name, is_split):
    tx = optax.MultiSteps(ACCUMULATED[name](), every_k_schedule=2)
    params = {"w": np.zeros(40, np.float32), "b": np.zeros([], np.float32)}
    x, state = normal(2, DEVICES, 40), jax.jit(tx.init)(params)
    is_feedback = lambda node: isinstance(node, jamp.sharding.ErrorFeedbackState)
    place = lambda node: P("data") if is_feedback(node) else P()
    places = jax.tree.map(place, state, is_leaf=is_feedback)
    first = lambda state: state
    if is_split:
        of_all = lambda leaf: np.zeros((DEVICES, *leaf.shape), np.float32)
        state = state._replace(acc_grads=jax.tree.map(of_all, params))
        places = places._replace(acc_grads=P("data"))
        first = lambda state: jax.tree.map(lambda leaf: leaf[0], state)

    def local(params, state, x):
        own = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x[0]) + p["b"] * x[0, 0])(own)
        given = state._replace(acc_grads=first(state.acc_grads))
        updates, new = tx.update(grads, given, params)
        if is_split:
            kept = jax.tree.map(lambda leaf: leaf[None], new.acc_grads)
            new = new._replace(acc_grads=kept)
        return optax.apply_updates(params, updates), new

    specs = {"in_specs": (P(), places, P("data")), "out_specs": (P(), places)}
    step = jax.jit(jax.shard_map(local, mesh=make_mesh(), **specs))
    if not is_split:
        with pytest.raises(ValueError, match="MultiSteps: give it a first axis"):
            step(params, state, x[0])
        return
    params, state = placed((params, state), (P(), places))
    for batch in x:
        params, state = step(params, state, batch)
    np.testing.assert_allclose(params["w"], -x.mean((0, 1)), atol=0.02)
    np.testing.assert_allclose(params["b"], -x.mean((0, 1))[0], atol=0.02)


@walk("dtype", ["float8_e5m2", "float8_e4m3b11fnuz", "int16", "uint8", "int4", "bool"])
@walk("name", ["gather", "mean", "error_feedback"])
def test_other_dtypes_are_refused_and_never_added_up_in_silence(dtype, name):
    with pytest.raises(TypeError, match=rf"dtype must be .*; got .*{dtype}"):
        if name == "gather":
            jamp.sharding.gather(jnp.ones(2), "data", reduce_dtype=dtype)
        elif name == "mean":
            jamp.sharding.mean(jnp.ones(2), "data", dtype=dtype)
        else:
            jamp.sharding.error_feedback("data", 8, dtype=dtype)


@pytest.mark.parametrize(
    "shapes, devices, message",
    [
        (None, DEVICES, "the state must be a ErrorFeedbackState"),
        ({"w": (3,)}, DEVICES, r"of one device.*shapes .* at \['w'\], not"),
        ({"v": (40,)}, DEVICES, "for these gradients; it has another tree"),
        (
            {"w": (40,)},
            4,
            r"devices must be 8, the number of devices along .'data',.; got",
        ),
    ],
)
def test_a_state_of_others_is_refused(shapes, devices, message):
    tx = jamp.sharding.error_feedback("data", devices)

    def update(grads):
        of = shapes and {name: jnp.ones(shape) for name, shape in shapes.items()}
        return tx.update(grads, tx.init(of) if of else optax.EmptyState())[0]

    with pytest.raises(ValueError, match=message):
        on_each(update)({"w": normal(DEVICES, 40)})


def test_a_state_that_is_not_split_over_devices_is_refused():
    tx = jamp.sharding.error_feedback("data", DEVICES)
    grads = normal(DEVICES, 40)
    mapped = jax.shard_map(
        tx.update, mesh=make_mesh(), in_specs=(P("data"), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"that of one device.*P\(axis_name\)"):
        jax.jit(mapped)(grads, tx.init(grads[0]))
