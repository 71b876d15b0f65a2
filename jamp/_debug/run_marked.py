"""Runs a jaxpr, and marks each value that holds an inf or a nan.

jit, remat, shard_map and custom derivatives are run in place. Each body of scan, while
and cond is a Program of its own, and a while loop keeps only the marks of one
iteration. Other ops that hold functions (kernels, solvers) count as one.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .. import _compat, _jaxprs
from .._autocast.traits import ELEMENTWISE, KERNELS
from .._checks import is_traced
from .._jaxprs import branches, called, param, read
from .._scaling import arithmetic
from .._scaling.mesh import typed_as, zeros_like
from .marks import (
    BAD,
    CARRIED,
    FINE,
    MATTERS,
    NOTED,
    RECIPROCAL,
    ROOT_MATTERS,
    SWALLOWED,
    TAKEN,
    TO_INTEGER,
    Branches,
    Inner,
    Loop,
    Marks,
    Node,
    Program,
    RunValue,
    can_hold_nan,
    known_mark,
    mark_of,
    marks_of,
)
from .op_location import OUTERMOST, Around, Location
from .traits import COMPARING, OVERFLOWING, PRESERVING, RANKING, SWALLOWING
from .walk import array

CHECK = arithmetic.all_finite.__code__

Numbered = tuple[RunValue, int]  # a value, and its number in the Program
# The results of an equation, the marks of its bodies, and what these belong to.
Looped = tuple[list[RunValue], Marks | Loop | Branches, Inner]


def run_marked(
    jaxpr: ClosedJaxpr, args: Sequence[RunValue], around: Around = OUTERMOST
) -> tuple[list[RunValue], Marks, Program]:
    """Runs a closed jaxpr. Returns its results, the marks, and what they belong to."""
    recorder = Recorder()
    program = recorder.program
    for value in args:
        number = program.number()
        program.inputs.append(number)
        recorder.mark(number, value)
    given = list(zip(args, program.inputs, strict=True))
    outs = recorder.run(jaxpr, given, around)
    program.outputs = [number for _, number in outs]
    return [value for value, _ in outs], recorder.marks(), program


class Recorder:
    """Runs equations and writes a Program."""

    def __init__(self):
        self.program = Program()
        self.values: list[Any] = []  # the marks so far
        self.inner: list[Marks | Loop | Branches] = []
        self.fixed: set[int] = set()  # values that are made of constants alone

    def marks(self) -> Marks:
        size = 256  # one op with thousands of operands compiles slowly
        starts = range(0, len(self.values), size)
        blocks = [jnp.stack(self.values[start : start + size]) for start in starts]
        values = jnp.concatenate(blocks) if blocks else jnp.zeros(0, jnp.uint8)
        return Marks(values, tuple(self.inner))

    def mark(
        self,
        number: int,
        value: RunValue,
        inputs: Sequence[RunValue] = (),
        by: str = "",
    ) -> None:
        if can_hold_nan(value) or (inputs and by):
            value = self.unfolded(value, number)
            self.program.slots[number] = len(self.values)
            self.values.append(mark_of(value, *inputs, by=by))

    def unfolded(self, value: RunValue, number: int) -> RunValue:
        """A value for the marks. XLA takes seconds to fold the mark of a constant."""
        is_folded = number in self.fixed and is_traced(value)
        return lax.optimization_barrier(value) if is_folded else value

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

        def results(eqn: JaxprEqn, inputs: list[Numbered]) -> list[Numbered]:
            check = is_check or CHECK in _compat.codes_of(eqn.source_info.traceback)
            return self.equation(eqn, inputs, around, check)

        constant = lambda value: (value, self.constant(value))
        return read(jaxpr, args, results, constant)

    def constant(self, value: RunValue) -> int:
        number = self.program.number()
        self.program.constants.add(number)
        self.fixed.add(number)
        if isinstance(value, jax.Array):
            self.mark(number, value)
        elif can_hold_nan(value) and (known := known_mark(value)) != FINE:
            self.program.slots[number] = len(self.values)
            self.values.append(np.uint8(known))
        return number

    def equation(
        self, eqn: JaxprEqn, inputs: list[Numbered], around: Around, is_check: bool
    ) -> list[Numbered]:
        name, values = eqn.primitive.name, [value for value, _ in inputs]
        if (inside := called(eqn)) is not None:
            below = inside, inputs, around.inside(eqn, inside.jaxpr), is_check
            if name == "shard_map":
                return self.on_devices(eqn, *below)
            return self.run(*below)
        at = Location(eqn, around)
        if name in LOOPS:
            outs, marks, inner = LOOPS[name](eqn, values, around)
            inner = inner._replace(place=len(self.inner))
            self.inner.append(marks)
            return self.add(at, inputs, outs, is_check, inner)
        if name in KERNELS:
            self.program.unseen.append(at)
        outs = _compat.bind_eqn(eqn, values)
        if name == "select_n":
            inputs = [inputs[0], *self.chosen(at, *inputs)]
        shape = np.shape(outs[0]) if outs else ()  # none from a `jax.debug.print`
        same = [x for x in values if can_hold_nan(x) and fits(np.shape(x), shape)]
        is_elementwise = name in ELEMENTWISE | COMPARING and len(same) == len(values)
        of = same if is_elementwise else ranked(eqn, values)
        return self.add(at, inputs, outs, is_check, of=of)

    def on_devices(
        self,
        eqn: JaxprEqn,
        inside: ClosedJaxpr,
        inputs: list[Numbered],
        around: Around,
        is_check: bool,
    ) -> list[Numbered]:
        """Runs a `shard_map`. A value has the marks that it has on any device."""
        values, inner = len(self.values), len(self.inner)
        numbers = []

        def body(*args):
            given = [(x, number) for x, (_, number) in zip(args, inputs, strict=True)]
            outs = self.run(inside, given, around, is_check)
            numbers[:] = [number for _, number in outs]
            made = self.values[values:], self.inner[inner:]
            return [value for value, _ in outs], made

        outs, made = _compat.bind_shard_map(eqn, body, [value for value, _ in inputs])
        made = jax.tree.map(on_any_device, made)
        self.values[values:], self.inner[inner:] = made
        return list(zip(outs, numbers, strict=True))

    def chosen(
        self, at: Location, which: Numbered, *cases: Numbered
    ) -> Iterator[Numbered]:
        """The part of each case that a select takes; the rest leads nowhere."""
        selector, _ = which
        for index, (case, number) in enumerate(cases):
            if not can_hold_nan(case):
                yield from self.add(at, [(case, number)], [case], False)
            else:
                shown = self.unfolded(case, number)
                with jax.enable_x64(True):  # scalars of a loss scale are float64
                    place = jnp.asarray(index, jnp.result_type(selector))
                    is_taken = jnp.equal(selector, place)
                    taken = jnp.where(is_taken, shown, jnp.zeros([], case.dtype))
                yield from self.add(at, [(case, number)], [taken], False)
                self.values[-1] |= jnp.any(is_taken).astype(jnp.uint8) * TAKEN

    def add(
        self,
        at: Location,
        inputs: Sequence[Numbered],
        outs: Sequence[RunValue],
        is_check: bool,
        inner: Inner | None = None,
        of: Sequence[RunValue] = (),
    ) -> list[Numbered]:
        """Adds an op.

        Args:
          of: its inputs, if it is elementwise; what it ranks, if it does.
        """
        program, numbers, by = self.program, [], swallowing(at.eqn)
        is_fixed = self.fixed.issuperset(number for _, number in inputs)
        source = inputs[0][1] if inputs and preserves(at.eqn) else None
        for place, value in enumerate(outs):
            number = program.number()
            numbers.append(number)
            if is_fixed:
                self.fixed.add(number)
            if source in program.slots:
                program.slots[number] = program.slots[source]
            else:
                is_key = by in RANKING and place < keys_among_results(at.eqn)
                self.mark(number, value, () if is_key else of, "" if is_key else by)
        given = tuple(number for _, number in inputs)
        is_single = all(np.size(value) == 1 for value in outs)
        flows = at, given, tuple(numbers)
        flags = is_check, is_single, inner, overflows(at.eqn)
        node = Node(at.eqn.primitive.name, *flows, *flags)
        program.nodes.append(node)
        program.made_by.update(dict.fromkeys(numbers, node))
        return list(zip(outs, numbers, strict=True))


def fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an elementwise op broadcasts one shape to another, if it must."""
    sizes = zip(given[::-1], shape[::-1], strict=False)
    return len(given) in (0, len(shape)) and all(n in (1, m) for n, m in sizes)


def swallowing(eqn: JaxprEqn) -> str:
    """The op's name, if it may make a finite number of an inf."""
    name = eqn.primitive.name
    if name == "integer_pow":
        exponent = param(eqn, "y")
        return RECIPROCAL if exponent == -1 else name if exponent < 0 else ""
    if name == "convert_element_type":
        given, made = array(eqn.invars[0]).dtype, param(eqn, "new_dtype")
        is_integer = jnp.issubdtype(made, jnp.integer)
        return TO_INTEGER if is_integer and jnp.issubdtype(given, jnp.floating) else ""
    return name if name in SWALLOWING | COMPARING | RANKING else ""


def ranked(eqn: JaxprEqn, values: Sequence[RunValue]) -> Sequence[RunValue]:
    """What an op of `RANKING` ranks, along the last axis, the largest first; or ()."""
    name = eqn.primitive.name
    if name not in RANKING or not jnp.issubdtype(values[0].dtype, jnp.floating):
        return ()
    axis = {"sort": "dimension", "top_k": "axis"}.get(name)
    (axis,) = [param(eqn, axis)] if axis else param(eqn, "axes")
    keys = jnp.moveaxis(values[0], axis, -1)
    return [-keys if name == "argmin" else keys]


def keys_among_results(eqn: JaxprEqn) -> int:
    """How many results of an op of `RANKING` are what it ranks, and not places."""
    return param(eqn, "num_keys") or int(eqn.primitive.name == "top_k")


def overflows(eqn: JaxprEqn) -> bool:
    """Whether an inf that an op makes of finite numbers is a number too large."""
    name = eqn.primitive.name
    if name == "pow":
        exponent = eqn.invars[1]
        return isinstance(exponent, Literal) and bool(np.all(exponent.val > 0))
    return name in OVERFLOWING and (param(eqn, "y") or 1) > 0


def preserves(eqn: JaxprEqn) -> bool:
    """Whether the result of an op has the mark of its first input."""
    if eqn.primitive.name == "convert_element_type":
        old, new = array(eqn.invars[0]).dtype, array(eqn.outvars[0]).dtype
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (old, new))
        return floats and bool(jnp.finfo(new).max >= jnp.finfo(old).max)
    if eqn.primitive.name not in PRESERVING or len(eqn.outvars) > 1:
        return False
    return 0 not in array(eqn.outvars[0]).shape


def run_scan(eqn: JaxprEqn, values: list[RunValue], around: Around) -> Looped:
    loop = _jaxprs.loop(eqn)
    _, consts, carry, xs = loop.split(values)
    inside = around.inside(eqn, loop.body.jaxpr)
    programs = []

    def body(carry, xs):
        outs, marks, program = run_marked(loop.body, [*consts, *carry, *xs], inside)
        programs[:] = [program]
        return outs[: loop.n_carry], (outs[loop.n_carry :], marks)

    length, reverse, unroll = (param(eqn, p) for p in ("length", "reverse", "unroll"))
    carry, (ys, marks) = lax.scan(body, carry, xs, length, reverse, unroll)
    inner = Inner.of(loop, "scan", programs)
    return [*carry, *ys], marks, inner._replace(reverse=reverse)


def run_while(eqn: JaxprEqn, values: list[RunValue], around: Around) -> Looped:
    loop, programs = _jaxprs.loop(eqn), []
    cond_consts, body_consts, carry, _ = loop.split(values)
    condition = loop.condition
    assert condition is not None
    inside = around.inside(eqn, loop.body.jaxpr)

    def body(carry):
        outs, marks, program = run_marked(loop.body, [*body_consts, *carry], inside)
        programs[:] = [program]
        return outs, marks, program

    start = [mark_of(x) if can_hold_nan(x) else np.uint8(FINE) for x in carry]
    start = jnp.stack(start)

    def step(state):
        count, kept, carry = state
        outs, marks, program = body(carry)
        after = marks_of(program, marks, program.outputs)
        is_bad = jnp.any(after & ~start & np.uint8(BAD))
        level = noted_in(program, marks) + only_if(is_bad, CARRIED)
        before = jnp.where(is_bad, kept.level, kept.level % CARRIED)
        is_new = (level >= before) & (before < CARRIED)
        choose = functools.partial(jnp.where, is_new)
        new, old = Loop(level, count, marks), kept._replace(level=before)
        return count + 1, jax.tree.map(choose, new, old), outs

    def goes_on(state):
        args = [*cond_consts, *state[2]]
        return jaxpr_as_fun(condition)(*args)[0]

    shapes = jax.eval_shape(lambda carry: body(carry)[1], carry)
    zero = jnp.int32(0)
    none = Loop(zero, zero, jax.tree.map(zeros_like, shapes))
    made = jax.eval_shape(step, (zero, none, carry))[1]
    none = jax.tree.map(typed_as, none, made)
    _, kept, outs = lax.while_loop(goes_on, step, (zero, none, carry))
    return outs, kept, Inner.of(loop, "while", programs)


def noted_in(program: Program, marks: Marks) -> jax.Array:
    """The level of what happened in a body, int32 []: `CHECKED` if a loss scaler's
    check met an inf or nan, `MATTERED` if an inf was swallowed by an op for which it
    matters how large the number is, `HIDDEN` if by another. The marks may be those of
    all iterations of a scan."""
    is_any = lambda bits: jnp.any(marks.values & np.uint8(bits))
    checked = [n for node in program.nodes if node.is_check for n in node.inputs]
    slots = sorted({program.slots[n] for n in checked if n in program.slots})
    met = jnp.any(marks.values[..., slots] & np.uint8(BAD))
    flags = is_any(SWALLOWED), is_any(MATTERS | ROOT_MATTERS), met
    levels = [*map(only_if, flags, NOTED)]
    for node in program.nodes:
        if node.inner is None:
            continue
        kept = marks.inner[node.inner.place]
        if isinstance(kept, Loop):
            levels.append(jnp.max(kept.level % CARRIED))
        else:  # the marks of a branch that did not run are zeros
            parts = kept.marks if isinstance(kept, Branches) else (kept,)
            levels += map(noted_in, node.inner.programs, parts)
    return functools.reduce(jnp.maximum, levels)


def only_if(flag: jax.Array, level: int) -> jax.Array:
    return jnp.where(flag, jnp.int32(level), jnp.int32(0))


def run_cond(eqn: JaxprEqn, values: list[RunValue], around: Around) -> Looped:
    index, *args = values
    jaxprs = branches(eqn)
    programs: dict[int, Program] = {}
    inside = around.inside(eqn, jaxprs[0].jaxpr)

    def branch(place, *args):
        outs, marks, programs[place] = run_marked(jaxprs[place], args, inside)
        return outs, marks

    index = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(jaxprs) - 1)
    if not is_traced(index):  # a `switch` would compile all branches at each call
        outs, marks = branch(int(index), *args)
        bodies = (programs[int(index)],)
        return outs, Branches(jnp.int32(0), (marks,)), Inner("cond", bodies, skipped=1)
    shapes = [
        jax.eval_shape(lambda *v, p=place: branch(p, *v)[1], *args)
        for place in range(len(jaxprs))
    ]

    def chosen(place, *args):
        outs, marks = branch(place, *args)
        zeros = jax.tree.map(zeros_like, shapes)
        return outs, [*zeros[:place], marks, *zeros[place + 1 :]]

    outs, marks = lax.switch(
        index,
        [lambda *v, p=place: chosen(p, *v) for place in range(len(jaxprs))],
        *args,
    )
    bodies = tuple(programs[place] for place in range(len(jaxprs)))
    return outs, Branches(index, tuple(marks)), Inner("cond", bodies, skipped=1)


def on_any_device(marks: jax.Array) -> jax.Array:
    """Of marks by device, all; of an iteration or a branch, the last."""
    if marks.dtype == jnp.uint8:
        return functools.reduce(jnp.bitwise_or, marks)
    return jnp.max(marks, axis=0)


LOOPS = {"scan": run_scan, "while": run_while, "cond": run_cond}
