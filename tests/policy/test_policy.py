"""Policy: casts, strings, errors, and `wrap` for functions and Equinox."""

import copy
import dataclasses
import itertools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jamp
from jamp._policy import float32_region
from jamp._targets import default_dtype
from shared.jaxprs import equations
from tests.jaxprs import products
from tests.marks import cover, walk

from ..around import forget

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
SPELLINGS = {
    "float16": ["f16", "float16", "half", jnp.float16, np.float16, np.dtype("float16")],
    "bfloat16": ["bf16", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")],
    "float32": ["full", "f32", "float32", jnp.float32, np.float32],
    "float64": ["f64", "float64", np.float64],
}


# The policy and its string.


@walk("name, spelling", [(n, s) for n, all in SPELLINGS.items() for s in all])
def test_dtypes_are_normalized(name, spelling):
    policy = jamp.Policy(spelling, spelling, spelling)
    assert policy == jamp.Policy(name, name, name)
    for dtype in (policy.param_dtype, policy.compute_dtype, policy.output_dtype):
        assert isinstance(dtype, np.dtype)
        assert dtype == jnp.dtype(name)


def all_policies():
    return [jamp.Policy(*dtypes) for dtypes in itertools.product(FLOATS, repeat=3)]


@walk("policy", all_policies())
def test_the_string_round_trips(policy):
    assert jamp.get_policy(str(policy)) == policy
    assert eval(repr(policy), {"get_policy": jamp.get_policy}) == policy


@st.composite
def spelled(draw):
    """A policy and another spelling of it."""
    names = [draw(st.sampled_from(sorted(SPELLINGS))) for _ in range(3)]
    parts = []
    for key, name in zip(("params", "compute", "output"), names, strict=True):
        spelling = draw(st.sampled_from([s for s in SPELLINGS[name] if type(s) is str]))
        space = draw(st.sampled_from(["", " "]))
        parts.append(f"{draw(st.sampled_from([key, key[0]]))}{space}={space}{spelling}")
    return jamp.Policy(*names), ",".join(draw(st.permutations(parts)))


@given(spelled())
def test_equal_policies_hash_equal(pair):
    policy, text = pair
    other = jamp.get_policy(text)
    assert other == policy
    assert hash(other) == hash(policy)
    assert {policy: 1}[other] == 1
    for same in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert same == policy
        assert hash(same) == hash(policy)


@walk(
    "text, dtypes",
    [
        ("half", ("float16", "float16", "float16")),
        ("c=f16", ("float32", "float16", "float16")),
        ("p=f16", ("float16", "float16", "float16")),
        ("o=f16", ("float32", "float32", "float16")),
        ("p=f16,c=bf16", ("float16", "bfloat16", "bfloat16")),
        ("output=full, compute=half", ("float32", "float16", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("params=float32,compute=float16,output=float32",) * 2,
    ],
)
def test_strings(text, dtypes):
    if isinstance(dtypes, str):
        dtypes = ("float32", "float16", "float32")
    assert jamp.get_policy(text) == jamp.Policy(*dtypes)


def test_a_policy_is_frozen_and_passes_through_get_policy():
    policy = jamp.get_policy("half")
    with pytest.raises(AttributeError):
        policy.param_dtype = jnp.float32
    assert jamp.get_policy(policy) is policy
    full = policy.with_output_dtype("full")
    assert full == jamp.Policy("half", "half", jnp.float32)


@walk(
    "text, message",
    [
        ("flaot16", "Unknown dtype 'flaot16'.*float16"),
        ("compute_float16", "Unknown dtype.*float16"),
        ("c=f17", "Unknown dtype 'f17'.*f16"),
        ("computation=f16", "Unknown key 'computation'.*'compute'"),
        ("p=f16,p=f32", "Second value for key 'p'"),
        ("p=f16,params=f32", "Second value"),
        ("p=int32", "int32 is not a floating dtype"),
        ("", "Unknown dtype"),
        ("=f16", "Unknown key ''"),
        ("p=f16,", "Unknown key ''"),
        ("p==f16", "Unknown dtype"),
        ("mixed_flaot16", "mixed_float16"),
    ],
)
def test_bad_strings(text, message):
    with pytest.raises(ValueError, match=f"get_policy.*{message}"):
        jamp.get_policy(text)


@walk("dtype", ["int32", jnp.int8, bool, "complex64", "uint16"])
@walk("field", range(3))
def test_dtypes_that_do_not_float(dtype, field):
    dtypes = [jnp.float32] * 3
    dtypes[field] = dtype
    name = ("param_dtype", "compute_dtype", "output_dtype")[field]
    with pytest.raises(ValueError, match=rf"Policy\({name}=.*not a floating dtype"):
        jamp.Policy(*dtypes)


@walk("value", [None, "f17", 16, 1.0, object(), "float", "f2"])
def test_what_is_no_dtype(value):
    with pytest.raises(ValueError, match="Unknown dtype"):
        jamp.Policy(jnp.float32, value, jnp.float32)


# Casts.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_casts_of_every_kind_of_leaf(dtype):
    key = jax.random.key(0)
    thing = object()
    tree = {
        "jax": jnp.ones(2, jnp.float32),
        "half": jnp.ones(2, jnp.bfloat16),
        "numpy": np.ones(2, np.float64),
        "scalar": np.float32(1.5),
        "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
        "float": 1.5,
        "int": 3,
        "bool": True,
        "None": None,
        "key": key,
        "old key": jax.random.PRNGKey(0),
        "ints": jnp.arange(3),
        "bools": np.ones(2, bool),
        "complex": jnp.ones(2, jnp.complex64),
        "float0": np.zeros(2, jax.dtypes.float0),
        "object": thing,
    }
    out = jamp.Policy(dtype, dtype, dtype).cast_to_compute(tree)
    for name in ("jax", "half", "numpy", "scalar", "struct"):
        assert out[name].dtype == dtype, name
    assert isinstance(out["numpy"], np.ndarray)
    assert isinstance(out["scalar"], np.generic)
    assert isinstance(out["struct"], jax.ShapeDtypeStruct)
    cast = ("jax", "half", "numpy", "scalar", "struct")
    for name in tree.keys() - set(cast):
        assert out[name] is tree[name], name


def test_the_three_casts():
    policy = jamp.Policy("float32", "float16", "bfloat16")
    x = {"x": jnp.ones(2)}
    assert policy.cast_to_param(x)["x"].dtype == jnp.float32
    assert policy.cast_to_compute(x)["x"].dtype == jnp.float16
    assert policy.cast_to_output(x)["x"].dtype == jnp.bfloat16


def test_struct_keeps_its_sharding():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert jamp.cast_to_half(struct).sharding == sharding
    assert jamp.cast_to_half(jax.device_put(jnp.ones(8), sharding)).sharding == sharding


def test_half_and_full():
    assert jamp.half_dtype() == jnp.float16  # on a CPU
    tree = {"x": jnp.ones(2), "n": np.ones(2, np.float32), "i": jnp.arange(2)}
    half, full = jamp.cast_to_half(tree), jamp.cast_to_full(tree)
    assert half["x"].dtype == half["n"].dtype == jnp.float16
    assert half["i"] is tree["i"]
    assert all(full[name] is tree[name] for name in tree)  # no copies
    assert not jamp.cast_to_full(jnp.asarray(1.0)).weak_type


def test_half_is_bfloat16_on_tpu(monkeypatch):
    class Device:
        platform = "tpu"

    monkeypatch.setattr(jax, "local_devices", lambda **_: [Device()])
    assert jamp.half_dtype() == jnp.bfloat16
    assert jamp.get_policy("half").compute_dtype == jnp.bfloat16


def test_a_policy_is_a_static_argument():
    traces = []

    @jax.jit
    def f(x):
        return x

    def cast(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(f(x))

    cast = jax.jit(cast, static_argnums=0)
    for text in ("half", "p=f16,c=half,o=f16", "half"):
        cast(jamp.get_policy(text), jnp.ones(2))
    assert len(traces) == 1


# wrap.


def layer(params, x):
    return jax.nn.softmax(x @ params["w"] + params["b"]) @ params["w"]


PARAMS = {"w": np.eye(4, dtype=np.float32), "b": np.zeros(4, np.float32)}
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def test_wrap_casts_in_and_out(standard_promotion):
    wrapped = jamp.get_policy("mixed_float16").wrap(layer)
    assert wrapped.__name__ == "layer"
    out = jax.jit(wrapped)(PARAMS, x=X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, jax.jit(layer)(PARAMS, X), atol=2e-3)
    assert products(wrapped, PARAMS, X) == [{"float16"}] * 2

    def loss(params):
        return jnp.sum(wrapped(params, X) ** 2)

    grads = jax.eval_shape(jax.grad(loss), PARAMS)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert products(jax.grad(loss), PARAMS) == [{"float16"}] * 5


def exponentials(function, *args):
    """The dtypes in which exponentials and logarithms are taken."""
    found = equations(jax.make_jaxpr(function)(*args))
    names = ("exp", "log")
    return {e.invars[0].aval.dtype.name for e in found if e.primitive.name in names}


@pytest.mark.parametrize("style", ["eager", "jit inside", "scan", "remat", "vmap"])
def test_softmax_stays_in_float32(style, standard_promotion):
    def model(x):
        if style == "jit inside":
            return jax.jit(jax.nn.softmax)(x)
        if style == "scan":
            return jax.lax.scan(lambda c, x: (c, jax.nn.softmax(x)), 0, x)[1]
        if style == "remat":
            return jax.checkpoint(jax.nn.softmax)(x)
        if style == "vmap":
            return jax.vmap(jax.nn.softmax)(x)
        return jax.nn.softmax(x)

    policy = jamp.get_policy("mixed_float16")
    for fun in (policy.wrap(model), jax.grad(lambda x: policy.wrap(model)(x)[0, 0])):
        assert exponentials(fun, X) == {"float32"}
    assert exponentials(policy.wrap(model, float32_for=()), X) == {"float16"}
    assert exponentials(policy.wrap(model, float32_for=("losses",)), X) == {"float16"}


def test_what_follows_softmax_is_half_precision_and_log_softmax_float32(
    standard_promotion,
):
    def model(x, v):
        seen.extend([2 * jax.nn.softmax(x), 2 * jax.nn.log_softmax(x)])
        return jnp.tanh(jax.nn.softmax(x) @ v)

    seen = []
    wrapped = jamp.get_policy("mixed_float16").wrap(model)
    found = list(equations(jax.make_jaxpr(wrapped)(X, jnp.eye(4))))
    dtypes = {e.primitive.name: e.outvars[0].aval.dtype.name for e in found}
    assert dtypes["dot_general"] == dtypes["tanh"] == "float16"
    assert [y.dtype for y in seen] == [jnp.float16, jnp.float32]


def test_losses_stay_in_float32(standard_promotion):
    def loss(x):
        labels = jnp.arange(2)
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    policy = jamp.get_policy("p=f32,c=f16,o=f16")
    assert exponentials(policy.wrap(loss), X) == {"float32"}
    kept = exponentials(policy.wrap(loss, float32_for=("norms",)), X)
    assert "float16" in kept
    big = jnp.full((2, 4), 60000.0)  # a sum of four overflows in float16
    assert np.isfinite(policy.with_output_dtype("full").wrap(loss)(big))


def test_losses_of_a_library_that_is_imported_late_stay_in_float32(
    standard_promotion, monkeypatch
):
    def seen():
        loss = lambda x: optax.losses.kl_divergence_with_log_targets(x, x).mean()
        return exponentials(jamp.get_policy("p=f32,c=f16,o=f16").wrap(loss), X)

    forget()
    with monkeypatch.context() as before:
        names = float32_region.loaded() - {"optax"}
        before.setattr(float32_region, "loaded", lambda: names)
        assert seen() == {"float16"}
    assert seen() == {"float32"}


@cover()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("float32_for", [(), ("norms", "softmax", "losses")])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_draws_under_a_policy_are_those_of_float32_or_refused(
    dtype, float32_for, wrap, standard_promotion
):
    """Noise in half precision has ties, which go to the first tokens."""
    policy = jamp.Policy("float32", dtype, "float32")
    key = jax.random.key(0)
    logits = 0.01 * np.random.default_rng(1).normal(size=1000).astype(np.float32)

    def draw(logits):
        return jax.random.categorical(key, logits, shape=(2000,))

    def cast_and_draw(logits):
        return draw(logits.astype(jnp.float32))

    wrapped = lambda function: wrap(policy.wrap(function, float32_for=float32_for))
    with pytest.raises(TypeError, match=rf"categorical got a {dtype}.*Cast the input"):
        wrapped(draw)(logits)
    rounded = logits.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(
        wrapped(cast_and_draw)(logits), jax.jit(draw)(rounded)
    )


def test_a_policy_wins_over_a_region_around_it():
    def model(x):
        return jnp.exp(x @ jnp.eye(4, dtype=x.dtype))

    def around(policy, **kwargs):
        def run(x):
            with jamp.autocast(dtype=jnp.bfloat16):
                return policy.wrap(model, **kwargs)(x)

        return run

    half, full = jamp.get_policy("half"), jamp.get_policy("full")
    for kwargs in ({}, {"float32_for": ()}):
        assert products(around(half, **kwargs), X) == [{"float16"}]
        assert exponentials(around(half, **kwargs), X) == {"float16"}
        assert products(around(full, **kwargs), X) == [{"float32"}]


def test_a_region_inside_wins_over_the_policy():
    def model(x):
        with jamp.autocast(dtype=jnp.bfloat16):
            assert jamp.is_autocast_enabled()
            return x @ jnp.eye(4, dtype=x.dtype)

    assert products(jamp.get_policy("full").wrap(model), X) == [{"bfloat16"}]


def test_a_policy_is_no_autocast_region():
    @jamp.get_policy("half").wrap
    def model(x):
        assert not jamp.is_autocast_enabled()
        assert jamp.get_autocast_dtype() == default_dtype()
        return x

    model(X)


def test_wrap_is_traced_once(standard_promotion):
    traces = []

    def model(x):
        traces.append(x.dtype)
        return jax.nn.softmax(x)

    step = jax.jit(jamp.get_policy("half").wrap(model))
    for _ in range(3):
        step(X)
    assert traces == [jnp.float16]


def test_wrap_leaks_no_tracers(standard_promotion, checking_leaks):
    jax.jit(jax.grad(lambda x: jamp.get_policy("half").wrap(layer)(PARAMS, x)[0, 0]))(X)


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    seen: list = eqx.field(static=True)

    def __call__(self, x):
        y = self.norm(self.linear(x))
        self.seen.append((self.linear.weight.dtype, self.norm.weight.dtype))
        return y * y


def equinox_block():
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    return Block(linear, eqx.nn.LayerNorm(4), [])


def test_equinox_module_as_argument_and_as_function(standard_promotion):
    policy = jamp.get_policy("mixed_float16")
    half, full = jnp.dtype("float16"), jnp.dtype("float32")
    as_argument, as_function = equinox_block(), equinox_block()
    for model, run in (
        (as_argument, lambda m, x: policy.wrap(lambda m, x: m(x))(m, x)),
        (as_function, lambda m, x: policy.wrap(m)(x)),
    ):
        out = eqx.filter_jit(run)(model, X[0])
        assert out.dtype == full
        assert model.seen == [(half, full)]
        found = equations(jax.make_jaxpr(lambda x, m=model, r=run: r(m, x))(X[0]))
        kinds = {(e.primitive.name, e.outvars[0].aval.dtype) for e in found}
        assert {("rsqrt", full), ("mul", half)} <= kinds
        np.testing.assert_allclose(
            out, eqx.filter_jit(equinox_block())(X[0]), atol=1e-2
        )
        loss = lambda m, run=run: jnp.sum(run(m, X[0]) ** 2)
        grads = eqx.filter_eval_shape(eqx.filter_grad(loss), model)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {full}


class PostNorm(eqx.Module):
    """A layer of BERT: the norm comes last, dropout and gelu follow."""

    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.norm, self.dropout = eqx.nn.LayerNorm(8), eqx.nn.Dropout(0.1)
        self.up = eqx.nn.Linear(8, 16, key=key)
        self.down = eqx.nn.Linear(16, 8, key=key)

    def __call__(self, x, key):
        x = self.dropout(jax.vmap(self.norm)(x), key=key)
        h = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
        return jax.vmap(self.norm)(jax.nn.gelu(h + x))


@pytest.mark.slow
def test_the_products_of_a_wrapped_equinox_model_are_in_float16(standard_promotion):
    keys = jax.random.split(jax.random.key(0), 4)
    model = PostNorm(keys[0])
    x = jax.random.normal(keys[1], (3, 5, 8))

    def two_layers(model, x, key):
        return model(jax.nn.gelu(model(x, key)), key)

    def run(x):
        return jax.vmap(
            jamp.get_policy("mixed_float16").wrap(two_layers), in_axes=(None, 0, 0)
        )(model, x, keys[1:])

    assert products(run, x) == [{"float16"}] * 4
    found = equations(jax.make_jaxpr(run)(x))
    assert {e.outvars[0].aval.dtype for e in found if e.primitive.name == "rsqrt"} == {
        jnp.dtype("float32")
    }
    plain = jax.vmap(two_layers, in_axes=(None, 0, 0))(model, x, keys[1:])
    np.testing.assert_allclose(run(x), plain, atol=1e-2)


def test_equinox_norms_without_the_preset(standard_promotion):
    model = equinox_block()
    jamp.get_policy("half").wrap(model, float32_for=())(X[0])
    assert model.seen == [(jnp.dtype("float16"),) * 2]


def test_equinox_norms_under_vmap_scan_and_jit(standard_promotion):
    policy = jamp.get_policy("mixed_float16")
    blocks = eqx.filter_vmap(lambda key: equinox_block())(
        jax.random.split(jax.random.key(0), 3)
    )
    arrays, static = eqx.partition(blocks, eqx.is_array)

    @policy.wrap
    def model(arrays, x):
        def body(x, arrays):
            return jax.vmap(eqx.combine(arrays, static))(x), None

        return jax.lax.scan(body, x, arrays)[0]

    out = eqx.filter_jit(model)(arrays, X)
    assert out.dtype == jnp.float32
    assert products(model, arrays, X) == [{"float16"}]


def test_equinox_state_is_not_cast(standard_promotion):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode="ema")
    wrapped = jamp.get_policy("half").wrap(norm)
    run = jax.vmap(wrapped, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    y, state = run(X, state)
    assert y.dtype == jnp.float16
    floats = [s.dtype for s in jax.tree.leaves(state) if s.dtype != bool]
    assert jnp.float16 not in floats


def test_haiku_takes_the_policy(standard_promotion):
    """Haiku has policies by module class, designed for jmp's policies."""
    import haiku as hk

    policy = jamp.get_policy("mixed_float16")
    hk.mixed_precision.set_policy(hk.Linear, policy)
    try:
        model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
        params = jax.jit(model.init)(jax.random.key(0), X)
        assert products(model.apply, params, X) == [{"float16"}]
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


def test_wrap_casts_what_a_partial_holds(standard_promotion):
    import functools

    wrapped = jamp.get_policy("mixed_float16").wrap(functools.partial(layer, PARAMS))
    assert products(wrapped, X) == [{"float16"}] * 2


@pytest.mark.usefixtures("standard_promotion")
def test_a_carry_that_differs_is_explained():
    def run(params, xs):
        step = lambda h, x: (x @ params, None)
        return jax.lax.scan(step, jnp.zeros(4), xs)[0]

    wrapped = jamp.get_policy("mixed_float16").wrap(run)
    with pytest.raises(TypeError, match="carry input and carry output") as caught:
        wrapped(jnp.ones((4, 4)), jnp.ones((3, 4)))
    assert any("x.astype(h.dtype)" in note for note in caught.value.__notes__)


def test_a_subclass_checks_its_dtypes_too():
    @dataclasses.dataclass(frozen=True)
    class Named(jamp.Policy):
        name: str = "mine"

    policy = Named("float32", "half", "float32")
    assert policy.compute_dtype == jamp.half_dtype() and policy.name == "mine"
    assert isinstance(policy.param_dtype, np.dtype)
    with pytest.raises(ValueError, match="compute_dtype"):
        Named("float32", "int8", "float32")
