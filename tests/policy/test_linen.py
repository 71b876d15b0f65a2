"""`jamp.linen.with_policy`: casts by module, paths, lifted transformations."""

import copy
import os
import pickle
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state

import jamp
from shared.jaxprs import equations
from tests.jaxprs import products
from tests.marks import cover

from .linen_models import MUTABLE, RNGS, Block, Compact, Setup

MIXED = jamp.get_policy("mixed_float16")
X = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(16, 8)

    def __call__(self, x):
        tokens = jnp.arange(4)
        return self.embed.attend(self.embed(tokens) + x)


def test_dtypes_between_modules():
    model = jamp.linen.with_policy(Compact(), MIXED)
    variables = jax.eval_shape(model.init, RNGS, X)
    run = dict(rngs=RNGS, mutable=MUTABLE, capture_intermediates=True)
    y, state = jax.eval_shape(lambda v: model.apply(v, X, **run), variables)
    kept = state["intermediates"]
    out, _ = jax.eval_shape(model.init_with_output, RNGS, X)
    assert out.dtype == jnp.float32
    for name in ("Dense_0", "BatchNorm_0", "Dropout_0", "Own_0", "Dense_1"):
        assert kept[name]["__call__"][0].dtype == jnp.float16, name
    assert kept["h"][0].dtype == jnp.float16
    assert kept["CheckpointBlock_0"]["LayerNorm_0"]["__call__"][0].dtype == jnp.float16
    assert y.dtype == jnp.float32


def norm_dtypes(model, variables):
    found = set()
    run = jax.make_jaxpr(lambda v: model.apply(v, X, rngs=RNGS, mutable=MUTABLE)[0])
    for eqn in equations(run(variables)):
        if eqn.primitive.name in ("rsqrt", "square", "integer_pow"):
            found |= {v.aval.dtype.name for v in eqn.invars}
    return found


class OfItsOwn(nn.Module):
    """A module with a parameter of its own."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return nn.Dense(4)(x * scale)


def test_the_override_of_the_root_is_for_its_own_parameters():
    model = jamp.linen.with_policy(OfItsOwn(), "half")
    whole = jamp.linen.with_policy(OfItsOwn(), "half", {OfItsOwn: "full"})
    found = [jax.eval_shape(m.init, RNGS, X)["params"] for m in (model, whole)]
    assert [p["scale"].dtype for p in found] == [jnp.float16, jnp.float32]


@pytest.mark.parametrize(
    "method",
    [
        "encode",
        "twice",
        "_private",
        Setup.encode,
        Setup._private,
        Setup().encode,
        jamp.linen.with_policy(Setup(), MIXED).encode,
        lambda model, x: model.encode(x),
        lambda model, x: model.own(x),
    ],
)
def test_other_methods(method):
    model = jamp.linen.with_policy(Setup(), MIXED)
    params = jax.eval_shape(model.init, RNGS, X)
    run = lambda params: model.apply(params, X, method=method)
    assert jax.eval_shape(run, params).dtype == jnp.float32
    assert products(run, params) == [{"float16"}]
    assert model.describe() == "a model"


def test_bound_modules():
    model = jamp.linen.with_policy(Setup(), MIXED)
    params = jax.jit(model.init)(RNGS, X)
    bound = model.bind(params)
    np.testing.assert_array_equal(bound(X), model.apply(params, X))
    assert products(lambda p: model.bind(p).encode(X), params) == [{"float16"}]


def test_names_of_a_module_stay():
    plain = Setup(name="gpt")
    model = jamp.linen.with_policy(plain, MIXED)
    assert type(model).__name__ == "Setup"
    assert model.name == "gpt"
    again = jamp.linen.with_policy(Setup(name="gpt"), "mixed_float16")
    assert model == again
    assert hash(model) == hash(again)
    assert model != jamp.linen.with_policy(Setup(name="gpt"), "half")
    model = jamp.linen.with_policy(Setup(), MIXED)
    for other in pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model.copy():
        assert other == model
    assert "Setup" in model.tabulate(RNGS, X)


def test_tied_parameters_are_cast_by_their_reader():
    model = jamp.linen.with_policy(Tied(), MIXED)
    params = jax.eval_shape(model.init, RNGS, X)
    assert products(lambda p: model.apply(p, X), params) == [{"float16"}]


def test_parameters_read_as_variables_are_cast():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(8)
            x = layer(x)
            kernel = layer.variables["params"]["kernel"]
            assert kernel.shape == (8, 8)
            assert kernel.T.dtype == jnp.float16
            return jnp.dot(x, kernel) + kernel[0] + jnp.asarray(kernel).sum()

    model = jamp.linen.with_policy(Model(), MIXED)
    params = jax.eval_shape(nn.Dense(8).init, RNGS, X)
    params = {"params": {"Dense_0": params["params"]}}
    assert products(lambda p: model.apply(p, X), params) == [{"float16"}] * 2


def test_decoding_caches_have_the_compute_dtype():
    plain = nn.MultiHeadDotProductAttention(2, decode=True)
    model, x = jamp.linen.with_policy(plain, MIXED), X[None]
    inits = jax.jit(lambda: (model.init(RNGS, x), plain.init(RNGS, x)))
    variables, expected = inits()
    jax.tree.map(np.testing.assert_array_equal, variables["params"], expected["params"])
    for name in ("cached_key", "cached_value"):
        assert variables["cache"][name].dtype == jnp.float16
    y, state = jax.jit(partial(model.apply, mutable="cache"))(variables, x[:, :1])
    assert y.dtype == jnp.float32
    assert state["cache"]["cache_index"] == 1


def test_parameters_that_a_module_changes():
    class Decays(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (8,))
            if not self.is_initializing() and self.is_mutable_collection("params"):
                self.put_variable("params", "w", w / 2)
            return nn.Dense(8)(x) * w

    model = jamp.linen.with_policy(Decays(), MIXED)
    variables = jax.jit(model.init)(RNGS, X)
    _, state = model.apply(variables, X, mutable=["params"])
    kernel = state["params"]["Dense_0"]["kernel"]
    assert state["params"]["w"][0] == 0.5
    assert state["params"]["w"].dtype == jnp.float32
    np.testing.assert_array_equal(kernel, variables["params"]["Dense_0"]["kernel"])


@pytest.mark.parametrize("norm", [nn.WeightNorm, nn.SpectralNorm])
def test_norms_of_weights_are_refused(norm):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            more = {"update_stats": True} if norm is nn.SpectralNorm else {}
            return norm(nn.Dense(8))(x, **more)

    variables = jax.eval_shape(Model().init, RNGS, X)
    for module in (Model(), norm(nn.Dense(8))):
        model = jamp.linen.with_policy(module, MIXED)
        with pytest.raises(NotImplementedError, match=f"{norm.__name__} does not run"):
            model.init(RNGS, X)
        with pytest.raises(NotImplementedError, match=r"jamp\.autocast"):
            model.apply(variables, X)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_init_makes_the_parameters_of_the_plain_module(jit):
    models = [jamp.linen.with_policy(Setup(), policy) for policy in (MIXED, "half")]
    inits = jit(lambda: [m.init(RNGS, X)["params"] for m in (Setup(), *models)])
    plain, made, half = inits()
    jax.tree.map(np.testing.assert_array_equal, made, plain)
    dtype = jax.tree.leaves(half)[0].dtype
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype), plain)
    jax.tree.map(np.testing.assert_array_equal, half, rounded)


# Overrides.


def test_an_override_of_the_output():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen["hidden"] = (x := nn.Dense(8, name="hidden")(x)).dtype
            seen["logits"] = (x := nn.Dense(8, name="logits")(x)).dtype
            return x

    seen = {}
    overrides = {"logits": "c=f16,o=f32", "hidden": "p=f32,c=f32,o=bf16"}
    model = jamp.linen.with_policy(Model(), "half", overrides)
    out, _ = jax.eval_shape(model.init_with_output, RNGS, X)
    assert out.dtype == jnp.float16
    assert seen == {"hidden": jnp.bfloat16, "logits": jnp.float32}


def test_modules_of_one_override_hand_on_what_they_compute():
    class Nested(nn.Module):
        depth: int = 0

        @nn.compact
        def __call__(self, x):
            if self.depth:
                seen.append((x := Nested(self.depth - 1)(x)).dtype)
            return nn.Dense(8)(x)

    seen = []
    model = jamp.linen.with_policy(Nested(1), "full", {Nested: MIXED})
    out, _ = jax.eval_shape(model.init_with_output, RNGS, X)
    assert (seen[-1], out.dtype) == (jnp.float16, jnp.float32)


class Cell(nn.Module):
    """A recurrent cell that Flax does not have."""

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(8)(x) + nn.Dense(8)(carry["h"]))
        return {"h": carry, "n": 0}, carry


class Chain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.LayerNorm()(x))


SHARE = {"variable_broadcast": "params", "split_rngs": {"params": False}}
STACK = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
LOOPS = {
    "cell": lambda x: nn.scan(Cell, **SHARE)(name="loop")({"h": x, "n": 0}, X[:, None]),
    "layers": lambda x: nn.scan(Block, **STACK, length=3)(name="loop")(x, None),
    "remat_scan": lambda x: [nn.remat_scan(Chain, lengths=(3,))(name="loop")(x)],
}


@pytest.mark.parametrize("start", [None, "float32"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_starts_in_the_dtype_that_it_computes_in(loop, start):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            return jax.tree.leaves(LOOPS[loop](x.astype(start or x.dtype))[0])[0]

    model = jamp.linen.with_policy(Model(), MIXED, start and {"loop": "full"})
    variables = jax.jit(model.init)(RNGS, X)
    found = products(model.apply, variables, X)
    assert all(dtypes == {start or "float16"} for dtypes in found[1:])
    both = jax.jit(lambda v: (model.apply(v, X), Model().apply(v, X)))
    np.testing.assert_allclose(*both(variables), atol=0.05)


class Writer(nn.RNNCellBase):
    """Reads what it has drawn from its own logits."""

    @nn.compact
    def __call__(self, carry, x):
        state, last = carry
        state, y = nn.LSTMCell(8)(state, last)
        logits = nn.Dense(64)(y).astype(jnp.float32)
        drawn = jax.random.categorical(self.make_rng("draw"), logits)
        return (state, jax.nn.one_hot(drawn, 8)), (logits, drawn)

    @property
    def num_feature_axes(self):
        return 1


class Text(nn.Module):
    @nn.compact
    def __call__(self, x):
        state = nn.LSTMCell(8, parent=None).initialize_carry(
            jax.random.key(0), x[:, 0].shape
        )
        writer = nn.RNN(Writer(), split_rngs={"params": False, "draw": True})
        return writer(x, initial_carry=(state, x[:, 0]))


@pytest.mark.slow
def test_what_a_scanned_cell_draws_under_a_policy():
    x = jnp.ones((4, 6, 8))
    keys = {"params": jax.random.key(0), "draw": jax.random.key(1)}
    variables = Text().init(keys, x)
    half = jamp.linen.with_policy(Text(), MIXED)
    logits, drawn = half.apply(variables, x, rngs=keys)
    plain, drawn_plain = Text().apply(variables, x, rngs=keys)
    np.testing.assert_array_equal(drawn, drawn_plain)
    np.testing.assert_allclose(logits, plain, atol=2e-3)


@cover()
@pytest.mark.parametrize("policy", [MIXED, "half"])
def test_a_float32_cache_takes_half_precision(policy):
    class Cached(nn.Module):
        @nn.compact
        def __call__(self, x):
            key = nn.Dense(8)(x)
            cache = self.variable("cache", "key", jnp.zeros, (4, 8), jnp.float32)
            index = self.variable("cache", "index", lambda: jnp.int32(1))
            at = (index.value, 0)
            cache.value = jax.lax.dynamic_update_slice(cache.value, key, at)
            return key @ cache.value.T

    model = jamp.linen.with_policy(Cached(), policy)
    variables = jax.jit(model.init)(RNGS, X[:1])
    for run in (model.apply, jax.jit(model.apply, static_argnames="mutable")):
        _, state = run(variables, X[:1], mutable=("cache",))
        assert state["cache"]["key"].dtype == jnp.float32
        assert np.count_nonzero(state["cache"]["key"]) == 8


@pytest.mark.parametrize("loop", [*LOOPS, "function"])
def test_a_carry_that_stays_unequal_is_explained(loop):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + jnp.ones(8)  # float32
            if loop in LOOPS:
                return LOOPS[loop](x)
            cell = lambda model, carry, x: (nn.Dense(8)(carry), None)
            return nn.scan(cell, **SHARE)(self, x, X)

    model = jamp.linen.with_policy(Model(), MIXED)
    with pytest.raises(TypeError, match="carry input and carry output") as caught:
        jax.eval_shape(model.init, RNGS, X)
    assert any("under a policy returns half" in n for n in caught.value.__notes__)


@cover()
@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"Dens_0": "full"}, r"'Dens_0'.*\n.*'Dense_0'"),
        ({"^Dense$": "full"}, r"'Dense_0'|'Dense_1'"),
        ({"Dense_0": "full", "encoder": "full"}, "no module: 'encoder'"),
        ({nn.Conv: "full"}, "Conv"),
    ],
)
def test_overrides_that_match_nothing(overrides, message):
    model = jamp.linen.with_policy(Compact(), MIXED, overrides)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, RNGS, X)
    run = dict(rngs=RNGS, mutable=MUTABLE)
    variables = jax.eval_shape(Compact().init, RNGS, X)
    if nn.Conv not in overrides:  # a path is checked against those of the variables
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda v: model.apply(v, X, **run), variables)


def test_overrides_of_what_one_call_leaves_out():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            if train:
                x = x + nn.Dense(8, name="auxiliary")(x)
                x = nn.Dropout(0.5, deterministic=False, name="drop")(x)
            return nn.Dense(8)(x)

        def other(self, x):
            return x

    overrides = {"auxiliary": "full", "drop": "full", nn.Dropout: "full"}
    model = jamp.linen.with_policy(Model(), MIXED, overrides)
    variables = jax.eval_shape(model.init, RNGS, X)
    for how in ({"train": False}, {"method": "other"}):
        jax.eval_shape(lambda v, how=how: model.apply(v, X, **how), variables)


# Training.


@cover()
@pytest.mark.parametrize("text", ["mixed_float16", "half"])
def test_training_is_traced_once_and_donates(text):
    model = jamp.linen.with_policy(Setup(), text)
    inner = jamp.master_weights(optax.adam(1e-2))
    params = jax.jit(model.init)(RNGS, X)["params"]
    state = jamp.linen.TrainState.create(
        apply_fn=model.apply, params=params, tx=jamp.dynamic_loss_scale(inner)
    )
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(x)

        def loss_fn(params):
            y = state.apply_fn({"params": params}, x)
            return jnp.mean((y.astype(jnp.float32) - 1) ** 2)

        loss, grads = jamp.value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    step = jax.jit(step, donate_argnums=0)
    losses = []
    dtypes = jax.tree.map(lambda p: p.dtype, state.params)
    for _ in range(30):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert len(traces) == 1
    assert losses[-1] < 0.3 * losses[0]
    assert jax.tree.map(lambda p: p.dtype, state.params) == dtypes


def test_flax_train_state_and_checkpoints():
    plain, mixed = Compact(), jamp.linen.with_policy(Compact(), MIXED)
    rng, shapes = np.random.default_rng(0), jax.eval_shape(plain.init, RNGS, X)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)
    variables = jax.tree.map(draw, shapes)
    saved = serialization.to_bytes(variables)
    restored = serialization.from_bytes(jax.eval_shape(mixed.init, RNGS, X), saved)
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    run = lambda v: mixed.apply(v, X, rngs=RNGS, mutable=MUTABLE)
    jax.eval_shape(run, restored)
    train_state.TrainState.create(
        apply_fn=mixed.apply, params=restored["params"], tx=optax.sgd(0.1)
    )


def test_partitioned_parameters_under_a_mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(8, kernel_init=init)(nn.LayerNorm()(x))

    model = jamp.linen.with_policy(Model(), "half")
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, RNGS, X)
        specs = nn.get_partition_spec(shapes)
        assert specs["params"]["Dense_0"]["kernel"] == jax.P(None, "model")
        shardings = nn.get_sharding(shapes, mesh)
        variables = jax.jit(model.init, out_shardings=shardings)(RNGS, X)
        kernel = variables["params"]["Dense_0"]["kernel"].value
        assert kernel.dtype == jnp.float16
        assert kernel.sharding.spec == jax.P(None, "model")
        out = jax.jit(model.apply)(variables, X)
    assert out.dtype == jnp.float16


@pytest.mark.slow
def test_no_tracer_leaks(checking_leaks):
    model = jamp.linen.with_policy(Compact(), MIXED)
    variables = jax.jit(model.init)(RNGS, X)
    jax.jit(lambda v: model.apply(v, X, rngs=RNGS, mutable=MUTABLE)[0])(variables)


# Ways into a model.


class Encoder(nn.Module):
    embed: nn.Module

    def __call__(self, x):
        return self.embed(x)


class Outer(nn.Module):
    def setup(self):
        self.encoder = Encoder(nn.Dense(8))
        self.head = nn.Dense(8)

    def __call__(self, x):
        x = self.encoder.embed(self.head(x))  # before the encoder is called
        self.encoder(x)
        return self.encoder.embed(x)


def test_a_module_called_from_elsewhere_keeps_the_policy_of_its_path():
    model = jamp.linen.with_policy(Outer(), MIXED, {"encoder": "full"})
    params = jax.eval_shape(model.init, RNGS, X)
    found = products(lambda p: model.apply(p, X), params)
    assert found == [{"float16"}, *[{"float32"}] * 3]


def test_a_module_handed_on_keeps_the_policy_of_its_path():
    class Decoder(nn.Module):
        embed: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.embed(nn.Dense(8)(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            embed = nn.Dense(8, name="embed")
            return Decoder(embed, name="decoder")(x)

    def found(overrides):
        model = jamp.linen.with_policy(Model(), MIXED, overrides)
        return products(
            lambda p: model.apply(p, X), jax.eval_shape(model.init, RNGS, X)
        )

    assert found({"decoder": "full"}) == [{"float32"}, {"float16"}]
    assert found({"embed": "full"}) == [{"float16"}, {"float32"}]


def test_a_model_applied_in_a_model_has_its_own_policy():
    inner = jamp.linen.with_policy(nn.Dense(8), "bf16")
    variables = jax.jit(inner.init)(RNGS, X)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(inner.apply(variables, x))

    model = jamp.linen.with_policy(Model(), MIXED)
    params = jax.eval_shape(model.init, RNGS, X)
    found = products(lambda p: model.apply(p, X), params)
    assert found == [{"bfloat16"}, {"float16"}]


def test_modules_that_share_a_scope():
    class Norm(nn.Module):
        def setup(self):
            self.norm = nn.LayerNorm()
            nn.share_scope(self, self.norm)

        def __call__(self, x):
            seen.append(x.dtype)
            return self.norm(x)

    seen = []
    model = jamp.linen.with_policy(nn.Sequential([nn.Dense(8), Norm()]), "half")
    params = jax.eval_shape(model.init, RNGS, X)["params"]
    assert params["layers_1"]["scale"].dtype == jnp.float32
    assert params["layers_0"]["kernel"].dtype == jnp.float16
    assert norm_dtypes(model, {"params": params}) == {"float32"}
    assert seen[-1] == jnp.float16


def test_init_forgets_what_matched_in_other_models():
    class Model(nn.Module):
        blocks: int

        @nn.compact
        def __call__(self, x):
            for i in range(self.blocks):
                x = nn.Dense(8, name=f"block_{i}")(x)
            return x

    overrides = {"block_1": "full"}
    jax.eval_shape(jamp.linen.with_policy(Model(2), MIXED, overrides).init, RNGS, X)
    with pytest.raises(ValueError, match="'block_0'"):
        jax.eval_shape(jamp.linen.with_policy(Model(1), MIXED, overrides).init, RNGS, X)


def calls_of_a_trace(n_layers):
    """Python calls in jamp's files, and of hash functions, while a model is traced."""
    layers = [nn.Dense(4) for _ in range(n_layers)]
    model = jamp.linen.with_policy(nn.Sequential(layers), "mixed_float16")
    x = np.ones((1, 4), np.float32)
    params = jax.eval_shape(model.init, RNGS, x)
    jax.jit(model.apply).trace(params, x)
    own, hashes = 0, 0

    def count(frame, event, argument):
        nonlocal own, hashes
        if event == "call":
            own += frame.f_code.co_filename.startswith(os.path.dirname(jamp.__file__))
            hashes += frame.f_code.co_name == "__hash__"

    again = jax.jit(lambda params, x: model.apply(params, x))
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        again.trace(params, x)
    finally:
        sys.setprofile(before)
    return own, hashes


def test_what_a_layer_adds_to_a_trace_is_bounded():
    # JAX hashes a region's settings for its caches, once with 1073 calls a layer.
    few, many = calls_of_a_trace(4), calls_of_a_trace(8)
    own, hashes = ((b - a) / 4 for a, b in zip(few, many, strict=True))
    assert 0 < own <= 380
    assert hashes <= 250
