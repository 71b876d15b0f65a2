"""Whether a program branches where a step may be skipped, decided when it is lowered.

A trace cannot know. One trace may be compiled for a CPU and exported for a GPU, and
`jax.jit(step)` and `jax.jit(step, donate_argnums=0)` trace alike. A lowering knows its
platform and the function that it is in. So a trace binds a primitive without arguments,
which lowers to a constant, true or false. XLA folds what depends on it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._tree import Flag

_DONOR = ("tf.aliasing_output", "jax.buffer_donor")  # attributes of a donated argument


def branches() -> Flag:
    """Whether the program is for a CPU and may write over arrays: bool [].

    On a CPU it is false where it is known that the program may not: in a jitted
    function that is called from outside and donates no argument. In a loop, or in a
    jitted function that another one calls, the updated arrays may be the program's own.
    """
    return branches_p.bind()


def _lower(ctx: mlir.LoweringRuleContext) -> list[mlir.ir.Value]:
    may_write = _may_write()
    platforms = ctx.module_context.platforms
    if len(platforms) == 1:
        return [mlir.ir_constant(np.bool_(may_write and platforms[0] == "cpu"))]
    choose = lambda: lax.platform_dependent(
        cpu=lambda: jnp.bool_(may_write), default=lambda: jnp.bool_(False)
    )
    return list(mlir.lower_fun(choose, multiple_results=False)(ctx))


def _may_write() -> bool:
    """Whether the function that is lowered now may write over arrays."""
    here: Any = mlir.ir.InsertionPoint.current
    function = here.block.owner.operation
    is_main = (
        function.name == "func.func"
        and mlir.ir.StringAttr(function.attributes["sym_name"]).value == "main"
    )
    return not is_main or any(
        name in mlir.ir.DictAttr(attributes)
        for attributes in mlir.ir.ArrayAttr(function.attributes["arg_attrs"])
        for name in _DONOR
    )


branches_p = Primitive("jamp_branches")
branches_p.def_impl(lambda: np.True_)
branches_p.def_abstract_eval(lambda: ShapedArray((), jnp.bool_))
# Lowered in place: a cached lowering would be a separate function.
mlir.register_lowering(branches_p, _lower, cacheable=False)
