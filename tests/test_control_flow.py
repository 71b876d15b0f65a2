"""Whatever reads a jaxpr, around each construct that holds one: a table of both.

The parameters of these constructs differ between releases of JAX. The numbers are small
integers and powers of two, so that what is expected is exact, in float16 too.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp

from .jaxprs import all_half
from .marks import cover

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.every_release,
]

eye = np.eye(2, dtype=np.float32)
BIG = np.diag(np.float32([2048, 1]))
half = jamp.autocast(jnp.float16)


def product(w, x):
    return (x @ w).astype(jnp.float32)


def logarithm(w, x):
    return jnp.log(x @ w)


# From a function of a matrix and a batch of two rows, to another that gives the same.


def scan(f):
    def run(w, x):
        def body(last, row):
            y = f(w, row[None])[0]
            return y, y

        last, stacked = lax.scan(body, jnp.zeros(2), x)
        return jnp.stack([stacked[0], last])

    return run


def scan_backward(f):
    """All arrays are carried, from the last row to the first."""

    def run(w, x):
        def body(carry, i):
            w, x, y = carry
            return (w, x, y.at[i].set(f(w, x[i][None])[0])), None

        start = w, x, jnp.zeros(x.shape)
        return lax.scan(body, start, jnp.arange(2), reverse=True)[0][2]

    return run


def while_loop(f):
    def run(w, x):
        first = jnp.int32(0), jnp.zeros(x.shape)
        last = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(w, x)), first)
        return last[1]

    return run


def fori_loop(f):
    return lambda w, x: lax.fori_loop(0, 2, lambda i, y: f(w, x), jnp.zeros(x.shape))


def cond(f):
    zeros = lambda w, x: jnp.zeros(x.shape)
    return lambda w, x: lax.cond(x[0, 0] > 0, f, zeros, w, x)


def switch(f):
    zeros, ones = (
        lambda w, x, make=make: make(x.shape) for make in (jnp.zeros, jnp.ones)
    )
    index = lambda x: jnp.int32(x[0, 0] > 0)
    return lambda w, x: lax.switch(index(x), [zeros, f, ones], w, x)


def custom_jvp(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return wrapped


def custom_vjp(f):
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(functools.partial(jax.vjp, f), lambda vjp, ct: vjp(ct))
    return wrapped


def vmap(f):
    return jax.vmap(lambda w, row: f(w, row[None])[0], in_axes=(None, 0))


def shard_map(f):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = P("data")
    return jax.shard_map(f, mesh=mesh, in_specs=(P(), rows), out_specs=rows)


def pmap(f):
    mapped = jax.pmap(f, in_axes=(None, 0))
    return lambda w, x: mapped(w, x.reshape(2, 1, 2)).reshape(2, 2)


def nested(f):
    return jax.jit(cond(scan(jax.checkpoint(f))))


CONSTRUCTS = {
    "jit": jax.jit,
    "scan": scan,
    "scan_backward": scan_backward,
    "while_loop": while_loop,
    "fori_loop": fori_loop,
    "cond": cond,
    "switch": switch,
    "checkpoint": jax.checkpoint,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "vmap": vmap,
    "shard_map": shard_map,
    "pmap": pmap,
    "nested": nested,
}


def summed(construct, f=product):
    """A loss of a matrix and a batch, with a derivative: a `while_loop` has none."""
    inside = construct(f)
    if construct is not while_loop:
        return lambda w, x: jnp.sum(inside(w, x))
    return lambda w, x: jnp.sum(f(w, lax.stop_gradient(inside(w, x)).astype(x.dtype)))


def check_autocast(construct):
    for function in (half(construct(product)), construct(half(product))):
        np.testing.assert_array_equal(np.float32(function(eye, BIG)), BIG)
        np.testing.assert_array_equal(np.float32(jax.jit(function)(eye, BIG)), BIG)
    for loss in (half(summed(construct)), summed(construct, half(product))):
        assert all_half(jax.grad(loss), eye, BIG)
        grads = jax.jit(jax.grad(loss))(eye, BIG)
        assert grads.dtype == jnp.float32
        np.testing.assert_array_equal(grads, [[2048, 2048], [1, 1]])


def check_policy(construct):
    wrapped = jamp.get_policy("c=float16,o=float32").wrap(summed(construct))
    assert all_half(wrapped, eye, BIG)
    assert wrapped(eye, BIG) == 2049


def check_explain(construct):
    found = jamp.debug.explain(summed(construct), jnp.float16)(eye, BIG)
    products = [row for row in found.rows if row.op == "dot_general"]
    assert products and found.to_dict()["matmul_share"] == 1
    assert {row.rule for row in products} == {"lower"}, found


def check_find_nonfinite(construct):
    report = jamp.debug.find_nonfinite(construct(logarithm))(eye, eye)
    assert {op["primitive"] for op in report.to_dict()["ops"]} == {"log"}
    loss = summed(construct, half(product))
    report = jax.jit(jamp.debug.find_nonfinite(jax.grad(loss)))(eye, eye * 2.0**20)
    assert {op["primitive"] for op in report.to_dict()["ops"]} == {
        "convert_element_type"
    }


def check_calibrate(construct):
    report = jamp.calibrate(summed(construct), dtype=jnp.bfloat16)(eye, BIG)
    assert {row.choice for row in report.rows} == {"bfloat16"}, report


class Training:
    """A step that overflows at a scale above 2**15, in the cotangent of the product."""

    def __init__(self, construct, init_scale):
        self.loss = summed(construct, half(product))
        self.tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=init_scale)
        self.state = jnp.asarray(eye), self.tx.init(eye)

    def step(self, state, x):
        w, opt_state = state
        loss, grads = jamp.value_and_grad(self.loss, opt_state)(w, x)
        return jamp.step(self.tx, grads, opt_state, w), loss


def check_moved(w):
    np.testing.assert_array_equal(w, [[0.5, -0.5], [-0.5, 0.5]])


def check_step(construct):
    training = Training(construct, 2.0**10)
    (w, _), loss = jax.jit(training.step)(training.state, eye)
    assert loss == 2
    check_moved(w)


def check_retry(construct):
    training = Training(construct, 2.0**18)
    (w, opt_state), loss = jax.jit(jamp.retry(training.step))(training.state, eye)
    assert loss == 2 and jamp.loss_scale(opt_state) == 2.0**15
    assert jamp.metrics(opt_state)["retried_steps"] == 3
    check_moved(w)


def check_find_loss_scale(construct):
    training = Training(construct, 2.0**4)
    state = jamp.find_loss_scale(training.step, training.state, eye)
    assert jamp.loss_scale(state) == 2.0**15


def check_grad_scaler(construct):
    loss = summed(construct, half(product))
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(eye)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    scaler = jamp.GradScaler(init_scale=2.0**16)

    @nnx.jit
    def step(model, optimizer, scaler, x):
        grads = nnx.grad(lambda m: scaler.scale(loss(m.kernel[...], x)))(model)
        skipped = scaler.step(optimizer, model, grads)
        scaler.update()
        return skipped

    assert step(model, optimizer, scaler, eye)
    assert not step(model, optimizer, scaler, eye)
    assert scaler.get_scale() == 2.0**15
    check_moved(model.kernel[...])


READERS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_moved"
}
# It needs the derivative of the loop, which newer releases of JAX have in this case.
LEFT_OUT = {("calibrate", "while_loop")}
CASES = [
    case for case in itertools.product(READERS, CONSTRUCTS) if case not in LEFT_OUT
]


@cover(quick=6)
@pytest.mark.parametrize(("reader", "construct"), CASES)
def test_the_inside_of_a_construct_is_read(reader, construct):
    READERS[reader](CONSTRUCTS[construct])


# A whole training inside a construct: three steps, of which the second overflows.
BATCHES = np.stack([eye, eye + np.inf, eye])


def python_loop(step, state, batches):
    for x in batches:
        state = jax.jit(step)(state, x)
    return state


def scanned(step, state, batches):
    return lax.scan(lambda state, x: (step(state, x), None), state, batches)[0]


def while_looped(step, state, batches):
    is_left = lambda c: c[0] < len(batches)
    body = lambda c: (c[0] + 1, step(c[1], batches[c[0]]))
    return lax.while_loop(is_left, body, (jnp.int32(0), state))[1]


def fori_looped(step, state, batches):
    body = lambda i, state: step(state, batches[i])
    return lax.fori_loop(0, len(batches), body, state)


def branched(step, state, batches):
    held = lambda state, x: state
    run = lambda state, x: lax.cond(jnp.any(x != 7), step, held, state, x)
    return scanned(run, state, batches)


def mapped(step, state, batches):
    run = lambda state: scanned(step, state, batches)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    return jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(run))(stacked))


def sharded(step, state, batches):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    train = functools.partial(scanned, step)
    places = dict(in_specs=(P(), P(None, "data")), out_specs=P())
    return jax.jit(jax.shard_map(train, mesh=mesh, **places))(state, batches)


def parallel(step, state, batches):
    train = jax.pmap(functools.partial(scanned, step), "data", in_axes=(None, 0))
    by_device = jnp.moveaxis(batches.reshape(3, 2, 1, 2), 1, 0)
    return jax.tree.map(lambda x: x[1], train(state, by_device))


LOOPS = [scanned, python_loop, while_looped, fori_looped, branched]
LOOPS += [mapped, sharded, parallel]


@cover()
@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_runs_inside(loop):
    axis = "data" if loop in (sharded, parallel) else None
    tx = jamp.dynamic_loss_scale(optax.sgd(0.5), init_scale=2.0**10, axis_name=axis)

    def step(state, x):
        w, opt_state = state
        whole = lambda w: 2 * jamp.sharding.gather(w, axis) if axis else w
        loss_fn = lambda w: jnp.sum(half(product)(whole(w), x))
        _, grads = jamp.value_and_grad(loss_fn, opt_state)(w)
        return jamp.step(tx, grads, opt_state, w)

    w = jnp.asarray(eye)
    w, opt_state = loop(step, (w, tx.init(w)), jnp.asarray(BATCHES))
    np.testing.assert_array_equal(w, eye - 1)
    metrics = jamp.metrics(opt_state)
    assert metrics["skipped_steps"] == 1 and metrics["loss_scale"] == 2.0**9


def nnx_scanned(step, objects, batches):
    def body(objects, x):
        step(objects, x)
        return objects

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(objects, batches)


def nnx_fori_looped(step, objects, batches):
    def body(i, objects):
        step(objects, batches[i])
        return objects

    nnx.fori_loop(0, len(batches), body, objects)


def nnx_while_looped(step, objects, batches):
    def body(carry):
        i, objects = carry
        step(objects, batches[i])
        return i + 1, objects

    nnx.while_loop(lambda carry: carry[0] < 3, body, (jnp.int32(0), objects))


def nnx_jitted(step, objects, batches):
    for x in batches:
        nnx.jit(step)(objects, x)


def nnx_branched(step, objects, batches):
    held = lambda objects, x: None
    for x in batches:
        nnx.cond(jnp.any(x != 7), step, held, objects, x)


NNX_LOOPS = [nnx_scanned, nnx_jitted, nnx_fori_looped, nnx_while_looped, nnx_branched]


@cover()
@pytest.mark.parametrize("loop", NNX_LOOPS)
def test_a_training_of_objects_runs_inside(loop):
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(eye)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    scaler = jamp.GradScaler(init_scale=2.0**10)

    def step(objects, x):
        model, optimizer, scaler = objects
        loss_fn = lambda m: scaler.scale(jnp.sum(half(m)(x).astype(jnp.float32)))
        scaler.step(optimizer, model, nnx.grad(loss_fn)(model))
        scaler.update()

    loop(step, nnx.List([model, optimizer, scaler]), jnp.asarray(BATCHES))
    np.testing.assert_array_equal(model.kernel[...], eye - 1)
    assert scaler.get_scale() == 2.0**9
    assert jamp.metrics(scaler)["skipped_steps"] == 1
