"""Whether the overflow of a step depends on the loss scale that the step is given.

If it does not, the loss was not scaled, and unscaling shrinks the gradients in silence.
No value shows this; the program of the step does. It is read forward, and a loop around
steps once: from the second step on, the parameters depend on the scale.
"""

import enum
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from .traced import RUN_ONCE, followed, opened


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

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[Flow]) -> list[Flow]:
        """What the outputs of a program are."""
        return followed(jaxpr, inputs, self.results, Flow.OTHER)

    def results(self, eqn: JaxprEqn, given: list[Flow]) -> Sequence[Flow]:
        """What the results of an op are."""
        name, of = eqn.primitive.name, eqn.params
        if name in RUN_ONCE:
            return self.outputs(opened(of["jaxpr"]), given)
        if name == "cond":
            branches = [self.outputs(b.jaxpr, given[1:]) for b in of["branches"]]
            return list(map(joined, zip(*branches, strict=True)))
        if name == "scan":
            carry = of["num_consts"], of["num_consts"] + of["num_carry"]
            return self.loop(opened(of["jaxpr"]), given, *carry)
        if name == "while":
            given, n = given[of["cond_nconsts"] :], of["body_nconsts"]
            return self.loop(opened(of["body_jaxpr"]), given, n, len(given))
        if name == "optimization_barrier":
            return given
        if eqn.effects:
            self.leaked |= Flow.SCALED in given
            given = [Flow.SCALED] if self.leaked else given
        flow = joined(given[1:] if name == "select_n" else given)
        return [flow] * len(eqn.outvars)

    def loop(self, body: Jaxpr, given: list[Flow], start: int, end: int) -> list[Flow]:
        """What a loop returns, whose carry is `given[start:end]`."""
        while True:
            found = self.outputs(body, given)
            carry = [
                Flow.SCALED if Flow.SCALED in pair else pair[0]
                for pair in zip(given[start:end], found, strict=False)
            ]
            if Flow.GIVEN in given[start:end] or carry == given[start:end]:
                return found
            given = [*given[:start], *carry, *given[end:]]


def joined(flows: Sequence[Flow]) -> Flow:
    """What is made of these, or is one of them."""
    if Flow.SCALED in flows:
        return Flow.SCALED
    return Flow.GIVEN if flows and set(flows) == {Flow.GIVEN} else Flow.OTHER
