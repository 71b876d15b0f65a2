"""Constructs in each way to run them and each precision: dtypes and values."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import scheduling_groups
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.bits import check_rounded
from tests.jaxprs import all_half, products, products_of
from tests.marks import cover

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
]

N = 8
half = partial(jamp.autocast, dtype=jnp.float16)


def params(n=N):
    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(n, n)) / n**0.5, "b": rng.normal(size=n) / 4}
    return jax.tree.map(lambda x: jnp.asarray(x.astype(np.float32)), p)


def batch(rows=4, n=N):
    x = np.random.default_rng(1).normal(size=(rows, n))
    return jnp.asarray(x.astype(np.float32))


def dense(p, x):
    return x @ p["w"] + p["b"]


@jax.custom_jvp
def squared(x, w):
    return (x @ w) ** 2


@squared.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = x @ w
    return y**2, 2 * y * (dx @ w + x @ dw)


@jax.custom_vjp
def doubled(x, w):
    return 2 * (x @ w)


def doubled_forward(x, w):
    return 2 * (x @ w), (x, w)


def doubled_backward(residuals, g):
    x, w = residuals
    return 2 * (g @ w.T), 2 * (x.T @ g)


doubled.defvjp(doubled_forward, doubled_backward)


def batched_custom(p, x):
    @jax.custom_batching.custom_vmap
    def product(x, w):
        return x @ w

    @product.def_vmap
    def _(size, in_batched, x, w):
        w_axis = 0 if in_batched[1] else None
        return jax.vmap(jnp.matmul, in_axes=(0, w_axis))(x, w), True

    return jax.vmap(product, in_axes=(0, None))(x, p["w"])


def scanned(p, x):
    def body(carry, _):
        carry = jnp.tanh(dense(p, carry))
        return carry, carry @ p["w"]

    carry, stacked = lax.scan(body, x, None, length=3)
    return carry + stacked.sum(0)


def while_loop(p, x):  # not differentiable: its result is a constant
    last = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, dense(p, c[1])),
                          (0, x))[1]  # fmt: skip
    return dense(p, lax.stop_gradient(last))


def shard_mapped(p, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(dense, mesh=mesh, in_specs=(P(), P("data")),
                           out_specs=P("data"))  # fmt: skip
    return mapped(p, x)


def parallel_map(p, x):
    product = jax.pmap(dense, in_axes=(None, 0))
    return product(p, x.reshape(2, -1, x.shape[-1])).reshape(x.shape)


def saving_names(p, x):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("y"))
    def block(p, x):
        return jnp.tanh(checkpoint_name(dense(p, x), "y"))

    return dense(p, block(p, x))


def linearized(p, x):
    y, tangent = jax.linearize(partial(dense, p), x)
    return y + tangent(x)


def vector_jacobian(p, x):
    y, vjp = jax.vjp(partial(dense, p), x)
    return y + vjp(y)[0]


def branches(p, x):
    options = [dense, lambda p, x: x, lambda p, x: jnp.tanh(x @ p["w"])]
    index = jnp.int32(2 * (jnp.sum(x) > -1e6))
    return lax.switch(index, options, p, x) + lax.switch(0, options, p, x)


def rematerialized_loops(p, x):
    step = lambda c, _: (jnp.tanh(c @ p["w"]), None)
    x = jax.checkpoint(lambda x: lax.scan(step, x, None, length=3)[0])(x)
    pairs = x.reshape(-1, 2, x.shape[-1])
    of_pair = lambda r: jnp.sin(r @ p["w"])
    return jax.checkpoint(lambda x: lax.map(of_pair, x))(pairs).reshape(x.shape)


def with_hints(p, x):
    """Functions with a word for the compiler."""
    from jax.experimental import compute_on

    make = getattr(compute_on, "compute_on2", compute_on.compute_on)
    space = jax.memory.Space.Device
    make = partial(make, compute_type="device_host", out_memory_spaces=space)
    x = make(lambda p, x: jnp.sin(x @ p["w"]))(p, x)
    return scheduling_groups.scheduling_group("first")(dense)(p, x)


CONSTRUCTS = {
    "plain": dense,
    "einsum": lambda p, x: jnp.einsum("bi,ij->bj", x, p["w"]),
    "jit": jax.jit(dense),
    "jit in jit": jax.jit(lambda p, x: jax.jit(dense)(p, jax.jit(dense)(p, x))),
    "grad inside": lambda p, x: jax.grad(lambda x: dense(p, x).sum())(x) + x,
    "vjp": vector_jacobian,
    "jvp": lambda p, x: jax.jvp(partial(dense, p), (x,), (x,))[1] + dense(p, x),
    "linearize": linearized,
    "vmap": lambda p, x: jax.vmap(lambda row: p["w"] @ row + p["b"])(x),
    "scan": scanned,
    "while": while_loop,
    "fori": lambda p, x: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(dense(p, x)), x),
    "cond": lambda p, x: lax.cond(x.sum() > -1e6, dense, lambda p, x: x, p, x),
    "switch": branches,
    "associative_scan": lambda p, x: (
        x @ lax.associative_scan(jnp.matmul, jnp.stack([p["w"]] * 4))[-1]
    ),
    "map": lambda p, x: lax.map(lambda row: p["w"] @ row, x),
    "remat": lambda p, x: dense(p, jax.checkpoint(dense)(p, x)),
    "remat, dots saved": lambda p, x: jax.checkpoint(
        dense, policy=jax.checkpoint_policies.dots_saveable
    )(p, x),
    "remat, names saved": saving_names,
    "custom_jvp": lambda p, x: squared(x, p["w"]),
    "custom_jvp in jit": jax.jit(lambda p, x: squared(x @ p["w"], p["w"])),
    "custom_vjp": lambda p, x: doubled(x, p["w"]),
    "custom_vjp in scan": lambda p, x: lax.scan(
        lambda c, _: (jnp.tanh(doubled(c, p["w"])), None), x, None, length=2
    )[0],
    "custom_batching": batched_custom,
    "shard_map": shard_mapped,
    "shard_map in jit": jax.jit(shard_mapped),
    "pmap": parallel_map,
    "remat of loops": rematerialized_loops,
}
if jax.__version_info__ >= (0, 10, 2):  # JAX 0.10.0 fails itself
    CONSTRUCTS["hints"] = with_hints


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def loss_of(construct):
    def loss(p, x):
        return jnp.mean(jnp.square(jnp.float32(construct(p, x))))

    return loss


def inside(construct, dtype=jnp.float16):
    """The construct within a region; a jitted construct gets its casts afterwards."""

    def autocast(p, x):
        with jamp.autocast(dtype):
            return construct(p, x)

    return autocast


def eager(loss):
    return jax.value_and_grad(loss)


def jitted(loss):
    return jax.jit(jax.value_and_grad(loss))


def region_around_jit(loss, dtype=jnp.float16):
    """What JAX traces first, without casts, is rewritten when the region gets it."""
    compiled = jax.jit(loss)

    def around(p, x):
        with jamp.autocast(dtype):
            return jnp.float32(compiled(p, x))

    return jax.value_and_grad(around)


def mapped(loss):
    def mean_loss(p, x):
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(p, jnp.stack([x, x])))

    return jax.value_and_grad(mean_loss)


# How near a loss and its gradients are to those of float32.


def by_number(results, expected):
    (value, gradients), (true_value, true_gradients) = results, expected
    np.testing.assert_allclose(value, true_value, rtol=5e-3)
    for gradient, truth in zip(
        *map(jax.tree.leaves, (gradients, true_gradients)), strict=True
    ):
        scale = np.abs(truth).max()
        np.testing.assert_allclose(gradient, truth, rtol=0.01, atol=0.005 * scale)


def apart(result, truth):
    """The relative distance of two trees, as vectors."""
    result, truth = (
        np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])
        for tree in (result, truth)
    )
    assert np.linalg.norm(truth) > 0
    return np.linalg.norm(result - truth) / np.linalg.norm(truth)


def by_norm(results, expected, *, of_value, of_gradients):
    np.testing.assert_allclose(results[0], expected[0], rtol=of_value)
    assert apart(results[1], expected[1]) < of_gradients


# In which precision the products of a construct run.

FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
# Products in a derivative that the construct takes, or that its user wrote, those in a
# jitted `shard_map`, and those of a single row, are none that qualify for float8.
NONE_IN_FLOAT8 = {
    "grad inside",
    "vjp",
    "linearize",
    "map",
    "custom_jvp",
    "custom_vjp",
    "custom_vjp in scan",
    "shard_map in jit",
    "pmap",
}
SOME_IN_FLOAT8 = {
    "jvp",
    "associative_scan",
    "custom_jvp in jit",
    "remat of loops",
}
# JAX differentiates the tangents' products of a custom_jvp as they are.
FLOAT32_IF_SCALED = {"custom_jvp", "custom_jvp in jit"}


def in_float16(name, jaxpr, rewritten):
    found = products_of(jaxpr, outer=False)
    assert found and all(dtypes == {"float16"} for dtypes in found), found


def in_float8(name, jaxpr, rewritten):
    found = [operands <= FLOAT8 for operands in products_of(jaxpr)]
    is_fixed = rewritten and name == "shard_map"
    assert any(found) == (name not in NONE_IN_FLOAT8 and not is_fixed)
    if not rewritten:
        assert all(found) == (name not in NONE_IN_FLOAT8 | SOME_IN_FLOAT8)


def in_scaled_float16(name, jaxpr, rewritten):
    found = products_of(jaxpr)
    assert found and all(len(dtypes) == 1 for dtypes in found)
    if not rewritten:
        assert {"float16"} in found or name in FLOAT32_IF_SCALED
        assert ({"float32"} in found) == (name in FLOAT32_IF_SCALED)


class Precision(NamedTuple):
    """A region, what it does to products, and how near its numbers are."""

    dtype: Any
    check: Callable
    near: Callable
    shape: tuple[int, int] = (4, N)  # of the batch
    factor: float = 1.0  # of the loss


SMALL = 2.0**-60  # float16 ends at 2**-24
PRECISIONS = {
    "float16": Precision(jnp.float16, in_float16, by_number),
    "float8": Precision(
        "float8",
        in_float8,
        partial(by_norm, of_value=0.05, of_gradients=0.15),
        (32, 32),
    ),
    "scaled": Precision(
        jamp.ScaledFloat16(),
        in_scaled_float16,
        partial(by_norm, of_value=5e-3, of_gradients=0.005),
        factor=SMALL,
    ),
}


@cache
def in_float32(name, shape=(4, N)):
    """What each way of running a construct must come near to."""
    return jitted(loss_of(CONSTRUCTS[name]))(params(shape[1]), batch(*shape))


def check(precision, name, step, rewritten=False):
    """Runs a step, whose loss has the precision's factor."""
    _, check_products, near, shape, factor = PRECISIONS[precision]
    p, x = params(shape[1]), batch(*shape)
    value, gradients = step(p, x)
    assert dtypes(gradients) == dtypes(p)
    truth = jax.tree.map(lambda y: y * factor, in_float32(name, shape))
    near((value, gradients), truth)
    check_products(name, jax.make_jaxpr(step)(p, x), rewritten)


def times(factor, loss):
    return loss if factor == 1 else lambda p, x: loss(p, x) * factor


# The quick tests hold each construct under jit, and the plain one eagerly too.
WAYS = {"eager": eager, "jit": jitted, "vmap": mapped}
OF_RECIPES = ["scan", "cond", "remat", "custom_vjp", "shard_map in jit"]
OF_RECIPES += [name for name in CONSTRUCTS if name not in OF_RECIPES]
RUNS = [
    *(("float16", name, "jit") for name in CONSTRUCTS),
    ("float16", "plain", "eager"),
    *((p, name, "jit") for name in OF_RECIPES for p in ("float8", "scaled")),
    ("float16", "plain", "vmap"),
    *((p, "plain", way) for p in ("float8", "scaled") for way in ("eager", "vmap")),
    *(("float16", n, w) for n in CONSTRUCTS for w in ("eager", "vmap") if n != "plain"),
]
RUNS.remove(("float16", "pmap", "vmap"))  # pmap cannot be mapped
QUICK = len(CONSTRUCTS) + 1 + 3


@cover(quick=QUICK)
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_products_are_in_the_precision_and_gradients_in_float32(run):
    precision, name, way = run
    dtype, *_, factor = PRECISIONS[precision]
    loss = times(factor, loss_of(inside(CONSTRUCTS[name], dtype)))
    check(precision, name, WAYS[way](loss))


FEW = ["jit", "scan", "cond", "while", "remat", "custom_vjp", "shard_map"]
REWRITTEN = [
    *(("float16", name) for name in FEW),
    *((p, name) for name in OF_RECIPES for p in ("float8", "scaled")),
    *(("float16", name) for name in CONSTRUCTS if name not in FEW),
]


@cover(quick=8)
@pytest.mark.parametrize("case", REWRITTEN, ids=" ".join)
def test_a_jitted_function_is_rewritten(case):
    precision, name = case
    dtype, *_, factor = PRECISIONS[precision]
    loss = times(factor, loss_of(CONSTRUCTS[name]))
    check(precision, name, region_around_jit(loss, dtype), rewritten=True)


def test_a_rule_of_custom_vmap_gives_the_dtype_of_the_function():
    @jax.custom_batching.custom_vmap
    def product(x):
        return x @ jnp.ones((4, 3))

    @product.def_vmap
    def _(size, is_batched, x):
        return x @ jnp.ones((4, 3)), True

    inside = jamp.autocast(dtype=jnp.float16)(product)
    one, many = inside(jnp.ones(4)), jax.vmap(inside)(jnp.ones((2, 4)))
    assert one.dtype == many.dtype == jnp.float32


@cover(quick=2)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_jax_grad_inside_the_region_gives_the_same_dtypes(name):
    p, x, construct = params(), batch(), CONSTRUCTS[name]
    with half():
        value, gradients = jax.value_and_grad(loss_of(construct))(p, x)
    assert value.dtype == jnp.float32
    assert dtypes(gradients) == dtypes(p)

    def step(p, x):
        with half():
            return jax.value_and_grad(loss_of(construct))(p, x)

    all_half(step, p, x)
    all_half(jax.jit(step), p, x)


# Those in which functions are kept, and perhaps values with them.
KEEPING = ["jit in jit", "scan", "cond", "custom_vjp in scan", "remat", "shard_map"]
LEAKS = [
    *(("float16", name) for name in KEEPING),
    *((precision, name) for precision in ("float8", "scaled") for name in KEEPING),
    *(("float16", name) for name in CONSTRUCTS if name not in (*KEEPING, "pmap")),
]  # `pmap` keeps its arguments


@cover(quick=5)
@pytest.mark.parametrize("leak", LEAKS, ids=" ".join)
def test_nothing_leaks(leak, checking_leaks):
    precision, name = leak
    dtype, *_, shape, factor = PRECISIONS[precision]
    loss = times(factor, loss_of(inside(CONSTRUCTS[name], dtype)))
    jax.make_jaxpr(jitted(loss))(params(shape[1]), batch(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["both", "one region", "region inside"])
def test_a_gradient_penalty_over_rematerialized_loops(order):
    p, x = params(), batch()

    def penalty(p, inner, outer):
        with jamp.autocast(jnp.float16, enabled=outer):
            loss = loss_of(rematerialized_loops)
            gradient = jax.grad(half()(loss) if inner else loss)(p, x)["w"]
            return jnp.sum(gradient**2)

    wheres = {"one region": (0, 1), "region inside": (1, 0), "both": (1, 1)}
    inner, outer = map(bool, wheres[order])
    found = jax.jit(jax.grad(partial(penalty, inner=inner, outer=outer)))
    expected = jax.jit(jax.grad(partial(penalty, inner=False, outer=False)))(p)
    assert apart(found(p)["w"], expected["w"]) < 0.02
    all_half(found, p)


def test_a_leak_is_found(checking_leaks):  # the control
    kept = []
    with pytest.raises(Exception, match="Leaked"):
        jax.make_jaxpr(lambda x: kept.append(x) or x)(1.0)


def test_kernels_and_callbacks_are_left_alone():
    from jax.experimental import pallas as pl

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    def call(x, w):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, shape, interpret=True)(x, w)

    def function(x, w):
        y = call(x @ w, w.astype(jnp.float16))
        z = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y, z

    x = w = jnp.asarray(np.eye(N, dtype=np.float32))
    y, z = jax.jit(half()(function))(x, w)
    assert y.dtype == jnp.float16 and z.dtype == jnp.float32

    # Traced in float32 first, the kernel still gets what it was traced with.
    @jax.jit
    def traced(x, w):
        return call(x @ w, w)

    assert jax.eval_shape(half()(traced), x, w).dtype == jnp.float32
    found = products(half()(traced), x, w)
    assert {"float16"} in found and {"float32"} in found


def test_an_exported_function_is_the_autocast_one():
    p, x = params(), batch()
    exported = jax.export.export(jax.jit(inside(dense)))(p, x)
    assert exported.out_avals[0].dtype == jnp.float16
    np.testing.assert_array_equal(exported.call(p, x), inside(dense)(p, x))
    with half():  # in a region it keeps its types
        assert exported.call(p, x @ p["w"] + x).dtype == jnp.float16
    found = products(half()(exported.call), p, x)
    assert not found  # it is a custom call by now


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(N)(x)), None


LIFTED = {
    "remat": lambda: nn.remat(Block)(),
    "scan": lambda: nn.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )(),
    "remat scan": lambda: nn.scan(
        nn.remat(Block),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )(),
    "vmap": lambda: nn.vmap(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
    )(),
    "jit": lambda: nn.jit(Block)(),
}


@cover()
@pytest.mark.parametrize("name", LIFTED)
def test_linen_lifted_transforms(name):
    model, x = LIFTED[name](), batch()
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def loss(variables):
        y, _ = model.apply(variables, x)
        return jnp.mean(jnp.float32(y) ** 2)

    def step(variables):
        return jax.value_and_grad(half()(loss))(variables)

    value, gradients = jax.jit(step)(variables)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, jax.jit(loss)(variables), rtol=5e-3)
    all_half(step, variables)
    # Parameters are made in float32 inside a region too, drawn by a polynomial with
    # nine coefficients, and scaled three times.
    again = jax.jit(half()(model.init))(jax.random.key(0), x)
    check_rounded(again, variables, 12)


CELLS = [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.MGUCell, nn.SimpleCell]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_networks(cell):
    model, x = nn.RNN(cell(N)), jnp.stack([batch()] * 3, axis=1)
    variables = jax.jit(half()(model.init))(jax.random.key(0), x)
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype("float32")}

    def loss(variables):
        return jnp.mean(jnp.float32(model.apply(variables, x)) ** 2)

    step = jax.value_and_grad(half()(loss))
    value, gradients = jax.jit(step)(variables)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, jax.jit(loss)(variables), rtol=5e-3)
    all_half(step, variables)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(N, N, rngs=rngs)
        self.norm = nnx.BatchNorm(N, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(N, N, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.linear(x)))))


def nnx_loss(model, x):
    return jnp.mean(jnp.float32(model(x)) ** 2)


@cover()
@pytest.mark.parametrize("way", ["jit", "eager", "remat", "scan", "jit inside"])
def test_nnx_transforms_update_their_state(way):
    def run(autocast):
        model, x = Net(nnx.Rngs(0)), batch()
        loss = nnx.remat(nnx_loss) if way == "remat" else nnx_loss
        if way == "scan":

            def loss(model, x):
                body = nnx.scan(
                    lambda m, x: (m, nnx_loss(m, x)), in_axes=(nnx.Carry, 0)
                )
                return jnp.mean(body(model, jnp.stack([x, x]))[1])

        loss = nnx.jit(loss) if way == "jit inside" else loss
        step = nnx.value_and_grad(autocast(loss))
        step = nnx.jit(step) if way == "jit" else step
        value, gradients = step(model, x)
        return value, gradients, model

    value, gradients, model = run(half())
    true_value, _, true_model = run(lambda f: f)
    np.testing.assert_allclose(value, true_value, rtol=0.01)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert model.norm.mean[...].dtype == model.norm.var[...].dtype == jnp.float32
    np.testing.assert_allclose(model.norm.var[...], true_model.norm.var[...], rtol=0.01)
    assert model.dropout.rngs.count[...] == true_model.dropout.rngs.count[...]


def test_nnx_parallel_ensemble():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0)
    def create(rngs):
        return nnx.Linear(N, N, rngs=rngs)

    models = create(nnx.Rngs(0))

    @half()
    @nnx.vmap(in_axes=(0, None))
    def forward(model, x):
        return model(x)

    def loss(models):
        return jnp.sum(jnp.float32(forward(models, batch())))

    gradients = nnx.jit(nnx.grad(loss))(models)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def linear(key=0):
    return nnx.Linear(4, 4, param_dtype=jnp.float16, rngs=nnx.Rngs(key))


def exp_of_normal(key, shape, dtype):
    return jnp.exp(jax.random.normal(key, shape, dtype))


def embedding():
    return eqx.nn.Embedding(8, 4, dtype=jnp.float16, key=jax.random.key(0))


def drawn(initializer):
    return initializer(jax.random.key(0), (4, 4), jnp.float16)


IN_HALF = {
    "nnx.Linear": linear,
    "eqx.nn.Linear": lambda: eqx.nn.Linear(
        4, 4, dtype=jnp.float16, key=jax.random.key(0)
    ),
    "jax.random.normal": lambda: drawn(jax.random.normal),
    "nnx.Linear, own init": lambda: nnx.Linear(
        4, 4, param_dtype=jnp.float16, kernel_init=exp_of_normal, rngs=nnx.Rngs(0)
    ),
    "nnx.Conv": lambda: nnx.Conv(2, 4, (3,), param_dtype=jnp.float16, rngs=nnx.Rngs(0)),
    "nnx.Embed": lambda: nnx.Embed(8, 4, param_dtype=jnp.float16, rngs=nnx.Rngs(0)),
    "nnx.jit": lambda: nnx.jit(linear)(),
    "nnx.vmap": lambda: nnx.vmap(linear)(jax.random.split(jax.random.key(0))),
    "eqx.nn.Embedding": embedding,
    "eqx.filter_jit": lambda: eqx.filter_jit(embedding)(),
    "lecun_normal": lambda: drawn(nn.initializers.lecun_normal()),
    "truncated_normal": lambda: jax.jit(
        lambda: drawn(nn.initializers.truncated_normal(0.02))
    )(),
}


@cover(quick=3)
@pytest.mark.parametrize("name", IN_HALF)
def test_half_precision_parameters_made_in_a_region_are_those_made_outside(name):
    make = IN_HALF[name]
    arrays = lambda tree: [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    outside = arrays(make())
    with half():
        inside = arrays(make())
        assert (jnp.ones((2, 4)) @ jnp.ones((4, 2))).dtype == jnp.float16  # as ever
    assert {leaf.dtype for leaf in outside} == {jnp.dtype("float16")}
    for given, made in zip(inside, outside, strict=True):
        assert given.dtype == made.dtype
        np.testing.assert_array_equal(given, made)
