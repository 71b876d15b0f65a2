"""Whether the overflow of a step depends on the loss scale that the step is given.

If it does not, the loss was not scaled, and unscaling shrinks the gradients in silence.
No value shows this; the program of the step does. It is read forward, and a loop around
steps once: from the second step on, the parameters depend on the scale.
"""

import enum
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jaxprs import Loop, follow, is_loop, loop


class Flow(enum.Enum):
    """What a value in a step's program is."""

    GIVEN = enum.auto()  # the flag that the step was given, passed on
    SCALED = enum.auto()  # it depends on the loss scale
    OTHER = enum.auto()


def flow_of(jaxpr: ClosedJaxpr, inputs: Sequence[Flow]) -> list[Flow]:
    """What the outputs of a program are, from what its inputs are."""
    leaked = False  # whether an effect, such as a write to a Ref, got the scale

    def results(eqn: JaxprEqn, given: list[Flow]) -> Sequence[Flow]:
        nonlocal leaked
        if is_loop(eqn):
            return looped(loop(eqn), given)
        if eqn.primitive.name == "optimization_barrier":
            return given
        if eqn.effects:
            leaked |= Flow.SCALED in given
            given = [Flow.SCALED] if leaked else given
        flow = joined(given[1:] if eqn.primitive.name == "select_n" else given)
        return [flow] * len(eqn.outvars)

    def looped(loop: Loop, given: list[Flow]) -> list[Flow]:
        _, consts, carry, slices = loop.split(given)
        while True:
            found = outputs(loop.body, [*consts, *carry, *slices])
            pairs = zip(carry, found, strict=False)
            new = [Flow.SCALED if Flow.SCALED in pair else pair[0] for pair in pairs]
            if Flow.GIVEN in carry or new == carry:
                return found
            carry = new

    def outputs(jaxpr: ClosedJaxpr, inputs: Sequence[Flow]) -> list[Flow]:
        return follow(jaxpr, inputs, results, joined, Flow.OTHER)

    return outputs(jaxpr, inputs)


def joined(flows: Sequence[Flow]) -> Flow:
    """What is made of these, or is one of them."""
    if Flow.SCALED in flows:
        return Flow.SCALED
    return Flow.GIVEN if flows and set(flows) == {Flow.GIVEN} else Flow.OTHER
