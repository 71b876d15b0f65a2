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
from .float32_region import COMPUTE_DTYPE, float32_region
from .overrides import Plan
from .policy import Policy

STATEFUL = (nnx.Pytree, nnx.Variable)  # a cast copy of these would lose its state


class ModuleCall(NamedTuple):
    plan: Plan
    module: nn.Module | nnx.Module
    method: str
    policy: Policy
    around: Policy | None  # the calling module's; None if no policy governs that
    ends: bool  # whether the policy ends here: otherwise results are not cast

    def run(self, function: Callable, args: tuple, kwargs: dict) -> PyTree:
        dtype = self.policy.compute_dtype
        is_cell = isinstance(self.module, nn.RNNCellBase | nnx.RNNCellBase)
        split = 1 if is_cell and self.method == "__call__" else 0
        carry, inputs = args[:split], args[split:]  # a carry keeps its dtype
        inputs, kwargs = cast_floating((inputs, kwargs), dtype, STATEFUL)
        region = contextlib.nullcontext()
        if self.around is None or self.around.compute_dtype != dtype:
            functions = self.plan.float32_for - {"norms"}  # norms are modules here
            region = float32_region(dtype, functions)
        with COMPUTE_DTYPE(dtype), region:
            out = function(*carry, *inputs, **kwargs)
        if self.ends:
            out = cast_floating(out, self.policy.output_dtype, STATEFUL)
        if carry:
            like = lambda x, y: cast_floating(x, jnp.result_type(y))
            out = jax.tree.map(like, out[0], *carry), *out[1:]
        return out
