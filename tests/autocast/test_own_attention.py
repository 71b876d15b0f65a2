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
from benchmarks import devices
from jamp._autocast import attention
from jamp._jaxprs import equations
from tests.bits import check_near, check_same_bits, nudged
from tests.marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion")

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


OTHER = normal(2, 8, 4, 16)
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
    again = jax.checkpoint(loss)

    def looped(*args):
        step = lambda total, c: (total + again(args[0] * c, *args[1:]), None)
        return lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

    pairs = lambda f: lambda *args: jax.vmap(f)(*[jnp.stack([x, 2 * x]) for x in args])
    return {
        "value": loss,
        "gradient": grad,
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


def penalty_of(attend):
    """The squares of gradients, which are taken in the region."""
    loss, args = loss_of(attend, {})
    squares = lambda *args: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(*args))
    return jamp.autocast("float16")(squares), args


def test_a_derivative_in_the_region_is_jaxs():
    (own, args), (jaxs, _) = penalty_of(OWN), penalty_of(JAXS)
    own, jaxs = jax.jit(own), jax.jit(jaxs)
    near = [jaxs(*moved) for moved in nudged(args, jnp.float16)]
    check_near(own(*args), jaxs(*args), near)


def test_another_derivative_is_refused_with_the_way():
    (loss, args), (penalty, _) = loss_of(OWN, {}), penalty_of(OWN)
    again = [
        lambda x: jax.jvp(jax.grad(lambda x: loss(x, *args[1:])), (x,), (x,)),
        jax.grad(lambda x: jnp.sum(jax.grad(lambda x: loss(x, *args[1:]))(x))),
        jax.grad(lambda x: penalty(x, *args[1:])),
    ]
    for derivative in again:
        with pytest.raises(NotImplementedError, match=r"jax\.nn"):
            jax.eval_shape(derivative, query)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: OWN(x, key, value), (query,), (query,))


class Attention:
    """A module that a rule may name; so may the scope in it."""

    def __init__(self, attend):
        self.attend = attend

    def __call__(self, *args):
        with jax.named_scope("attn"):
            return self.attend(*(x @ EYE for x in args)).astype(jnp.float32)


def in_a_scan(f):
    step = lambda *args: lambda total, _: (total + f(*args), None)
    return lambda *args: lax.scan(step(*args), 0 * args[0], None, 2)[0]


def over_each(f):
    return lambda *args: jax.vmap(f)(*(x[:, None] for x in args))[:, 0]


CALLERS = {
    "live": lambda module: module,
    "jit": jax.jit,
    "scan": in_a_scan,
    "remat": jax.checkpoint,
    "vmap": over_each,
    "in a jit": lambda module: Attention(jax.jit(module.attend)),
}
REACHES = {
    "scaled": jamp.ScaledFloat16(),
    "float8 activations": jamp.Float8(activations=True),
    "float8": jamp.Float8(),
    "float32": jnp.float32,
    "left": None,
}


@cover(quick=2, ci=24)
@pytest.mark.parametrize("recipe", REACHES)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("key", ["attn", Attention], ids=["path", "class"])
@pytest.mark.parametrize("grad", ["around", "inside"])
def test_a_rule_reaches_its_products(grad, key, caller, recipe):
    """As those of JAX's function: float16 gradients of 1e-10 would be 0."""
    rule = REACHES[recipe]
    half = "bfloat16" if isinstance(rule, jamp.Float8) else "float16"
    region = jamp.autocast(half, rules={key: rule})

    def gradients(attend):
        module = CALLERS[caller](Attention(attend))
        loss = lambda *args: 1e-10 * jnp.sum(jnp.sin(module(*args)))
        if grad == "inside":
            return jax.jit(region(jax.grad(loss, (0, 1, 2))))
        return jax.jit(jax.grad(region(loss), (0, 1, 2)))

    args = query, query + OTHER, query - OTHER
    for own, jaxs in zip(gradients(OWN)(*args), gradients(JAXS)(*args), strict=True):
        assert half == "bfloat16" or own.any()
        tolerance = 4 * float(jnp.finfo(half).eps)
        np.testing.assert_allclose(own, jaxs, tolerance, tolerance * float(jaxs.max()))


@pytest.mark.parametrize(
    "rules", [{"other": jnp.float32}, {lax.conv_general_dilated_p: None}]
)
def test_a_rule_that_reaches_nothing_is_an_error(rules):
    with pytest.raises(ValueError, match="rule"):
        jamp.autocast("float16", rules=rules)(Attention(OWN))(query, query, query)


def test_it_is_compiled_once(caplog):
    def compiled(shift):
        caplog.clear()
        with jax.log_compiles():
            jax.block_until_ready(OWN(query + shift, key, value, scale=0.123))
        texts = [record.message for record in caplog.records]
        return [t for t in texts if t.startswith("Compiling")]

    assert compiled(0)
    assert [compiled(i) for i in range(1, 4)] == [[]] * 3


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
    run = attention.Attention((), None, False)
    assert attention.refused(run, half, None) == "an odd length"


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


FLOATS, MESH_BATCH = ("query", "key", "value", "bias"), 2
WIDE = {name: normal(2, 8, 4, 16) for name in FLOATS[:3]} | {"bias": normal(2, 4, 8, 8)}


def outcome(run):
    """The results of a call with their types, or the type of its error."""
    try:
        return [(str(jax.typeof(x)), np.asarray(x)) for x in jax.tree.leaves(run())]
    except Exception as error:
        return type(error)


def check_as_jaxs(run):
    own, jaxs = (outcome(lambda f=f: run(f)) for f in (OWN, JAXS))
    if isinstance(jaxs, type) or isinstance(own, type):
        assert own is jaxs
        return
    for (kind, x), (jaxs_kind, y) in zip(own, jaxs, strict=True):
        assert kind == jaxs_kind
        np.testing.assert_allclose(np.float32(x), np.float32(y), 1e-2, 2e-3)


def gradients_of(f):
    loss = lambda *args: jnp.sum(jnp.sin(f(*args).astype(jnp.float32)))
    return lambda *args: jax.grad(loss, tuple(range(len(args))))(*args)


@cover(quick=2, ci=20)
@pytest.mark.parametrize("mode", ["value", "gradient"])
@pytest.mark.parametrize("varying", ["key", "bias", "query", "value bias", ""])
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("jitted", [True, False])
def test_what_varies_in_a_shard_map_is_what_jax_says(
    jitted, dtype, checks, varying, mode
):
    """A result is whole only if all that it is made of is."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = tuple(P("data") if name in varying.split() else P() for name in FLOATS)
    pairs = zip(WIDE.values(), specs, strict=True)
    args = [np.concatenate([x, -x]) if spec else x for x, spec in pairs]

    def run(attend):
        f = attend if dtype is None else jamp.autocast(dtype)(attend)
        f = gradients_of(f) if mode == "gradient" else f
        outs = specs if mode == "gradient" else P()
        run = jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=checks
        )
        return (jax.jit(run) if jitted else run)(*args)

    check_as_jaxs(run)


LAYOUTS = {
    "batch": P("data"),
    "heads": P(None, None, "model"),
    "both": P("data", None, "model"),
    "lengths": P(None, "data"),
    "whole": P(),
}


@cover(quick=2)
@pytest.mark.parametrize("mode", ["value", "gradient"])
@pytest.mark.parametrize("keys", LAYOUTS)
@pytest.mark.parametrize("queries", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_what_is_sharded_on_an_explicit_mesh_is_what_jax_says(
    dtype, queries, keys, mode
):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), explicit)
    specs = LAYOUTS[queries], LAYOUTS[keys], LAYOUTS[keys]

    def run(attend):
        f = attend if dtype is None else jamp.autocast(dtype)(attend)
        pairs = zip(WIDE.values(), specs, strict=False)
        args = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, s)) for x, s in pairs
        ]
        return jax.jit(gradients_of(f) if mode == "gradient" else f)(*args)

    with jax.set_mesh(mesh):
        check_as_jaxs(run)


@cover(quick=2)
@pytest.mark.parametrize("mode", ["value", "gradient", "each gradient"])
@pytest.mark.parametrize(
    "mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 1, 0)]
)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_vmap_over_a_dimension_that_is_sharded(dtype, mapped, mode):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    args = []
    for x, dim in zip(list(WIDE.values())[:3], mapped, strict=True):
        spec = P() if dim is None else P(*[None] * dim, "data")
        x = x if dim is None else np.stack([x, -x], dim)
        args.append(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))

    def run(attend):
        f = attend if dtype is None else jamp.autocast(dtype)(attend)
        each = jax.vmap(f, mapped)
        return jax.jit(
            {
                "value": each,
                "gradient": gradients_of(each),
                "each gradient": jax.vmap(gradients_of(f), mapped),
            }[mode]
        )(*args)

    with jax.set_mesh(mesh):
        check_as_jaxs(run)


TAKEN = {
    "a list": {"local_window_size": [1, 2]},
    "an array": {"local_window_size": np.array([2, 1])},
    "a number": {"local_window_size": 1, "is_causal": True},
    "a traced number": {"local_window_size": (jnp.int32(1), 1)},
    "an integer bias": {"bias": np.int32(3 * bias)},
    "a scale of NumPy's": {"scale": np.float32(0.3)},
    "integers": {},
}


@cover(quick=3)
@pytest.mark.parametrize("given", TAKEN)
@pytest.mark.parametrize("half", [None, "float16"])
def test_it_takes_what_jaxs_takes(half, given):
    """The numbers are those of JAX's."""
    region = jamp.autocast(half or "float16", enabled=half is not None)
    args = query, key, value
    if given == "integers":
        args = [np.int32(4 * x) for x in args]

    def of(attend):
        f = lambda args, traced: attend(*args, **TAKEN[given] | traced)
        traced = TAKEN[given] if given == "a traced number" else {}
        return jax.jit(region(f))(args, traced)

    assert of(OWN).dtype == of(JAXS).dtype
    np.testing.assert_array_equal(of(OWN), of(JAXS))


def test_it_takes_lists():
    lists = [x.tolist() for x in (query, key, value)]
    expected = JAXS(query, key, value)
    np.testing.assert_allclose(OWN(*lists), expected, 1e-5, 1e-5)


EACH = {
    "one": lambda f: f,
    "queries": lambda f: jax.vmap(f, (0, None, None, None)),
    "others": lambda f: jax.vmap(f, (None, 1, 0, 0)),
    "twice": lambda f: jax.vmap(
        jax.vmap(f, (None, 0, None, None)), (0, None, None, None)
    ),
}


@cover(quick=2)
@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
@pytest.mark.parametrize("name", ["nothing", "bias", "mask", "lengths"])
def test_cudnns_form_is_mapped_as_xlas(name, order, each, monkeypatch):
    """A kernel that takes one batch stands for it."""

    def kernel(*floats, implementation, **options):
        assert {x.ndim for x in floats} == {4}
        return JAXS(*floats, implementation="xla", **options)

    rest = {n: x for n, x in ALSO[name].items() if n != "bias"}
    given = bias if name == "bias" else np.zeros_like(bias)
    attend = lambda q, k, v, b: jnp.sin(
        OWN(q, k, v, **rest, **({"bias": b} if name == "bias" else {}))
    )
    if order == "grad of vmap":
        f = jax.grad(lambda *args: EACH[each](attend)(*args).sum(), (0, 1, 2, 3))
    else:
        f = EACH[each](jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2, 3)))
    args = [query, key, value, given]
    dims = {"queries": {0: 0}, "others": {1: 1, 2: 0, 3: 0}, "twice": {0: 0, 1: 0}}
    for i, dim in dims.get(each, {}).items():
        args[i] = np.stack([args[i], 2 * args[i]], dim)
    eqns = [*equations(jax.make_jaxpr(f)(*args))]
    found = [e for e in eqns if e.primitive is attention.attention_p]
    assert len(found) == 2  # forward, and backward
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    for eqn in found:
        arrays = [drawn(v.aval) for v in eqn.invars]
        forms = attention.CUDNN, attention.XLA
        own, expected = (eqn.params["run"](attention.Form(n), *arrays) for n in forms)
        for x, y in zip(own, expected, strict=True):
            np.testing.assert_allclose(x, y, 1e-4, 1e-5)


def drawn(aval):
    numbers = normal(*aval.shape)
    if aval.dtype == bool:
        return jnp.asarray(numbers > 0)
    return jnp.asarray(numbers + 4 * (aval.dtype == np.int32), aval.dtype)


@cover(quick=2)
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("varying", ["all", "keys"])
@pytest.mark.parametrize("around", ["shard_map", "vmap", "vmap of both"])
def test_cudnns_kernel_is_called(around, varying, checks):
    """As on a GPU that has it, for whatever JAX transforms."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    q, k = jnp.ones((4, 128, 4, 64)), jnp.ones((4, 128, 2, 64))
    region = jamp.autocast("float16")
    f = gradients_of(region(OWN))
    if around == "vmap":
        both = jax.vmap(region(OWN), (0, 0 if varying == "all" else None, None))
        f = lambda q, k, v: gradients_of(both)(
            q[None], k[None] if varying == "all" else k, v
        )
    elif around == "vmap of both":
        each = jax.vmap(f, (0, None, 0))
        f = lambda q, k, v: each(q[None], k, v[None])
    else:
        mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
        specs = P("data") if varying == "all" else P(), P("data"), P("data")
        q = q if varying == "all" else q[:2]
        outs = specs if checks else P("data")
        f = jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=checks
        )
    with devices.asked_for("h100"):
        traced = jax.jit(f).trace(q, k, k)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmaxBackward" in text and "dot_general" not in text


def test_a_mask_in_a_bias_is_finite_for_cudnn(monkeypatch):
    """Its kernel takes the bias in half precision, in which -1e9 is -inf."""
    given = []

    def kernel(q, k, v, *, bias, **options):
        given.append(bias)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    run = attention.Attention(("bias",), None, False)
    low = np.float32([[[[-1e9, -7e4, -3.0, 2.0, np.finfo(np.float32).min, -np.inf]]]])
    for dtype in (jnp.float16, jnp.bfloat16):
        args = [jnp.asarray(x, dtype) for x in (query, key, value)]
        run(attention.Form(attention.CUDNN), *args, jnp.asarray(low))
        assert given[-1].dtype == dtype
        assert np.isfinite(np.float32(given[-1])).tolist()[0][0][0] == [True] * 5 + [
            False
        ]
        assert given[-1][0, 0, 0, 2:4].tolist() == [-3.0, 2.0]


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


LINENS, NNXS = nn.dot_product_attention, nnx.dot_product_attention
PAIRS = [
    (jamp.linen.dot_product_attention, LINENS),
    (jamp.nnx.dot_product_attention, NNXS),
]
heads, lower = normal(2, 8, 4, 16), np.tril(np.ones((8, 8)))


WHOLE = np.int32(4 * heads)
FLAXS_TAKE = {
    "integers": ((WHOLE, WHOLE, WHOLE), {}),
    "integer keys": ((heads, WHOLE, WHOLE), {}),
    "a mask of numbers": ((heads, heads, heads), {"mask": lower}),
    "an integer bias": ((heads, heads, heads), {"bias": np.int32(3 * lower)}),
    "a bias for each key": ((heads, heads, heads), {"bias": lower[0]}),
    "small values": ((heads, heads, heads[..., :5]), {}),
}


@cover(quick=3)
@pytest.mark.parametrize("given", FLAXS_TAKE)
@pytest.mark.parametrize("own, flaxs", PAIRS, ids=["linen", "nnx"])
@pytest.mark.parametrize("half", [None, "float16"])
def test_it_takes_what_flaxs_takes(half, own, flaxs, given):
    """NNX's refuses values of another size."""
    region = jamp.autocast(half or "float16", enabled=half is not None)
    args, more = FLAXS_TAKE[given]
    if given == "small values" and flaxs is NNXS:
        with pytest.raises(ValueError, match="value"):
            own(*args)
        return
    got, expected = (region(f)(*args, **more) for f in (own, flaxs))
    assert got.dtype == expected.dtype
    tolerance = 1e-5 if half is None else 1e-2
    np.testing.assert_allclose(got, expected, tolerance, tolerance)


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
