"""Which inputs of a program can influence its outputs, read off its jaxpr.

If the gradients of a step do not depend on the loss scale, the step divides them by a
number that they were never multiplied by. No value shows this; the program does.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

CALLS = ("jit", "pjit", "shard_map", "checkpoint")  # each runs its jaxpr once


def influences(program: ClosedJaxpr) -> list[set[int]]:
    """For each output, the inputs that it may depend on, by index.

    It never misses one. It may name too many: the results of a loop or a conditional
    count as depending on all that goes in, and with side effects everything counts.
    """
    jaxpr = program.jaxpr
    if jaxpr.effects or _holds_refs(jaxpr):
        return [set(range(len(jaxpr.invars)))] * len(jaxpr.outvars)
    return _outputs(jaxpr, [{index} for index in range(len(jaxpr.invars))])


def _outputs(jaxpr: Jaxpr, inputs: Sequence[set[int]]) -> list[set[int]]:
    found: dict[Var, set[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Var | Literal) -> set[int]:
        return set() if isinstance(atom, Literal) else found.get(atom, set())

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = eqn.params["jaxpr"]
            outputs = _outputs(getattr(inner, "jaxpr", inner), operands)
        else:
            outputs = [set().union(*operands)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _holds_refs(jaxpr: Jaxpr) -> bool:
    """Whether values pass through mutable arrays, which equations do not show."""
    for eqn in jaxpr.eqns:
        atoms = (*eqn.invars, *eqn.outvars)
        if any(hasattr(atom.aval, "inner_aval") for atom in atoms):
            return True
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in CALLS else None
        if inner is not None and _holds_refs(getattr(inner, "jaxpr", inner)):
            return True
    return False
