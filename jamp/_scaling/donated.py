"""Whether a program may write its results over the arrays that it was given.

A trace cannot know: `jax.jit(step)` and `jax.jit(step, donate_argnums=0)` trace alike.
A lowering can. So a trace binds a primitive without arguments, which lowers to a
constant, true or false. XLA folds what depends on it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._tree import Flag

_DONOR = ("tf.aliasing_output", "jax.buffer_donor")  # attributes of a donated argument


def overwrites() -> Flag:
    """Whether the program may overwrite arrays: bool [].

    False where it is known that it may not: in a jitted function that is called from
    outside and donates no argument. In a loop, or in a jitted function that another one
    calls, the updated arrays may be the program's own.
    """
    return overwrites_p.bind()


def _lower(ctx: mlir.LoweringRuleContext) -> list[mlir.ir.Value]:
    del ctx
    here: Any = mlir.ir.InsertionPoint.current
    function = here.block.owner.operation
    is_main = (
        function.name == "func.func"
        and mlir.ir.StringAttr(function.attributes["sym_name"]).value == "main"
    )
    donates = not is_main or any(
        name in mlir.ir.DictAttr(attributes)
        for attributes in mlir.ir.ArrayAttr(function.attributes["arg_attrs"])
        for name in _DONOR
    )
    return [mlir.ir_constant(np.bool_(donates))]


overwrites_p = Primitive("jamp_overwrites")
overwrites_p.def_impl(lambda: np.True_)
overwrites_p.def_abstract_eval(lambda: ShapedArray((), jnp.bool_))
# Lowered in place: a cached lowering would be a separate function.
mlir.register_lowering(overwrites_p, _lower, cacheable=False)
