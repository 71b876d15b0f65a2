"""Whether the overflow of a step depends on the loss scale that the step is given.

If it does not, the loss was not scaled, and unscaling shrinks the gradients in silence.
No value shows this; the program of the step does. It is read forward, and a loop around
steps once: from the second step on, the parameters depend on the scale.
"""

import enum
from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jaxprs import Loop, follow, is_loop, loop
from .rule import LossScaleState
from .trials import Trials

NOT_SCALED = """{caller}: the step divides its gradients by a loss scale{where} that \
they do not depend on. Multiply the loss by the scale of the state that the step is \
given. With a GradScaler, let the loss function return scaler.scale(loss). With the \
state of an optimizer, use jamp.value_and_grad(loss_fn, opt_state), or let the loss \
function return jamp.scale_loss(loss, opt_state). Or another loss scale takes the \
gradient, such as a DynamicScale: turn it off."""


class Flow(enum.Enum):
    GIVEN = enum.auto()  # the flag that the step was given, passed on
    SCALED = enum.auto()  # it depends on the loss scale
    OTHER = enum.auto()


def flow_of(jaxpr: ClosedJaxpr, inputs: Sequence[Flow]) -> list[Flow]:
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
    if Flow.SCALED in flows:
        return Flow.SCALED
    return Flow.GIVEN if flows and set(flows) == {Flow.GIVEN} else Flow.OTHER


def check_scales_its_loss(trials: Trials) -> None:
    """Raises ValueError if `found_inf` cannot depend on the scale of its state.

    A step that does not use a scale returns the `found_inf` that it was given.
    """
    program, paths = trials.once.closed, trials.paths
    count = len(LossScaleState._fields)
    after = len(program.jaxpr.outvars) - count * len(paths)
    flag, scale = map(LossScaleState._fields.index, ("found_inf", "loss_scale"))
    for start, path in zip(range(0, count * len(paths), count), paths, strict=True):
        inputs = [Flow.OTHER] * len(program.in_avals)
        inputs[start + flag], inputs[start + scale] = Flow.GIVEN, Flow.SCALED
        if flow_of(program, inputs)[after + start + flag] is Flow.OTHER:
            where = f" at {path}" if len(paths) > 1 else ""
            raise ValueError(NOT_SCALED.format(caller=trials.call.caller, where=where))
