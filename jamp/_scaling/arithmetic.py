"""Scaling, checking and unscaling, equal to torch's bit for bit.

`scale` is the product in `torch.amp.GradScaler.scale`. `all_finite` and `unscale` are
`torch._amp_foreach_non_finite_check_and_unscale_`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._tree import Flag, PyTree, T, dtype_of, is_inexact, widened
from .mesh import may_be_split, on_all
from .rule import SMALLEST_SCALE


def is_scalable(x: object) -> bool:
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return isinstance(x, int | float | complex) and not isinstance(x, bool)
    return x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)


def scale(x: ArrayLike, loss_scale: jax.Array) -> jax.Array:
    """`x * loss_scale` with torch's result dtype.

    The product is formed in float32 at least. An array with dimensions keeps its
    dtype; a scalar is promoted to float32, so that a float16 loss above 1 does not
    overflow at a scale of 2**16. Integers become float32. Wider dtypes stay.
    """
    dtype = dtype_of(x) if is_inexact(x) else jnp.dtype(jnp.float32)
    product = _times(jnp.asarray(x, widened(dtype)), loss_scale)
    return product if jnp.ndim(x) == 0 else lax.convert_element_type(product, dtype)


def all_finite(tree: PyTree, axis_name: str | Sequence[str] | None = None) -> Flag:
    """Whether no floating or complex leaf holds an inf or nan: bool [].

    Check *scaled* gradients, before they are multiplied by the inverse scale: an
    overflow in that product does not count in torch either. With `axis_name`, all
    replicas must be finite.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    # Layers repeat: arrays of one shape take one reduction instead of one each.
    alike: dict[Any, list[jax.Array]] = {}
    for index, leaf in enumerate(leaves):
        split = jax.typeof(leaf).sharding.spec
        key = index if may_be_split(leaf) else (jnp.shape(leaf), split)
        alike.setdefault(key, []).append(jnp.isfinite(leaf))
    checks = (jnp.all(functools.reduce(jnp.logical_and, c)) for c in alike.values())
    return on_all(functools.reduce(jnp.logical_and, checks, np.True_), axis_name)


class InverseScale(NamedTuple):
    """`float32(1 / float64(loss_scale))` as two factors, neither of them subnormal.

    Above a scale of 2**126 the inverse is subnormal, and XLA's CPU backend would flush
    it to 0, so that every update vanished. `shift` is a power of two, so multiplying by
    both factors rounds exactly like multiplying by their product.
    """

    inverse: jax.Array  # float32 []
    shift: jax.Array  # float32 []: 1, or 2**-64 for a scale above 2**64


def invert(loss_scale: jax.Array) -> InverseScale:
    with jax.enable_x64(True):
        exact = 1.0 / lax.convert_element_type(loss_scale, jnp.float64)
        # Below 2**-126 float32 has a fixed spacing of 2**-149: round in the same way.
        coarse = lax.round(exact * 2.0**149, lax.RoundingMethod.TO_NEAREST_EVEN)
        exact = jnp.where(exact < SMALLEST_SCALE, coarse * 2.0**-149, exact)
        shift = jnp.where(exact < 2.0**-64, 2.0**-64, 1.0)
        return InverseScale(
            lax.convert_element_type(exact / shift, jnp.float32),
            lax.convert_element_type(shift, jnp.float32),
        )


def unscale(tree: PyTree, inverse: InverseScale) -> PyTree:
    """Multiplies gradients by the inverse scale, as torch does.

    Half-precision leaves come out in float32: in float16, the product would flush to
    zero what the scale has saved. Integer, bool, `float0` and missing leaves stay.

    Call `invert` outside a `skip.run_or_hold`, so that the scalar arithmetic is not
    repeated for every element inside.
    """

    def unscale_leaf(leaf: ArrayLike) -> ArrayLike:
        if not is_inexact(leaf):
            return leaf
        wide = jnp.asarray(leaf, widened(dtype_of(leaf)))
        return _times(_times(wide, inverse.inverse), inverse.shift)

    return jax.tree.map(unscale_leaf, tree)


def unscale_as_before(tree: T, inverse: InverseScale) -> T:
    """The same, with every leaf in its own dtype."""

    def as_before(new: ArrayLike, old: ArrayLike) -> ArrayLike:
        same = new is old or dtype_of(new) == dtype_of(old)
        return new if same else lax.convert_element_type(new, dtype_of(old))

    return jax.tree.map(as_before, unscale(tree, inverse), tree)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """`2.0**exponent`, exactly, for int32 exponents from -126 to 127; inf at 128."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor` in the dtype of x, for a real scalar factor.

    A complex x is multiplied part by part: `(a + ib) * (f + 0i)` would turn an inf in
    one part into a nan in the other.
    """
    if jnp.iscomplexobj(x):
        return lax.complex(_times(x.real, factor), _times(x.imag, factor))
    return x * lax.convert_element_type(factor, x.dtype)
