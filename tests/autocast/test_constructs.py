"""A table of constructs and ways to run them: dtypes and values, forward and back."""

from functools import cache, partial

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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.jaxprs import all_half, products
from tests.marks import mostly_slow, slow

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
]

N = 8
half = partial(jamp.autocast, dtype=jnp.float16)


def params(n=N):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (n, n)) / n**0.5,
        "b": jax.random.normal(keys[1], (n,)) / 4,
    }


def batch(rows=4, n=N):
    return jax.random.normal(jax.random.key(1), (rows, n))


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
}


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def loss_of(construct):
    def loss(p, x):
        return jnp.mean(jnp.square(jnp.float32(construct(p, x))))

    return loss


def inside(construct):
    """The construct within the region; a jitted construct gets its casts afterwards."""

    def autocast(p, x):
        with half():
            return construct(p, x)

    return autocast


def eager(loss):
    return jax.value_and_grad(loss)


def jitted(loss):
    return jax.jit(jax.value_and_grad(loss))


def region_around_jit(loss):
    """What JAX traces first, without casts, is rewritten when the region gets it."""
    compiled = jax.jit(loss)

    def around(p, x):
        with half():
            return jnp.float32(compiled(p, x))

    return jax.value_and_grad(around)


def mapped(loss):
    def mean_loss(p, x):
        return jnp.mean(jax.vmap(loss, in_axes=(None, 0))(p, jnp.stack([x, x])))

    return jax.value_and_grad(mean_loss)


def assert_near(results, expected):
    (value, gradients), (true_value, true_gradients) = results, expected
    np.testing.assert_allclose(value, true_value, rtol=5e-3)
    for gradient, truth in zip(
        *map(jax.tree.leaves, (gradients, true_gradients)), strict=True
    ):
        scale = np.abs(truth).max()
        np.testing.assert_allclose(gradient, truth, rtol=0.01, atol=0.005 * scale)


@cache
def in_float32(name):
    """What each way of running a construct must come near to."""
    return jitted(loss_of(CONSTRUCTS[name]))(params(), batch())


# The quick tests hold each construct under jit, and the plain one every way.
WAYS = {"eager": eager, "jit": jitted, "vmap": mapped}
RUNS = [
    (name, way) if way == "jit" or name == "plain" else slow((name, way))
    for name in CONSTRUCTS
    for way in WAYS
    if (name, way) != ("pmap", "vmap")  # pmap cannot be mapped
]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_products_in_float16_gradients_in_float32(name, way):
    p, x = params(), batch()
    step = WAYS[way](loss_of(inside(CONSTRUCTS[name])))
    value, gradients = step(p, x)
    assert dtypes(gradients) == dtypes(p)
    assert_near((value, gradients), in_float32(name))
    all_half(step, p, x)


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


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_jitted_function_is_rewritten(name):
    p, x = params(), batch()
    step = region_around_jit(loss_of(CONSTRUCTS[name]))
    value, gradients = step(p, x)
    assert dtypes(gradients) == dtypes(p)
    assert_near((value, gradients), in_float32(name))
    all_half(step, p, x)


@pytest.mark.parametrize("name", mostly_slow(CONSTRUCTS, "plain", "scan", "remat"))
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


LEAKING = ["pmap"]  # it keeps its arguments
# Those in which functions are kept, and perhaps values with them.
KEEPING = ["jit in jit", "scan", "cond", "custom_vjp in scan", "remat", "shard_map"]


@pytest.mark.parametrize(
    "name",
    mostly_slow([name for name in CONSTRUCTS if name not in LEAKING], *KEEPING),
)
def test_nothing_leaks(name, checking_leaks):
    jax.make_jaxpr(jitted(loss_of(inside(CONSTRUCTS[name]))))(params(), batch())


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

    x = w = jnp.eye(N)
    with half():
        y, z = function(x, w)
    assert y.dtype == jnp.float16 and z.dtype == jnp.float32

    # Traced in float32 first, the kernel still gets what it was traced with.
    @jax.jit
    def traced(x, w):
        return call(x @ w, w)

    with half():
        assert traced(x, w).dtype == jnp.float32
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
    "scan": lambda: nn.scan(
        Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )(),
    "remat": lambda: nn.remat(Block)(),
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


@pytest.mark.parametrize("name", mostly_slow(LIFTED, "remat scan", "jit"))
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
    np.testing.assert_allclose(value, loss(variables), rtol=5e-3)
    all_half(step, variables)
    with half():  # parameters are made in float32 inside a region too
        again = model.init(jax.random.key(0), x)
    plain = model.init(jax.random.key(0), x)  # not jitted: its last bits are others
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), again, plain)


CELLS = [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.MGUCell, nn.SimpleCell]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_networks(cell):
    model, x = nn.RNN(cell(N)), jnp.stack([batch()] * 3, axis=1)
    with half():
        variables = model.init(jax.random.key(0), x)
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype("float32")}

    def loss(variables):
        return jnp.mean(jnp.float32(model.apply(variables, x)) ** 2)

    step = jax.value_and_grad(half()(loss))
    value, gradients = step(variables)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, loss(variables), rtol=5e-3)
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


@pytest.mark.parametrize(
    "way", mostly_slow(["eager", "jit", "remat", "scan", "jit inside"], "jit", "remat")
)
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

    gradients = nnx.grad(loss)(models)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def parameters_in_half():
    f16, key, keys = jnp.float16, jax.random.key(0), jax.random.split(jax.random.key(0))
    linear = lambda key: nnx.Linear(4, 4, param_dtype=f16, rngs=nnx.Rngs(key))
    exp = lambda key, shape, dtype: jnp.exp(jax.random.normal(key, shape, dtype))
    return {
        "nnx.Linear": lambda: linear(0),
        "nnx.Linear, own init": lambda: nnx.Linear(
            4, 4, param_dtype=f16, kernel_init=exp, rngs=nnx.Rngs(0)
        ),
        "nnx.Conv": lambda: nnx.Conv(2, 4, (3,), param_dtype=f16, rngs=nnx.Rngs(0)),
        "nnx.Embed": lambda: nnx.Embed(8, 4, param_dtype=f16, rngs=nnx.Rngs(0)),
        "nnx.jit": lambda: nnx.jit(lambda: linear(0))(),
        "nnx.vmap": lambda: nnx.vmap(linear)(keys),
        "eqx.nn.Linear": lambda: eqx.nn.Linear(4, 4, dtype=f16, key=key),
        "eqx.nn.Embedding": lambda: eqx.nn.Embedding(8, 4, dtype=f16, key=key),
        "eqx.filter_jit": lambda: eqx.filter_jit(
            lambda: eqx.nn.Embedding(8, 4, dtype=f16, key=key)
        )(),
        "lecun_normal": lambda: nn.initializers.lecun_normal()(key, (4, 4), f16),
        "truncated_normal": lambda: jax.jit(
            lambda: nn.initializers.truncated_normal(0.02)(key, (4, 4), f16)
        )(),
        "jax.random.normal": lambda: jax.random.normal(key, (4, 4), f16),
    }


@pytest.mark.parametrize(
    "name", mostly_slow(parameters_in_half(), *[*parameters_in_half()][::4])
)
def test_half_precision_parameters_made_in_a_region_are_those_made_outside(name):
    make = parameters_in_half()[name]
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
