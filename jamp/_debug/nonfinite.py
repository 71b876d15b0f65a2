"""`find_nonfinite`: the first op that made an inf or nan from finite numbers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax.typing import ArrayLike

from .. import _compat
from .._autocast.region import ambient
from .._checks import is_traced
from .._jaxprs import equations
from .flat_call import named_results, open_call, takes_a_function
from .marks import BAD, SWALLOWED, Marks, Program, holds
from .report import (
    Report,
    Table,
    check_single,
    markdown_table,
    only_when,
    report,
    stacked_text,
    static,
)
from .run_marked import run_marked
from .sources import Origin, find_sources
from .swallowed import swallowed

LISTED = 5
OTHERS = "bad_arguments", "bad_constants", "results"  # of a report, beside its ops
ROUNDING = "convert_element_type", "reduce_precision"
NORMAL = (
    "A scaled gradient overflows float16 there, which is normal in the first steps."
)
FOUND_INF = "found_inf"  # the name of what `jamp.metrics` and the states call it

UNEXPLAINED = """found_inf is True in the results of {}, and no op was seen that made \
an inf or nan. It was made in an earlier step, in another attempt of jamp.retry, or by \
code that is not looked into. With the state from before the step, look into the \
gradients: \
jamp.debug.find_nonfinite(jamp.value_and_grad(loss_fn, opt_state))(params, batch)."""

FOREIGN_REF = """find_nonfinite follows a `jax.Ref` that the function makes, but got \
one from outside: write a function that takes its value, `ref[...]`, and makes the \
reference from that (`jax.new_ref(value)`)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What the marks of a report belong to."""

    program: Program
    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def unseen(self) -> list[str]:
        """The kernels, callbacks and solvers, into which nothing looks."""
        return list(dict.fromkeys(str(at.site) for at in self.program.all_unseen()))


@report
class NonfiniteReport(Report):
    """Where infs and nans come from. From `find_nonfinite`.

    It is a pytree, so that a jitted function can return it. `print` waits for the
    device.

    Attributes:
      marks: which values hold an inf or a nan: small arrays.
      skipped: bool [], whether a result that is named `found_inf` is true.
      layout: what the marks belong to.

    Raises:
      TypeError: it was read inside a trace, where it has no numbers, or as a bool.
      ValueError: it was read while stacked, with several steps: index it first.

    Examples:
      >>> import jax.numpy as jnp
      >>> report = find_nonfinite(lambda x: jnp.log(x) * 2)(jnp.zeros(2))
      >>> report.to_dict()["ops"][0]["primitive"]
      'log'
    """

    marks: Marks
    skipped: jax.Array
    layout: Layout = static()

    @property
    def found(self) -> list[str]:
        """The sources of infs and nans, in the order in which they ran: the arguments
        that held one, then the ops. It is empty if nothing was found."""
        row = self.to_dict()
        return [
            *row.get("bad_arguments", ()),
            *(o["op"] for o in row.get("ops", ())),
            *(o["op"] for o in row.get("swallowed", ())),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything that was found, or `{}`.

        Keys: `ops`, a list with, for each op, `op` (one line of text), `made` ("inf" or
        "nan"), `primitive`, `dtypes_in`, `dtypes_out`, `line`, `path` (of modules),
        `region`, `backward`, `loops` (pairs such as ("scan", 17)), `times` (in how many
        iterations, or how often on that line), `arguments` (those that go into it) and
        `from_inf` (whether it made a nan from an inf). `swallowed` is a list of the
        overflows that end in finite numbers, with the same keys and `by`, the op that
        swallowed them. Then `bad_arguments`, `bad_constants` (lines), and `results`,
        the paths of the results that are not finite: none, if a train step was skipped.
        """
        check_single(self)
        program, names = self.layout.program, self.layout.arguments
        marks = jax.tree.map(np.asarray, self.marks)
        is_bad = [program.mark(marks, number) & BAD > 0 for number in program.outputs]
        results = list(itertools.compress(self.layout.results, is_bad))
        bad = dict.fromkeys(itertools.compress(program.outputs, is_bad), BAD)
        ops, inputs, constants = find_sources(program, marks, bad)
        if all(o.from_inf for o in ops):  # nothing, or the inf was in the input
            checks = find_sources(program, marks, {}, checked=True)
            ops, inputs = [*ops, *checks.origins], inputs | checks.inputs
            constants += checks.constants
        hidden = swallowed(program, marks)
        if not (ops or inputs or constants or results or hidden):
            return {}
        if any(not o.from_inf for o in ops):  # the others follow from these
            ops = [o for o in ops if not o.from_inf]
        first = {}  # of the iterations of a loop, and of equal ops on a line
        for o in ops:
            first.setdefault((o.at.site, o.made, o.from_inf), []).append(o)

        def row(same: list[Origin]) -> dict[str, Any]:
            first, site = same[0], same[0].at.site
            return (
                {"op": str(site), "made": first.made, "from_inf": first.from_inf}
                | site._asdict()
                | {"loops": list(first.loops), "times": len(same)}
                | {"arguments": [names[i] for i in sorted(first.fed_by)]}
            )

        return {
            "ops": [row(same) for same in first.values()],
            "swallowed": [
                row(h.origins) | {"by": {"op": str(h.by)} | h.by._asdict()}
                for h in hidden
            ],
            "bad_arguments": [names[i] for i in sorted(inputs)],
            "bad_constants": list(dict.fromkeys(at.site.line for at in constants)),
            "results": results,
        }

    def _parts(self, table: Table) -> list[str]:
        if self._stacked_shape():
            return [stacked_text(self, np.array([anything_in(step) for step in self]))]
        row, layout = self.to_dict(), self.layout
        bullet = "- " if table is markdown_table else ""
        n, hidden = len(layout.results), row.get("swallowed", [])
        lines = [bullet + text_of(op) for op in hidden[:LISTED]]
        if len(hidden) > LISTED:
            lines.append(f"... and {len(hidden) - LISTED} swallowed ones more")
        if not any(row.get(key) for key in ("ops", *OTHERS)):
            plural = n != 1
            results = f"the {n} results" if plural else "the result"
            results += f" of {layout.function}"
            if np.any(self.skipped):
                lines.append(UNEXPLAINED.format(layout.function))
            else:
                wrong = f"{results} {'are' if plural else 'is'} finite but wrong"
                lines.append(wrong if hidden else f"no inf or nan in {results}")
            if layout.unseen:
                lines.append(f"not looked into: {some(layout.unseen)}")
            return lines
        after, lines = lines, []
        if row["bad_arguments"]:
            lines.append(f"inf or nan given in {some(row['bad_arguments'])}")
        elif row["bad_constants"] and all(o["from_inf"] for o in row["ops"]):
            given = some(row["bad_constants"])
            lines.append(f"inf or nan given as a constant at {given}")
        lines += [bullet + text_of(op) for op in row["ops"][:LISTED]]
        if len(row["ops"]) > LISTED:
            lines.append(f"... and {len(row['ops']) - LISTED} ops more")
        if row["results"]:
            reached = f"{len(row['results'])} of {n} results: {some(row['results'])}"
            lines.append(f"reaches {reached}")
        else:
            repeats = any(k == "while" for o in row["ops"] for k, _ in o["loops"])
            lines.append("reaches the loss scaler's check; the step was skipped")
            lines[-1] += ", or run again by jamp.retry" if repeats else ""
            if all(o["backward"] and o["primitive"] in ROUNDING for o in row["ops"]):
                lines.append(NORMAL)
        return [*lines, *after]


def anything_in(report: NonfiniteReport) -> bool:
    if report._stacked_shape():
        return any(map(anything_in, report))
    return holds(report.marks, BAD | SWALLOWED) and bool(report.to_dict())


def text_of(op: dict[str, Any]) -> str:
    of = "of an inf" if op["from_inf"] else "of finite numbers"
    text = f"{op['made']} made {of} by {op['op']}"
    text += "".join(f", in iteration {i} of a {kind}" for kind, i in op["loops"])
    text += f", and {op['times'] - 1} times after it" if op["times"] > 1 else ""
    text += f", from {some(op['arguments'])}" if op["arguments"] else ""
    return text + (f", and swallowed by {op['by']['op']}" if "by" in op else "")


def some(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


@takes_a_function("find_nonfinite")
def find_nonfinite(
    fn: Callable[..., object], *, when: ArrayLike | None = None
) -> Callable[..., NonfiniteReport]:
    """Finds the first op, forward or backward, that made an inf or nan.

    It runs `fn` op by op with the given arguments, notes for each value whether it
    holds an inf or a nan, and goes back from the results that do to the op that made
    them from finite numbers: through jit, scan, while, cond, remat, custom derivatives,
    shard_map and pmap. Kernels, callbacks and solvers count as one op, and an answer
    that nothing was found names them. Only values that lead to a result count, so a
    mask of -inf or the branch that `where` did not take are not faults. To see the
    backward pass, give it the function that takes the gradient, or the whole step:

        jamp.debug.find_nonfinite(jax.grad(loss_fn))(params, batch)
        grad_fn = jamp.value_and_grad(loss_fn, opt_state)
        jamp.debug.find_nonfinite(grad_fn)(params, batch)
        jamp.debug.find_nonfinite(train_step)(model, optimizer, scaler, batch)

    A train step that was skipped returns finite results; then the values that the loss
    scaler found are followed. With `when` inside a jitted step, the function runs again
    only on steps where it is true, and takes longer to compile.

        report = jamp.debug.find_nonfinite(grad_fn, when=skipped)(params, batch)

    Args:
      fn: any function of pytrees or of Flax, Equinox or Haiku modules, or a Flax module
        or its method. Its side effects happen again.
      when: bool [], or None to look always.

    Returns:
      A function with the arguments of `fn` that returns a `NonfiniteReport`: a pytree
      of marks, and of names that stay in Python. It prints which op made the inf, in
      which dtype, on which line, in which module, forward or backward, in which
      iteration of a scan, from which parameters, and what it reaches. `found` is a list
      of lines, and `to_dict()` has the parts.

    Raises:
      TypeError: `fn` cannot be called, `when` is not a bool, an array has no values, or
        there is a `jax.Ref` that `fn` does not make.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss_fn(params, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.sum(jnp.log(x @ params["w"]))
      >>> params = {"w": jnp.zeros((2, 3))}
      >>> find = jamp.debug.find_nonfinite(jax.grad(loss_fn))
      >>> report = find(params, jnp.ones((1, 2)))
      >>> op, *_ = report.to_dict()["ops"]
      >>> op["made"], op["primitive"], op["path"], op["backward"]
      ('inf', 'div', 'head', True)

    PyTorch: `torch.autograd.detect_anomaly`, which sees nans in the backward pass.
    """

    @functools.wraps(fn, updated=())
    def find(*args, **kwargs):
        call = open_call("find_nonfinite", fn, args, kwargs)
        for name, array in zip(call.names, call.arrays, strict=True):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"find_nonfinite runs the function: {name!r} must be an array; got "
                    f"{array!r}."
                )
        names, around = [], ambient()

        def flat(*arrays):
            with around():
                names[:], results = named_results(call.run(arrays))
                return results

        traced = jax.make_jaxpr(flat)(*call.arrays)
        inputs = map(jax.typeof, (*call.arrays, *traced.consts))
        if any(isinstance(aval, jax.ref.AbstractRef) for aval in inputs):
            raise TypeError(FOREIGN_REF)
        jaxpr = _compat.without_refs(traced)
        programs = []

        def run():
            with jax.debug_nans(False), jax.debug_infs(False):  # these would stop it
                outs, marks, program = run_marked(jaxpr, call.arrays)
            programs[:] = [program]
            pairs = zip(outs, names, strict=True)
            flags = [out for out, name in pairs if name.endswith(FOUND_INF)]
            flags = [jnp.any(flag) for flag in flags if flag.dtype == jnp.bool_]
            return marks, functools.reduce(jnp.logical_or, flags, jnp.bool_(False))

        # Op by op, JAX does not move constants to the devices of a sharded array, and
        # compiles a program for each op in a shard_map.
        at_once = is_spread(call.arrays) or any(
            eqn.primitive.name == "shard_map" for eqn in equations(jaxpr)
        )
        runs = jax.jit(run) if at_once else run
        marks, skipped = only_when(when, runs)
        layout = Layout(programs[0], call.function, call.names, tuple(names))
        return NonfiniteReport(marks, skipped, layout)

    return find


def is_spread(arrays: Sequence[object]) -> bool:
    concrete = [a for a in arrays if isinstance(a, jax.Array) and not is_traced(a)]
    return any(len(array.sharding.device_set) > 1 for array in concrete)
