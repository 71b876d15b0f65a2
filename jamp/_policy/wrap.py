"""A policy around a function of arrays: `Policy.wrap`."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from .._checks import imported
from .._tree import cast_floating
from .float32_region import float32_region, norm_classes


def wrap(
    function: Callable,
    compute_dtype: np.dtype,
    output_dtype: np.dtype,
    kept: frozenset[str],
) -> Callable:
    if isinstance(function, functools.partial):  # a leaf to JAX, with its arrays
        function = jax.tree_util.Partial(
            function.func, *function.args, **function.keywords
        )
    owner = getattr(function, "__self__", function)  # of a bound method
    kind = owner if isinstance(owner, type) else type(owner)
    # A cast copy of a Flax module would lose its state.
    flax = imported("flax.linen", "Module") + imported("flax.nnx", "Module")
    if not callable(function) or issubclass(kind, flax):
        raise TypeError(
            f"policy.wrap: {kind.__name__} is not a function of arrays; "
            "for Flax, use jamp.linen.with_policy or jamp.nnx.with_policy."
        )

    @functools.wraps(function, updated=())
    def wrapped(*args, **kwargs):
        states = imported("equinox.nn", "State")  # such as the averages of a BatchNorm
        norms = norm_classes() if "norms" in kept else ()
        call = (function, args, kwargs)  # an equinox.Module has arrays inside
        run, args, kwargs = cast_floating(call, compute_dtype, states + norms)
        with float32_region(compute_dtype, kept):
            out = run(*args, **kwargs)
        return cast_floating(out, output_dtype, states)

    return wrapped
