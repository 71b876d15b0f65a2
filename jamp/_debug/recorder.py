"""Runs a jaxpr and notes for each value whether it holds an inf or a nan.

jit, remat and custom derivatives are run in place. The rules for scan, while and cond
are in `loops`. Other ops that hold functions (shard_map, kernels) count as one op.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from .. import _compat
from .._autocast.traits import CALLS, ELEMENTWISE, PRESERVING
from .._scaling import arithmetic
from . import loops
from .equations import Atom, array, called_by, variables
from .finiteness import can_hold_nan, known_mark, mark_of
from .marks import Branches, Inner, Loop, Marks, Node, Program, Value
from .sites import OUTERMOST, Around, Site, site_of

CHECK = arithmetic.all_finite.__code__

Numbered = tuple[Value, int]  # a value, and its number in the Program


def run_marked(
    jaxpr: ClosedJaxpr, args: Sequence[Value], around: Around = OUTERMOST
) -> tuple[list[Value], Marks, Program]:
    """Runs a closed jaxpr. Returns its results, the marks, and what they belong to."""
    recorder = Recorder()
    results = recorder.whole(jaxpr, args, around)
    return results, recorder.marks(), recorder.program


class Recorder:
    """Runs equations and writes a Program."""

    def __init__(self):
        self.program = Program()
        self.values: list[jax.Array] = []  # the marks so far
        self.inner: list[Marks | Loop | Branches] = []

    def whole(
        self, jaxpr: ClosedJaxpr, args: Sequence[Value], around: Around
    ) -> list[Value]:
        """Runs a whole Program; returns its results."""
        for value in args:
            number = self.program.number()
            self.program.inputs.append(number)
            self.mark(number, value)
        given = list(zip(args, self.program.inputs, strict=True))
        outs = self.run(jaxpr, given, around)
        self.program.outputs = [number for _, number in outs]
        return [value for value, _ in outs]

    def marks(self) -> Marks:
        size = 256  # one op with thousands of operands compiles slowly
        blocks = [jnp.stack(block) for block in _chunks(self.values, size)]
        values = jnp.concatenate(blocks) if blocks else jnp.zeros(0, jnp.uint8)
        return Marks(values, tuple(self.inner))

    def mark(self, number: int, value: Value, inputs: Sequence[Value] = ()) -> None:
        if can_hold_nan(value):
            self.program.slots[number] = len(self.values)
            self.values.append(mark_of(value, *inputs))

    def run(
        self,
        jaxpr: ClosedJaxpr,
        args: Sequence[Numbered],
        around: Around,
        is_check: bool = False,
    ) -> list[Numbered]:
        """Runs a closed jaxpr on pairs of a value and its number; returns such pairs.

        Args:
          is_check: whether a loss scaler's check calls it.
        """
        env: dict[Var, Numbered] = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
        for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            env[variable] = value, self.constant(value)
        uses = [variables(eqn.invars) for eqn in jaxpr.jaxpr.eqns]
        last_use = {v: index for index, used in enumerate(uses) for v in used}
        keep = set(variables(jaxpr.jaxpr.outvars))

        def read(atom: Atom) -> Numbered:
            if isinstance(atom, Literal):
                return atom.val, self.constant(atom.val)
            return env[atom]

        for index, eqn in enumerate(jaxpr.jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            check = is_check or CHECK in _compat.codes_of(eqn.source_info)
            outs = self.equation(eqn, inputs, around, check)
            env.update(zip(eqn.outvars, outs, strict=True))
            for variable in uses[index]:  # frees big values at once
                if last_use[variable] == index and variable not in keep:
                    env.pop(variable, None)
        return [read(atom) for atom in jaxpr.jaxpr.outvars]

    def constant(self, value: Value) -> int:
        number = self.program.number()
        self.program.constants.add(number)
        if isinstance(value, jax.Array):
            self.mark(number, value)
        elif can_hold_nan(value):
            self.program.known[number] = known_mark(value)
        return number

    def equation(
        self, eqn: JaxprEqn, inputs: list[Numbered], around: Around, is_check: bool
    ) -> list[Numbered]:
        name, values = eqn.primitive.name, [value for value, _ in inputs]
        if name in CALLS and (inside := called_by(eqn)) is not None:
            return self.run(inside, inputs, around.inside(eqn, inside.jaxpr), is_check)
        site = site_of(eqn, around)
        if name in loops.RULES:
            outs, marks, inner = loops.RULES[name](eqn, values, around, run_marked)
            inner = inner._replace(place=len(self.inner))
            self.inner.append(marks)
            return self.add(site, inputs, outs, is_check, inner)
        outs = _compat.bind_eqn(eqn, values)
        if name == "select_n":
            inputs = [inputs[0], *self.chosen(site, *inputs)]
        shape = np.shape(outs[0]) if outs else None  # none from a `jax.debug.print`
        alike = lambda x: np.shape(x) == shape and can_hold_nan(x)
        same = [x for x in values if alike(x)]
        is_elementwise = name in ELEMENTWISE and len(same) == len(values)
        fresh = same if is_elementwise else ()
        return self.add(site, inputs, outs, is_check, None, preserves(eqn), fresh)

    def chosen(
        self, site: Site, which: Numbered, *cases: Numbered
    ) -> Iterator[Numbered]:
        """The part of each case that a select takes; the rest leads nowhere."""
        selector, _ = which
        for index, (case, number) in enumerate(cases):
            taken = case
            if can_hold_nan(case):
                with jax.enable_x64(True):  # scalars of a loss scale are float64
                    is_taken = jnp.equal(selector, jnp.asarray(index, selector.dtype))
                    taken = jnp.where(is_taken, case, jnp.zeros([], case.dtype))
            yield from self.add(site, [(case, number)], [taken], False)

    def add(
        self,
        site: Site,
        inputs: Sequence[Numbered],
        outs: Sequence[Value],
        is_check: bool,
        inner: Inner | None = None,
        preserves: bool = False,
        elementwise: Sequence[Value] = (),
    ) -> list[Numbered]:
        program, numbers = self.program, []
        for value in outs:
            number = program.number()
            numbers.append(number)
            source = inputs[0][1] if inputs else None
            if preserves and source in program.slots:
                program.slots[number] = program.slots[source]
            elif preserves and source in program.known:
                program.known[number] = program.known[source]
            else:
                self.mark(number, value, elementwise)
        given = tuple(number for _, number in inputs)
        is_single = all(np.size(value) == 1 for value in outs)
        node = Node(site, given, tuple(numbers), is_check, is_single, inner)
        program.nodes.append(node)
        program.made_by.update(dict.fromkeys(numbers, node))
        return list(zip(outs, numbers, strict=True))


def preserves(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "convert_element_type":
        old, new = array(eqn.invars[0]).dtype, array(eqn.outvars[0]).dtype
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (old, new))
        return floats and bool(jnp.finfo(new).max >= jnp.finfo(old).max)
    is_single = len(eqn.outvars) == 1 and 0 not in array(eqn.outvars[0]).shape
    return eqn.primitive.name in PRESERVING and is_single


def _chunks(values: list[jax.Array], size: int) -> list[list[jax.Array]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
