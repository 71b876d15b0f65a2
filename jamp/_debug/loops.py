"""scan, while and cond with marks of their bodies: which iterations are kept.

Each body is a separate Program. A while loop keeps only the iterations that made
something bad.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .. import _compat
from .finiteness import INF, NAN
from .marks import Branches, Inner, Loop, Marks, Program, Value, marks_of
from .sites import Around

# Runs a body: its results, their marks, and what the marks belong to.
RunWhole = Callable[
    [ClosedJaxpr, Sequence[Value], Around], tuple[list[Value], Marks, Program]
]
# The results of an equation, the marks of its bodies, and what these belong to.
Looped = tuple[list[Value], Marks | Loop | Branches, Inner]


def scan(
    eqn: JaxprEqn, values: list[Value], around: Around, run_whole: RunWhole
) -> Looped:
    params = eqn.params
    n_consts, n_carry = _compat.scan_arity(params)
    consts, carry, xs = _split(values, n_consts, n_carry)
    inside = around.inside(eqn, params["jaxpr"].jaxpr)
    programs = []

    def body(carry, xs):
        args = [*consts, *carry, *xs]
        outs, marks, program = run_whole(params["jaxpr"], args, inside)
        programs[:] = [program]
        return outs[:n_carry], (outs[n_carry:], marks)

    reverse = params["reverse"]
    carry, (ys, marks) = lax.scan(
        body, carry, xs, params["length"], reverse, params["unroll"]
    )
    inner = Inner(
        "scan", tuple(programs), n_consts=n_consts, n_carry=n_carry, reverse=reverse
    )
    return [*carry, *ys], marks, inner


def while_loop(
    eqn: JaxprEqn, values: list[Value], around: Around, run_whole: RunWhole
) -> Looped:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = _split(values, n_cond, n_body)
    condition, programs = params["cond_jaxpr"], []
    inside = around.inside(eqn, params["body_jaxpr"].jaxpr)

    def body(carry):
        args = [*body_consts, *carry]
        outs, marks, program = run_whole(params["body_jaxpr"], args, inside)
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
    inner = Inner(
        "while", tuple(programs), n_consts=n_body, skipped=n_cond, n_carry=len(carry)
    )
    return outs, loop, inner


def cond(
    eqn: JaxprEqn, values: list[Value], around: Around, run_whole: RunWhole
) -> Looped:
    index, *args = values
    jaxprs = eqn.params["branches"]
    programs: dict[int, Program] = {}
    inside = around.inside(eqn, jaxprs[0].jaxpr)

    def branch(place, *args):
        outs, marks, programs[place] = run_whole(jaxprs[place], args, inside)
        return outs, marks

    shapes = [
        jax.eval_shape(lambda *v, p=place: branch(p, *v)[1], *args)
        for place in range(len(jaxprs))
    ]

    def chosen(place, *args):
        outs, marks = branch(place, *args)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return outs, [*zeros[:place], marks, *zeros[place + 1 :]]

    index = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(jaxprs) - 1)
    outs, marks = lax.switch(
        index,
        [lambda *v, p=place: chosen(p, *v) for place in range(len(jaxprs))],
        *args,
    )
    bodies = tuple(programs[place] for place in range(len(jaxprs)))
    return outs, Branches(index, tuple(marks)), Inner("cond", bodies, skipped=1)


RULES = {"scan": scan, "while": while_loop, "cond": cond}


def _split(values: list[Value], *sizes: int) -> list[list[Value]]:
    parts = []
    for size in sizes:
        parts.append(values[:size])
        values = values[size:]
    return [*parts, values]
