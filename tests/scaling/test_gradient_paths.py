"""Every path that a gradient takes: an overflow of a plain cast stays one.

Where the casts that a path names would make a number inf, the path does not make it
finite, or the step would not be skipped and the scale would grow. And what these casts
leave finite stays finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from jamp._scaling import arithmetic, eight_bits

from ..marks import cover

DEVICES = 8
pytestmark = [
    pytest.mark.devices(DEVICES),
    pytest.mark.usefixtures("standard_promotion"),
]
F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
WIDE, EIGHT = (F32, F16, BF16), (jnp.int8, jnp.float8_e4m3fn)

# Each value has a block of its own, in which eight bits gain by clipping the value.
BLOCK = 64
VALUES = [1.0, 65504.0, -65504.0, 65519.0, 65521.0, 66e3, 67e3, -67e3, 68e3, 7e4, 1e6]
VALUES = np.array([*VALUES, 3e38, 3.4e38, np.inf, -np.inf, np.nan], np.float32)
BESIDE = np.linspace(1.0, 6e4, BLOCK - 1, dtype=np.float32)
GRADIENTS = np.stack([np.append(BESIDE, value) for value in VALUES])
assert len(VALUES) % DEVICES == 0  # or blocks would be shared


def cast(*dtypes):
    """The values through plain casts, one after the other."""
    values = jnp.asarray(VALUES)
    for dtype in dtypes:
        values = values.astype(dtype)
    return np.asarray(values, np.float32)


def check(name, found, *dtypes):
    """`found` is finite where the values are finite after plain casts."""
    expected, found = cast(*dtypes), np.asarray(found, np.float32)
    wrong = np.isfinite(found) != np.isfinite(expected)
    assert not wrong.any(), (name, VALUES[wrong.reshape(-1, len(VALUES)).any(0)])


def on_devices(function):
    """Results of `function` of each gradient on eight devices: [devices, ...] each."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda values: jax.tree.map(lambda x: x[None], function(values))
    run = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False
    )
    return jax.jit(run)(GRADIENTS)


@cover(quick=2, ci=18)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("used", WIDE, ids=str)
@pytest.mark.parametrize("own", WIDE, ids=str)
def test_gather(own, used, split):
    cases = (None, *WIDE, *EIGHT)

    def gradients(values):
        def gradient(reduced):
            gather = lambda param: jamp.sharding.gather(
                param,
                "data",
                P("data") if split else None,
                param_dtype=used,
                reduce_dtype=reduced,
                block=BLOCK,
            )
            _, pull = jax.vjp(gather, jnp.ones(values.shape, own))
            given = jnp.tile(values, (DEVICES, 1)) if split else values
            return pull(given.astype(used))[0][:, -1]

        return [gradient(reduced) for reduced in cases]

    for reduced, found in zip(cases, on_devices(gradients), strict=True):
        between = [reduced] if reduced in WIDE else []
        check((own, used, reduced), found, used, *between, own)


@cover(ci=3)
@pytest.mark.parametrize("own", WIDE, ids=str)
def test_mean_and_error_feedback(own):
    means, feedbacks = (None, *WIDE, *EIGHT), EIGHT

    def averaged(values):
        def mean(dtype):
            given = values.astype(own)
            return jamp.sharding.mean(given, "data", dtype=dtype, block=BLOCK)[:, -1]

        def feedback(dtype):
            tx = jamp.sharding.error_feedback("data", DEVICES, dtype=dtype, block=BLOCK)
            given = values.astype(own)
            return tx.update(given, tx.init(given))[0][:, -1]

        return [*map(mean, means)], [*map(feedback, feedbacks)]

    of_mean, of_feedback = on_devices(averaged)
    for dtype, found in zip(means, of_mean, strict=True):
        between = [dtype, own] if dtype in WIDE else []
        check(("mean", own, dtype), found, own, *between)
    for dtype, found in zip(feedbacks, of_feedback, strict=True):
        check(("error_feedback", own, dtype), found, own)


@cover(quick=3, ci=9)
@pytest.mark.parametrize("scale", [2.0**16, 1.0, 2.0**126])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_unscale_and_the_step(dtype, scale):
    tx = jamp.dynamic_loss_scale(optax.sgd(1.0), init_scale=scale)
    inverse = arithmetic.invert(jnp.float32(scale))
    grads = jnp.asarray(VALUES).astype(dtype)
    check(("unscale", dtype), arithmetic.unscale(grads, inverse), dtype)

    def skips(grad):
        params = [jnp.ones([], own) for own in WIDE]
        return [jamp.step(tx, grad, tx.init(p), p)[1].found_inf for p in params]

    for own, skipped in zip(WIDE, jax.jit(jax.vmap(skips))(grads), strict=True):
        check(("step", dtype, own), np.where(skipped, np.inf, 0.0), dtype)


PATHS = {
    "a policy": lambda dtype, f: jamp.Policy(F32, dtype, F32).wrap(f),
    "a cast": lambda dtype, f: lambda param: f(param.astype(dtype)),
    "cast_inputs": lambda dtype, f: jamp.autocast(BF16)(
        jamp.autocast(cast_inputs=dtype)(f)
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_casts_of_parameters(name):
    for dtype in WIDE:

        def pulled(value, dtype=dtype):
            """The gradient of a parameter whose copy has this cotangent."""
            loss_fn = PATHS[name](dtype, lambda param: param.astype(F32) * value)
            return jax.grad(loss_fn)(jnp.float32(1.0))

        check((name, dtype), jax.jit(jax.vmap(pulled))(VALUES), dtype)


@cover()
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_bytes_of_a_block(dtype):
    known = jnp.dtype(dtype)
    sent = jax.jit(lambda grads: eight_bits.encode(grads, known))(GRADIENTS)
    found = jax.jit(lambda sent: eight_bits.decode(sent, known))(sent)
    check(dtype, found[:, -1], F32)
