"""The style of a step, optax's or NNX's, which its arguments show."""

import jax

from .._checks import imported
from .calls import Args, Call, Kwargs, Step
from .state import DynamicLossScaleState, is_scale


def call_of(caller: str, step: Step, args: Args, kwargs: Kwargs) -> Call:
    """The call of a step in the style that its arguments show.

    NNX objects are arguments of the NNX style, unless the first argument holds a loss
    scale beside them, as a pair of a module and an optax state does.
    """
    objects = imported("flax.nnx", "Pytree")
    kinds = (DynamicLossScaleState, *objects)
    nodes = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    has_objects = any(isinstance(node, objects) for node in nodes((args, kwargs)))
    if not has_objects or any(map(is_scale, nodes(args[:1]))):
        return Call(caller, step, args, kwargs)
    from .nnx_call import NNXCall  # imports Flax

    return NNXCall(caller, step, args, kwargs)
