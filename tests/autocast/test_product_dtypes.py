"""A dtype depends on how a product is written, not on sizes or on where `jit` stands.

What JAX makes of a line depends on sizes: of a batch of one it drops the batch before
the product and adds it again, and a reshape of one row is another one than of three.

In a user's own code, a sum over one number is a multiplication: that is the one size
on which a dtype depends. A batch of one entry is a batch, a layer of one feature a
layer, and attention to one key attention. `vmap`, `jit` and a region may stand around
each other in any order.
"""

import functools
import itertools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jamp
from jamp import _compat
from tests.marks import cover

from . import ways

pytestmark = pytest.mark.usefixtures("standard_promotion")

half = jamp.autocast(jnp.float16)
SIZES = (1, 3), (3, 1), (1, 1), (3, 3)  # of the rows and of the columns
K = 5


def ones(*shape):
    return np.ones(shape, np.float32)


def attention_by_hand(q, k):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), k)


def linen_attention(q, k):
    layer = nn.MultiHeadDotProductAttention(num_heads=1, qkv_features=2)
    return layer.init_with_output(jax.random.key(0), q[:, :, 0], k[:, :, 0])[0]


def linen_dense(x, w):
    layer = nn.Dense(w.shape[1], use_bias=False)
    return layer.apply({"params": {"kernel": w}}, x)


def linen_with_bias(x, w):
    layer = nn.Dense(w.shape[1])
    return layer.apply({"params": {"kernel": w, "bias": w[0]}}, x)


def nnx_linear(x, w):
    layer = nnx.Linear(*w.shape, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = w, w[0]
    return layer(x)


def equinox_linear(x, w):
    layer = eqx.nn.Linear(*w.shape, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w.T, w[0]))
    return jax.vmap(layer)(x)


def haiku_linear(x, w):
    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(w.shape[1])(x)))
    return layer.apply({"linear": {"w": w, "b": w[0]}}, x)


def channels_last(x, w):
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout)


# The dimensions of both inputs, in letters of which each has a size, and the dtype.
HALF, FULL = jnp.float16, jnp.float32
FORMS = {
    "@": ("ij", "jk", jnp.matmul, HALF),
    "dot": ("ij", "jk", jnp.dot, HALF),
    "inner": ("ij", "jk", lambda a, b: jnp.inner(a, b.T), HALF),
    "tensordot": ("ij", "jk", lambda a, b: jnp.tensordot(a, b, 1), HALF),
    "einsum": ("ij", "jk", lambda a, b: jnp.einsum("ij,jk->ik", a, b), HALF),
    "dot_general": (
        "ij",
        "jk",
        lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))),
        HALF,
    ),
    "matrix @ vector": ("ij", "j", jnp.matmul, HALF),
    "vector @ matrix": ("j", "jk", jnp.matmul, HALF),
    "dot of a matrix and a vector": ("ij", "j", jnp.dot, HALF),
    "matvec": ("ij", "j", jnp.matvec, HALF),
    "batched @": ("bij", "bjk", jnp.matmul, HALF),
    "batched einsum": (
        "bij",
        "bjk",
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        HALF,
    ),
    "convolution": ("bic", "kco", channels_last, HALF),
    "linen": ("ij", "jk", linen_dense, HALF),
    "linen with a bias": ("ij", "jk", linen_with_bias, HALF),
    "nnx": ("ij", "jk", nnx_linear, HALF),
    "equinox": ("ij", "jk", equinox_linear, HALF),
    "haiku": ("ij", "jk", haiku_linear, HALF),
    "attention": (
        "bqhd",
        "bkhd",
        lambda q, k: jax.nn.dot_product_attention(q, k, k),
        HALF,
    ),
    "jamp's attention": (
        "bqhd",
        "bkhd",
        lambda q, k: jamp.dot_product_attention(q, k, k),
        HALF,
    ),
    "linen's attention": ("bqhd", "bkhd", linen_attention, HALF),
    "attention by hand": ("bqhd", "bkhd", attention_by_hand, HALF),
    "vecdot": ("i", "i", jnp.vecdot, HALF),
    "tensordot of vectors": ("i", "i", lambda a, b: jnp.tensordot(a, b, 1), HALF),
    "dot of vectors": ("i", "i", jnp.dot, FULL),
    "vdot": ("i", "i", jnp.vdot, FULL),
    "vdot of matrices": ("ij", "ij", jnp.vdot, FULL),
    "inner of vectors": ("i", "i", jnp.inner, FULL),
    "vector @ vector": ("i", "i", jnp.matmul, FULL),
    "einsum of vectors": ("i", "i", lambda a, b: jnp.einsum("i,i->", a, b), FULL),
    "dots of a batch": (
        "bi",
        "bi",
        lambda a, b: jnp.einsum("bi,bi->b", a, b),
        FULL,
    ),
    "outer": ("i", "j", jnp.outer, FULL),
    "outer einsum": ("i", "j", lambda a, b: jnp.einsum("i,j->ij", a, b), FULL),
    "outer @": ("i", "j", lambda a, b: a[:, None] @ b[None], FULL),
    "outer @, of a batch": (
        "bi",
        "bj",
        lambda a, b: a[..., None] @ b[:, None],
        FULL,
    ),
    "outer @, after other ops": (
        "i",
        "j",
        lambda a, b: (2 * a[:, None] + 1) @ jnp.cos(b.reshape(1, -1)),
        FULL,
    ),
    "outer @, stacked": (
        "i",
        "j",
        lambda a, b: a[:, None] @ jnp.stack([b[None]] * 2),
        FULL,
    ),
}
OWN = [*FORMS][: [*FORMS].index("convolution")]
OWN += ["attention by hand", "vecdot", "tensordot of vectors"]
FAST = "@", "batched einsum", "attention by hand", "dot of vectors", "outer @", "linen"


def nested(function):
    """Regions around `jit` and `vmap` and inside of them; both inputs are mapped."""
    over_two = lambda f: lambda a, b: jax.vmap(f)(jnp.stack([a, a]), jnp.stack([b, b]))
    for name, way in {
        "live": half(function),
        "jit inside": half(jax.jit(function)),
        "jit around": jax.jit(half(function)),
        "vmap around": over_two(half(function)),
        "vmap inside": half(over_two(function)),
        "vmap of jit inside": half(over_two(jax.jit(function))),
        "jit of vmap inside": half(jax.jit(over_two(function))),
    }.items():
        yield name, functools.partial(jax.eval_shape, way)  # nothing is compiled


def sizes_of(form):
    """Each letter with each size, from ones alone to twos alone."""
    left, right, *_ = FORMS[form]
    letters = sorted({*left, *right})
    return [
        dict(zip(letters, sizes, strict=True))
        for sizes in itertools.product((1, 2), repeat=len(letters))
    ]


# First each form with ones alone, then with twos alone, and then with both.
CASES = sorted(
    ((i, form) for form in FORMS for i in range(len(sizes_of(form)))),
    key=lambda case: (case[0] > 0, case[0] + 1 < len(sizes_of(case[1])), case[0]),
)
CASES.sort(key=lambda case: case[0] > 0 or case[1] not in FAST)


@cover(quick=len(FAST), ci=4 * len(FORMS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def test_a_dtype_depends_on_one_size_at_most(case):
    i, form = case
    left, right, function, expected = FORMS[form]
    size = sizes_of(form)[i]
    summed = {"attention by hand": "k", "vecdot": "i", "tensordot of vectors": "i"}
    if form in OWN and size[summed.get(form, "j")] == 1:
        expected = FULL
    shapes = [[size[d] for d in dims] for dims in (left, right)]
    a, b = (jnp.asarray(ones(*shape)) for shape in shapes)
    found = {name: way(a, b).dtype for name, way in nested(function)}
    if len({*size.values()}) == 1:
        found["eager"] = half(function)(a, b).dtype
    assert set(found.values()) == {jnp.dtype(expected)}, (size, found)


def test_a_growing_cache_keeps_its_dtype():
    """The first step of decoding has one key, and a scan's carry fits."""

    @half
    def decode(x):
        keys = x[:, :1]
        results = []
        for t in range(1, 4):
            y = jax.nn.dot_product_attention(x[:, t - 1 : t], keys, keys)
            results.append(y)
            keys = jnp.concatenate([keys, x[:, t : t + 1]], axis=1)
        return results

    @half
    def looped(x):
        step = lambda c, _: (jax.nn.dot_product_attention(c, c, c), None)
        return lax.scan(step, x, None, length=2)[0]

    x = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)
    assert [y.dtype for y in jax.eval_shape(decode, x)] == [jnp.float16] * 3
    carry = jax.eval_shape(looped, jax.ShapeDtypeStruct((1, 1, 2, 8), jnp.float16))
    assert carry.dtype == jnp.float16


# A product and what is added to it.

# The first of the forms, and other ways to write the same matrix.
PRODUCTS = {
    **{name: FORMS[name][2] for name in [*FORMS][:6]},
    "matvec": lambda x, w: jnp.matvec(w.T, x),
    "vecmat": lambda x, w: jnp.vecmat(x, w),
    "einsum, transposed": lambda x, w: jnp.einsum("ij,jk->ki", x, w).T,
    "multi_dot": lambda x, w: jnp.linalg.multi_dot([x, w]),
    "convolution": lambda x, w: channels_last(x[:, None], w[None])[:, 0],
}

# Moves after which a product is still one, and a bias added to it stays half.
KNOWN_AFTER = {
    "nothing": lambda h: h,
    "[None]": lambda h: h[None],
    "[:, None]": lambda h: h[:, None],
    "[..., :]": lambda h: h[..., :],
    "[:1]": lambda h: h[:1],
    "[::2]": lambda h: h[::2],
    "[0:n]": lambda h: h[0 : h.shape[0]],
    "expand_dims": lambda h: jnp.expand_dims(h, 1),
    "atleast_3d": lambda h: jnp.atleast_3d(h)[..., 0],
    "reshape": lambda h: h.reshape(-1, h.shape[-1]),
    "reshape in three": lambda h: h.reshape(h.shape[0], 1, h.shape[1]),
    "reshape and back": lambda h: h.reshape(*h.shape, 1)[..., 0],
    "squeeze": lambda h: h[:, None].squeeze(1),
    "T.T": lambda h: h.T.T,
    "swapaxes": lambda h: h[None].swapaxes(0, 1),
    "moveaxis": lambda h: jnp.moveaxis(h[None], 0, 1),
    "rollaxis": lambda h: jnp.rollaxis(h[None], 0, 2),
    "permute_dims": lambda h: jnp.permute_dims(h[None], (1, 0, 2)),
    "broadcast_to": lambda h: jnp.broadcast_to(h, (2, *h.shape)),
    "broadcast_to itself": lambda h: jnp.broadcast_to(h, h.shape),
    "lax.broadcast": lambda h: lax.broadcast(h, (1,)),
    "lax.collapse": lambda h: lax.collapse(h[None], 0, 2),
    "repeat": lambda h: jnp.repeat(h, 2, 0),
    "copy": jnp.copy,
    "asarray": jnp.asarray,
    "stop_gradient": lax.stop_gradient,
    "checkpoint_name": lambda h: checkpoint_name(h, "h"),
    "device_put": jax.device_put,
    "optimization_barrier": lax.optimization_barrier,
    "jit": lambda h: jax.jit(lambda h: h[None])(h),
    "checkpoint": lambda h: jax.checkpoint(lambda h: h[None])(h),
    "vmap": lambda h: jax.vmap(lambda h: h[None])(h),
    "cond": lambda h: lax.cond(True, lambda h: h, lambda h: h, h),
}
# Those after which it is a value like any other, to which a sum is float32.
UNKNOWN_AFTER = {
    "take": lambda h: jnp.take(h, jnp.array([0]), axis=0),
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (0, 0), h.shape),
    "[::-1]": lambda h: h[::-1],
    "roll": lambda h: jnp.roll(h, 1, 0),
    "tile": lambda h: jnp.tile(h, (1, 1)),
    "concatenate": lambda h: jnp.concatenate([h, h]),
    "stack": lambda h: jnp.stack([h]),
    "split": lambda h: jnp.split(h, h.shape[0])[0],
    "pad": lambda h: jnp.pad(h, ((0, 0), (0, 0))),
    "where": lambda h: jnp.where(True, h, 0),
    "-": lambda h: -h,
}
MOVES = KNOWN_AFTER | UNKNOWN_AFTER

WAYS = {
    name: functools.partial(ways.WAYS[name], half)
    for name in ("live", "jit around", "jit inside", "checkpoint")
} | {
    "vmap around": lambda f: over_one(half(f)),
    "vmap inside": lambda f: half(over_one(f)),
}


def over_one(f):
    return lambda x, w, b: jax.vmap(f, (0, None, None))(x[None], w, b)


def dtype_of_moved(move):
    return jnp.dtype("float16" if move in KNOWN_AFTER else "float32")


def is_vectors(product, n):
    """JAX drops a batch of one: a matrix by a vector, to which a residual is added."""
    return product == "matvec" and n == 1


def sums_of(product):
    def sums(x, w, b):
        return {name: MOVES[name](PRODUCTS[product](x, w)) + b for name in MOVES}

    return sums


@cover(quick=6)
@pytest.mark.parametrize("way", [*WAYS, "eager"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_dtype_of_a_product_and_a_bias(product, sizes, way):
    n, m = sizes
    args = ones(n, K), ones(K, m), ones(m)
    if way == "eager":
        found = half(sums_of(product))(*map(jnp.asarray, args))
    else:
        found = jax.eval_shape(WAYS[way](sums_of(product)), *args)
    for move, y in found.items():
        assert y.dtype == dtype_of_moved(move) or is_vectors(product, n), move


# What is added, and the shapes of the three arrays for a batch of `n` with `t` rows.
BIASES = {
    "bias": (lambda b: b, lambda n, t: [(n, t, K), (K, 4), (4,)]),
    "b[None]": (lambda b: b[None], lambda n, t: [(n, t, K), (K, 4), (4,)]),
    "a row of more": (
        lambda b: jnp.squeeze(b.reshape(1, 1, 4), 0),
        lambda n, t: [(n, t, K), (K, 4), (4,)],
    ),
    "one number": (lambda b: b, lambda n, t: [(n, t, K), (K, 4), ()]),
    "of experts": (lambda b: b, lambda n, t: [(n, t, K), (n, K, 4), (4,)]),
}
NO_BIASES = {
    "a number for each row": (
        lambda b: b[:, None],
        lambda n, t: [(n, t, K), (K, 4), (t,)],
    ),
    "a number for each example": (
        lambda b: b.reshape(-1, 1, 1),
        lambda n, t: [(n, t, K), (K, 4), (n,)],
    ),
    "a number for each expert": (
        lambda b: b[:, None, None],
        lambda n, t: [(n, t, K), (n, K, 4), (n,)],
    ),
    "of a vector": (lambda b: b, lambda n, t: [(n, t, K), (K,), (t,)]),
    "a stacked row": (
        lambda b: jnp.stack([b]),
        lambda n, t: [(n, t, K), (K, 4), (4,)],
    ),
    "a row": (lambda b: b, lambda n, t: [(n, t, K), (K, 4), (1, 4)]),
    "positions": (lambda b: b, lambda n, t: [(n, t, K), (K, 4), (t, 4)]),
    "positions[None]": (lambda b: b[None], lambda n, t: [(n, t, K), (K, 4), (t, 4)]),
    "one for each example": (
        lambda b: b[:, None],
        lambda n, t: [(n, t, K), (K, 4), (n, 4)],
    ),
    "one for each expert": (
        lambda b: b[:, None],
        lambda n, t: [(n, t, K), (n, K, 4), (n, 4)],
    ),
    "a mask": (lambda b: b, lambda n, t: [(n, t, K), (n, K, 4), (t, 4)]),
}


@cover(quick=2)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_a_bias_does_not_depend_on_sizes(way):
    for name, (view, shapes) in (BIASES | NO_BIASES).items():
        function = WAYS[way](lambda x, w, b, view=view: x @ w + view(b))
        for n, t in SIZES:
            args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes(n, t)]
            expected = jnp.float16 if name in BIASES else jnp.float32
            assert jax.eval_shape(function, *args).dtype == expected, (name, n, t)


CALLED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x, y: lax.cond(x[0, 0] > 0, f, f, x, y),
}


@cover(quick=2)
@pytest.mark.parametrize("way", CALLED)
def test_a_function_of_a_bias_and_one_of_a_residual_share_no_cache(way):
    """The arguments have the same types: the region knows more of one of them."""
    add = CALLED[way](lambda x, y: x + y)
    x, w, b = map(jnp.asarray, (ones(3, K), ones(K, 4), ones(4)))
    for turn in (1, -1, 1):
        with half:
            h, bias = x @ w, jnp.broadcast_to(b, (3, 4))
            calls = {"float16": (h, bias), "float32": (h, x @ w * jnp.ones((3, 4)))}
            for dtype, args in list(calls.items())[::turn]:
                assert add(*args).dtype == dtype


def test_a_branch_rounds_a_sum_with_a_bias_whatever_the_others_return():
    """The branch is rewritten again, for the dtype on which all of them agree."""
    x, w, b = jnp.ones((3, K)), jnp.ones((K, 4)), jnp.full((1, 4), 2.0**-12)

    def function(h, b):
        return lax.cond(True, lambda h, b: h + b[0], lambda h, b: h * b, h, b)

    for wrap in (lambda f: f, jax.jit):
        found = half(lambda x, w, b, wrap=wrap: wrap(function)(x @ w, b))(x, w, b)
        assert found.dtype == jnp.float32 and (found == K).all()


def test_what_is_promoted_does_not_depend_on_the_users_setting():
    _compat.widest.cache_clear()
    residual = half(jax.jit(lambda x, w: x @ w + x))
    with jax.numpy_dtype_promotion("strict"):
        out = jax.eval_shape(residual, ones(K, K), ones(K, K))
    assert out.dtype == jnp.float32


# Products of a half-precision value with itself that are not lowered, or promoted.
PROMOTED = {
    "outer": lambda h: jnp.outer(h, h),
    "einsum": lambda h: jnp.einsum("tu,tv->tuv", h, h),
    "einsum of all": lambda h: jnp.einsum("ab,cd->abcd", h, h),
    "tensordot of none": lambda h: jnp.tensordot(h, h, 0),
    "kron": lambda h: jnp.kron(h, h),
    "dot_general": lambda h: lax.dot_general(h, h, (((), ()), ((0,), (0,)))),
    "size 1": lambda h: h[:, :1] @ h[:1],
    "dot": lambda h: jnp.dot(h[0], h[0]),
    "inner": lambda h: jnp.inner(h[0], h[1]),
    "vdot": lambda h: jnp.vdot(h, h),
    "vecdot": lambda h: jnp.vecdot(h, h),
    "tensordot of all": lambda h: jnp.tensordot(h, h, 2),
    "einsum to a number": lambda h: jnp.einsum("ab,ab->", h, h),
    "highest": lambda h: jnp.matmul(h, h, precision="highest"),
}


@cover(quick=3)
@pytest.mark.parametrize("way", WAYS)
def test_a_product_that_is_promoted_follows_what_it_gets(way):
    """Where it was traced for float32, too. Under `vmap`, float32 may be lowered."""
    args = ones(3, K), ones(K, 3), ones(3)
    for name, product in PROMOTED.items():
        for of, value in {
            "half": lambda x, w, b: x @ w,
            "float32": lambda x, w, b: (x @ w) * b,
        }.items():
            function = lambda *args, f=product, v=value: f(v(*args))
            found = jax.eval_shape(WAYS[way](function), *args).dtype
            if of == "half":
                assert found == jnp.float16, name
            elif "vmap" not in way:
                assert found == jax.eval_shape(half(function), *args).dtype, name


def test_a_pair_of_rows_is_no_bias():
    """`s[:, None] + t`: numbers along a dimension that the product does not have."""
    for n, t in SIZES:
        args = ones(n, K), ones(K), ones(t)
        found = jax.eval_shape(half(lambda x, w, b: (x @ w)[:, None] + b), *args)
        assert found.dtype == jnp.float32 and found.shape == (n, t)


BATCHED = {
    "vmap": over_one,
    "grad in vmap": lambda f: over_one(differentiated(jax.grad, f)),
    "jvp in vmap": lambda f: over_one(in_forward_mode(f)),
    "linearize in vmap": lambda f: over_one(differentiated(linearized, f)),
    "grad of grad in vmap": lambda f: over_one(
        differentiated(jax.grad, differentiated(jax.grad, f))
    ),
    "grad of jvp in vmap": lambda f: over_one(
        differentiated(jax.grad, in_forward_mode(f))
    ),
    "vmap of vmap": lambda f: lambda x, *rest: over_one(over_one(f))(x[None], *rest),
    "vmap in grad": lambda f: differentiated(jax.grad, over_one(f)),
}


def differentiated(derivative, f):
    def run(x, w, b):
        return derivative(lambda w: jnp.sum(f(x, w, b).astype(jnp.float32)))(w)

    return run


def linearized(f):
    return lambda w: jax.linearize(f, w)[1](w)


def in_forward_mode(f):
    return lambda x, w, b: jax.jvp(lambda w: f(x, w, b), (w,), (w,))[1]


@pytest.mark.parametrize("way", BATCHED)
def test_what_a_batch_shares_is_a_bias_in_a_derivative_too(way):
    """A vector added to a vector is a bias if `vmap` adds the batch to one of them."""
    dtypes = []

    @half
    def layer(x, w, b):
        y = x @ w + b
        dtypes.append(y.dtype)
        return y

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((K,), (K, 4), (4,))]
    jax.eval_shape(BATCHED[way](layer), *args)
    assert dtypes and set(dtypes) == {jnp.dtype("float16")}


def test_one_number_is_added_on_one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, w = jnp.ones((2, 3, K)), jnp.ones((K, 4))
    assert half(lambda x: x @ w + jnp.float32(1))(x).dtype == jnp.float16


@pytest.mark.parametrize("n", [1, 2])
def test_a_scan_starts_from_a_product(n):
    """Its carry comes back in the dtype that it had, whatever the batch."""
    w, b = ones(K, K), ones(K)

    def steps(x):
        step = lambda h, _: ((jnp.matvec(w, h) + b).astype(jnp.float16), None)
        return lax.scan(step, jnp.matvec(w, x) + b, length=3)[0]

    assert jax.eval_shape(half(steps), ones(n, K)).dtype == jnp.float16


def test_a_symbolic_batch_is_moved_like_any_other():
    scope = jax.export.SymbolicScope()
    n, t = jax.export.symbolic_shape("n, t", scope=scope)
    w, b = ones(6, 12), ones(12)
    moves = {
        "as it is": lambda h: h,
        "merged": lambda h: h.reshape(-1, 12),
        "merged and split": lambda h: h.reshape(-1, 12).reshape(h.shape),
        "heads": lambda h: h.reshape(*h.shape[:2], 3, 4).reshape(h.shape),
        "rows": lambda h: h[:, None].reshape(h.shape),
        "transposed": lambda h: h.transpose(1, 0, 2).reshape(-1, 12),
    }
    for name, move in moves.items():
        function = jamp.autocast(jnp.float16)(lambda x, move=move: move(x @ w) + b)
        exported = jax.export.export(jax.jit(function))(
            jax.ShapeDtypeStruct((n, t, 6), jnp.float32)
        )
        assert exported.out_avals[0].dtype == jnp.float16, name


def test_a_scalar_is_reshaped_to_a_scalar():
    x = jnp.ones(K)
    assert half(lambda x: jnp.dot(x, x).reshape(()))(x) == K
    draw = lambda: jax.random.uniform(jax.random.key(0))  # JAX reshapes it to ()
    assert half(draw)() == draw()
