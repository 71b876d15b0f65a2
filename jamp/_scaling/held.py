"""Which parts of a state a skipped step does not change, read off its program.

A step that skips an overflow returns the parameters that it was given, through the
other branch of a `lax.cond` or through a select. Holding them a second time would cost
a copy of each. So the step's program is read to see what each output is if `found_inf`
is true. Outputs that are not seen to be inputs then (statistics, counters, averages)
must be held.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .donated import overwrites_p


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What an output is made of: an input, an op on flags, a choice, or unknown."""

    op: str = ""
    of: tuple["Value", ...] = ()


def held_on_skip(program: ClosedJaxpr, found_inf: int, count: int) -> list[bool]:
    """Whether each of the first `count` outputs is its own input if found_inf is true.

    Args:
      program: of a step; its inputs begin with the state, its outputs too.
      found_inf: index of the output, bool [], that says whether the step was skipped.
      count: leaves of the state.
    """
    inputs = [Value() for _ in program.jaxpr.invars]
    outputs = evaluate(program.jaxpr, inputs)
    facts = implied(outputs[found_inf])
    resolved: dict[Value, Value] = {}
    return [resolve(outputs[i], facts, resolved) is inputs[i] for i in range(count)]


def evaluate(jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """The outputs of a jaxpr, for inputs that are known as far as `Value` says."""
    values: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Value:
        return Value() if isinstance(atom, Literal) else values.get(atom, Value())

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        for var, value in zip(eqn.outvars, _apply(eqn, operands), strict=True):
            values[var] = value
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        return evaluate(params["jaxpr"].jaxpr, operands)
    if name == "cond":
        index, *rest = operands
        branches = [evaluate(branch.jaxpr, rest) for branch in params["branches"]]
        return [Value("choice", (index, *of)) for of in zip(*branches, strict=True)]
    if name == "select_n" and len(operands) == 3 and _is_flag(eqn.invars[0]):
        return [Value("choice", tuple(operands))]
    if name in ("not", "or") and _is_flag(eqn.invars[0]):
        return [Value(name, tuple(operands))]
    if name == overwrites_p.name:  # if it is false, a skipped step holds its inputs too
        return [Value("true")]
    if name == "copy" or (name == "convert_element_type" and _keeps(eqn)):
        return operands
    return [Value() for _ in eqn.outvars]


def _is_flag(atom: Any) -> bool:
    return atom.aval.shape == () and atom.aval.dtype == np.bool_


def _keeps(eqn: Any) -> bool:
    """Whether a conversion changes no value: to its own dtype, or a flag to 0 or 1."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return source == target or (_is_flag(eqn.invars[0]) and target == np.int32)


def implied(flag: Value) -> dict[Value, bool]:
    """What is known about other flags if this one is true."""
    facts = {flag: True}
    truth = True
    while flag.op == "not":
        flag, truth = flag.of[0], not truth
        facts[flag] = truth
    return facts


def resolve(
    value: Value, facts: dict[Value, bool], resolved: dict[Value, Value]
) -> Value:
    """The value that is chosen, as far as the facts decide.

    Args:
      resolved: the values that were resolved before. This adds to them.
    """
    if value.op != "choice":
        return value
    if value not in resolved:
        which, *choices = value.of
        known = _truth(which, facts)
        if known is not None and len(choices) == 2:
            choices = [choices[known]]
        chosen = {resolve(choice, facts, resolved) for choice in choices}
        resolved[value] = chosen.pop() if len(chosen) == 1 else value
    return resolved[value]


def _truth(flag: Value, facts: dict[Value, bool]) -> bool | None:
    """Whether a flag is true, or None if the facts do not say."""
    if flag in facts or flag.op == "true":
        return facts.get(flag, True)
    known = [_truth(part, facts) for part in flag.of if flag.op in ("not", "or")]
    if flag.op == "not":
        return None if known[0] is None else not known[0]
    return True if True in known else None if None in known or not known else False
