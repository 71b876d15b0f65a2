"""`find_nonfinite`: through every construct of JAX, eagerly and inside jit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

import jamp
from jamp import debug
from tests.marks import cover

ZERO, ONE = np.float32(0.0), np.float32(1.0)


def scanned(x):
    def body(carry, t):
        return carry + 1.0, jnp.log(x + 0.0 * t)

    return jax.lax.scan(body, 0.0, jnp.arange(4.0))[1]


def carried(x):
    body = lambda carry, t: (carry * jnp.where(t == 2, 1.0 / x, 1.0), t)
    return jax.lax.scan(body, 1.0, jnp.arange(4))[0]


def backwards(x):
    body = lambda carry, t: (carry + jnp.where(t == 2, 1.0 / x, 1.0), t)
    return jax.lax.scan(body, 1.0, jnp.arange(4), reverse=True)[0]


def looped(x):
    body = lambda s: (s[0] + 1, s[1] + jnp.where(s[0] == 3, 1.0 / x, 0.0))
    return jax.lax.while_loop(lambda s: s[0] < 5, body, (0, 1.0))[1]


def fori(x):
    body = lambda i, s: s + jnp.where(i == 3, 1.0 / x, 0.0)
    return jax.lax.fori_loop(0, 5, body, 1.0)


def branched(x):
    return jax.lax.cond(x > 0.5, lambda x: x, lambda x: 1.0 / x, x)


def nested(x):
    def outer(carry, t):
        inner = lambda c, s: (c + jnp.where((t == 1) & (s == 2), 1.0 / x, 0.0), s)
        return jax.lax.scan(inner, carry, jnp.arange(3))[0], t

    return jax.lax.scan(outer, 0.0, jnp.arange(2))[0]


@jax.jit
def jitted(x):
    return jax.jit(lambda x: 1.0 / x)(x)


def rematerialized(x):
    return jax.checkpoint(lambda x: jnp.sin(1.0 / x))(x)


@jax.custom_jvp
def with_jvp(x):
    return 1.0 / x


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return 1.0 / x


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


def mapped(x):
    return jax.vmap(lambda y: y / x)(jnp.arange(1.0, 4.0))


CONSTRUCTS = {
    scanned: "log",
    carried: "div",
    backwards: "div",
    looped: "div",
    fori: "div",
    branched: "div",
    nested: "div",
    jitted: "div",
    rematerialized: "div",
    with_jvp: "div",
    with_vjp: "div",
    mapped: "div",
}
LOOPS = {
    scanned: [("scan", 0)],
    carried: [("scan", 2)],
    backwards: [("scan", 2)],
    looped: [("while", 3)],
    fori: [("scan", 3)],
    nested: [("scan", 1), ("scan", 2)],
}


@cover(quick=len(CONSTRUCTS))
@pytest.mark.parametrize("fn", CONSTRUCTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("jit", [True, False])
def test_the_op_is_found(fn, jit):
    find = debug.find_nonfinite(fn)
    find = jax.jit(find) if jit else find
    (op, *_) = find(ZERO).to_dict()["ops"]
    assert op["made"] == "inf" and op["primitive"] == CONSTRUCTS[fn]
    assert op["line"].startswith("test_nonfinite.py:")
    assert op["loops"] == LOOPS.get(fn, []) and op["arguments"] == ["x"]
    assert find(ONE).to_dict() == {} and find(ONE).found == []


WITH_A_GRADIENT = [fn for fn in reversed(CONSTRUCTS) if fn is not looped]


@cover(quick=5)
@pytest.mark.parametrize("fn", WITH_A_GRADIENT, ids=lambda fn: fn.__name__)
def test_the_gradient_is_searched_too(fn):
    find = debug.find_nonfinite(jax.grad(lambda x: jnp.sum(fn(x))))
    report = find(ZERO)
    if fn in (with_jvp, with_vjp):  # their rules give a finite gradient
        assert report.found == []
    else:
        assert report.found
    assert find(ONE).found == []


def test_what_follows_from_an_inf_is_not_listed():
    def overflows(x):
        big = x * x
        return big - big, jnp.sin(big), jnp.log(x - x)

    report = debug.find_nonfinite(overflows)(jnp.full(3, 1e30))
    made = [(op["primitive"], op["made"]) for op in report.to_dict()["ops"]]
    assert made == [("mul", "inf"), ("log", "inf")]


def test_intended_infs_are_no_fault():
    def attention(x, mask):
        logits = jnp.where(mask, x @ x.T, -jnp.inf)
        best = jnp.max(logits, axis=-1, keepdims=True)
        masked_log = jnp.where(x > 0, jnp.log(x), 0.0)
        return jnp.sum(jax.nn.softmax(logits - best) @ x) + jnp.sum(masked_log)

    mask = np.tril(np.ones((3, 3), bool))
    x = np.abs(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    x[0, 0] = 0.0
    assert jax.jit(debug.find_nonfinite(attention))(x, mask).found == []


def test_a_running_maximum_that_starts_at_minus_infinity():
    def online_softmax(x):
        def body(carry, x):
            best, total = carry
            new = jnp.maximum(best, x)
            return (new, total * jnp.exp(best - new) + jnp.exp(x - new)), None

        (best, total), _ = jax.lax.scan(body, (-jnp.inf, 0.0), x)
        return best + jnp.log(total)

    x = jnp.arange(5.0)
    assert debug.find_nonfinite(online_softmax)(x).found == []
    found = debug.find_nonfinite(online_softmax)(x.at[3].set(-jnp.inf)).found
    assert found == []  # exp of it is zero
    report = debug.find_nonfinite(online_softmax)(x.at[0].set(-jnp.inf))
    (op,) = report.to_dict()["ops"]
    assert op["primitive"] == "sub" and op["made"] == "nan" and op["from_inf"]


def test_the_first_of_several_comes_first():
    def f(x):
        a = jnp.log(x)
        b = jnp.sqrt(x - 1.0)
        return b, a

    ops = debug.find_nonfinite(f)(ZERO).to_dict()["ops"]
    assert [(op["primitive"], op["made"]) for op in ops] == [
        ("log", "inf"),
        ("sqrt", "nan"),
    ]


def test_a_nan_is_followed_through_nans():
    def f(x):
        return jnp.log(x) + jnp.sqrt(x - 1.0)  # the first is a mask, for all we know

    (op,) = debug.find_nonfinite(f)(jnp.zeros(2)).to_dict()["ops"]
    assert op["primitive"] == "sqrt"
    ops = debug.find_nonfinite(f)(ZERO).to_dict()["ops"]  # no mask
    assert [op["primitive"] for op in ops] == ["log", "sqrt"]


def test_the_line_is_that_of_the_call_though_jax_traced_it_before():
    def first(x):
        return jnp.logaddexp(x, x) - jnp.nanmean(1.0 / x)

    def second(x):
        y = jnp.where(x < 0, x, 1.0 / x)
        return y

    debug.find_nonfinite(first)(ZERO)
    line = second.__code__.co_firstlineno + 1
    (op,) = debug.find_nonfinite(second)(ZERO).to_dict()["ops"]
    assert op["line"] == f"test_nonfinite.py:{line} in second"


def test_an_argument_that_is_not_finite_is_named():
    params = {"a": jnp.ones(2), "b": {"w": jnp.array([1.0, jnp.nan])}}
    f = lambda params, x: jnp.sum(params["a"] * x + params["b"]["w"])
    report = debug.find_nonfinite(f)(params, jnp.ones(2))
    assert report.found == ["params/b/w"]
    assert "inf or nan given in params/b/w" in str(report)


def test_a_constant_that_is_not_finite_is_told():
    report = debug.find_nonfinite(lambda x: x * jnp.inf - jnp.inf)(ONE)
    assert "given as a constant" in str(report)
    assert report.to_dict()["ops"][0]["primitive"] == "sub"


def test_results_are_named():
    f = lambda x: {"fine": x, "loss": 1.0 / x, "aux": (x, jnp.log(x))}
    report = debug.find_nonfinite(f)(ZERO)
    assert report.to_dict()["results"] == ["aux/1", "loss"]
    assert "reaches 2 of 4 results: aux/1, loss" in str(report)


def loss_fn(params, x):
    with jamp.autocast(dtype=jnp.float16):
        with jax.named_scope("head"):
            h = x @ params["w"]
        return jnp.mean(h**2)


def make_step(tx, traces):
    @jax.jit
    def train_step(params, opt_state, x):
        traces.append(1)
        grad_fn = jamp.value_and_grad(loss_fn, opt_state)
        _, grads = grad_fn(params, x)
        params_after, opt_state = jamp.step(tx, grads, opt_state, params)
        skipped = jamp.metrics(opt_state)["found_inf"]
        report = debug.find_nonfinite(grad_fn, when=skipped)(params, x)
        return params_after, opt_state, report

    return train_step


def test_a_skipped_step_is_explained_afterwards(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.0), init_scale=8.0)
    traces, params = [], {"w": jnp.full((64, 8), 30.0)}
    step, opt_state, reports = make_step(tx, traces), tx.init(params), []
    for factor in (0.01, 60.0, 0.01):
        x = jnp.full((2, 64), factor)
        params, opt_state, report = step(params, opt_state, x)
        reports.append(report)
    assert [bool(report.found) for report in reports] == [False, True, False]
    (op, *_) = reports[1].to_dict()["ops"]
    assert op["primitive"] == "dot_general" and op["dtypes_out"] == ("float16",)
    assert op["path"] == "head" and set(op["arguments"]) == {"params/w", "x"}
    assert len(traces) == 1


def sharded(step):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P(), P("x")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(step, mesh=mesh, **specs)


def on_two(function):
    """For a function that is mapped over two devices."""

    def run(params, opt_state, x):
        both = lambda a: jnp.broadcast_to(a, (2, *jnp.shape(a)))
        params, opt_state = jax.tree.map(both, (params, opt_state))
        return function(params, opt_state, x.reshape(2, -1, x.shape[-1]))

    return run


def scanned_steps(step):
    def run(params, opt_state, x):
        body = lambda state, x: (step(*state, x)[:2], None)
        return jax.lax.scan(body, (params, opt_state), jnp.stack([x, x]))[0]

    return run


def in_a_branch(step):
    def run(*args):
        shapes = jax.eval_shape(step, *args)
        zeros = lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.cond(args[-1][0, 0] > 0, step, zeros, *args)

    return run


STEPS = {
    "alone": (None, lambda step: step),
    "jit of jit": (None, lambda step: jax.jit(jax.jit(step))),
    "scan": (None, scanned_steps),
    "scan of scan": (None, lambda step: scanned_steps(scanned_steps(step))),
    "scan of cond": (None, lambda step: scanned_steps(in_a_branch(step))),
    "retry": (None, lambda step: jamp.retry(step, attempts=2)),
    "vmap": ("x", lambda step: on_two(jax.vmap(step, axis_name="x"))),
    "shard_map": ("x", sharded),
    "jit of shard_map": ("x", lambda step: jax.jit(sharded(step))),
    "shard_map of jit": ("x", lambda step: sharded(jax.jit(step))),
    "scan of shard_map": ("x", lambda step: scanned_steps(sharded(step))),
    "shard_map of scan": ("x", lambda step: sharded(scanned_steps(step))),
    "pmap": ("x", lambda step: on_two(jax.pmap(step, axis_name="x"))),
}


@cover(quick=0, ci=6)
@pytest.mark.parametrize("way", STEPS)
def test_a_skipped_step_is_never_without_a_cause(way, standard_promotion):
    axis_name, around = STEPS[way]
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name=axis_name)
    params = {"w": np.ones((8, 4), np.float32)}
    x = np.ones((4, 8), np.float32)
    x[3, 2] = 300.0  # on the second device

    def loss_fn(params, x):
        with jamp.autocast(jnp.float16):
            h = x @ params["w"]
            return jnp.mean(h.astype(jnp.float32) ** 2) * 1e3

    def step(params, opt_state, x):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
        params, opt_state = jamp.step(tx, grads, opt_state, params)
        return params, opt_state, loss

    if way == "retry":
        one = step
        step = lambda state, x: ((new := one(*state, x))[:2], new[2])
        step = around(step)
        run = lambda params, opt_state, x: step((params, opt_state), x)
    else:
        run = around(step)
    opt_state = jax.jit(tx.init)(params)
    report = debug.find_nonfinite(run)(params, opt_state, x)
    assert "no inf or nan" not in str(report)
    assert ("or run again by jamp.retry" in str(report)) == (way == "retry")
    assert "which is normal in the first steps" in str(report)
    op = report.to_dict()["ops"][0]
    assert (op["made"], op["primitive"], op["backward"]) == (
        "inf",
        "convert_element_type",
        True,
    )
    assert op["line"].startswith("test_nonfinite.py") and "loss_fn" in op["line"]


def test_a_skip_that_stays_unexplained_is_said(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    params = np.ones(3, np.float32)

    @jax.jit
    def skipped(params):
        return jamp.step(tx, params * jnp.inf, tx.init(params), params)[1]

    opt_state = skipped(params)
    report = debug.find_nonfinite(lambda state: jamp.metrics(state))(opt_state)
    assert "found_inf is True in the results" in str(report)
    assert "no inf or nan in" not in str(report)
    assert "no inf or nan in" in str(debug.find_nonfinite(lambda x: x)(params))


@pytest.mark.parametrize("looped", [False, True])
def test_an_answer_names_what_was_not_looked_into(looped, standard_promotion):
    def called(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    run = (lambda x: jax.lax.map(called, x[None])) if looped else called
    text = str(debug.find_nonfinite(run)(jnp.ones(4)))
    assert "not looked into: pure_callback" in text and "in called" in text


def test_a_step_that_is_fine_does_not_run_the_search(standard_promotion):
    calls = []

    def watched(x):
        jax.debug.callback(lambda: calls.append(1))
        return 1.0 / x

    run = jax.jit(lambda x, when: debug.find_nonfinite(watched, when=when)(x))
    assert run(ZERO, False).found == []
    jax.effects_barrier()
    assert not calls
    assert run(ZERO, True).found
    jax.effects_barrier()
    assert len(calls) == 1


@pytest.mark.slow
def test_a_scan_of_train_steps(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.0), init_scale=8.0)
    step, params = make_step(tx, []), {"w": jnp.full((64, 8), 30.0)}

    def train(params, opt_state, xs):
        def body(carry, x):
            *carry, report = step(*carry, x)
            return tuple(carry), report

        return jax.lax.scan(body, (params, opt_state), xs)

    xs = jnp.full((6, 2, 64), 0.01).at[4].set(60.0)
    _, reports = jax.jit(train)(params, tx.init(params), xs)
    assert "something found in 1: 4." in str(reports)
    assert reports[4].found and not reports[3].found
    with pytest.raises(ValueError, match=r"stacked, of 6 steps; index it first"):
        reports.to_dict()
    # The steps are skipped, so that all results are finite.
    report = debug.find_nonfinite(lambda *args: train(*args)[0])(
        params, tx.init(params), xs
    )
    row = report.to_dict()
    assert row["results"] == [] and row["ops"][0]["loops"] == [("scan", 4)]
    assert "the step was skipped" in str(report)


@pytest.mark.slow
def test_a_train_step_of_nnx(standard_promotion):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(64, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.drop(self.dense(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    scaler = jamp.GradScaler()

    @nnx.jit
    def train_step(model, optimizer, scaler, x):
        def loss(model):
            with jamp.autocast(dtype=jnp.float16):
                return scaler.scale(jnp.mean(model(x) ** 2))

        grads = nnx.grad(loss)(model)
        skipped = scaler.step(optimizer, model, grads)
        scaler.update()
        return skipped

    before = jax.tree.leaves(nnx.state((model, optimizer, scaler)))
    x = jax.random.normal(jax.random.key(1), (4, 64))
    find = debug.find_nonfinite(train_step)
    assert find(model, optimizer, scaler, x).found == []
    report = find(model, optimizer, scaler, 1e6 * x)
    (op, *_) = report.to_dict()["ops"]
    assert op["primitive"] == "convert_element_type" and op["arguments"] == ["x"]
    after = jax.tree.leaves(nnx.state((model, optimizer, scaler)))
    assert all(a is b for a, b in zip(before, after, strict=True))  # nothing moved


def test_modules_and_methods_are_called_with_their_parameters(standard_promotion):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x, *, train):
            assert train is True
            return self.score(x)

        def score(self, x):
            return self.dense(x)

    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
    model.dense.kernel[...] = jnp.full((2, 2), jnp.inf)
    x = np.ones((1, 2), np.float32)
    assert debug.find_nonfinite(model)(x, train=True).found == ["Model/dense/kernel"]
    assert debug.find_nonfinite(model.score)(x).found == ["Model/dense/kernel"]


@pytest.mark.gpu
def test_half_precision_is_seen_though_xla_computes_in_float32():
    f = lambda x: ((x * jnp.float16(300)) * jnp.float16(300)).astype(jnp.float32)
    report = jax.jit(debug.find_nonfinite(f))(jnp.float16(1.0))
    if report.found:  # XLA may keep the product in float32 all the way
        assert "mul (float16 -> float16)" in report.found[0]
    report = debug.find_nonfinite(f)(jnp.float16(1.0))
    assert "mul (float16 -> float16)" in report.found[0]


def test_other_transformations(standard_promotion):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        lambda x: jax.lax.psum(1.0 / x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    (op,) = debug.find_nonfinite(sharded)(jnp.arange(8.0)).to_dict()["ops"]
    assert op["primitive"] == "div"
    callback = lambda x: jax.pure_callback(lambda x: x / 0, x, x)
    with np.errstate(divide="ignore"):
        (op,) = debug.find_nonfinite(callback)(ONE).to_dict()["ops"]
    assert op["primitive"] == "pure_callback"


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.float16, jnp.bfloat16])
def test_dtypes(dtype):
    value = np.zeros((), dtype)
    assert debug.find_nonfinite(lambda x: 1 / x)(value).found
    assert not debug.find_nonfinite(lambda x: 1 / (1 + x))(value).found


def test_what_is_no_array_stays_as_it_is():
    def f(x, mode, n=2, key=None, scale=1.0):
        assert mode == "double" and isinstance(n, int) and isinstance(scale, float)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return jnp.full((n,), x / scale)

    find = debug.find_nonfinite(f)
    assert find(ONE, "double", n=3, key=jax.random.key(0)).found == []
    assert find(ONE, "double", key=jax.random.key(0), scale=0.0).found


# Defects that reviews found.


def test_an_overflow_beside_a_mask_of_minus_infinity():
    def masked(q):
        logits = q @ q.T
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape, bool)), logits, -jnp.inf)
        logits = logits.astype(jnp.float16)  # here
        return jnp.sum(jax.nn.softmax(logits))

    find = jax.jit(debug.find_nonfinite(masked))
    report = find(np.full((4, 4), 1e3, np.float32))
    (op, *_) = report.to_dict()["ops"]
    line = masked.__code__.co_firstlineno + 3
    assert op["line"] == f"test_nonfinite.py:{line} in masked"
    assert op["primitive"] == "convert_element_type" and op["made"] == "inf"
    assert find(np.ones((4, 4), np.float32)).found == []


def test_a_fault_in_a_buffer_that_starts_as_nan():
    def fill(x):
        def body(buffer, i):
            return buffer.at[i].set(jnp.log(x[i])), None

        return jax.lax.scan(body, jnp.full(3, jnp.nan), jnp.arange(3))[0]

    (op, *_) = debug.find_nonfinite(fill)(jnp.array([1.0, 0.0, 2.0])).to_dict()["ops"]
    assert op["primitive"] == "log" and op["loops"] == [("scan", 1)]
    assert debug.find_nonfinite(fill)(jnp.ones(3)).found == []


def test_a_while_loop_with_an_inf_that_goes_away(standard_promotion):
    def loop(x):
        def body(state):
            i, best, total = state
            best = jnp.where(i == 0, 1 / i.astype(jnp.float32), 1.0)
            return i + 1, best, total + jnp.log(x - i)

        start = jnp.int32(0), jnp.float32(1), jnp.float32(0)
        return jax.lax.while_loop(lambda s: s[0] < 5, body, start)[2]

    (op, *_) = debug.find_nonfinite(loop)(jnp.float32(3.0)).to_dict()["ops"]
    assert op["primitive"] == "log" and op["loops"] == [("while", 3)]
    assert debug.find_nonfinite(loop)(jnp.float32(10.0)).found == []


def test_a_while_loop_whose_carries_pass_it_on():
    def loop(x):
        body = lambda s: (
            s[0] + 1,
            jnp.where(s[0] == 2, 1.0 / x, 0.0),
            s[1],
            s[3] + s[2],
        )
        return jax.lax.while_loop(lambda s: s[0] < 6, body, (0, 0.0, 0.0, 0.0))[3]

    (op,) = debug.find_nonfinite(loop)(ZERO).to_dict()["ops"]
    assert op["primitive"] == "div"


def test_the_first_iteration_explains_what_follows_in_a_while_loop():
    def loop(x):
        def body(state):
            i, grown, difference = state
            return i + 1, grown * 2.0**60, difference + (grown - grown)

        start = jnp.int32(0), x, jnp.float32(0)
        return jax.lax.while_loop(lambda s: s[0] < 6, body, start)[2]

    (op,) = debug.find_nonfinite(loop)(jnp.float32(1)).to_dict()["ops"]
    assert op["primitive"] == "mul" and op["made"] == "inf" and not op["from_inf"]
    assert op["loops"] == [("while", 2)]
    (op,) = jax.jit(debug.find_nonfinite(loop))(jnp.float32(2.0**90)).to_dict()["ops"]
    assert op["primitive"] == "mul" and op["loops"] == [("while", 0)]


def test_a_mask_that_a_while_loop_is_given_hides_nothing():
    def loop(mask, x):
        def body(state):
            i, mask, total = state
            return i + 1, mask + 0.0, total + jnp.log(x - i.astype(jnp.float32))

        start = jnp.int32(0), mask, jnp.float32(0)
        return jax.lax.while_loop(lambda s: s[0] < 5, body, start)[2]

    arguments = jnp.array([0.0, -jnp.inf]), jnp.float32(3)
    (op,) = debug.find_nonfinite(loop)(*arguments).to_dict()["ops"]
    assert op["primitive"] == "log" and op["loops"] == [("while", 3)]


def test_what_was_bad_before_a_while_loop_explains_nothing_in_it(standard_promotion):
    def loop(mask, x):
        body = lambda s: (s[0] + 1, s[1] + 0.0, 1 / (3 - s[0] * x), s[3] + s[2])
        start = jnp.int32(0), mask, jnp.float32(0), jnp.float32(0)
        return jax.lax.while_loop(lambda s: s[0] < 6, body, start)[3]

    arguments = jnp.array([0.0, -jnp.inf]), jnp.float32(1)
    found = debug.find_nonfinite(loop)(*arguments).to_dict()
    assert [op["primitive"] for op in found["ops"]] == ["div"]
    assert found["bad_arguments"] == []


def test_only_the_case_that_was_chosen_is_followed():
    def f(x, y):
        kept = jnp.where(x > 0, jnp.log(x), jnp.exp(y))
        return jnp.sum(kept)

    (op,) = debug.find_nonfinite(f)(
        jnp.array([-1.0, 0.0, 2.0]), 1e3 * jnp.ones(3)
    ).to_dict()["ops"]
    assert op["primitive"] == "exp"
    branch = lambda x: jax.lax.cond(x > 0, jnp.sqrt, lambda x: jnp.log(x + 1), x)
    x = jnp.array([-1.0, 0.0, 1.0])
    (op,) = debug.find_nonfinite(jax.vmap(branch))(x).to_dict()["ops"]
    assert op["primitive"] == "log"


def test_the_users_line_is_preferred_to_a_librarys(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.adam(1e-3, eps=0.0))
    params = {"w": np.ones(2, np.float32)}
    line = inspect.currentframe().f_lineno + 1
    step = lambda params, state, grads: jamp.step(tx, grads, state, params)
    zeros = {"w": np.zeros(2, np.float32)}
    find = jax.jit(debug.find_nonfinite(step))
    (op, *_) = find(params, jax.jit(tx.init)(params), zeros).to_dict()["ops"]
    assert op["line"].startswith(f"test_nonfinite.py:{line} ")
    assert debug.find_nonfinite(jnp.log)(ZERO).to_dict()["ops"][0]["line"] == ""


def test_an_inf_that_was_given_does_not_hide_a_skipped_step(standard_promotion):
    tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
    params = {"c": np.zeros(3, np.float32)}

    def step(params, state, best, x):
        loss = lambda params: jnp.sqrt(jnp.sum((params["c"] - x) ** 2))
        value, grads = jamp.value_and_grad(loss, state)(params)
        params, state = jamp.step(tx, grads, state, params)
        return params, state, jnp.where(jamp.metrics(state)["found_inf"], best, value)

    args = params, jax.jit(tx.init)(params), np.float32(np.inf), params["c"]
    row = jax.jit(debug.find_nonfinite(step))(*args).to_dict()
    assert row["bad_arguments"] == ["best"]
    assert row["ops"][0]["primitive"] == "div"


SUMS = {
    "jit": lambda total: lambda x: jnp.sum(jnp.log(x)),
    "shard_map": lambda total: total,
    "its gradient": jax.grad,
}


@cover()
@pytest.mark.parametrize("way", SUMS)
def test_a_jitted_function_of_sharded_arrays(way):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, P("x"))
    x = np.arange(8, dtype=np.float32)
    total = jax.shard_map(
        lambda x: jax.lax.psum(jnp.log(x).sum(), "x"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
    )
    find = debug.find_nonfinite(jax.jit(SUMS[way](total)))
    assert find(jax.device_put(x, spread)).found
    assert not find(jax.device_put(x + 1, spread)).found


def test_a_region_around_it_counts(standard_promotion):
    x, w = jnp.full((2, 64), 60.0), jnp.full((64, 2), 30.0)
    with jamp.autocast(dtype=jnp.float16):
        report = debug.find_nonfinite(lambda x, w: x @ w)(x, w)
    assert "dot_general (float16 -> float16)" in report.found[0]


def test_float8():
    def f(x):
        return (x * 1000.0).astype(jnp.float8_e4m3fn).reshape(-1).astype(jnp.float32)

    (op,) = debug.find_nonfinite(f)(jnp.ones((2, 2))).to_dict()["ops"]
    assert op["dtypes_out"] == ("float8_e4m3fn",)


def test_a_constant_is_told_with_the_line_that_uses_it():
    def f(x):
        return jnp.where(x > 0, x, -jnp.inf)

    report = debug.find_nonfinite(f)(jnp.arange(3.0))
    line = f.__code__.co_firstlineno + 1
    assert f"given as a constant at test_nonfinite.py:{line} in f" in str(report)


def test_nothing_is_no_fault():
    assert not debug.find_nonfinite(lambda x: jnp.broadcast_to(x, (0,)))(jnp.inf).found


def test_a_result_that_is_a_constant():
    report = debug.find_nonfinite(lambda x: jnp.full(3, jnp.nan))(ONE)
    assert report.to_dict()["results"] == ["the result"]


def test_jax_debug_nans_does_not_stop_the_search():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert debug.find_nonfinite(lambda x: jnp.log(x))(ZERO).found


def written(x):
    ref = jax.new_ref(jnp.ones_like(x))
    ref[...] = jnp.log(x)
    return jnp.sum(ref[...])


def written_row(x):
    ref = jax.new_ref(jnp.ones((2, 2)))
    jax.jit(lambda x: ref.__setitem__(1, jnp.log(x)))(x)
    return jnp.sum(jax.ref.freeze(ref))


def added(x):
    ref = jax.new_ref(jnp.float32(0.0))
    jax.checkpoint(lambda x: jax.ref.addupdate(ref, ..., jnp.sum(jnp.log(x))))(x)
    return ref[...]


@cover(quick=3, ci=9)
@pytest.mark.parametrize("fn", [written, written_row, added])
@pytest.mark.parametrize("way", ["eager", "jit", "region"])
def test_values_are_followed_through_references(fn, way):
    wrap = {"jit": jax.jit, "region": jamp.autocast(dtype=jnp.float16)}.get(way)
    run = wrap(fn) if wrap else fn
    (op,) = debug.find_nonfinite(run)(jnp.zeros(2)).to_dict()["ops"]
    assert (op["made"], op["primitive"]) == ("inf", "log")
    assert f" in {fn.__name__}" in op["line"] or "lambda" in op["line"]
    assert not debug.find_nonfinite(run)(jnp.ones(2)).found


def overwritten(x):
    ref = jax.new_ref(jnp.log(x))
    ref[...] = x
    return jnp.sum(ref[...])


def test_what_a_reference_no_longer_holds_is_no_fault():
    assert not debug.find_nonfinite(overwritten)(jnp.zeros(2)).found


def test_the_iteration_that_made_a_reference_bad():
    def fn(x):
        ref = jax.new_ref(jnp.zeros_like(x))

        def body(carry, _):
            ref[...] += jnp.log(carry)
            return carry - 1.0, None

        jax.lax.scan(body, x, None, length=3)
        return jnp.sum(ref[...])

    (op,) = debug.find_nonfinite(fn)(jnp.full(2, 2.0)).to_dict()["ops"]
    assert (op["made"], op["primitive"], op["loops"]) == ("inf", "log", [("scan", 2)])


def test_a_reference_from_outside_is_refused():
    ref = jax.new_ref(jnp.zeros(2))

    def fn(x):
        ref[...] = jnp.log(x)
        return ref[...]

    with pytest.raises(TypeError, match=r"jax\.Ref.*from outside.*`ref\[\.\.\.\]`"):
        debug.find_nonfinite(fn)(jnp.ones(2))
    with pytest.raises(TypeError, match="from outside"):
        debug.find_nonfinite(lambda ref: ref[...])(ref)


def test_a_function_that_prints(capfd):
    def fn(x):
        jax.debug.print("x is {}", x)
        return jnp.log(x - 1.0)

    report = jamp.debug.find_nonfinite(fn)(jnp.ones(3))
    assert "log" in str(report)
    jax.effects_barrier()
    assert "x is [1. 1. 1.]" in capfd.readouterr().out


@cover()
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(1, 4, 4, 1), (8, 8, 8, 8)])
def test_a_pooling_that_drops_nans_is_not_blamed(shape, dtype):
    # Of large arrays XLA's maximum on a CPU is -inf where all numbers are nan.
    def loss_fn(x, bias):
        big = (x * x).astype(dtype)
        return nnx.max_pool(big - big + bias, (2, 2), (2, 2))

    x, zero = np.full(shape, 1e30, np.float32), np.zeros((), dtype)
    report = debug.find_nonfinite(loss_fn)(x, zero)
    assert report.found and "reduce_window" not in str(report), report
    assert str(report).startswith("inf made of finite numbers by"), report
    assert ", from x" in str(report).splitlines()[0], report


def test_a_maximum_over_nothing_is_named():
    pool = lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1,), (3,), ((2, 0),)
    )
    report = debug.find_nonfinite(pool)(jnp.ones(4))
    assert "reduce_window_max" in str(report)


def test_only_the_branch_that_runs_is_compiled(caplog):
    def f(x):
        return jax.lax.cond(x > 0, lambda x: x / 0.0, lambda x: jnp.sinh(x), x)

    debug.find_nonfinite(f)(ONE)
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        (op,) = debug.find_nonfinite(f)(ONE).to_dict()["ops"]
        again = [r.getMessage() for r in caplog.records]
        assert not any("Finished XLA compilation" in text for text in again)
        debug.find_nonfinite(lambda x: jnp.cosh(f(x)))(ZERO - ONE)  # new ops
    assert op["primitive"] == "div"
    assert any("Finished XLA compilation" in r.getMessage() for r in caplog.records)


@cover()
@pytest.mark.parametrize("by", ["shard_map", "pmap"])
def test_what_runs_on_several_devices_is_compiled_at_once(by, caplog):
    def f(x):
        for op in (jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.log, jnp.sqrt, jnp.tanh):
            x = op(x) / 2 + 3
        return x

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    mapped = {
        "pmap": jax.pmap(f),
        "shard_map": jax.shard_map(
            f, mesh=mesh, in_specs=jax.P("batch"), out_specs=jax.P("batch")
        ),
    }
    x = jnp.ones((2, 3))
    with jax.log_compiles(), caplog.at_level("DEBUG"):
        assert debug.find_nonfinite(mapped[by])(x).to_dict() == {}
    compiled = [r for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert 0 < len(compiled) < 7  # fewer than there are kinds of op


def of_inputs(jaxpr, given):
    """Whether each result depends on an input, or is hidden from XLA; and the sums."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    folded = []
    for eqn in jaxpr.eqns:
        inputs = [
            not isinstance(v, Literal) and known.get(v, False) for v in eqn.invars
        ]
        depends = any(inputs) or eqn.primitive.name == "optimization_barrier"
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"].jaxpr
            outs, more = of_inputs(inner, inputs)
            folded += more
        else:
            outs = [depends] * len(eqn.outvars)
            if eqn.primitive.name.startswith("reduce") and not depends:
                folded.append(eqn)
        known |= zip(eqn.outvars, outs, strict=True)
    outs = [not isinstance(v, Literal) and known.get(v, False) for v in jaxpr.outvars]
    return outs, folded


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_xla_folds_no_mark_of_a_constant(wrap):
    """Each would take it seconds: a mark of the zeros of a relu is a large sum."""

    def loss(w, x):
        steps = jnp.linspace(0.0, 1.0, 8)[:, None] * jnp.ones((8, 4))
        hidden = jax.nn.relu(wrap(lambda x: jax.nn.relu(x @ w))(x + steps))
        return jnp.sum(jnp.where(hidden > 1, hidden, 0.0) ** 2)

    find = debug.find_nonfinite(jax.value_and_grad(loss))
    jaxpr = jax.make_jaxpr(find)(jnp.ones((4, 4)), jnp.ones((8, 4)))
    _, folded = of_inputs(jaxpr.jaxpr, [True, True])
    assert not folded
    assert "reduce" in str(jaxpr)
