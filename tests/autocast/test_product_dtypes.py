"""`product + b` has one dtype, however the product is written, moved and called.

What JAX makes of a line depends on sizes: of a batch of one it drops the batch before
the product and adds it again, and a reshape of one row is another one than of three.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jamp
from jamp import _compat
from tests.marks import cover

from . import ways

half = jamp.autocast(jnp.float16)
SIZES = (1, 3), (3, 1), (1, 1), (3, 3)  # of the rows and of the columns
K = 5


def ones(*shape):
    return np.ones(shape, np.float32)


PRODUCTS = {
    "@": lambda x, w: x @ w,
    "dot": lambda x, w: jnp.dot(x, w),
    "inner": lambda x, w: jnp.inner(x, w.T),
    "matvec": lambda x, w: jnp.matvec(w.T, x),
    "vecmat": lambda x, w: jnp.vecmat(x, w),
    "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
    "einsum": lambda x, w: jnp.einsum("ij,jk->ik", x, w),
    "einsum, transposed": lambda x, w: jnp.einsum("ij,jk->ki", x, w).T,
    "dot_general": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "multi_dot": lambda x, w: jnp.linalg.multi_dot([x, w]),
    "convolution": lambda x, w: lax.conv_general_dilated(
        x[:, None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[:, 0],
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


def sums_of(product, moves=tuple(MOVES)):
    def sums(x, w, b):
        return {name: MOVES[name](PRODUCTS[product](x, w)) + b for name in moves}

    return sums


@cover(quick=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_dtype_of_a_product_and_a_bias(product, sizes, way, standard_promotion):
    n, m = sizes
    args = ones(n, K), ones(K, m), ones(m)
    found = jax.eval_shape(WAYS[way](sums_of(product)), *args)
    for move, y in found.items():
        assert y.dtype == dtype_of_moved(move) or is_vectors(product, n), move


@cover()
@pytest.mark.parametrize("part", range(12))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_eagerly_it_is_the_same(product, sizes, part, standard_promotion):
    n, m = sizes
    args = map(jnp.asarray, (ones(n, K), ones(K, m), ones(m)))
    found = half(sums_of(product, [*MOVES][part::12]))(*args)
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
def test_what_is_a_bias_does_not_depend_on_sizes(way, standard_promotion):
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
def test_a_function_of_a_bias_and_one_of_a_residual_share_no_cache(
    way, standard_promotion
):
    """The arguments have the same types: the region knows more of one of them."""
    add = CALLED[way](lambda x, y: x + y)
    x, w, b = map(jnp.asarray, (ones(3, K), ones(K, 4), ones(4)))
    for turn in (1, -1, 1):
        with half:
            h, bias = x @ w, jnp.broadcast_to(b, (3, 4))
            calls = {"float16": (h, bias), "float32": (h, x @ w * jnp.ones((3, 4)))}
            for dtype, args in list(calls.items())[::turn]:
                assert add(*args).dtype == dtype


def test_a_branch_rounds_a_sum_with_a_bias_whatever_the_others_return(
    standard_promotion,
):
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
def test_a_product_that_is_promoted_follows_what_it_gets(way, standard_promotion):
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


def test_a_pair_of_rows_is_no_bias(standard_promotion):
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
def test_what_a_batch_shares_is_a_bias_in_a_derivative_too(way, standard_promotion):
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


def test_one_number_is_added_on_one_device(monkeypatch, standard_promotion):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x, w = jnp.ones((2, 3, K)), jnp.ones((K, 4))
    assert half(lambda x: x @ w + jnp.float32(1))(x).dtype == jnp.float16


@pytest.mark.parametrize("n", [1, 2])
def test_a_scan_starts_from_a_product(n, standard_promotion):
    """Its carry comes back in the dtype that it had, whatever the batch."""
    w, b = ones(K, K), ones(K)

    def steps(x):
        step = lambda h, _: ((jnp.matvec(w, h) + b).astype(jnp.float16), None)
        return lax.scan(step, jnp.matvec(w, x) + b, length=3)[0]

    assert jax.eval_shape(half(steps), ones(n, K)).dtype == jnp.float16


def test_a_symbolic_batch_is_moved_like_any_other(standard_promotion):
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


def test_a_scalar_is_reshaped_to_a_scalar(standard_promotion):
    x = jnp.ones(K)
    assert half(lambda x: jnp.dot(x, x).reshape(()))(x) == K
    draw = lambda: jax.random.uniform(jax.random.key(0))  # JAX reshapes it to ()
    assert half(draw)() == draw()
