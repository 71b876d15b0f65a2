"""`jamp.dot_product_attention`: JAX's numbers, in every mode and place."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from jamp._autocast import attention
from jamp._jaxprs import equations
from tests.bits import check_near, check_same_bits, nudged
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


query, key, value = normal(2, 8, 4, 16), normal(2, 6, 2, 16), normal(2, 6, 2, 16)
bias, mask = normal(1, 4, 8, 6), rng.random((2, 1, 8, 6)) < 0.7
lengths, EYE = np.int32([3, 8]), np.eye(16, dtype=np.float32)
JAXS, OWN = jax.nn.dot_product_attention, jamp.dot_product_attention
ALSO = {
    "nothing": {},
    "bias": {"bias": bias},
    "mask": {"mask": mask},
    "bias and mask": {"bias": bias, "mask": mask},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "lengths": {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths - 2},
    "window": {"local_window_size": 2},
    "sides of a window": {"local_window_size": (2, 1), "is_causal": True},
}


def loss_of(attend, also):
    """A loss of all inputs with gradients, and these."""
    rest = {name: x for name, x in also.items() if name != "bias"}
    given = query, key, value, *([also["bias"]] if "bias" in also else [])

    def loss(*args):
        out = attend(*args, **rest)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return loss, given


def every(loss, count):
    grad = jax.grad(loss, range(count))
    squares = lambda *args: sum(jnp.sum(g**2) for g in grad(*args))
    again = jax.checkpoint(loss)

    def looped(*args):
        step = lambda total, c: (total + again(args[0] * c, *args[1:]), None)
        return lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

    pairs = lambda f: lambda *args: jax.vmap(f)(*[jnp.stack([x, 2 * x]) for x in args])
    return {
        "value": loss,
        "gradient": grad,
        "forward": lambda *args: jax.jvp(loss, args, args),
        "reverse of reverse": jax.grad(squares, range(count)),
        "forward of reverse": lambda *args: jax.jvp(squares, args, args),
        "reverse of forward": jax.grad(lambda *a: jax.jvp(loss, a, a)[1], range(count)),
        "loop": jax.grad(looped, range(count)),
        "vmap": pairs(grad),
        "vmap of one": lambda q, *rest: jax.vmap(grad, (1, *[None] * len(rest)))(
            jnp.stack([q, 2 * q], 1), *rest
        ),
    }


@cover(quick=2)
@pytest.mark.parametrize("mode", every(jnp.sum, 3))
@pytest.mark.parametrize("name", ALSO)
def test_the_numbers_are_those_of_jax(name, mode):
    """In one program: alone, JAX runs its own op by op."""

    def found(attend):
        loss, args = loss_of(attend, ALSO[name])
        return jax.jit(every(loss, len(args))[mode]), args

    (own, args), (jaxs, _) = found(OWN), found(JAXS)
    check_near(own(*args), jaxs(*args), [jaxs(*moved) for moved in nudged(args)])


RECIPES = ["float16", "bfloat16", "float8", jamp.ScaledFloat16()]
RECIPES += [jamp.Float8(activations=True)]


@cover(quick=2)
@pytest.mark.parametrize("dtype", RECIPES, ids=str)
@pytest.mark.parametrize("name", ALSO)
def test_a_region_runs_it_as_jaxs(name, dtype):
    """The inputs are the results of products, as in a model."""

    def of(attend):
        loss, args = loss_of(attend, ALSO[name])
        f = lambda w: loss(*(x @ w for x in args[:3]), *args[3:])
        return jax.jit(jax.value_and_grad(jamp.autocast(dtype)(f)))

    check_same_bits(of(OWN)(EYE), of(JAXS)(EYE))


def test_its_dtype_is_that_of_the_region_and_of_the_rules():
    for dtype in ("float16", "bfloat16"):
        own, region = (query, key, value), jamp.autocast(dtype)
        for function, args in (
            (OWN, own),
            (OWN, (query.astype(dtype), key, value)),
            (jax.jit(OWN), own),
        ):
            assert jax.eval_shape(region(function), *args).dtype == dtype
    with jamp.autocast("float16", rules={"head": jnp.float32}):
        assert OWN(query, key, value).dtype == jnp.float16
        with jax.named_scope("head"):
            assert OWN(query, key, value).dtype == jnp.float32
    assert OWN(query[0], key[0], value[0]).shape == query.shape[1:]
    half = [x.astype(jnp.float16) for x in (query, key, value)]
    assert jax.eval_shape(OWN, *half).dtype == jnp.float16


@pytest.mark.parametrize("key", ["head", lax.dot_general_p, jamp.dot_product_attention])
def test_a_rule_for_its_products_decides_about_them(key):
    """Of what runs as one op, the digits of float32 would be lost."""
    region = jamp.autocast("float16", rules={key: lax.Precision.HIGHEST})

    def attend(x):
        with jax.named_scope("head"):
            return OWN(x, x, x)

    jaxpr = jax.make_jaxpr(region(attend))(query)
    found = [e for e in equations(jaxpr) if e.primitive is lax.dot_general_p]
    highest = (lax.Precision.HIGHEST,) * 2
    assert [e.params["precision"] for e in found] == [highest] * 2
    assert not [e for e in equations(jaxpr) if e.primitive is attention.attention_p]


@cover()
@pytest.mark.parametrize("order", ["first", "second"])
def test_a_derivative_in_the_region_is_jaxs(order):
    """The second derivative too, as a gradient penalty takes it."""

    def of(attend):
        loss, args = loss_of(attend, {})
        squares = lambda *args: sum(
            jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(*args)
        )
        penalty = jamp.autocast("float16")(squares)
        return jax.jit(penalty if order == "first" else jax.grad(penalty)), args

    (own, args), (jaxs, _) = of(OWN), of(JAXS)
    near = [jaxs(*moved) for moved in nudged(args, jnp.float16)]
    check_near(own(*args), jaxs(*args), near)


def test_it_is_compiled_once():
    params = {"scale": 0.123, "is_causal": True}
    for i in range(3):
        OWN(query + i, key, value, **params)
    function = attention.jitted(attention.attention_p, ARGUMENTS)
    assert function._cache_size() == 1


ARGUMENTS = (
    ("names", ()),
    ("scale", 0.123),
    ("is_causal", True),
    ("local_window_size", None),
    ("trains", False),
)


def test_wrong_inputs_are_errors():
    with pytest.raises(ValueError, match="key/value heads"):
        OWN(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="mask dtype should be bool"):
        OWN(query, key, value, mask=bias)
    with pytest.raises(ValueError, match="value dtype should be float32"):
        OWN(query, key, value.astype(jnp.float16))


def text_for(platform, *args):
    loss, _ = loss_of(jamp.autocast("float16")(OWN), {})
    traced = jax.jit(jax.grad(loss)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_without_its_gpu_xlas_form_is_lowered():
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        text = text_for(platform, query, key, value)
        assert "dot_general" in text and "cudnn" not in text


def test_jax_is_asked_what_cudnn_takes(monkeypatch):
    """Where JAX takes the inputs, its kernel is called, forward and backward."""
    asked = []

    def kernel(q, k, v, *args, implementation, **options):
        if implementation == "cudnn":
            asked.append(q.dtype)
            if q.shape[1] % 2:
                raise NotImplementedError("an odd length")
            return jnp.cbrt(q)
        return JAXS(q, k, v, *args, implementation=implementation, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    assert "cbrt" in text_for("cuda", query, key, value)
    assert "cbrt" not in text_for("cpu", query, key, value)
    assert "cbrt" not in text_for("cuda", query[:, 1:], key, value)
    assert jnp.float16 in asked
    half = [x.astype(jnp.float16) for x in (query[:, 1:], key, value)]
    params = {"names": (), "scale": None, "is_causal": False, "local_window_size": None}
    assert attention.refused(half, params) == "an odd length"


def test_explain_says_which_form_it_took():
    report = jamp.debug.explain(lambda q: OWN(q, key, value), "float16")(query)
    (row,) = [row for row in report.rows if row.op == "jamp_attention"]
    assert row.dtypes == "float16 -> float16" and "XLA's form" in row.note
    assert row.flops == 2 * 2 * query.size * key.shape[1]


AROUND = {
    "layer": lambda f: f,
    "scan": lambda f: (
        lambda w, x: lax.scan(
            lambda c, _: (c + f(w, x), None), jnp.zeros(x.shape), None, 2
        )[0]
    ),
    "remat": jax.checkpoint,
}
BAD = query.copy()
BAD[0, 0, 0, 0] = 1e30


def loss_around(place):
    """The loss of a model whose inputs are `query`."""

    def layer(w, x):
        h = x @ w
        return OWN(h, h, h, is_causal=True).astype(jnp.float32)

    def loss(w, x):
        with jamp.autocast("float16"):
            return jnp.mean(AROUND[place](layer)(w, x) ** 2)

    return loss


def training_of(loss):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))

    def step(state, x):
        w, opt_state = state
        value, grads = jamp.value_and_grad(loss, opt_state)(w, x)
        return jamp.step(tx, grads, opt_state, w), value

    return step, (jnp.asarray(EYE), jax.jit(tx.init)(EYE))


@pytest.mark.slow
@pytest.mark.parametrize("place", AROUND)
def test_searches_look_past_it(place):
    step, state = training_of(loss_around(place))
    found = jamp.find_loss_scale(jax.jit(step), state, jnp.asarray(query))
    assert np.isfinite(float(jamp.loss_scale(found[1])))


@cover()
@pytest.mark.parametrize("place", AROUND)
def test_reports_look_past_it(place):
    find = jamp.debug.find_nonfinite(loss_around(place))
    assert "no inf or nan" not in str(find(EYE, BAD))
    assert "no inf or nan" in str(find(EYE, query))


@pytest.mark.slow
@pytest.mark.parametrize("place", AROUND)
def test_reports_of_a_step_look_past_it(place):
    step, state = training_of(loss_around(place))
    report = jamp.debug.find_nonfinite(step)(state, jnp.asarray(BAD))
    assert "no inf or nan" not in str(report)


@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_it_is_divided_over_devices(way):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    loss, args = loss_of(jamp.autocast("float16")(OWN), {})
    expected = jax.jit(jax.grad(loss))(*args)
    if way == "jit":
        sharding = jax.sharding.NamedSharding(mesh, P("data"))
        args = [jax.device_put(x, sharding) for x in args]
        found = jax.jit(jax.grad(loss))(*args)
    else:
        grad = jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        found = jax.jit(grad)(*args)
    check_near(found, expected, [expected + 1e-3, expected - 1e-3])


# Flax's modules.


def same_layer(mine, own, x, **options):
    @jax.jit
    def both(x):
        regions = [jamp.autocast("float16", enabled=on) for on in (False, True)]
        return [[of(f)(x, **options) for f in (mine, own)] for of in regions]

    for (got, expected), rtol in zip(both(x), (1e-5, 1e-2), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol, rtol)


x = normal(2, 8, 32)
MASKED = {"mask": np.tril(np.ones((2, 1, 8, 8), np.float32))}
CALLS = {
    "a batch": (x, {}),
    "one": (x[0], {}),
    "three": (np.repeat(x[None], 3, 0), {}),
    "masked": (x, MASKED),
}


@pytest.fixture(scope="module")
def nnx_layers():
    """jamp's and Flax's, with the same parameters."""
    make = lambda **more: nnx.MultiHeadAttention(
        4, 32, decode=False, rngs=nnx.Rngs(0), **more
    )
    return make(attention_fn=jamp.nnx.dot_product_attention), make()


@cover()
@pytest.mark.parametrize("call", CALLS)
def test_it_is_an_attention_of_nnx(call, nnx_layers):
    inputs, options = CALLS[call]
    same_layer(*nnx_layers, inputs, **options)


@cover()
@pytest.mark.parametrize("options", [{}, MASKED, {"sow_weights": True}], ids=list)
def test_it_is_an_attention_of_linen(options):
    make = lambda **more: nn.MultiHeadDotProductAttention(4, **more)
    mine, own = make(attention_fn=jamp.linen.dot_product_attention), make()
    variables = jax.jit(own.init)(jax.random.key(0), x)
    applied = lambda layer: lambda x, **more: layer.apply(variables, x, **more)
    same_layer(applied(mine), applied(own), x, **options)


def test_dropout_is_flaxs():
    make = lambda **more: nn.MultiHeadDotProductAttention(
        4, dropout_rate=0.5, deterministic=False, **more
    )
    mine, own = make(attention_fn=jamp.linen.dot_product_attention), make()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(own.init)(keys, x)
    got, expected = (
        jax.jit(layer.apply)(variables, x, rngs={"dropout": jax.random.key(2)})
        for layer in (mine, own)
    )
    check_same_bits(got, expected)
