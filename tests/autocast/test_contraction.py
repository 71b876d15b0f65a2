"""The dimensions of products, and of their gradients, of any `dot_general`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp._autocast.contraction import Contraction
from jamp._autocast.low_precision import E4M3, multiplied, quantized

# Names as in `einsum`: both operands.
PRODUCTS = [
    "ij jk",
    "ji kj",
    "bij bjk",
    "ibj kjb",  # a batch in other places
    "iab bak",  # two contracted dimensions, in another order
    "iab abk",
    "caibd dbkac",
    "i j",
    "i ij",
]
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "i": 6, "j": 7, "k": 8}


def numbers_of(names):
    left, right = names.split()
    contracted = {"iab bak": "ab", "iab abk": "ab", "caibd dbkac": "db", "i j": ""}
    over = contracted.get(names, "j" if names != "i ij" else "i")
    batch = [n for n in left if n in right and n not in over]
    places = [
        tuple(tuple(map(side.index, n)) for side in (left, right))
        for n in (over, batch)
    ]
    return tuple(places)


def operands(names):
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = (tuple(SIZES[n] for n in side) for side in names.split())
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def both(names):
    pair = operands(names)
    numbers = numbers_of(names)
    return *pair, Contraction.of(numbers, [x.ndim for x in pair]), numbers


@pytest.mark.parametrize("names", PRODUCTS)
def test_gradients_are_products_of_the_cotangent(names):
    left, right, over, numbers = both(names)
    assert over.numbers == numbers
    out, pull_back = jax.vjp(lambda x, y: lax.dot_general(x, y, numbers), left, right)
    cotangent = jax.random.normal(jax.random.key(1), out.shape)
    for side, expected in enumerate(pull_back(cotangent)):
        product, order = over.gradient(side)
        pair = (cotangent, right) if side == 0 else (left, cotangent)
        found = lax.transpose(lax.dot_general(*pair, product.numbers), order)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("names", PRODUCTS)
def test_sizes_are_those_of_one_product_for_each_batch_entry(names):
    left, right, over, numbers = both(names)
    batch, rows, contracted, columns = over.sizes(left.shape, right.shape)
    assert batch * rows * contracted == left.size
    assert batch * contracted * columns == right.size
    assert batch * rows * columns == lax.dot_general(left, right, numbers).size


@pytest.mark.parametrize("names", [names for names in PRODUCTS if names != "i j"])
def test_each_row_of_any_product_may_have_a_scale(names):
    left, right, over, numbers = both(names)
    pair = [
        quantized(x, dtype=E4M3, axes=over[side].contracted)
        for side, x in enumerate((left, right))
    ]
    found = multiplied(*pair, over, jnp.dtype("float32"))
    exact = [x.values.astype(jnp.float32) * x.inverse for x in pair]
    expected = lax.dot_general(*exact, numbers)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
