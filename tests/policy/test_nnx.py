"""`jamp.nnx.with_policy`: casts by module, paths, NNX's transformations."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
from tests.jaxprs import products
from tests.marks import cover

from .nnx_models import PRODUCTS, TOKENS, Block, Model

MIXED = jamp.get_policy("mixed_float16")
FULL = jnp.dtype("float32")

pytestmark = pytest.mark.usefixtures("standard_promotion")


def pure(model, *kinds):
    return nnx.as_pure(nnx.state(model, *kinds))


def model_products(model, *args):
    graphdef, state = nnx.split(model)
    return products(lambda state: nnx.merge(graphdef, state)(*args), state)


def test_it_is_still_the_model():
    plain = Model(nnx.Rngs(0))
    mixed = jamp.nnx.with_policy(plain, MIXED)
    assert isinstance(mixed, Model)
    assert isinstance(mixed.head, nnx.Linear)
    assert type(plain) is Model
    assert type(plain.head.kernel) is nnx.Param
    assert plain.embed.dtype == FULL
    assert mixed.w is not plain.w
    assert mixed.w.get_raw_value() is plain.w.get_raw_value()
    copies = nnx.clone(mixed), copy.deepcopy(mixed), pickle.loads(pickle.dumps(mixed))
    for other in copies:
        assert type(other) is type(mixed)
        assert model_products(other, TOKENS) == [{"float16"}] * PRODUCTS
    again = jamp.nnx.with_policy(plain, "mixed_float16")
    assert nnx.graphdef(again) == nnx.graphdef(mixed)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["mixed_float16", "half"])
def test_training_is_traced_once_and_keeps_its_dtypes(text):
    mixed = jamp.nnx.with_policy(Model(nnx.Rngs(0)), text)
    tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(1e-2)), 2.0**8)
    optimizer = nnx.Optimizer(mixed, tx, wrt=nnx.Param)
    before = jax.tree.map(lambda x: x.dtype, pure(mixed))
    traces = []

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer, tokens):
        traces.append(tokens)

        def loss_fn(model):
            logits = model(tokens).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(8)[None] % 3
            )
            return jamp.scale_loss(losses.mean(), optimizer.opt_state), losses.mean()

        (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(mixed, optimizer, TOKENS)) for _ in range(20)]
    assert len(traces) == 1
    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.map(lambda x: x.dtype, pure(mixed)) == before
    assert isinstance(mixed, Model)
    assert mixed.calls[...] == 20


def test_parameters_are_cast_in_calls_alone():
    mixed = jamp.nnx.with_policy(Model(nnx.Rngs(0)), MIXED)
    kernel = mixed.head.kernel
    assert kernel[...].dtype == kernel.get_value().dtype == kernel.dtype == FULL
    assert jnp.asarray(kernel).dtype == (kernel + 1).dtype == FULL
    kernel[...] = kernel[...] * 2
    assert kernel.get_raw_value().dtype == FULL
    assert isinstance(kernel, nnx.Param)
    assert type(kernel).__name__ == "Param"
    assert mixed.w.tag == "mine"


@cover()
@pytest.mark.parametrize("cache_dtype", [jnp.float16, jnp.float32])
def test_a_decoding_cache_keeps_its_dtype(cache_dtype):
    make = lambda: nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    attention = nnx.jit(make)()
    mixed = jamp.nnx.with_policy(attention, MIXED)
    for model, dtype in ((attention, FULL), (mixed, cache_dtype)):
        model.init_cache((2, 3, 4), dtype=dtype)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    run = nnx.jit(lambda models, x: [model(x) for model in models])
    for token in np.split(x, 3, axis=1):
        out, expected = run([mixed, attention], token)
        np.testing.assert_allclose(out, expected, atol=2e-3)
    assert mixed.cached_key[...].dtype == cache_dtype


class Average(nnx.Module):
    """Keeps a running average of its inputs, in a Variable of the given kind."""

    def __init__(self, kind=nnx.Param):
        self.mean = kind(jnp.zeros(4))

    def __call__(self, x):
        self.mean[...] = 0.999 * self.mean[...] + 0.001 * x.mean(0)
        return x


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_parameter_is_not_written_from_its_rounded_value(wrap):
    x = 1 + jax.random.uniform(jax.random.key(0), (8, 4))

    @wrap
    def run(model, x):
        for _ in range(20):
            model(x)

    run(plain := Average(), x)
    with pytest.raises(ValueError, match="Average writes a parameter while"):
        run(jamp.nnx.with_policy(Average(), MIXED), x)
    cures = [
        jamp.nnx.with_policy(Average(), MIXED, {Average: "full"}),
        jamp.nnx.with_policy(Average(nnx.BatchStat), "c=f16,o=f32"),
    ]
    for model in cures:
        run(model, x)
        assert model.mean[...].dtype == FULL
    np.testing.assert_array_equal(cures[0].mean[...], plain.mean[...])
    np.testing.assert_allclose(cures[1].mean[...], plain.mean[...], rtol=1e-3)


def test_a_parameter_that_is_written_keeps_the_dtype_that_it_is_stored_in():
    class Last(nnx.Module):
        def __init__(self):
            self.whole, self.part = nnx.Param(jnp.zeros(4)), nnx.Param(jnp.ones(4) / 3)

        def __call__(self, x):
            self.whole.set_value(x[0])
            self.part[1] = x[0, 0]
            return self.whole[...]

    last = jamp.nnx.with_policy(Last(), "p=f16,c=f32,o=f32")
    assert last(jnp.full((2, 4), 0.1)).dtype == FULL
    assert last.whole[...].dtype == last.part[...].dtype == jnp.float16
    with pytest.raises(ValueError, match="Last writes a parameter while"):
        jamp.nnx.with_policy(Last(), MIXED)(jnp.ones((2, 4)))


@cover()
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_norms_of_weights_read_and_write_what_is_stored(norm):
    def make():
        rngs = nnx.Rngs(0)
        return norm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    x = jax.random.normal(jax.random.key(1), (2, 4))
    with pytest.raises(ValueError, match=f'{{{norm.__name__}: "full"}}'):
        jamp.nnx.with_policy(make(), MIXED)(x)
    overrides = {norm: "full", "layer_instance": MIXED}
    plain, mixed = make(), jamp.nnx.with_policy(make(), MIXED, overrides)
    for _ in range(3):
        expected, out = plain(x), mixed(x)
    stored = [nnx.as_pure(nnx.state(model)) for model in (plain, mixed)]
    jax.tree.map(np.testing.assert_array_equal, *stored)
    np.testing.assert_allclose(out, expected, atol=5e-3)
    assert {"float16"} in model_products(mixed, x)


def test_parts_are_called_by_themselves():
    mixed = jamp.nnx.with_policy(Model(nnx.Rngs(0)), MIXED)
    x = jnp.ones((1, 16))
    assert model_products(mixed.head, x) == [{"float16"}]
    assert mixed.head(x).dtype == jnp.float16  # its result in the model
    assert mixed.project(x).dtype == FULL  # a method of the outermost one


def test_a_norm_computes_in_float64_where_its_policy_does():
    with jax.enable_x64(True):
        norm = jamp.nnx.with_policy(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), "float64")
        assert norm.scale.dtype == jnp.float64
        x = jnp.arange(4.0)
        # float32 holds the squares of these numbers to within 10.
        np.testing.assert_allclose(norm(1e4 + x), (x - 1.5) / x.std(), rtol=1e-4)


def test_a_shared_parameter_is_cast_by_its_reader():
    class Head(nnx.Module):
        def __init__(self, embedding):
            self.embedding = embedding

        def __call__(self, x):
            return x @ self.embedding[...].T

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 16, rngs=rngs)
            self.linear = nnx.Linear(16, 16, rngs=rngs)
            self.unembed = Head(self.embed.embedding)

        def __call__(self, tokens):
            return self.unembed(self.linear(self.embed(tokens)))

    mixed = jamp.nnx.with_policy(Tied(nnx.Rngs(0)), MIXED, {"unembed": "full"})
    assert mixed.unembed.embedding is mixed.embed.embedding
    assert model_products(mixed, TOKENS) == [{"float16"}, {"float32"}]


def test_checkpoints_load_both_ways():
    plain = Model(nnx.Rngs(0))
    mixed = jamp.nnx.with_policy(Model(nnx.Rngs(1)), MIXED)
    graphdef, _ = nnx.split(mixed)
    for state in (nnx.state(plain), nnx.as_pure(nnx.state(plain))):
        fresh = nnx.clone(mixed)
        nnx.update(fresh, state)
        assert model_products(fresh, TOKENS) == [{"float16"}] * PRODUCTS
        jax.tree.map(
            np.testing.assert_array_equal,
            pure(fresh, nnx.Param),
            pure(plain, nnx.Param),
        )
    merged = nnx.merge(graphdef, nnx.state(plain))
    assert model_products(merged, TOKENS) == [{"float16"}] * PRODUCTS
    nnx.update(plain, nnx.state(mixed))
    assert model_products(plain, TOKENS) == [{"float32"}] * PRODUCTS


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_eval_mode_and_sow():
    class Sower(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(16, rngs)

        def __call__(self, x):
            y = self.block(x)
            self.sow(nnx.Intermediate, "y", y)
            return y

    mixed = jamp.nnx.with_policy(Sower(nnx.Rngs(0)), MIXED)
    mixed.eval()
    assert mixed.block.dropout.deterministic
    mixed(jnp.ones((1, 16)))
    kept = nnx.pop(mixed, nnx.Intermediate)
    assert jax.tree.leaves(kept)[0].dtype == jnp.float16


def test_sharding_metadata():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh):
        linear = nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))
        mixed = jamp.nnx.with_policy(linear, "half")
        spec = nnx.get_partition_spec(nnx.state(mixed))["kernel"].get_raw_value()
        assert spec == jax.P(None, "model")
        kernel = mixed.kernel.get_raw_value()
        assert kernel.sharding.spec == jax.P(None, "model")
        assert kernel.dtype == jnp.float16
        out = nnx.jit(lambda model, x: model(x))(mixed, jnp.ones((2, 8)))
    assert out.dtype == jnp.float16


def test_abstract_models():
    abstract = nnx.eval_shape(lambda: jamp.nnx.with_policy(Model(nnx.Rngs(0)), "half"))
    assert abstract.head.kernel.get_raw_value().dtype == jnp.float16
    late = jamp.nnx.with_policy(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), "half")
    assert late.head.kernel.get_raw_value().dtype == jnp.float16


def test_jax_transformations_of_a_closure():
    integers = lambda key, shape, dtype: jax.random.randint(key, shape, -8, 9) * 1.0
    linear = nnx.Linear(4, 4, kernel_init=integers, rngs=nnx.Rngs(0))
    mixed = jamp.nnx.with_policy(linear, MIXED)
    x = jnp.ones((3, 4))
    expected = mixed(x)  # exact in any order
    for run in (jax.jit(mixed), jax.vmap(mixed), jax.checkpoint(mixed)):
        np.testing.assert_array_equal(run(x), expected)


# Ways into a model.


@pytest.mark.parametrize("decorate", [nnx.jit, nnx.remat, jax.jit])
def test_decorated_methods(decorate):
    class Part(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.w = nnx.Param(jnp.eye(4))

        @decorate
        def __call__(self, x):
            return self.helper(self.linear(x) @ self.w)

        def helper(self, x):
            seen.append(x.dtype)
            return x @ self.w.T

    class Whole(nnx.Module):
        def __init__(self, rngs):
            self.part = Part(rngs)
            self.head = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.part(x))

    seen, x, rngs = [], jnp.ones((1, 4)), nnx.Rngs(0)
    part = jamp.nnx.with_policy(Part(rngs), MIXED)
    assert part(x).dtype == FULL
    whole = jamp.nnx.with_policy(Whole(rngs), MIXED, {"part": "c=bf16,o=half"})
    assert whole(x).dtype == FULL
    assert seen == [jnp.float16, jnp.bfloat16]
    assert model_products(whole, x) == [*[{"bfloat16"}] * 3, {"float16"}]


def test_every_way_to_read_a_parameter():
    class Reads(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(4))
            self.many = nnx.List([nnx.Param(jnp.eye(4))])
            self.tree = nnx.Param({"w": jnp.eye(4)})

        def __call__(self, x):
            w = self.w
            values = [
                w[...],
                w.T,
                w.sum(),
                w + 0,
                -w,
                jnp.asarray(w),
                w.astype(w.dtype),
            ]
            values += [w.get_value(), self.many[0][...], self.tree["w"], w[0]]
            dtypes.extend(v.dtype for v in values)
            assert w.shape == (4, 4)
            return x

    dtypes = []
    jamp.nnx.with_policy(Reads(), MIXED)(jnp.ones((1, 4)))
    assert set(dtypes) == {jnp.dtype("float16")}


@pytest.mark.slow
def test_attention_runs_on_a_cpu():
    """Cast by hand, JAX refuses to compile it: F16_F16_F32 is not supported there."""
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    mixed = jamp.nnx.with_policy(attention, MIXED)
    x = jax.random.normal(jax.random.key(0), (1, 4, 8))
    run = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2)))
    (value, grads), (expected, others) = run(mixed, x), run(attention, x)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert all(grad.dtype == FULL for grad in jax.tree.leaves(grads))
    grads, others = nnx.as_pure(grads), nnx.as_pure(others)
    distance = optax.tree.norm(optax.tree.sub(grads, others))
    assert distance < 0.02 * optax.tree.norm(others)


def test_linen_modules_in_a_bridge():
    import flax.linen as nn

    x = jnp.ones((1, 4))

    class Whole(nnx.Module):
        def __init__(self, linen):
            self.part = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(x)
            self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(self.part(x))

    plain = jamp.nnx.with_policy(Whole(nn.Dense(4)), MIXED)
    assert plain(x).dtype == FULL
    governed = jamp.linen.with_policy(nn.Dense(4), MIXED)
    mixed = jamp.nnx.with_policy(Whole(governed), MIXED)
    assert model_products(mixed, x) == [{"float16"}] * 2


@pytest.mark.skipif(not hasattr(nnx, "with_vars"), reason="not in this Flax")
def test_hijax_variables_are_refused():
    linear = nnx.with_vars(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), hijax=True)
    with pytest.raises(NotImplementedError, match="hijax"):
        jamp.nnx.with_policy(linear, MIXED)
