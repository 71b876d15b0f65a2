"""What a policy does to one call of a module's method, in Linen and in NNX.

The inputs are cast to the compute dtype, and so are parameters when they are read. If
the policy ends at this module, the results are cast to its output dtype.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .._tree import PyTree, cast_floating
from .float32_region import COMPUTE_DTYPE, advised, float32_region
from .overrides import Place, Plan

# They read the parameters of the layer inside, and write them.
WRITERS = (nnx.WeightNorm, nnx.SpectralNorm)

STATEFUL = (nnx.Pytree, nnx.Variable)  # a cast copy of these would lose its state


class ModuleCall(NamedTuple):
    plan: Plan
    module: nn.Module | nnx.Module
    method: str
    place: Place
    around: Place | None  # the calling module's; None if no policy governs that
    ends: bool  # whether the policy ends here: otherwise results are not cast
    loops: bool = False  # whether this is a step of a loop over the module

    def run(self, function: Callable, args: tuple, kwargs: dict) -> PyTree:
        dtype = self.place.policy.compute_dtype
        is_cell = isinstance(self.module, nn.RNNCellBase | nnx.RNNCellBase)
        split = 1 if is_cell and self.method == "__call__" else 0
        carry, inputs = args[:split], args[split:]  # a carry keeps its dtype
        inputs, kwargs = cast_floating((inputs, kwargs), dtype, STATEFUL)
        with contextlib.ExitStack() as contexts:
            reads = None if isinstance(self.module, WRITERS) else dtype
            contexts.enter_context(COMPUTE_DTYPE(reads))
            if self.around is None:
                contexts.enter_context(advised())
            if self.around is None or self.around.policy.compute_dtype != dtype:
                functions = self.plan.float32_for - {"norms"}  # norms are modules here
                contexts.enter_context(float32_region(dtype, functions))
            out = function(*carry, *inputs, **kwargs)
        if self.ends:
            out = cast_floating(out, self.place.policy.output_dtype, STATEFUL)
        return as_carried(out, args[0]) if carry or self.loops else out


def as_carried(out: PyTree, carry: PyTree) -> PyTree:
    """The result of a step of a loop, with the carry in the dtypes that came in."""
    structure = jax.tree.structure(carry)
    if jax.tree.structure(out) == structure:
        return in_dtypes_of(carry, out)
    if isinstance(out, tuple) and out and jax.tree.structure(out[0]) == structure:
        return in_dtypes_of(carry, out[0]), *out[1:]
    return out


def in_dtypes_of(like: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: cast_floating(x, jnp.result_type(y)), tree, like)
