"""A region's result does not depend on what ran before it, or runs in other threads."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from jamp._autocast.retracing import without_caches
from jamp._autocast.trace import PROBE

from ..around import alike, alone, one_after_another, program, side_by_side
from ..marks import cover

pytestmark = pytest.mark.usefixtures("standard_promotion", "default_precision")

HALF, FLOAT32, BFLOAT16 = jnp.float16, jnp.float32, jnp.bfloat16
SHAPE = jax.ShapeDtypeStruct((16, 16), FLOAT32)
MESH = jax.make_mesh(
    (1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
)


def precise(function, *args):
    return function(*args)


def lenient(function, *args):
    return function(*args)


def watched(trace, op, out):
    return out


# Functions that hold a jaxpr which JAX traces once, and so does jamp for each setting.


def jitted(body):
    return jax.jit(body)


def inlined(body):
    return jax.jit(body, inline=True)


def rematerialized(body):
    return jax.checkpoint(body)


def scanned(body):
    def step(carry, _):
        outs = body(*carry)
        return carry, outs

    return lambda x, w: lax.scan(step, (x, w), None, length=2)[1]


def looped(body):
    def step(_, carry):
        x, w, _ = carry
        return x, w, sum(body(x, w)) * 0.5

    return lambda x, w: lax.fori_loop(0, 2, step, (x, w, jnp.zeros_like(x)))


def chosen(body):
    other = lambda x, w: (x, w, x)  # in float32, so that the branches must agree
    return lambda x, w: lax.cond(x[0, 0] > 0, body, other, x, w)


def chosen_alike(body):
    other = lambda x, w: (w @ x, w @ x, w @ x)
    return lambda x, w: lax.cond(x[0, 0] > 0, body, other, x, w)


def with_jvp(body):
    function = jax.custom_jvp(body)

    @function.defjvp
    def _(primals, tangents):
        x, w = primals
        return function(x, w), jax.jvp(lambda x: body(x, w), (x,), tangents[:1])[1]

    return function


def with_vjp(body):
    function = jax.custom_vjp(body)

    def bwd(kept, cotangents):
        return jax.vjp(body, *kept)[1](tuple(cotangents))

    function.defvjp(lambda x, w: (function(x, w), (x, w)), bwd)
    return function


def with_vmap(body):
    function = jax.custom_batching.custom_vmap(body)

    @function.def_vmap
    def _(size, batched, x, w):
        outs = jax.vmap(body, in_axes=(0 if batched[0] else None, None))(x, w)
        return outs, (True, True, True)

    return function


def sharded(body):
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P()))


FORMS = {
    "jit": jitted,
    "inlined": inlined,
    "checkpoint": rematerialized,
    "scan": scanned,
    "loop": looped,
    "cond": chosen,
    "cond of equals": chosen_alike,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "jit of custom_jvp": lambda body: jax.jit(with_jvp(body)),
    "jit of custom_vjp": lambda body: jax.jit(with_vjp(body)),
    "custom_vmap": with_vmap,
    "shard_map": sharded,
    "jit of jit": lambda body: jax.jit(jax.jit(body)),
}
# The jaxprs that JAX made in one region are not those of another one. But a jaxpr that
# was made before them all may run in each.
BEFORE = "jaxpr of "
MADE_BEFORE = [BEFORE + form for form in FORMS]


def case(form, few=()):
    """Calls of one function that differ in each thing that decides about an op.

    Args:
      few: the names of the calls, if they are not all.
    """

    def make(pause):
        def body(x, w):
            pause()
            h = x @ w
            return h, jax.nn.log_softmax(h @ w + w[0]), jnp.where(h > 0, h, -1e10)

        run = FORMS[form.removeprefix(BEFORE)](body)
        if form.startswith(BEFORE):
            made = jax.make_jaxpr(run)(SHAPE, SHAPE)
            run = lambda *args: jaxpr_as_fun(made)(*args)
        left_out = {*IN_HALF} if form.startswith(BEFORE) else set()
        if "shard_map" in form:
            left_out |= ON_A_DEVICE
        calls = calls_of(run)
        names = [name for name in few or calls if name not in left_out]
        return {name: calls[name] for name in names}

    return make


def calls_of(run):
    def traced(function, *shapes):
        return lambda: jax.make_jaxpr(function)(*(shapes or (SHAPE, SHAPE)))

    def layer(x, w):
        """The function, and a sum that asks what is known about its result."""
        outs = run(x, w)
        return outs, jax.tree.leaves(outs)[0] + w[0]

    def loss(x, w):
        return sum(jnp.sum(y) for y in jax.tree.leaves(layer(x, w)))

    def under(*settings, function=layer, **wishes):
        def program(x, w):
            with jamp.autocast(*settings, **wishes):
                return function(x, w)

        return traced(program)

    def at(name, function=layer):
        rules = {"head": FLOAT32, "neck": None}

        def inside(x, w):
            for used in ("head", "neck"):
                with jax.named_scope(used):
                    x @ w
            with jax.named_scope(name):
                return function(x, w)

        return under(HALF, rules=rules, function=inside)

    def by(function, **wishes):
        def inside(x, w):
            precise(jnp.matmul, x, w)
            return function(layer, x, w)

        return under(HALF, rules={precise: FLOAT32}, function=inside, **wishes)

    def twice(inner, function=layer):
        def inside(x, w):
            with jamp.autocast(**inner):
                return function(x, w)

        return inside

    def probed():
        with PROBE(watched):
            return under(HALF)()

    def uncached():
        with without_caches():
            return under(HALF)()

    def explained():
        explain = jamp.debug.explain(layer, HALF)
        report = explain(*(jnp.ones(SHAPE.shape) for _ in "xw"))
        return sorted({(row.op, row.dtypes, row.rule) for row in report.rows})

    def in_context(context):
        def call():
            with context():
                return under(HALF)()

        return call

    def failing():
        def fails(x, w):
            layer(x, w)
            raise ZeroDivisionError

        return under(HALF, function=fails)()

    again = lambda x, w: layer(x @ w, w)  # in other dtypes than it was traced with
    gradient = jax.grad(loss, (0, 1))
    other = lambda x, w: jax.jit(layer)(x, w)
    half = jax.ShapeDtypeStruct((16, 16), HALF)
    region = jamp.autocast(HALF, rules={lax.log_p: BFLOAT16, lax.dot_general_p: None})
    one = traced(region(layer))
    return {
        "no region": traced(layer),
        "float16": under(HALF),
        "bfloat16": under(BFLOAT16),
        "casting anew": under(HALF, cache_enabled=False),
        "one object": one,
        "one object again": one,
        "float8": under("float8"),
        "float8 by rows": under(jamp.Float8("rowwise")),
        "scaled": under(jamp.ScaledFloat16()),
        "off": under(enabled=False),
        "in head": at("head"),
        "in neck": at("neck"),
        "in body": at("body"),
        "in head, in a jitted function": at("head", jax.jit(layer)),
        "in body, in a jitted function": at("body", jax.jit(layer)),
        "called by a function with a rule": by(precise),
        "called by one without": by(lenient),
        "in a jitted function with a rule": by(jax.jit(precise, static_argnums=0)),
        "in one without": by(jax.jit(lenient, static_argnums=0)),
        "rule for products": under(HALF, rules={lax.dot_general_p: BFLOAT16}),
        "other rule for products": under(HALF, rules={lax.dot_general_p: None}),
        "float8 by a rule": under(HALF, rules={lax.dot_general_p: "float8"}),
        "of half precision": under(HALF, function=jax.jit(again)),
        "of what is half": traced(jamp.autocast(HALF)(layer), half, SHAPE),
        "in a jitted function": under(HALF, function=other),
        "in one in float8": under("float8", function=other),
        "differentiated around": traced(jax.grad(jamp.autocast(HALF)(loss))),
        "differentiated inside": under(HALF, function=gradient),
        "differentiated inside, jitted": under(HALF, function=jax.jit(gradient)),
        "differentiated inside in float8": under("float8", function=gradient),
        "differentiated inside, scaled": under(jamp.ScaledFloat16(), function=gradient),
        "on one device in float8": under("float8", function=on_one_device(layer)),
        "a derivative there": under("float8", function=on_one_device(gradient)),
        "scaled on one device": under(
            jamp.ScaledFloat16(), function=on_one_device(layer)
        ),
        "batched": traced(jax.vmap(jamp.autocast(HALF)(layer)), *2 * [batch()]),
        "in another region": under(BFLOAT16, function=twice({"dtype": HALF})),
        "in one that is off": under(enabled=False, function=twice({"dtype": HALF})),
        "off in another": under(HALF, function=twice({"enabled": False})),
        "off in another, in a jitted function": under(
            HALF, function=jax.jit(twice({"enabled": False}))
        ),
        "its own region in one": under(
            HALF, function=jax.jit(twice({"dtype": BFLOAT16}))
        ),
        "its own region in two": under(
            BFLOAT16,
            function=twice({"dtype": HALF}, jax.jit(twice({"dtype": BFLOAT16}))),
        ),
        "policy": traced(jamp.get_policy("c=float16").wrap(layer)),
        "policy without softmax": traced(
            jamp.get_policy("c=float16").wrap(layer, float32_for=("norms",))
        ),
        "policy in bfloat16": traced(jamp.get_policy("c=bfloat16").wrap(layer)),
        "probed": probed,
        "explained": explained,
        "uncached": uncached,
        "in high precision": in_context(
            lambda: jax.default_matmul_precision("highest")
        ),
        "with float64": in_context(lambda: jax.enable_x64(True)),
        "failing": failing,
    }


def on_one_device(function):
    run = jax.shard_map(
        function, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(run)


def batch():
    return jax.ShapeDtypeStruct((2, *SHAPE.shape), FLOAT32)


DERIVATIVES = {
    "differentiated around",
    "differentiated inside",
    "differentiated inside, jitted",
    "differentiated inside in float8",
    "differentiated inside, scaled",
    "a derivative there",
}
# These give half precision to the function, which a jaxpr of float32 does not take.
IN_HALF = {"of what is half", "policy", "policy without softmax", "policy in bfloat16"}
# JAX does not take a `shard_map` in another one over the same axis.
ON_A_DEVICE = {"on one device in float8", "a derivative there", "scaled on one device"}
# The user's rules decide nothing about a function that runs as it was traced.
UNUSED = {"rule for products", "other rule for products", "float8 by a rule"}
UNUSED |= {"one object", "one object again"}
# The calls that raise an error, besides the one that should.
REFUSED = {
    "loop": {"of what is half"},
    "cond": {"of what is half"},
    "custom_vmap": DERIVATIVES | UNUSED,
}
REFUSED |= {BEFORE + form: names - IN_HALF for form, names in REFUSED.items()}


@functools.cache
def expected_of(form):
    return alone(case(form))


@pytest.mark.slow
@cover(ci=len(FORMS) + 3)
@pytest.mark.parametrize("form", [*FORMS, *MADE_BEFORE])
def test_a_call_is_the_same_after_others(form):
    expected = expected_of(form)
    refused = {name for name, found in expected.items() if isinstance(found, tuple)}
    assert refused == {"failing"} | REFUSED.get(form, set())
    assert one_after_another(case(form), expected) == []


KINDS = [  # one call of each
    "no region",
    "float16",
    "float8",
    "in head",
    "called by a function with a rule",
    "rule for products",
    "differentiated inside",
    "in another region",
    "failing",
]


@pytest.mark.parametrize(
    "form", ["jit", "scan", "cond", "custom_vjp", "shard_map", BEFORE + "jit"]
)
def test_a_call_is_the_same_after_one_of_each_kind(form):
    few = case(form, KINDS)
    expected = alone(few)
    assert alike(expected) == [["float16", "in another region"]]
    assert one_after_another(few, expected) == []


@pytest.mark.slow
def test_only_these_calls_are_alike():
    """A cache that confuses two calls may do so whenever they are made."""
    assert alike(expected_of("jit")) == [
        ["no region", "off", "off in another"],
        [
            "float16",
            "in another region",
            "in one that is off",
            "uncached",
            "with float64",
        ],
        ["one object", "one object again"],
        ["in head", "in neck"],
        ["its own region in one", "its own region in two"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jit", "scan", "cond", "custom_vjp"])
def test_a_call_is_the_same_beside_another(form):
    expected = expected_of(form)
    assert side_by_side(case(form), expected, [7]) == []


def test_a_call_is_the_same_beside_one_of_another_kind():
    few = case("jit", KINDS[:6])
    assert side_by_side(few, alone(few), [1]) == []


def objects(pause):
    """Regions that are entered more than once, as objects and as decorators."""
    rules = {lax.dot_general_p: BFLOAT16}
    region, other = jamp.autocast(HALF), jamp.autocast(HALF, rules=rules)
    off, cast = jamp.autocast(enabled=False), jamp.autocast(cast_inputs=FLOAT32)
    closed = jax.make_jaxpr(lambda x, w: jax.jit(jnp.matmul)(x, w))(SHAPE, SHAPE)

    def layer(x, w):
        before = x @ w
        pause()
        inner = jaxpr_as_fun(closed)(x, w)
        state = jamp.is_autocast_enabled(), jamp.get_autocast_dtype().name
        mark = {(False, "bfloat16"): 0, (True, "float16"): 1}[state]
        return before, inner, x @ w, jax.nn.softmax(before), jnp.ones(mark)

    def entered(*regions, fails=False):
        def function(x, w):
            with contextlib.ExitStack() as stack:
                for each in regions:
                    stack.enter_context(each)
                outs = layer(x, w)
                if fails:
                    raise ZeroDivisionError
            return outs, x @ w

        return lambda: jax.make_jaxpr(function)(SHAPE, SHAPE)

    def decorated(*regions):
        function = layer
        for each in regions:
            function = each(function)
        return lambda: jax.make_jaxpr(lambda x, w: (function(x, w), x @ w))(
            SHAPE, SHAPE
        )

    return {
        "none": entered(),
        "one": entered(region),
        "the other": entered(other),
        "twice": entered(region, region),
        "one in the other": entered(other, region),
        "the other in one": entered(region, other),  # its rule is used
        "off": entered(off),
        "off in one": entered(region, off),
        "one in off in the other": entered(other, off, region),
        "failing": entered(region, fails=True),
        "decorated": decorated(region),
        "decorated twice": decorated(other, region),
        "cast": decorated(cast),
        "cast in one": decorated(cast, region),
    }


@functools.cache
def expected_of_objects():
    return alone(objects)


def test_one_region_serves_many_calls():
    expected = expected_of_objects()
    assert expected["failing"][0] == "ZeroDivisionError"
    assert one_after_another(objects, expected) == []


@cover()
@pytest.mark.parametrize("distance", range(1, 14))
def test_one_region_serves_many_threads(distance):
    expected = expected_of_objects()
    assert len(expected) == 14
    assert side_by_side(objects, expected, [distance], shared=True) == []


def scoped(*scopes):
    """A product in scopes, each of which is an entry of JAX's name stack."""

    def product(x):
        with contextlib.ExitStack() as stack:
            for make in scopes:
                stack.enter_context(make())
            return x @ x

    return product


def of_derivative(x):
    """A product that JAX differentiates, which is an entry as well."""
    return jax.grad(lambda x: jnp.sum(x @ x))(x)


NAMED, OTHER = (functools.partial(jax.named_scope, name) for name in "ab")
OFF = functools.partial(jamp.autocast, enabled=False)
SAME, BRAIN = (functools.partial(jamp.autocast, d) for d in (HALF, BFLOAT16))
PRODUCTS = {
    "alone": scoped(),
    "named": scoped(NAMED),
    "named otherwise": scoped(OTHER),
    "named twice": scoped(NAMED, OTHER),
    "in the same region": scoped(SAME),
    "in another region": scoped(BRAIN),
    "where it is off": scoped(OFF),
    "named, where it is off": scoped(NAMED, OFF),
    "where it is off, named": scoped(OFF, NAMED),
    "where it is on again": scoped(OFF, SAME),
    "differentiated": of_derivative,
}


def ops_of(*products, traced_before=False):
    """What a region makes of products, each of an argument of its own."""

    def function(*args):
        return [product(x) for product, x in zip(products, args, strict=True)]

    args = [SHAPE] * len(products)
    if traced_before:
        function = jaxpr_as_fun(jax.make_jaxpr(function)(*args))
    *ops, _ = program(jax.make_jaxpr(jamp.autocast(HALF)(function))(*args))
    return ops


@pytest.mark.parametrize("traced_before", [False, True])
def test_an_op_is_the_same_after_each_other_op(traced_before):
    """A trace remembers the scope of its last op."""
    ops = functools.partial(ops_of, traced_before=traced_before)
    expected = {name: ops(product) for name, product in PRODUCTS.items()}
    assert len(alike(expected)) == 2  # those in float16, and those that are off
    for first, second in itertools.product(PRODUCTS, repeat=2):
        found = ops(PRODUCTS[first], PRODUCTS[second])
        assert found == expected[first] + expected[second], (first, second)


RECIPES = {
    "half": HALF,
    "scaled": jamp.ScaledFloat16(),
    "tensorwise": jamp.Float8(),
    "rowwise": jamp.Float8("rowwise"),
    "mixed": jamp.Float8("rowwise_with_gw_hp"),
    "wide": FLOAT32,
}


def uses_of(recipes, x, w):
    """Products of one value with another one, each by the rule of its scope."""

    def use(name, derivative, turned):
        def loss(x):
            with jax.named_scope(name):
                return jnp.sum((w @ x if turned else x @ w).astype(FLOAT32) ** 2)

        return derivative(loss)(x)

    derivatives = (lambda f: f), jax.grad
    for options in itertools.product(recipes, derivatives, (False, True)):
        yield functools.partial(use, *options)


@cover()
@pytest.mark.parametrize("recipes", [("half", "rowwise"), tuple(RECIPES)], ids=len)
def test_a_value_is_kept_in_each_format_apart(recipes):
    """A region makes each copy of a value once: in one dtype, along some axes."""
    x, w = np.random.default_rng(0).normal(size=(2, 32, 32)).astype(np.float32)
    of = functools.partial(uses_of, recipes)

    def run(*uses):
        rules = {use.args[0]: RECIPES[use.args[0]] for use in uses}
        with jamp.autocast(BFLOAT16, rules=rules):
            return [use() for use in uses]

    expected = jax.jit(lambda *args: [run(use)[0] for use in of(*args)])(x, w)
    for order in (1, -1):
        together = jax.jit(lambda *args, n=order: run(*[*of(*args)][::n])[::n])
        rows = zip(of(x, w), together(x, w), expected, strict=True)
        for use, found, wanted in rows:
            np.testing.assert_array_equal(found, wanted, str(use.args))
