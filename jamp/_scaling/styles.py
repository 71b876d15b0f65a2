"""The style of a step, optax's or NNX's, which its arguments show."""

import inspect

import jax

from .._checks import imported
from .calls import Args, Call, Kwargs, Step
from .state import DynamicLossScaleState, is_scale

WRONG_ARGUMENTS = """{}: the step cannot be called with these arguments: {}. Pass its \
own, as in a call of it: step{}."""


def call_of(caller: str, step: Step, args: Args, kwargs: Kwargs) -> Call:
    """The call of a step in the style that its arguments show.

    NNX objects are arguments of the NNX style, unless the first argument holds a loss
    scale beside them, as a pair of a module and an optax state does.
    """
    check_arguments(caller, step, args, kwargs)
    objects = imported("flax.nnx", "Pytree")
    kinds = (DynamicLossScaleState, *objects)
    nodes = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    has_objects = any(isinstance(node, objects) for node in nodes((args, kwargs)))
    if not has_objects or any(map(is_scale, nodes(args[:1]))):
        return Call(caller, step, args, kwargs)
    from .nnx_call import NNXCall  # imports Flax

    return NNXCall(caller, step, args, kwargs)


def check_arguments(caller: str, step: Step, args: Args, kwargs: Kwargs) -> None:
    """Raises TypeError if a function does not take the arguments, as far as it says."""
    # What a function of the user's wraps may take others.
    function = getattr(step, "__wrapped__", step) if hasattr(step, "lower") else step
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(WRONG_ARGUMENTS.format(caller, error, signature)) from None
