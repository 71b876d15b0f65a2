"""float8 for a batch of products: experts and ensembles, and attention beside them."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from shared.collectives import COLLECTIVE
from shared.jaxprs import equations
from tests.bits import check_rounded
from tests.marks import cover

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ALL = {name: jamp.Float8(name) for name in RECIPES} | {"scaled": jamp.ScaledFloat16()}
IN_FLOAT8, NO_WEIGHT = "float8 tensorwise", "no float8: neither input is a weight"
FIXED = "no float8: in a derivative or a jitted shard_map"
EXPERTS = "ecd,edf->ecf"
LAYOUTS = [
    EXPERTS,
    "ced,dfe->fec",
    "ehcd,hdfe->hcef",
    "ecab,eabf->ecf",
    "ecd,abed->eabc",
]
SIZES = {"e": 4, "h": 2, "c": 32, "d": 64, "f": 48, "a": 16, "b": 4}
TERMS = 64  # of a sum at most: d, or a and b
# The experts' numbers are this far apart, and those of a cotangent too.
APART = {"e": 2.0 ** np.array([0, -8, -16, -24])}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def draw(*names, seed=0):
    """Arrays with the named dimensions, of experts that are far apart."""
    rng, arrays = np.random.default_rng(seed), []
    for dims in names:
        x = rng.normal(size=[SIZES[n] for n in dims])
        shape = [SIZES[n] if n == "e" else 1 for n in dims]
        x = x * APART["e"].reshape(shape) if "e" in dims else x
        arrays.append(jnp.asarray(x.astype(np.float32)))
    return arrays


def parts_of(layout):
    return layout.replace("->", ",").split(",")


def result_and_gradients(region, layout, x, w, g):
    y, pull = jax.vjp(region(functools.partial(jnp.einsum, layout)), x, w)
    return y, *pull(g.astype(y.dtype))


def entries(layout, *arrays):
    """The arrays of each product of a batch, and the layout of one."""
    left, right, out = parts_of(layout)
    batch = sorted({*left} & {*right} & {*out})
    alone = "".join(n for n in layout if n not in batch)
    for index in np.ndindex(*(SIZES[n] for n in batch)):
        at = dict(zip(batch, index, strict=True))
        pairs = zip(arrays, (left, right, out, out, left, right), strict=True)
        place = lambda dims, at=at: tuple(at.get(n, slice(None)) for n in dims)
        yield alone, [x[place(dims)] for x, dims in pairs]


def notes_of(function, *args, dtype: Any = "float8"):
    """What `explain` says of each kind of product."""
    rows = jamp.debug.explain(function, dtype)(*args).rows
    return [row.note for row in rows if row.flops]


def relative(result, truth):
    result, truth = np.float64(result), np.float64(truth)
    return np.linalg.norm(result - truth) / np.linalg.norm(truth)


# Numbers.


@cover(quick=2, ci=24)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", sorted(ALL, key=["rowwise", "scaled", *ALL].index))
def test_each_product_is_the_one_that_it_would_be_alone(recipe, layout):
    region = jamp.autocast(ALL[recipe])
    if recipe == "rowwise_with_gw_hp" and layout == LAYOUTS[2]:
        pytest.skip("einsum swaps the inputs, of which neither is an activation")
    run = jax.jit(result_and_gradients, static_argnums=(0, 1))
    arrays = draw(*parts_of(layout))
    made = run(region, layout, *arrays)
    for alone, (x, w, g, *found) in entries(layout, *arrays, *made):
        for a, b in zip(found, run(region, alone, x, w, g), strict=True):
            # A sum of float32 is taken in another order, and a half one rounded once.
            check_rounded(a, b, TERMS if a.dtype == jnp.float32 else 1)


@pytest.mark.parametrize("layout", ["ecd,edf->ecf", "edf,ecd->ecf"])
def test_the_weight_is_the_input_that_is_no_activation(layout):
    x, w, g = draw(*parts_of(EXPERTS))

    def run(x, w):
        h = jax.lax.optimization_barrier(x + 0 * experts(x, w)[..., :1])
        return jnp.einsum(layout, *((h, w) if layout == EXPERTS else (w, h)))

    region = jamp.autocast(jamp.Float8("rowwise_with_gw_hp"))
    both = lambda f, g: jax.jit(lambda x, w: jax.vjp(f, x, w)[1](g)[1])(x, w)
    dw, truth = both(region(run), g.astype(jnp.bfloat16)), both(experts, g)
    assert max(map(relative, dw, truth)) < 0.01  # in bfloat16


@cover(quick=2, ci=2 * len(ALL))
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("recipe", ALL)
def test_experts_may_be_far_apart(recipe, inside):
    """A derivative that is taken inside a float8 region is in bfloat16."""
    region, same = jamp.autocast(ALL[recipe]), lambda f: f
    around = same if inside else region
    run = functools.partial(result_and_gradients, around, EXPERTS)
    run = region(run) if inside else run
    x, w, g = draw(*parts_of(EXPERTS))
    if recipe == "scaled":  # it scales cotangents alone
        x, w = (a / APART["e"].reshape(-1, 1, 1) for a in (x, w))
    arrays = x, w, g
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(result_and_gradients, same, EXPERTS))(*arrays)
    # E4M3 has three digits after the point, and E5M2, for cotangents, two.
    largest = {"tensorwise": (0.04, 0.065, 0.065), "scaled": (1e-3,) * 3}
    bounds = largest.get(recipe, (0.04,) * 3)
    for a, b, bound in zip(jax.jit(run)(*arrays), exact, bounds, strict=True):
        assert max(map(relative, a, b)) < bound


@cover(ci=2 * len(ALL))
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("recipe", ALL)
def test_an_expert_alone_is_not_finite(recipe, bad):
    x, w, g = draw(*parts_of(EXPERTS))
    x, w, g = x.at[0].set(0), w.at[1, 2, 3].set(bad), g.at[2].set(0)
    run = jax.jit(result_and_gradients, static_argnums=(0, 1))
    made = run(jamp.autocast(ALL[recipe]), EXPERTS, x, w, g)
    for result in made[:2]:
        finite = np.isfinite(np.float32(result)).all((1, 2))
        assert [*finite] == [True, False, True, True]
    assert np.isfinite(made[2]).all()  # the gradient of the weight does not read it
    y, dx, dw = made
    assert not np.any(y[0]) and not np.any(dw[0])  # an expert without a token
    assert not np.any(dx[2]) and not np.any(dw[2])


# What is a weight.


def attend(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", q, k))
    return jnp.einsum("bhnm,bmhd->bnhd", p, v)


def experts(x, w):
    return jnp.einsum(EXPERTS, x, w)


def with_jvp(function):
    function = jax.custom_jvp(function)
    function.defjvp(functools.partial(jax.jvp, function.fun))
    return function


def with_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(functools.partial(jax.vjp, function), lambda pull, g: pull(g))
    return wrapped


def with_vmap(function):
    wrapped = jax.custom_batching.custom_vmap(function)
    wrapped.def_vmap(lambda _, __, *args: (jax.vmap(function)(*args), True))
    return wrapped


def sharded(function):
    mesh = jax.make_mesh((1,), ("x",))
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P())


def looped(function):
    def run(x, *rest):
        def body(i, carry):
            return (function(carry, *rest) + 0 * carry).astype(carry.dtype)

        return lax.fori_loop(0, 2, body, x)

    return run


def branched(function):
    return lambda *args: lax.cond(jnp.all(args[0] == 3), function, function, *args)


def mapped(function):
    """Over a dimension of size 1 that all arguments get."""
    return lambda *args: jax.vmap(function)(*[x[None] for x in args])[0]


def stacked(function):
    def run(x, *rest):
        return lax.scan(lambda c, x: (c, function(x, *rest)), 0, x[None])[1][0]

    return run


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": mapped,
    "scan": stacked,
    "fori_loop": looped,
    "cond": branched,
    "shard_map": sharded,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_vmap": with_vmap,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "shard_map of jit": lambda f: sharded(jax.jit(f)),
    "scan of vmap": lambda f: stacked(mapped(f)),
}


@cover(quick=2, ci=2 * len(AROUND))
@pytest.mark.parametrize("around", [n for n in reversed(AROUND) if n != "custom_vmap"])
@pytest.mark.parametrize("jit", [False, True])
def test_attention_is_in_bfloat16_and_experts_are_in_float8(around, jit):
    """Whatever function holds them: what is a weight is known from outside of it."""

    def run(x, w, up):
        q = jnp.einsum("bnd,dhk->bnhk", x, w)
        h = AROUND[around](attend)(q, q, q)
        h = jnp.einsum("bnhk,dhk->bnd", h, w)
        return AROUND[around](experts)(h, up)

    x, w, up = jnp.ones((4, 32, 64)), jnp.ones((64, 4, 16)), jnp.ones((4, 64, 64))
    notes = notes_of(jax.jit(run) if jit else run, x, w, up)
    if jit and around.startswith("shard_map"):  # JAX has fixed the dtypes
        assert FIXED in notes
    else:
        assert {*notes} == {IN_FLOAT8, NO_WEIGHT}
    found = jamp.debug.explain(run, "float8")(x, w, up).matmul_flops
    scores = 2 * 4 * 4 * 32 * 32 * 16 * 2
    if around not in ("fori_loop", "cond"):  # what runs there is not known
        assert found == {"float8_e4m3fn": 2 * 128 * 64 * 64 * 3, "bfloat16": scores}


def off(function):
    def run(x, *rest):
        with jamp.autocast(enabled=False):
            return function(jnp.sin(x), *rest)

    return run


def written(function):
    def run(x, *rest):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = function(x, *rest).astype(x.dtype)
        return ref[...]

    return run


OUTSIDE = {"off": off, "jit of off": lambda f: jax.jit(off(f)), "ref": written}


@cover(quick=5, ci=2 * len(AROUND | OUTSIDE))
@pytest.mark.parametrize("made", [*OUTSIDE, *reversed(AROUND)])
@pytest.mark.parametrize("jit", [False, True])
def test_what_a_function_makes_by_a_product_is_an_activation(made, jit):
    """Its arguments are none, and the product is inside of it."""
    around = (AROUND | OUTSIDE)[made]

    def run(x, w):
        h = around(jnp.matmul)(x, w)
        return h @ jnp.swapaxes(h, 1, 2)

    x, w = jnp.ones((4, 32, 64)), jnp.ones((64, 64))
    run = jax.jit(run) if jit else run
    assert notes_of(run, x, w)[-1] == NO_WEIGHT
    # JAX does not differentiate a custom_vmap in reverse.
    differentiate = (lambda f: f) if made == "custom_vmap" else jax.grad
    loss = lambda w: jnp.sum(jnp.float32(jamp.autocast("float8")(run)(x, w)))
    scores = [
        eqn.invars[0].aval.dtype.name
        for eqn in equations(jax.make_jaxpr(differentiate(loss))(w))
        if eqn.primitive.name == "dot_general"
        and (4, 32, 32) in [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    ]
    assert scores and {*scores} <= {"bfloat16", "float32"}


@pytest.mark.parametrize("around", [off, jamp.autocast(cast_inputs=jnp.float32)])
@pytest.mark.parametrize("outer", ["jit", "eager"])
def test_it_is_one_where_the_function_ran_outside_before(around, outer):
    """JAX has compiled it then, and would run that without a word to the region."""
    inner, other = (jax.jit(lambda x, w: x @ w) for _ in range(2))
    scores = lambda h: h @ jnp.swapaxes(h, 1, 2)
    scores = jax.jit(scores) if outer == "jit" else scores
    run = jamp.autocast("float8")(lambda f, x, w: scores(around(f)(x, w)))
    x, w = draw("ecd", "df")
    inner(jnp.sin(x), w), inner(x, w)
    np.testing.assert_array_equal(run(inner, x, w), run(other, x, w))


@pytest.mark.parametrize("name", ["broadcast_in_dim", "nested region"])
def test_an_activation_stays_one(name):
    """Where an op returns its input, and in a region that is inside of another one."""

    def attend(h):
        return h @ jnp.swapaxes(h, 1, 2)

    def run(x, w):
        h = x @ w
        if name == "nested region":
            return jamp.autocast("float8")(attend)(h)
        return attend(
            lax.broadcast_in_dim_p.bind(
                h, shape=h.shape, broadcast_dimensions=(0, 1, 2), sharding=None
            )
        )

    x, w = jnp.ones((4, 32, 64)), jnp.ones((64, 64))
    assert notes_of(run, x, w) == [IN_FLOAT8, NO_WEIGHT]


def picked(h, w):
    best = jnp.argmax(jnp.mean(h, 1)[:, :4], -1)
    return jnp.einsum("bnd,bdf->bnf", h, w[best])


def picked_one_by_one(h, w):
    best = jnp.argmax(jnp.mean(h, 1)[:, :4], -1)
    return lax.map(lambda args: args[0] @ w[args[1]], (h, best))


def barred(h, w):
    h, w = lax.optimization_barrier((h, w))
    return experts(h, w)


def beside(around):
    """Both pass through a function, which is known to compute one from each."""
    return lambda h, w: experts(*around(lambda h, w: (2 * h, 2 * w))(h, w))


def of_norm_one(h, w):
    u = v = jnp.ones(64)
    return h @ (w[0] / (u @ w[0] @ v))


def carried(h, w):
    def body(carry, _):
        h, w = carry
        return (experts(h, w).astype(h.dtype), w), None

    (h, w), _ = lax.scan(body, (h, w), length=2)
    return experts(h, w)


def layer_by_layer(h, w):
    return lax.fori_loop(0, 4, lambda i, h: (h @ w[i]).astype(h.dtype), h)


@cover(quick=6)
@pytest.mark.parametrize(
    "uses",
    [
        picked,
        picked_one_by_one,
        barred,
        of_norm_one,
        carried,
        beside(with_vjp),
        layer_by_layer,
        beside(sharded),
        beside(jax.checkpoint),
    ],
)
def test_a_weight_stays_one_beside_activations(uses):
    """Where an index, a single number, or what passes through with it, is one."""
    run = lambda x, w: uses(x @ w[0], w)
    notes = notes_of(run, jnp.ones((4, 32, 64)), jnp.ones((4, 64, 64)))
    assert IN_FLOAT8 in notes[1:2] and NO_WEIGHT not in notes


@pytest.mark.parametrize(
    "made",
    [
        lambda w: w.astype(jnp.float16),
        lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True),
        lambda w: jnp.stack([w[i] for i in range(4)]),
        lambda w: w[jnp.array([3, 1, 0, 2])],
        lambda w: jnp.concatenate(jnp.split(w, 2)),
        lambda w: lax.dynamic_slice_in_dim(jnp.tile(w, (2, 1, 1)), 2, 4),
        lambda w: jnp.swapaxes(jnp.swapaxes(w, 1, 2), 1, 2) * 0.5,
        jax.jit(lambda w: jnp.tanh(w)),
        lambda w: jnp.where(w > 0, w, 0),
    ],
)
def test_what_is_made_of_a_weight_without_a_product_is_a_weight(made):
    x, w = jnp.ones((4, 32, 64)), jnp.ones((4, 64, 64))
    run = lambda x, w: experts(jnp.tanh(experts(x, w)), made(w))
    assert {*notes_of(run, x, w)} == {IN_FLOAT8}
    merged = lambda x, w, a: experts(experts(x, w), w + a @ jnp.swapaxes(a, 1, 2))
    assert NO_WEIGHT in notes_of(merged, x, w, w)


def test_a_rule_may_take_activations_too():
    def run(x, w):
        h = experts(x, w)
        with jax.named_scope("scores"):
            return h @ jnp.swapaxes(h, 1, 2)

    x, w = jnp.ones((4, 32, 64)), jnp.ones((4, 64, 64))
    rules = {"scores": jamp.Float8("rowwise", activations=True)}
    explained = jamp.debug.explain(run, "float8", rules=rules)(x, w)
    notes = [row.note for row in explained.rows if row.flops]
    assert notes == [IN_FLOAT8, "float8 rowwise"]
    assert NO_WEIGHT in notes_of(run, x, w)
    out = {"scores": jnp.bfloat16}
    explained = jamp.debug.explain(run, "float8", rules=out)(x, w)
    assert "bfloat16" in explained.matmul_flops
    assert repr(jamp.Float8(activations=True)).count("activations=True") == 1
    assert jamp.Float8(activations=True) != jamp.Float8()


# Models that know nothing of jamp.


class LinenMixture(nn.Module):
    """Experts behind a capacity, dispatched by one-hot products."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64, name="in")(x).reshape(-1, 64)
        gates = jax.nn.softmax(nn.Dense(8, name="router")(h))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 8)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(int) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, 32)[:, None]
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (8, 64, 128))
        down = self.param("down", init, (8, 128, 64))
        h = jnp.einsum("nec,nd->ecd", dispatch, h)
        h = jnp.einsum("ecf,efd->ecd", nn.gelu(jnp.einsum("ecd,edf->ecf", h, up)), down)
        combine = dispatch * gates[..., None]
        return jnp.einsum("nec,ecd->nd", combine, h).reshape(x.shape)


class NnxExpert(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class EquinoxExpert(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(64, 128, key=key)
        self.down = eqx.nn.Linear(128, 64, key=key)

    def __call__(self, x):
        return jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(x))))(x)


def linen_mixture():
    model, x = LinenMixture(), jnp.ones((4, 32, 64))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x))
    return lambda params: model.apply(params, x), params


def nnx_mixture():
    make = nnx.split_rngs(splits=8)(nnx.vmap(NnxExpert))
    graph, params = nnx.split(make(nnx.Rngs(0)))
    run = nnx.vmap(lambda expert, x: expert(x))
    x = jnp.ones((8, 32, 64))
    return lambda params: run(nnx.merge(graph, params), x @ jnp.eye(64)), params


def equinox_mixture():
    model = eqx.filter_vmap(EquinoxExpert)(jax.random.split(jax.random.key(0), 8))
    params, rest = eqx.partition(model, eqx.is_array)
    run = eqx.filter_vmap(lambda expert, x: expert(x))
    x = jnp.ones((8, 32, 64))
    return lambda params: run(eqx.combine(params, rest), x @ jnp.eye(64)), params


MIXTURES = {f.__name__: f for f in (linen_mixture, nnx_mixture, equinox_mixture)}


def flops_of_experts(apply, params):
    """FLOPs of a loss and its gradient by dtype, of products with a batch."""
    found = {}

    def loss(params):
        with jamp.autocast("float8"):
            return jnp.mean(jnp.float32(apply(params)) ** 2)

    for eqn in equations(jax.make_jaxpr(jax.grad(loss))(params)):
        if eqn.primitive.name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            dtype = eqn.invars[1].aval.dtype.name
            if batch[0]:
                found[dtype] = found.get(dtype, 0) + eqn.outvars[0].aval.size
    return found


@cover()
@pytest.mark.parametrize("name", MIXTURES)
def test_all_products_of_experts_are_in_float8(name):
    apply, params = MIXTURES[name]()
    assert {*flops_of_experts(apply, params)} <= {"float8_e4m3fn", "float8_e5m2"}


def linen_block(x):
    attention = nn.MultiHeadDotProductAttention(4)
    layers = [nn.LayerNorm(), attention, nn.Dense(256), nn.gelu, nn.Dense(64)]
    model = nn.Sequential(layers)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: jnp.asarray(np.zeros(p.shape, p.dtype)), shapes)
    return lambda x: model.apply(params, x)


def nnx_block(x):
    rngs = nnx.Rngs(0)
    attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
    up, down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
    norm = nnx.LayerNorm(64, rngs=rngs)
    return lambda x: down(nnx.gelu(up(attention(norm(x)))))


@cover()
@pytest.mark.parametrize("make", [linen_block, nnx_block])
def test_all_of_a_transformer_block_but_attention_is_in_float8(make):
    x = jnp.ones((2, 32, 64))
    found = jamp.debug.explain(make(x), "float8")(x).matmul_flops
    scores = 2 * (2 * 2 * 32 * 32 * 64)
    linear = 2 * 64 * (4 * 64 * 64 + 2 * 64 * 256)
    assert found.pop("float8_e4m3fn") == linear
    assert sum(found.values()) == scores


# Meshes, export.


@cover()
@pytest.mark.parametrize("recipe", ALL)
def test_experts_on_devices_of_their_own_need_no_collective_more(recipe):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w, _ = draw(*parts_of(EXPERTS))

    def step(dtype):
        def loss(w, x):
            with jamp.autocast(dtype):
                y = jnp.tanh(experts(x, w))
            return lax.pmean(jnp.mean(jnp.float32(y) ** 2), "x")

        specs = {"in_specs": (P("x"), P("x")), "out_specs": P("x")}
        return jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))

    count = lambda f: len(COLLECTIVE.findall(f.lower(w, x).compile().as_text()))
    assert count(step(ALL[recipe])) == count(step(jnp.bfloat16))


@pytest.mark.slow
def test_experts_are_exported_for_a_batch_of_any_size():
    x, w, _ = draw(*parts_of(EXPERTS))
    run = jax.jit(jamp.autocast("float8")(experts))
    (n,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, 32, 64), x.dtype)
    weight = jax.ShapeDtypeStruct((n, 64, 48), x.dtype)
    exported = jax.export.export(run)(shape, weight)
    np.testing.assert_array_equal(exported.call(x, w), run(x, w))
    assert "f8E4M3FN" in exported.mlir_module()


# Sizes.


@cover(ci=6)
@pytest.mark.parametrize("recipe", sorted(RECIPES, key=["rowwise", *RECIPES].index))
@pytest.mark.parametrize("layout", ["cd,df->cf", EXPERTS])
def test_large_sizes_are_padded(recipe, layout):
    sizes = {"e": 2, "c": 300, "d": 270, "f": 257}
    rng = np.random.default_rng(0)
    shapes = [[sizes[n] for n in dims] for dims in parts_of(layout)]
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    region = jamp.autocast(jamp.Float8(recipe))
    run = jax.jit(result_and_gradients, static_argnums=(0, 1))
    made = run(region, layout, x, w, g)
    with jax.default_matmul_precision("highest"):
        exact = run(lambda f: f, layout, x, w, g)
    for a, b in zip(made, exact, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 0.065
    (note,) = notes_of(jnp.matmul, x, w, dtype=jamp.Float8(recipe))
    assert note == f"float8 {recipe}, padded to 304x272x272"


def test_a_size_that_is_fit_with_others_is_not_padded():
    x, w = jnp.ones((4, 300, 64)), jnp.ones((64, 256))
    jaxpr = jax.make_jaxpr(jamp.autocast("float8")(jnp.matmul))(x, w)
    assert "pad[" not in str(jaxpr)
    assert notes_of(jnp.matmul, x, w) == [IN_FLOAT8]
