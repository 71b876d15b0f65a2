"""Runs a jaxpr and notes for each value whether it holds an inf or a nan.

jit, remat and custom derivatives are run in place. The bodies of scan and cond are
Programs of their own; of a while loop only iterations that made something bad are kept.
What else holds functions (shard_map, kernels) counts as one op.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from .. import _compat
from .._autocast.sources import holds_jaxpr
from .._scaling import arithmetic
from .finiteness import INF, NAN, is_float, known_mark, mark_of
from .marks import Branches, Inner, Loop, Marks, Node, Program, marks_of
from .sites import Around, site_of

# Results hold an inf or nan exactly where the input does.
PRESERVING = frozenset(
    """
    abs broadcast_in_dim copy copy_p expand_dims name neg optimization_barrier
    reshape rev sharding_constraint squeeze stop_gradient transpose
    """.split()
)
ELEMENTWISE = frozenset(
    """
    acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp convert_element_type
    cos cosh digamma div erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p
    log2 logistic max min mul nextafter pow reduce_precision rem rsqrt select_n sin sinh
    sqrt square sub tan tanh
    """.split()
)
CALLS = frozenset(
    """
    call checkpoint closed_call core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jit pjit remat2
    """.split()
)
CHECK = arithmetic.all_finite.__code__


def run_marked(jaxpr: Any, args: Sequence[Any]) -> tuple[list[Any], Marks, Program]:
    """Runs a closed jaxpr. Returns its results, the marks, and what they belong to."""
    return Recorder().whole(jaxpr, args, Around())


class Recorder:
    """Runs equations and writes a Program."""

    def __init__(self):
        self.program = Program()
        self.values: list[Any] = []  # the marks so far
        self.inner: list[Any] = []

    def whole(self, jaxpr, args, around):
        """A whole Program: the results, the marks, and what they belong to."""
        for value in args:
            number = self.program.number()
            self.program.inputs.append(number)
            self.mark(number, value)
        given = list(zip(args, self.program.inputs, strict=True))
        outs = self.run(jaxpr, given, around)
        self.program.outputs = [number for _, number in outs]
        return [value for value, _ in outs], self.marks(), self.program

    def marks(self) -> Marks:
        size = 256  # one op with thousands of operands compiles slowly
        blocks = [jnp.stack(block) for block in _chunks(self.values, size)]
        values = jnp.concatenate(blocks) if blocks else jnp.zeros(0, jnp.uint8)
        return Marks(values, tuple(self.inner))

    def mark(self, number: int, value: Any, inputs: Sequence[Any] = ()) -> None:
        if is_float(value):
            self.program.slots[number] = len(self.values)
            self.values.append(mark_of(value, *inputs))

    def run(self, jaxpr, args, around, is_check=False):
        """Runs a closed jaxpr on pairs of a value and its number; returns such pairs.

        Args:
          is_check: whether a loss scaler's check calls it.
        """
        env = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
        for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            env[variable] = value, self.constant(value)
        last_use = {v: i for i, e in enumerate(jaxpr.jaxpr.eqns) for v in _vars(e)}
        keep = {v for v in jaxpr.jaxpr.outvars if not _is_literal(v)}

        def read(atom):
            if _is_literal(atom):
                return atom.val, self.constant(atom.val)
            return env[atom]

        for index, eqn in enumerate(jaxpr.jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            check = is_check or CHECK in _compat.codes_of(eqn.source_info)
            outs = self.equation(eqn, inputs, around, check)
            env.update(zip(eqn.outvars, outs, strict=True))
            for variable in _vars(eqn):  # big values are let go at once
                if last_use[variable] == index and variable not in keep:
                    env.pop(variable, None)
        return [read(atom) for atom in jaxpr.jaxpr.outvars]

    def constant(self, value) -> int:
        number = self.program.number()
        self.program.constants.add(number)
        if isinstance(value, jax.Array):
            self.mark(number, value)
        elif is_float(value):
            self.program.known[number] = known_mark(value)
        return number

    def equation(self, eqn, inputs, around, is_check):
        name, values = eqn.primitive.name, [value for value, _ in inputs]
        if name in CALLS and (inside := inside_of(eqn)) is not None:
            return self.run(inside, inputs, around.inside(eqn, inside.jaxpr), is_check)
        site = site_of(eqn, around)
        if name in ("scan", "while", "cond"):
            rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}
            outs, inner = rule[name](eqn, values, around)
            return self.add(site, inputs, outs, is_check, inner)
        outs = _compat.bind_eqn(eqn, values)
        if name == "select_n":
            inputs = [inputs[0], *self.chosen(site, *inputs)]
        same = [x for x in values if np.shape(x) == np.shape(outs[0]) and is_float(x)]
        is_elementwise = name in ELEMENTWISE and len(same) == len(values)
        fresh = same if is_elementwise else ()
        return self.add(site, inputs, outs, is_check, None, preserves(eqn), fresh)

    def chosen(self, site, which, *cases):
        """What a select takes of each case: the rest of it leads nowhere."""
        selector, _ = which
        for index, (case, number) in enumerate(cases):
            taken = case
            if is_float(case):
                with jax.enable_x64(True):  # scalars of a loss scale are float64
                    is_taken = jnp.equal(selector, jnp.asarray(index, selector.dtype))
                    taken = jnp.where(is_taken, case, jnp.zeros([], case.dtype))
            yield from self.add(site, [(case, number)], [taken], False)

    def add(
        self, site, inputs, outs, is_check, inner=None, preserves=False, elementwise=()
    ):
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

    # Loops and branches.

    def scan(self, eqn, values, around):
        params = eqn.params
        n_consts, n_carry = _compat.scan_arity(params)
        consts, carry, xs = _split(values, n_consts, n_carry)
        inside = around.inside(eqn, params["jaxpr"].jaxpr)
        programs = []

        def body(carry, xs):
            outs, marks, program = Recorder().whole(
                params["jaxpr"], [*consts, *carry, *xs], inside
            )
            programs[:] = [program]
            return outs[:n_carry], (outs[n_carry:], marks)

        carry, (ys, marks) = lax.scan(
            body, carry, xs, params["length"], params["reverse"], params["unroll"]
        )
        inner = self.keep(marks, "scan", programs, n_consts, 0, n_carry)
        return [*carry, *ys], inner._replace(reverse=params["reverse"])

    def while_loop(self, eqn, values, around):
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = _split(values, n_cond, n_body)
        condition, programs = params["cond_jaxpr"], []
        inside = around.inside(eqn, params["body_jaxpr"].jaxpr)

        def body(carry):
            outs, marks, program = Recorder().whole(
                params["body_jaxpr"], [*body_consts, *carry], inside
            )
            programs[:] = [program]
            return outs, marks, program

        kinds = np.array([[INF], [NAN]], np.uint8)
        shape = 2, len(carry)
        shapes = jax.eval_shape(lambda carry: body(carry)[1], carry)
        nothing = jax.tree.map(lambda s: jnp.zeros((*shape, *s.shape), s.dtype), shapes)

        def step(state):
            count, loop, carry = state
            outs, marks, program = body(carry)
            before = marks_of(program, marks, program.inputs[n_body:])
            after = marks_of(program, marks, program.outputs)
            worse = ((after & ~before)[None] & kinds) > 0
            iteration = jnp.where(worse, count, loop.iteration)

            def latest(new, old):
                is_new = worse.reshape(*shape, *[1] * new.ndim)
                return jnp.where(is_new, new, old)

            kept = jax.tree.map(latest, marks, loop.marks)
            return count + 1, Loop(iteration, kept), outs

        def goes_on(state):
            args = [*cond_consts, *state[2]]
            return jaxpr_as_fun(condition)(*args)[0]

        start = jnp.int32(0), Loop(jnp.full(shape, -1, jnp.int32), nothing), carry
        _, loop, outs = lax.while_loop(goes_on, step, start)
        return outs, self.keep(loop, "while", programs, n_body, n_cond, len(carry))

    def cond(self, eqn, values, around):
        index, *values = values
        jaxprs = eqn.params["branches"]
        programs: list[Any] = [None] * len(jaxprs)
        inside = around.inside(eqn, jaxprs[0].jaxpr)

        def branch(place, *values):
            outs, marks, program = Recorder().whole(jaxprs[place], values, inside)
            programs[place] = program
            return outs, marks

        shapes = [
            jax.eval_shape(lambda *v, p=place: branch(p, *v)[1], *values)
            for place in range(len(jaxprs))
        ]

        def chosen(place, *values):
            outs, marks = branch(place, *values)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return outs, [*zeros[:place], marks, *zeros[place + 1 :]]

        index = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(jaxprs) - 1)
        outs, marks = lax.switch(
            index,
            [lambda *v, p=place: chosen(p, *v) for place in range(len(jaxprs))],
            *values,
        )
        inner = self.keep(Branches(index, tuple(marks)), "cond", programs, 0, 1)
        return outs, inner

    def keep(self, marks, kind, programs, n_consts, skipped, n_carry=0) -> Inner:
        self.inner.append(marks)
        place = len(self.inner) - 1
        return Inner(kind, tuple(programs), place, n_consts, skipped, n_carry)


def inside_of(eqn: Any) -> Any:
    """The jaxpr that an equation calls with its inputs, or None."""
    held = [value for value in eqn.params.values() if holds_jaxpr(value)]
    if len(held) != 1 or isinstance(held[0], tuple | list):
        return None
    inside: Any = held[0]
    if not hasattr(inside, "jaxpr"):
        inside = _compat.ClosedJaxpr(inside, ())
    return inside if len(inside.jaxpr.invars) == len(eqn.invars) else None


def preserves(eqn: Any) -> bool:
    if eqn.primitive.name == "convert_element_type":
        old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (old, new))
        return floats and bool(jnp.finfo(new).max >= jnp.finfo(old).max)
    is_single = len(eqn.outvars) == 1 and 0 not in eqn.outvars[0].aval.shape
    return eqn.primitive.name in PRESERVING and is_single


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, _compat.Literal)


def _vars(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not _is_literal(v)]


def _split(values: Sequence[Any], *sizes: int) -> list[list[Any]]:
    values, parts = list(values), []
    for size in sizes:
        parts.append(values[:size])
        values = values[size:]
    return [*parts, values]


def _chunks(values: list[Any], size: int) -> list[list[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
