"""The dtype of a product depends on how it is written, and on one size at most.

In a user's own code, a sum over one number is a multiplication. A batch of one entry is
a batch, a layer of one feature a layer, and attention to one key attention. `vmap`,
`jit` and a region may stand around each other in any order.
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

import jamp
from tests.marks import cover

half = jamp.autocast(jnp.float16)
SIZES = 1, 2
pytestmark = pytest.mark.usefixtures("standard_promotion")


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
LOWERED, PROMOTED = jnp.float16, jnp.float32
FORMS = {
    "@": ("ij", "jk", jnp.matmul, LOWERED),
    "dot": ("ij", "jk", jnp.dot, LOWERED),
    "inner": ("ij", "kj", jnp.inner, LOWERED),
    "tensordot": ("ij", "jk", lambda a, b: jnp.tensordot(a, b, 1), LOWERED),
    "einsum": ("ij", "jk", lambda a, b: jnp.einsum("ij,jk->ik", a, b), LOWERED),
    "dot_general": (
        "ij",
        "jk",
        lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))),
        LOWERED,
    ),
    "matrix @ vector": ("ij", "j", jnp.matmul, LOWERED),
    "vector @ matrix": ("j", "jk", jnp.matmul, LOWERED),
    "dot of a matrix and a vector": ("ij", "j", jnp.dot, LOWERED),
    "matvec": ("ij", "j", jnp.matvec, LOWERED),
    "batched @": ("bij", "bjk", jnp.matmul, LOWERED),
    "batched einsum": (
        "bij",
        "bjk",
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        LOWERED,
    ),
    "convolution": ("bic", "kco", channels_last, LOWERED),
    "linen": ("ij", "jk", linen_dense, LOWERED),
    "linen with a bias": ("ij", "jk", linen_with_bias, LOWERED),
    "nnx": ("ij", "jk", nnx_linear, LOWERED),
    "equinox": ("ij", "jk", equinox_linear, LOWERED),
    "haiku": ("ij", "jk", haiku_linear, LOWERED),
    "attention": (
        "bqhd",
        "bkhd",
        lambda q, k: jax.nn.dot_product_attention(q, k, k),
        LOWERED,
    ),
    "jamp's attention": (
        "bqhd",
        "bkhd",
        lambda q, k: jamp.dot_product_attention(q, k, k),
        LOWERED,
    ),
    "linen's attention": ("bqhd", "bkhd", linen_attention, LOWERED),
    "attention by hand": ("bqhd", "bkhd", attention_by_hand, LOWERED),
    "vecdot": ("i", "i", jnp.vecdot, LOWERED),
    "tensordot of vectors": ("i", "i", lambda a, b: jnp.tensordot(a, b, 1), LOWERED),
    "dot of vectors": ("i", "i", jnp.dot, PROMOTED),
    "vdot": ("i", "i", jnp.vdot, PROMOTED),
    "vdot of matrices": ("ij", "ij", jnp.vdot, PROMOTED),
    "inner of vectors": ("i", "i", jnp.inner, PROMOTED),
    "vector @ vector": ("i", "i", jnp.matmul, PROMOTED),
    "einsum of vectors": ("i", "i", lambda a, b: jnp.einsum("i,i->", a, b), PROMOTED),
    "dots of a batch": (
        "bi",
        "bi",
        lambda a, b: jnp.einsum("bi,bi->b", a, b),
        PROMOTED,
    ),
    "outer": ("i", "j", jnp.outer, PROMOTED),
    "outer einsum": ("i", "j", lambda a, b: jnp.einsum("i,j->ij", a, b), PROMOTED),
    "outer @": ("i", "j", lambda a, b: a[:, None] @ b[None], PROMOTED),
    "outer @, of a batch": (
        "bi",
        "bj",
        lambda a, b: a[..., None] @ b[:, None],
        PROMOTED,
    ),
    "outer @, after other ops": (
        "i",
        "j",
        lambda a, b: (2 * a[:, None] + 1) @ jnp.cos(b.reshape(1, -1)),
        PROMOTED,
    ),
    "outer @, stacked": (
        "i",
        "j",
        lambda a, b: a[:, None] @ jnp.stack([b[None]] * 2),
        PROMOTED,
    ),
}
OWN = [*FORMS][: [*FORMS].index("convolution")]
OWN += ["attention by hand", "vecdot", "tensordot of vectors"]
FAST = "@", "batched einsum", "attention by hand", "dot of vectors", "outer @", "linen"


def ways(function):
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
        for sizes in itertools.product(SIZES, repeat=len(letters))
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
        expected = PROMOTED
    shapes = [[size[d] for d in dims] for dims in (left, right)]
    a, b = (jnp.asarray(np.ones(shape, np.float32)) for shape in shapes)
    found = {name: way(a, b).dtype for name, way in ways(function)}
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
