"""Primitives that run as they were traced: autocast does not look into them.

`LEFT_ALONE` names JAX's kernels, callbacks and solvers. Primitives that another library
defines are left alone too, whatever they hold. Their inputs get the dtypes that they
were traced with. A primitive of JAX itself that holds a function and has no rule is
refused: it is newer than jamp.
"""

from .. import _compat
from .casting import CastingTrace
from .decision import Action, Kind, Op, Reason, Result, Source
from .sources import holds_jaxpr
from .traits import LEFT_ALONE

REASON_KIND = "left_alone"

NO_RULE = """autocast has no rule for the primitive {name!r}, which holds a function \
({params}).
Put the code around it under `with jamp.autocast(enabled=False):`, or add a rule to \
NESTED in jamp/_autocast/nested.py (or the name to LEFT_ALONE, in traits.py)."""


def leave_alone(trace: CastingTrace, op: Op) -> Result:
    """Binds a primitive that is in no table, with the inputs that it was traced with.

    Raises NotImplementedError for one of JAX's with a function inside.
    """
    primitive, params = op.primitive, op.params
    inputs = trace.as_traced(op.args, op.avals)
    held = [name for name, value in params.items() if holds_jaxpr(value)]
    is_known = primitive.name in LEFT_ALONE
    if not is_known and _compat.is_jax_primitive(primitive):
        if held:
            held = ", ".join(held)
            raise NotImplementedError(NO_RULE.format(name=primitive.name, params=held))
        return trace.bind(primitive, inputs, params)
    why = Reason(REASON_KIND, Source.PRIMITIVE, primitive.name)
    with trace.noted(Action(Kind.KEEP, why=why)):
        return trace.bind(primitive, inputs, params)
