"""Whether the overflow of a step depends on the loss scale that the step is given.

If it does not, the loss was not scaled, and unscaling shrinks the gradients in silence.
No value shows this; the program of the step does. It is read forward, and a loop around
steps once: from the second step on, the parameters depend on the scale.
"""

import enum
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jaxprs import Loop, follow, loop


class Flow(enum.Enum):
    """What a value in a step's program is."""

    GIVEN = enum.auto()  # the flag that the step was given, passed on
    SCALED = enum.auto()  # it depends on the loss scale
    OTHER = enum.auto()


class ScaleFlow:
    """Reads a program, with the programs inside it.

    Attributes:
      leaked: whether an effect, such as a write to a Ref, got the scale.
    """

    def __init__(self) -> None:
        self.leaked = False

    def outputs(self, jaxpr: ClosedJaxpr, inputs: Sequence[Flow]) -> list[Flow]:
        """What the outputs of a program are."""
        return follow(jaxpr, inputs, self.results, joined, Flow.OTHER)

    def results(self, eqn: JaxprEqn, given: list[Flow]) -> Sequence[Flow]:
        """What the results of an op are."""
        if (found := loop(eqn)) is not None:
            return self.looped(found, given)
        if eqn.primitive.name == "optimization_barrier":
            return given
        if eqn.effects:
            self.leaked |= Flow.SCALED in given
            given = [Flow.SCALED] if self.leaked else given
        flow = joined(given[1:] if eqn.primitive.name == "select_n" else given)
        return [flow] * len(eqn.outvars)

    def looped(self, loop: Loop, given: list[Flow]) -> list[Flow]:
        """What a loop returns."""
        _, consts, carry, slices = loop.split(given)
        while True:
            found = self.outputs(loop.body, [*consts, *carry, *slices])
            pairs = zip(carry, found, strict=False)
            new = [Flow.SCALED if Flow.SCALED in pair else pair[0] for pair in pairs]
            if Flow.GIVEN in carry or new == carry:
                return found
            carry = new


def joined(flows: Sequence[Flow]) -> Flow:
    """What is made of these, or is one of them."""
    if Flow.SCALED in flows:
        return Flow.SCALED
    return Flow.GIVEN if flows and set(flows) == {Flow.GIVEN} else Flow.OTHER
